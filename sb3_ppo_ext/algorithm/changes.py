"""Detection of options that have been changed between two calls of ``learn``."""

from collections.abc import Mapping

import numpy as np
import torch as th


def remembered(value: object) -> object:
    """
    :param value: Value of an option
    :return: The same value, with copies of dictionaries and lists, which may be changed in place
    """
    if isinstance(value, Mapping):
        return {key: remembered(part) for key, part in value.items()}
    return [remembered(part) for part in value] if isinstance(value, list | tuple) else value


def is_same(one: object, other: object) -> bool:
    """
    :param one: Value that :func:`remembered` has returned
    :param other: Current value of the same option
    :return: Whether it has not been changed
    """
    if isinstance(other, Mapping):
        return isinstance(one, dict) and one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(other, list | tuple):
        return isinstance(one, list) and len(one) == len(other) and all(map(is_same, one, other))
    if one is other:
        return True
    if isinstance(other, np.ndarray | th.Tensor):  # comparisons of these have no truth value
        return False
    return type(one) is type(other) and bool(one == other)

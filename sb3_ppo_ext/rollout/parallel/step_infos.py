"""Infos of a step on their way between two processes."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any, TypeAlias

import numpy as np

# Infos with more in them than whether the episode was truncated, and infos of new episodes, each by the index of the
# environment in its process
StepInfos: TypeAlias = tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]
# Types of values that nobody can change
IMMUTABLE = frozenset((bool, int, float, str, bytes, type(None), np.bool_, np.float32, np.float64, np.int32, np.int64))
# Numbers of NumPy, for which pickle takes ten times as long as for those of Python, and a letter for each type
LETTERS: dict[type, str] = {np.float64: "d", np.float32: "f", np.int64: "q", np.int32: "i", np.bool_: "?"}
TYPES: dict[str, Any] = {letter: kind for kind, letter in LETTERS.items()}


def pickled_infos(infos: StepInfos) -> bytes:
    """
    :param infos: Infos of a step
    :return: The infos, pickled
    """
    return pickle.dumps(({index: _plain(info) for index, info in infos[0].items()}, infos[1]), protocol=5)


def unpickled_infos(data: Any) -> StepInfos:
    """
    :param data: What :func:`pickled_infos` returns, or a ``memoryview`` of it
    :return: The infos
    """
    plain, resets = pickle.loads(data)
    return {index: _with_types(*part) for index, part in plain.items()}, resets


def _plain(info: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """An info with Python's numbers, and the letters of the types of its values."""
    letters = "".join([LETTERS.get(type(value), "-") for value in info.values()])
    if letters.count("-") == len(letters):
        return info, ""
    return {
        key: value if letter == "-" else value.item() for (key, value), letter in zip(info.items(), letters, strict=True)
    }, letters


def _with_types(info: dict[str, Any], letters: str) -> dict[str, Any]:
    for (key, value), letter in zip(info.items(), letters, strict=False):
        if letter != "-":
            info[key] = TYPES[letter](value)
    return info


def detached(info: dict[str, Any]) -> dict[str, Any]:
    """
    :param info: Info of a step
    :return: The info, without objects that the environment may still change
    """
    return info if all(type(value) in IMMUTABLE for value in info.values()) else deepcopy(info)

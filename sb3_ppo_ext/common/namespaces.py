"""Functions of arrays that NumPy and JAX both have, so that what is computed with either is written once."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_ppo_ext.common.type_aliases import Arrays


def namespace(array: Arrays) -> Any:
    """
    :param array: Array of NumPy or of JAX
    :return: ``numpy`` or ``jax.numpy``
    """
    return np if isinstance(array, np.ndarray) else array.__array_namespace__()


def in_double(array: Arrays) -> Arrays:
    """
    :param array: Array of NumPy or of JAX
    :return: The same in float64; arrays of JAX, which has it not by default, are returned unchanged
    """
    return array.astype(np.float64) if isinstance(array, np.ndarray) else array

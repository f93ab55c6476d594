"""Reflections of vectors: signed permutations and matrices, as users write them in plain data, and as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch as th

from sb3_ppo_ext.common.validation import refuse

# Function of tensors of shape (..., size), which returns tensors of the same shape
MapOfTensors: TypeAlias = Callable[[th.Tensor], th.Tensor]
FORM = "give a list with an index or [index, sign] for each number, such as [0, [1, -1]], or `dict(matrix=[[...], ...])`"
TOLERANCE = 1e-6


@dataclass(frozen=True)
class SignedPermutation:
    """
    Reflection of a vector x whose element i is ``signs[i] * x[indices[i]]``.

    :param indices: Indices, shape ``(size,)``
    :param signs: 1 or -1, shape ``(size,)``
    """

    indices: np.ndarray
    signs: np.ndarray

    @property
    def size(self) -> int:
        """Length of the vectors."""
        return len(self.indices)

    def is_involution(self) -> bool:
        """:return: Whether the reflection of the reflection is the vector itself"""
        back = np.array_equal(self.indices[self.indices], np.arange(self.size))
        return back and np.array_equal(self.signs * self.signs[self.indices], np.ones(self.size))

    def on(self, device: th.device, mean: np.ndarray | None = None, std: np.ndarray | None = None) -> MapOfTensors:
        """
        :param device: Device of the tensors
        :param mean: Mean by which the vectors have been normalised, shape ``(size,)``, ``None`` for 0
        :param std: Standard deviation by which they have been normalised, shape ``(size,)``, ``None`` for 1
        :return: The reflection of normalised vectors
        """
        indices, scale, offset = th.from_numpy(self.indices).to(device), self.signs, None
        if mean is not None and std is not None:
            scale = self.signs * std[self.indices] / std
            offset = _tensor((self.signs * mean[self.indices] - mean) / std, device)
        weights = _tensor(scale, device)
        if offset is None:
            return lambda x: x[..., indices] * weights
        return lambda x: x[..., indices] * weights + offset


@dataclass(frozen=True)
class ReflectionMatrix:
    """
    Reflection of a vector x to ``M x``.

    :param matrix: Matrix M, shape ``(size, size)``
    """

    matrix: np.ndarray

    @property
    def size(self) -> int:
        """Length of the vectors."""
        return len(self.matrix)

    def is_involution(self) -> bool:
        """:return: Whether the reflection of the reflection is the vector itself"""
        return np.allclose(self.matrix @ self.matrix, np.eye(self.size), atol=TOLERANCE)

    def on(self, device: th.device, mean: np.ndarray | None = None, std: np.ndarray | None = None) -> MapOfTensors:
        """
        :param device: Device of the tensors
        :param mean: Mean by which the vectors have been normalised, shape ``(size,)``, ``None`` for 0
        :param std: Standard deviation by which they have been normalised, shape ``(size,)``, ``None`` for 1
        :return: The reflection of normalised vectors
        """
        matrix, offset = self.matrix, np.zeros(self.size)
        if mean is not None and std is not None:
            matrix, offset = matrix * std / std[:, np.newaxis], (matrix @ mean - mean) / std
        weights, constant = _tensor(matrix.T, device), _tensor(offset, device)
        return lambda x: x.to(weights.dtype) @ weights + constant


Reflection: TypeAlias = SignedPermutation | ReflectionMatrix


def parse_reflection(where: str, value: object) -> Reflection:
    """
    :param where: Name of the argument, for messages
    :param value: A list with an index, or a pair of index and sign, for each element of the result; or a dictionary with
        ``matrix``, a list of rows
    :return: The reflection
    :raises ValueError: if it is something else, or the reflection of the reflection is not the vector itself
    """
    if isinstance(value, Mapping) and value.keys() == {"matrix"}:
        reflection: Reflection = _parse_matrix(where, value)
    elif isinstance(value, list | tuple):
        reflection = _parse_permutation(where, value)
    else:
        refuse(where, value, FORM)
    if not reflection.is_involution():
        refuse(where, value, "applied twice, it must leave everything as it was; the mirror of a mirror is the original")
    return reflection


def _parse_permutation(where: str, value: Any) -> SignedPermutation:
    pairs = [(entry, 1) if isinstance(entry, int) else entry for entry in value]
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(type(number) is int for number in pair):
            refuse(where, value, FORM)
        if pair[0] < 0 or pair[1] not in (1, -1):
            refuse(where, value, f"{list(pair)} is no index from 0 with the sign 1 or -1 (write [1, -1] for minus element 1)")
    indices, signs = (np.array([pair[part] for pair in pairs], np.int64) for part in (0, 1))
    if sorted(indices) != list(range(len(indices))):
        refuse(where, value, f"each index from 0 to {len(indices) - 1} must occur once")
    return SignedPermutation(indices, signs)


def _parse_matrix(where: str, value: Any) -> ReflectionMatrix:
    try:
        matrix = np.array(value["matrix"], np.float64)
    except (TypeError, ValueError):
        refuse(where, value, f"the rows are no lists of numbers of one length; {FORM}")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not np.isfinite(matrix).all():
        refuse(where, value, f"it is no square matrix of finite numbers, but has the shape {matrix.shape}")
    return ReflectionMatrix(matrix)


def _tensor(values: np.ndarray, device: th.device) -> th.Tensor:
    return th.as_tensor(np.ascontiguousarray(values), dtype=th.float32, device=device)

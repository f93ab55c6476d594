"""Detection of changes of the parameters of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch as th
from torch import nn

# Number of elements from which on NumPy compares tensors faster than torch
LARGE = 2**14


class WeightWatch:
    """
    Detects changes of the parameters and buffers of a policy.

    :param by_value: Whether to compare all values, which also detects changes that torch does not track (with ``.data`` or
        through NumPy). Otherwise the addresses and torch's version counters are compared, which is faster
    """

    def __init__(self, by_value: bool):
        self.by_value = by_value
        self._before: Any = None

    def have_changed(self, policy: nn.Module) -> bool:
        """
        :param policy: Current policy, which may be a different object than before
        :return: Whether anything has changed since the last call; True at the first call
        """
        tensors = tensors_of(policy)
        if not self.by_value:
            now = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
            before, self._before = self._before, now
            return now != before
        if self._before is not None and are_equal(self._before, tensors):
            return False
        self._before = copies(tensors)
        return True


def tensors_of(*modules: nn.Module) -> list[th.Tensor]:
    """
    :param modules: Modules
    :return: Their parameters and buffers
    """
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    tensors = (tensor for part in parts for tensor in (*part._parameters.values(), *part._buffers.values()))
    return [tensor for tensor in tensors if tensor is not None]


def copies(tensors: Sequence[th.Tensor]) -> list[th.Tensor]:
    """
    :param tensors: Tensors
    :return: Copies of their values
    """
    return [tensor.detach().clone() for tensor in tensors]


def are_equal(ones: Sequence[th.Tensor], others: Sequence[th.Tensor]) -> bool:
    """
    :param ones: Tensors
    :param others: Other tensors
    :return: Whether all values are equal, and types, shapes and devices with them
    """
    if [_kind(one) for one in ones] != [_kind(other) for other in others]:
        return False
    on_device = [(one == other).all() for one, other in zip(ones, others, strict=True) if one.device.type != "cpu"]
    if on_device and not th.stack(on_device).all():  # read at once
        return False
    return all(_is_equal(one, other) for one, other in zip(ones, others, strict=True) if one.device.type == "cpu")


def _kind(tensor: th.Tensor) -> tuple[th.dtype, th.Size, th.device]:
    return tensor.dtype, tensor.shape, tensor.device


def _is_equal(one: th.Tensor, other: th.Tensor) -> bool:
    if one.numel() >= LARGE and one.dtype in (th.float32, th.float64):
        return bool((one.detach().numpy() == other.detach().numpy()).all())
    return th.equal(one, other)

"""Detection of changes of the parameters of a policy."""

from __future__ import annotations

from typing import Any

import torch as th
from torch import nn


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
        tensors = [*policy.parameters(), *policy.buffers()]
        if not self.by_value:
            now = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
            before, self._before = self._before, now
            return now != before
        if self._before is not None and _are_equal(self._before, tensors):
            return False
        self._before = [tensor.detach().clone() for tensor in tensors]
        return True


def _are_equal(ones: list[th.Tensor], others: list[th.Tensor]) -> bool:
    return len(ones) == len(others) and all(
        one.shape == other.shape and one.device == other.device and th.equal(one, other)
        for one, other in zip(ones, others, strict=True)
    )

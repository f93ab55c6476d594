"""Whether the parameters of a policy have changed since somebody looked."""

from __future__ import annotations

from typing import Any

import torch as th
from torch import nn


class WeightWatch:
    """
    Tells whether the parameters and buffers of a policy are others than before.

    :param by_value: Whether to compare all numbers, which notices what is written past torch's back as well (by ``.data``, or
        through NumPy). Otherwise torch's counters of changes and the addresses are compared, which takes less time
    """

    def __init__(self, by_value: bool):
        self.by_value = by_value
        self._before: Any = None

    def have_changed(self, policy: nn.Module) -> bool:
        """
        :param policy: The policy as it is now, which may be another one than before
        :return: Whether anything has changed since the last call; at first it has
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

"""Means of what environments in tensors want logged."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch as th
from stable_baselines3.common.logger import Logger

# Entry of the log for which SB3 logs the rate
SUCCESS = "is_success"


class EnvLog:
    """Sums of what environments want logged, on their device. Successes are left to SB3, which logs their rate."""

    def __init__(self) -> None:
        # Sum and number of each entry
        self._sums: dict[str, tuple[th.Tensor, th.Tensor]] = {}

    def add(self, log: Mapping[str, th.Tensor], dones: th.Tensor) -> None:
        """
        Add steps. A scalar counts in each step, the value of an environment at the end of its episode.

        :param log: Scalars, or tensors with the shape of ``dones``
        :param dones: Whether an episode has ended, bool
        """
        for name, value in log.items():
            if name == SUCCESS:
                continue
            value = value.detach().float()
            if value.ndim == 0:
                total, n = value, th.ones_like(value)
            else:
                total, n = th.where(dones, value, 0.0).sum(), dones.sum().float()
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (before[0] + total, before[1] + n)

    def numbers(self) -> list[th.Tensor]:
        """:return: Sum and number of each entry, one after the other, on the device"""
        return [number for pair in self._sums.values() for number in pair]

    def record(self, logger: Logger, numbers: np.ndarray | None = None) -> None:
        """
        Record the means, and begin anew.

        :param logger: Logger of the training
        :param numbers: What :meth:`numbers` returns, on the host; ``None`` to fetch it
        """
        if numbers is None and self._sums:
            numbers = th.stack(self.numbers()).cpu().numpy()
        if numbers is not None:
            for name, (total, n) in zip(self._sums, numbers.reshape(-1, 2), strict=True):
                if n > 0:
                    logger.record(name if "/" in name else f"env/{name}", float(total / n))
        self.clear()

    def clear(self) -> None:
        """Forget what has been added."""
        self._sums.clear()

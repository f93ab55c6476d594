"""What is measured while the policy is updated."""

import math
from collections import defaultdict

import numpy as np
import torch as th


class Metrics(defaultdict[str, list[th.Tensor]]):
    """
    Scalars by name, one for each minibatch or step, or vectors of them. They stay on the device until they are read.
    """

    def __init__(self) -> None:
        super().__init__(list)

    def add(self, measured: dict[str, th.Tensor]) -> None:
        """
        :param measured: Of one more minibatch, by name
        """
        for name, value in measured.items():
            self[name].append(value)

    def numbers(self, name: str) -> np.ndarray:
        """
        :param name: Of the metric
        :return: All of its values, in one transfer to the host; a NaN if there are none
        """
        if not self[name]:
            return np.array([np.nan], np.float32)
        return (th.cat if self[name][0].ndim else th.stack)(self[name]).cpu().numpy()

    def mean(self, name: str) -> float:
        """
        :param name: Of the metric
        :return: Its mean, in float64 as SB3 averages Python's numbers
        """
        return float(self.numbers(name).astype(np.float64).mean())

    def weighted(self, name: str, shares: list[float]) -> th.Tensor:
        """
        :param name: Of the metric
        :param shares: Of its last values, summing to 1
        :return: Their weighted mean, on the device
        """
        values = self[name][-len(shares) :]
        if len(values) == 1:
            return values[0]
        return th.stack([share * value for share, value in zip(shares, values, strict=True)]).sum()

    def lengths(self) -> dict[str, int]:
        """:return: How many values there are of each, for the two methods below"""
        return {name: len(values) for name, values in self.items()}

    def bad_since(self, lengths: dict[str, int], name: str) -> float:
        """
        :param lengths: From :meth:`lengths`
        :param name: Of a metric that was measured since
        :return: The first value since then that is not finite, or the last
        """
        numbers = [value.item() for value in self[name][lengths.get(name, 0) :]]
        return next((number for number in numbers if not math.isfinite(number)), numbers[-1])

    def forget_since(self, lengths: dict[str, int]) -> None:
        """
        :param lengths: From :meth:`lengths`
        """
        for name, values in self.items():
            del values[lengths.get(name, 0) :]

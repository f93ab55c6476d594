"""What is measured while the policy is updated."""

import math
from collections import defaultdict

import numpy as np
import torch as th

# Of these the last epoch alone counts, as for SB3.
OF_LAST_EPOCH = ("approx_kl", "kl", "ratio", "action_parameters")
# Not logged as the mean under their own name
LOGGED_OTHERWISE = {
    "entropy_loss",
    "policy_gradient_loss",
    "value_loss",
    "clip_fraction",
    "approx_kl",
    "loss",
    "ratio",
    "action_parameters",
}
# Names that ``extra_actor_loss`` cannot give to what it logs, beside those of the auxiliary losses
RESERVED_NAMES = LOGGED_OTHERWISE | {
    "extra_actor_loss",
    "actor_frozen",
    "grad_norm",
    "critic_grad_norm",
    "muon_grad_norm",
    "actions_at_bounds",
    "mass_near_bounds",
    "std",
    "concentration",
}


class Metrics(defaultdict[str, list[th.Tensor]]):
    """
    Scalars by name, one for each minibatch or step of the optimiser, or vectors of them. They stay on the device until they
    are read.
    """

    def __init__(self) -> None:
        super().__init__(list)

    def begin_epoch(self) -> None:
        """Forget what counts for one epoch only."""
        for name in OF_LAST_EPOCH:
            self[name].clear()

    def add(self, measured: dict[str, th.Tensor]) -> None:
        """
        :param measured: Values of one more minibatch or step, by name
        """
        for name, value in measured.items():
            self[name].append(value)

    def numbers(self, name: str) -> np.ndarray:
        """
        :param name: Name of the metric
        :return: All of its values, in one transfer to the host; a NaN if there are none
        """
        if not self[name]:
            return np.array([np.nan], np.float32)
        return (th.cat if self[name][0].ndim else th.stack)(self[name]).cpu().numpy()

    def mean(self, name: str) -> float:
        """
        :param name: Name of the metric
        :return: Its mean, in float64 as SB3 averages Python's numbers
        """
        return float(self.numbers(name).astype(np.float64).mean())

    def vector(self, name: str) -> th.Tensor:
        """
        :param name: Name of a metric whose values are vectors
        :return: All of them joined, on the device
        """
        return th.cat(self[name])

    def weighted(self, name: str, shares: list[float]) -> th.Tensor:
        """
        :param name: Name of the metric
        :param shares: Weights of its last values, summing to 1
        :return: Their weighted mean, on the device
        """
        values = self[name][-len(shares) :]
        if len(values) == 1:
            return values[0]
        return th.stack([share * value for share, value in zip(shares, values, strict=True)]).sum()

    def lengths(self) -> dict[str, int]:
        """:return: How many values there are of each metric, for the two methods below"""
        return {name: len(values) for name, values in self.items()}

    def bad_since(self, lengths: dict[str, int], name: str) -> float:
        """
        :param lengths: What :meth:`lengths` returned before
        :param name: Name of a metric that was measured since
        :return: The first value since then that is not finite, or the last
        """
        numbers = [value.item() for value in self[name][lengths.get(name, 0) :]]
        return next((number for number in numbers if not math.isfinite(number)), numbers[-1])

    def forget_since(self, lengths: dict[str, int]) -> None:
        """
        :param lengths: What :meth:`lengths` returned before
        """
        for name, values in self.items():
            del values[lengths.get(name, 0) :]

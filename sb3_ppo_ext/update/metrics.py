"""Metrics that are collected during an update."""

from collections import defaultdict

import numpy as np
import torch as th

from sb3_ppo_ext.distributed.ranks import Ranks

# Metrics of only the last epoch, as in SB3
OF_LAST_EPOCH = ("approx_kl", "kl", "ratio", "action_parameters")
# Metrics with a value for each sample
OF_SAMPLES = ("ratio", "action_parameters")
# Metrics that are logged in other ways than as their mean under their own name
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
# Names that ``extra_actor_loss`` cannot use for its logs, in addition to those of the penalties
RESERVED_NAMES = LOGGED_OTHERWISE | {
    "extra_actor_loss",
    "actor_frozen",
    "grad_norm",
    "critic_grad_norm",
    "muon_grad_norm",
    "value_mean",
    "value_std",
    "actions_at_bounds",
    "mass_near_bounds",
    "std",
    "concentration",
}


class Metrics(defaultdict[str, list[th.Tensor]]):
    """
    Measurements by name: a list of scalars, one for each minibatch or step of the optimiser, or of vectors. They stay on the
    device until they are read.
    """

    def __init__(self) -> None:
        super().__init__(list)

    def begin_epoch(self) -> None:
        """Clear the metrics that cover a single epoch."""
        for name in OF_LAST_EPOCH:
            self[name].clear()

    def add(self, measured: dict[str, th.Tensor]) -> None:
        """
        :param measured: Values of a minibatch or step, by name
        """
        for name, value in measured.items():
            self[name].append(value)

    def numbers(self, name: str) -> np.ndarray:
        """
        :param name: Name of the metric
        :return: All values of the metric, in one transfer to the host; a single NaN if there are none
        """
        if not self[name]:
            return np.array([np.nan], np.float32)
        return (th.cat if self[name][0].ndim else th.stack)(self[name]).cpu().numpy()

    def mean(self, name: str) -> float:
        """
        :param name: Name of the metric
        :return: Mean of the metric, in float64 since SB3 averages Python floats
        """
        return float(self.numbers(name).astype(np.float64).mean())

    def vector(self, name: str) -> th.Tensor:
        """
        :param name: Name of a metric with vectors as values
        :return: Concatenated values, on the device
        """
        return th.cat(self[name])

    def weighted(self, name: str, shares: list[float]) -> th.Tensor:
        """
        :param name: Name of the metric
        :param shares: Weights of the last values of the metric, which sum to 1
        :return: Weighted mean of these values, on the device
        """
        values = self[name][-len(shares) :]
        if len(values) == 1:
            return values[0]
        return th.stack([share * value for share, value in zip(shares, values, strict=True)]).sum()

    def average(self, ranks: Ranks, counts: np.ndarray | None) -> None:
        """
        Replace each measurement of a minibatch or step by its mean over the ranks.

        :param ranks: Ranks of the training
        :param counts: Number of samples of this rank in each step of the update, shape ``(n_steps,)``; ``None`` if it is the
            same on all ranks
        """
        names = [name for name, values in self.items() if values and name not in OF_SAMPLES]
        own = {name: self.numbers(name).astype(np.float64) for name in names}
        weights = {name: self._weights(numbers, counts) for name, numbers in own.items()}
        found = ranks.gather((own, weights))
        for name, numbers in own.items():
            parts = [(each[0][name], each[1][name]) for each in found if len(each[0].get(name, ())) == len(numbers)]
            total = np.sum([weight for _, weight in parts], axis=0)
            with np.errstate(invalid="ignore"):
                mean = np.sum([numbers * weight for numbers, weight in parts], axis=0) / total
            self[name] = [th.from_numpy(mean.astype(np.float32))]

    @staticmethod
    def _weights(numbers: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
        # Metrics of only the last epoch, or of the whole rollout, have fewer values.
        if counts is None or len(numbers) == 1 or len(counts) < len(numbers):
            return np.ones(len(numbers))
        return counts[len(counts) - len(numbers) :]

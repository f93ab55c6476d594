"""The minibatches of an epoch in NumPy, and what is measured of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch as th

from sb3_ppo_ext.distributions import NumpyDistribution
from sb3_ppo_ext.update.losses import LossConfig
from sb3_ppo_ext.update.metrics import Metrics


class FlatRollout(NamedTuple):
    """Arrays whose first dimension is that of the samples."""

    features: np.ndarray
    actions: np.ndarray
    values: np.ndarray
    log_probs: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray


class NativeMinibatches:
    """
    The minibatches of an epoch one after the other, and what is measured of them.

    :param order: Places in the rollout in the order in which they are drawn
    :param samples: In this order
    :param sizes: Of the minibatches
    :param weights: Of the samples, ``None`` for equal ones
    :param distribution: The action distribution that the outputs of the network stand for
    """

    def __init__(
        self,
        order: np.ndarray,
        samples: FlatRollout,
        sizes: np.ndarray,
        weights: np.ndarray | None,
        distribution: NumpyDistribution,
    ):
        self.order, self.samples, self.sizes, self.weights, self.distribution = order, samples, sizes, weights, distribution
        # What auxiliary losses add to the loss of each minibatch
        self.auxiliary = np.zeros(len(sizes), np.float32)
        self.log_ratios, self.ratios, self.objectives, self.errors = np.empty((4, len(samples.features)), np.float32)
        # Of the minibatches that were evaluated
        self.described: list[np.ndarray] = []
        self.skipped: list[int] = []

    def skip(self, n: int) -> None:
        """
        Leave minibatches out of what is measured.

        :param n: How many of those that were evaluated last
        """
        self.skipped += range(len(self.described) - n, len(self.described))

    def terms(self, part: slice, n: int) -> dict[str, float]:
        """
        :param part: The samples of the last minibatches
        :param n: How many minibatches they are
        :return: The losses of PPO for them
        """
        weights = 1.0 if self.weights is None else self.weights[part]
        return {
            "policy_gradient_loss": -float(np.mean(self.objectives[part] * weights)),
            "value_loss": float(np.mean(np.square(self.errors[part]) * weights)),
            "entropy_loss": -float(np.mean(self.distribution.entropies(np.concatenate(self.described[-n:])))),
        }

    def measured(self) -> Measured:
        """:return: Of the minibatches that were evaluated"""
        sizes = self.sizes[: len(self.described)]
        n = int(sizes.sum())
        kept = np.ones(len(sizes), bool)
        kept[self.skipped] = False
        return Measured(
            sizes,
            kept,
            self.auxiliary[: len(sizes)],
            np.concatenate(self.described),
            self.objectives[:n],
            self.errors[:n],
            self.ratios[:n],
            self.log_ratios[:n],
            None if self.weights is None else self.weights[:n],
        )


class Measured(NamedTuple):
    """
    What was measured in some minibatches.

    :param sizes: Samples of each minibatch, shape ``(n_minibatches,)``
    :param kept: Whether a minibatch counts, shape ``(n_minibatches,)``
    :param auxiliary: What auxiliary losses added to the loss of each minibatch, shape ``(n_minibatches,)``
    :param described: What ``NumpyDistribution.described`` returned for each sample, shape ``(n_samples, n)``
    :param objectives: Objectives of the surrogate, shape ``(n_samples,)``
    :param errors: Errors whose squares the value loss averages, shape ``(n_samples,)``
    :param ratios: Probability ratios, shape ``(n_samples,)``
    :param log_ratios: Their logarithms, shape ``(n_samples,)``
    :param weights: Importance weights, shape ``(n_samples,)``, ``None`` for equal ones
    """

    sizes: np.ndarray
    kept: np.ndarray
    auxiliary: np.ndarray
    described: np.ndarray
    objectives: np.ndarray
    errors: np.ndarray
    ratios: np.ndarray
    log_ratios: np.ndarray
    weights: np.ndarray | None

    @classmethod
    def merged(cls, parts: list[Measured]) -> Measured:
        """
        :param parts: At least one
        :return: All of them, one after the other
        """
        columns: Any = zip(*parts, strict=True)
        arrays: Any = [None if column[0] is None else np.concatenate(column) for column in columns]
        return cls(*arrays)

    def report(self, metrics: Metrics, distribution: NumpyDistribution, config: LossConfig) -> None:
        """
        :param metrics: They get the means of each minibatch
        :param distribution: The action distribution
        :param config: With the coefficients of the losses
        """
        weights = 1.0 if self.weights is None else self.weights
        policy_loss = -self._means(self.objectives * weights)
        value_loss = self._means(np.square(self.errors) * weights)
        entropy_loss = -self._means(distribution.entropies(self.described))
        coefficients: Any = (config.ent_coef, config.vf_coef)
        ent_coef, vf_coef = coefficients
        means = {
            "policy_gradient_loss": policy_loss,
            "value_loss": value_loss,
            "entropy_loss": entropy_loss,
            "clip_fraction": self._means(np.abs(self.ratios - 1) > config.clip_range),
            "loss": policy_loss + ent_coef * entropy_loss + vf_coef * value_loss + self.auxiliary[self.kept],
        }
        for name, values in means.items():
            if len(values):
                metrics[name].append(th.from_numpy(values))

    def report_last(self, metrics: Metrics, distribution: NumpyDistribution) -> None:
        """
        :param metrics: They get what is measured in the last epoch alone
        :param distribution: The action distribution
        """
        approx_kl = self._means(self.ratios - 1 - self.log_ratios)
        samples = np.repeat(self.kept, self.sizes)
        if len(approx_kl):
            metrics["approx_kl"].append(th.from_numpy(approx_kl))
            metrics["ratio"].append(th.from_numpy(self.ratios[samples]))
        parameters = distribution.parameters(self.described)
        if parameters is not None:
            metrics["action_parameters"].append(parameters[samples])

    def _means(self, values: np.ndarray) -> np.ndarray:
        """Of the minibatches that count."""
        means: np.ndarray = mean_of_each(values, self.sizes)[self.kept]
        return means.astype(np.float32)


def mean_of_each(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """
    :param values: Shape ``(sizes.sum(),)``
    :param sizes: Of its parts
    :return: The mean of each part, in float64
    """
    sums: np.ndarray
    if sizes.min() == sizes.max():
        sums = np.add.reduce(values.reshape(len(sizes), -1), axis=1, dtype=np.float64)
    else:
        sums = np.add.reduceat(values, np.cumsum(sizes) - sizes, dtype=np.float64)
    means: np.ndarray = sums / sizes
    return means


def normalize_each(advantages: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """
    :param advantages: Shape ``(sizes.sum(),)``
    :param sizes: Of the minibatches
    :return: Each minibatch by itself as in :func:`sb3_ppo_ext.update.advantages.normalize`
    """
    centred: np.ndarray = advantages - np.repeat(mean_of_each(advantages, sizes), sizes)
    # Of the sample, that is by n - 1; a single advantage stays as it is.
    variances = mean_of_each(np.square(centred), sizes) * sizes / np.maximum(sizes - 1, 1)
    centred /= np.repeat(np.sqrt(variances) + 1e-8, sizes)
    if sizes.min() == 1:
        centred = np.where(np.repeat(sizes > 1, sizes), centred, advantages)
    return centred.astype(np.float32)

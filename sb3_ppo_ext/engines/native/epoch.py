"""The minibatches of an epoch in NumPy, and their metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch as th

from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.distributions import NumpyDistribution
from sb3_ppo_ext.update.losses import LossConfig
from sb3_ppo_ext.update.metrics import Metrics


class FlatRollout(NamedTuple):
    """
    The samples of a rollout, as arrays of shape ``(n_samples, ...)``; ``invalid`` is ``None`` if all actions are valid, and
    ``old``, parameters of the old action distributions, if no loss reads them.
    """

    features: np.ndarray
    actions: np.ndarray
    values: np.ndarray
    log_probs: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray
    invalid: np.ndarray | None = None
    old: np.ndarray | None = None

    def take(self, order: np.ndarray, out: FlatRollout | None = None) -> FlatRollout:
        """
        :param order: Indices of samples, shape ``(n,)``
        :param out: Samples to write into, ``None`` for new ones
        :return: These samples
        """
        targets = [None] * len(self) if out is None else out
        parts: Arrays = [
            # Indices are valid; with another mode, NumPy would write into a copy first.
            None if array is None else array.take(order, axis=0, out=target, mode="clip")
            for array, target in zip(self, targets, strict=True)
        ]
        return FlatRollout(*parts)


class NativeMinibatches:
    """
    The samples of an epoch, or of several one after the other, in the order of the minibatches, and their measurements.

    :param order: Indices of the samples in the flattened rollout, in the order in which they are drawn, shape ``(n_samples,)``
    :param samples: Samples in this order
    :param sizes: Number of samples in each minibatch, shape ``(n_minibatches,)``
    :param weights: Importance weights, shape ``(n_samples,)``, ``None`` for equal weights
    :param distribution: Action distribution that the outputs of the actor parametrise
    """

    def __init__(
        self,
        order: np.ndarray,
        samples: FlatRollout,
        sizes: np.ndarray,
        weights: np.ndarray | None,
        distribution: NumpyDistribution,
    ):
        self.samples, self.sizes, self.weights, self.distribution = samples, sizes, weights, distribution
        self.measurements = np.empty((5, len(samples.features)), np.float32)
        self.log_ratios, self.ratios, self.objectives, self.errors, self.entropies = self.measurements
        # What the extension module measures besides: descriptions of the distributions, and penalties of the samples, by name
        self.rows: np.ndarray | None = None
        self.penalized: dict[str, np.ndarray] = {}
        self.begin(order)

    def measure(self, penalties: Iterable[str], describes: bool) -> None:
        """
        Make arrays for what the extension module measures besides.

        :param penalties: Names of penalties
        :param describes: Whether it describes the distributions, see ``NumpyDistribution.described``
        """
        n, n_outputs = len(self.samples.features), self.distribution.n_described
        self.rows = np.empty((n, n_outputs), np.float32) if describes else None
        self.penalized = {name: np.empty(n, np.float32) for name in penalties}

    def begin(self, order: np.ndarray) -> None:
        """
        Begin again, without measurements.

        :param order: Indices of the samples, as above
        """
        self.order = order
        # Weighted sum of the penalties of each minibatch
        self.penalties = np.zeros(len(self.sizes), np.float32)
        # Number of minibatches evaluated so far, the parameters of their distributions if entropies are computed from these at
        # the end, and indices of those that are skipped
        self.n = 0
        self.described: list[np.ndarray] = []
        self.skipped: list[int] = []

    def skip(self, n: int) -> None:
        """
        Exclude the last evaluated minibatches from the metrics.

        :param n: Number of minibatches to exclude
        """
        self.skipped += range(self.n - n, self.n)

    def terms(self, part: slice, n: int) -> dict[str, float]:
        """
        :param part: Samples of the last evaluated minibatches
        :param n: Number of these minibatches
        :return: Losses of PPO for these minibatches, by name
        """
        weights = 1.0 if self.weights is None else self.weights[part]
        with np.errstate(over="ignore"):
            squares = np.square(self.errors[part])
        return {
            "policy_gradient_loss": -float(np.mean(self.objectives[part] * weights)),
            "value_loss": float(np.mean(squares * weights)),
            "entropy_loss": -float(np.mean(self._entropies(part, n))),
            **{name: float(np.mean(values[part])) for name, values in self.penalized.items()},
        }

    def _entropies(self, part: slice, n: int) -> np.ndarray:
        if not self.described:
            return self.entropies[part]
        return self.distribution.entropies(np.concatenate(self.described[-n:]))

    def measured(self, first: int = 0) -> MeasuredMinibatches:
        """
        :param first: Number of a minibatch
        :return: Measurements of the minibatches evaluated so far, from this one on, which further ones leave as they are
        """
        sizes = self.sizes[first : self.n]
        kept = np.ones(len(sizes), bool)
        kept[[number - first for number in self.skipped if number >= first]] = False
        start = int(self.sizes[:first].sum())
        part = slice(start, start + int(sizes.sum()))
        log_ratios, ratios, objectives, errors, entropies = self.measurements[:, part].copy()
        rows = None if self.rows is None else self.rows[part].copy()
        return MeasuredMinibatches(
            sizes,
            kept,
            self.penalties[first : self.n],
            np.concatenate(self.described[first:]) if self.described else rows,
            None if self.described else entropies,
            objectives,
            errors,
            ratios,
            log_ratios,
            None if self.weights is None else self.weights[part],
            *(None if (values := self.penalized.get(name)) is None else values[part].copy() for name in ("kl", "bounds_loss")),
        )


class MeasuredMinibatches(NamedTuple):
    """
    Measurements of several minibatches.

    :param sizes: Number of samples in each minibatch, shape ``(n_minibatches,)``
    :param kept: Whether each minibatch is included in the metrics, shape ``(n_minibatches,)``
    :param penalties: Weighted sum of the penalties of each minibatch, shape ``(n_minibatches,)``
    :param described: Results of ``NumpyDistribution.described`` for each sample, shape ``(n_samples, n)``; ``None`` if nothing
        is computed from them
    :param entropies: Entropies, shape ``(n_samples,)``; ``None`` if they are computed from these
    :param objectives: Surrogate objectives, shape ``(n_samples,)``
    :param errors: Errors of the values, with the value loss as their mean square, shape ``(n_samples,)``
    :param ratios: Probability ratios, shape ``(n_samples,)``
    :param log_ratios: Logarithms of the probability ratios, shape ``(n_samples,)``
    :param weights: Importance weights, shape ``(n_samples,)``, ``None`` for equal weights
    :param kl: KL divergences, shape ``(n_samples,)``, ``None`` if they are among the penalties above or there are none
    :param bounds_loss: The same of the bounds losses
    """

    sizes: np.ndarray
    kept: np.ndarray
    penalties: np.ndarray
    described: np.ndarray | None
    entropies: np.ndarray | None
    objectives: np.ndarray
    errors: np.ndarray
    ratios: np.ndarray
    log_ratios: np.ndarray
    weights: np.ndarray | None
    kl: np.ndarray | None
    bounds_loss: np.ndarray | None

    @classmethod
    def merged(cls, parts: list[MeasuredMinibatches]) -> MeasuredMinibatches:
        """
        :param parts: Measurements of several epochs, at least one
        :return: Concatenated measurements
        """
        columns = zip(*parts, strict=True)
        arrays: Arrays = [None if column[0] is None else np.concatenate(column) for column in columns]
        return cls(*arrays)

    def report(self, metrics: Metrics, distribution: NumpyDistribution, config: LossConfig) -> None:
        """
        :param metrics: Metrics that the mean of each minibatch is added to
        :param distribution: Action distribution of the policy
        :param config: Options with the coefficients of the losses
        """
        weights = 1.0 if self.weights is None else self.weights
        policy_loss = -self._means(self.objectives * weights)
        value_loss = self._means(np.square(self.errors) * weights)
        entropies = self.entropies
        if entropies is None:
            assert self.described is not None
            entropies = distribution.entropies(self.described)
        entropy_loss = -self._means(entropies)
        coefficients = (config.ent_coef, config.vf_coef)
        ent_coef, vf_coef = coefficients
        penalties = self.penalties[self.kept]
        for name, values in (("kl", self.kl), ("bounds_loss", self.bounds_loss)):
            if values is not None:
                penalties = penalties + config.penalties[name] * self._means(values)
        means = {
            "policy_gradient_loss": policy_loss,
            "value_loss": value_loss,
            "entropy_loss": entropy_loss,
            "clip_fraction": self._means(np.abs(self.ratios - 1) > config.clip_range),
            "loss": policy_loss + ent_coef * entropy_loss + vf_coef * value_loss + penalties,
        }
        if self.bounds_loss is not None:
            means["bounds_loss"] = self._means(self.bounds_loss)
        for name, values in means.items():
            if len(values):
                metrics[name].append(th.from_numpy(values))

    def report_last(self, metrics: Metrics, distribution: NumpyDistribution) -> None:
        """
        :param metrics: Metrics to which only those of the last epoch are added
        :param distribution: Action distribution of the policy
        """
        approx_kl = self._means(self.ratios - 1 - self.log_ratios)
        samples = np.repeat(self.kept, self.sizes)
        if self.weights is not None:
            samples &= self.weights > 0  # without a sample that stands for an empty minibatch
        if len(approx_kl):
            metrics["approx_kl"].append(th.from_numpy(approx_kl))
            metrics["ratio"].append(th.from_numpy(self.ratios[samples]))
            if self.kl is not None:
                metrics["kl"].append(th.from_numpy(self._means(self.kl)))
        parameters = None if self.described is None else distribution.parameters(self.described)
        if parameters is not None:
            metrics["action_parameters"].append(parameters[samples])

    def _means(self, values: np.ndarray) -> np.ndarray:
        """Means over the samples of each kept minibatch, shape ``(n_kept,)``."""
        means: np.ndarray = mean_of_each(values, self.sizes)[self.kept]
        return means.astype(np.float32)


def mean_of_each(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """
    :param values: Values of consecutive parts, shape ``(sizes.sum(),)``
    :param sizes: Number of values in each part, shape ``(n_parts,)``
    :return: Mean of each part in float64, shape ``(n_parts,)``
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
    :param advantages: Advantages of consecutive minibatches, shape ``(sizes.sum(),)``
    :param sizes: Number of samples in each minibatch, shape ``(n_minibatches,)``
    :return: Advantages, normalised in each minibatch as by :func:`sb3_ppo_ext.update.advantages.normalize`, in the same shape
    """
    centred: np.ndarray = advantages - np.repeat(mean_of_each(advantages, sizes), sizes)
    # Sample variances, with a divisor of n - 1. A single advantage is left unchanged.
    variances = mean_of_each(np.square(centred), sizes) * sizes / np.maximum(sizes - 1, 1)
    centred /= np.repeat(np.sqrt(variances) + 1e-8, sizes)
    if sizes.min() == 1:
        centred = np.where(np.repeat(sizes > 1, sizes), centred, advantages)
    return centred.astype(np.float32)

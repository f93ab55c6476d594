"""The minibatches of an epoch in NumPy, and what is measured of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th

from sb3_ppo_ext.distributions import NumpyDistribution
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
    :param head: What the outputs of the network mean
    """

    def __init__(
        self,
        order: np.ndarray,
        samples: FlatRollout,
        sizes: np.ndarray,
        weights: np.ndarray | None,
        head: NumpyDistribution,
    ):
        self.order, self.samples, self.sizes, self.weights, self.head = order, samples, sizes, weights, head
        # What other terms add to the loss of each minibatch
        self.further = np.zeros(len(sizes), np.float32)
        self.ends = np.cumsum(sizes)
        self.log_ratios, self.ratios, self.objectives, self.errors = np.empty((4, len(samples.features)), np.float32)
        # Of the minibatches that were evaluated
        self.described: list[np.ndarray] = []
        # Of each step that was made
        self.norms: list[float] = []
        self.skipped: list[int] = []

    def parts(self) -> Iterator[slice]:
        """:return: Where each minibatch is"""
        return (slice(end - size, end) for end, size in zip(self.ends.tolist(), self.sizes.tolist(), strict=True))

    def skip(self) -> None:
        """Leave the last one out of what is measured."""
        self.skipped.append(len(self.described) - 1)

    def approximate_kl(self, part: slice) -> float:
        """
        :param part: A minibatch
        :return: See :func:`sb3_ppo_ext.update.losses.approximate_kl`
        """
        return float(np.mean(self.ratios[part] - 1 - self.log_ratios[part]))

    def terms(self, part: slice) -> dict[str, float]:
        """
        :param part: The last minibatch
        :return: The terms of its loss
        """
        weights = 1.0 if self.weights is None else self.weights[part]
        return {
            "policy_gradient_loss": -float(np.mean(self.objectives[part] * weights)),
            "value_loss": float(np.mean(np.square(self.errors[part]) * weights)),
            "entropy_loss": -float(np.mean(self.head.entropies(self.described[-1]))),
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
            self.further[: len(sizes)],
            np.array(self.norms, np.float32),
            np.concatenate(self.described),
            self.objectives[:n],
            self.errors[:n],
            self.ratios[:n],
            self.log_ratios[:n],
            None if self.weights is None else self.weights[:n],
        )


class Measured(NamedTuple):
    """What was measured in some minibatches: of each, of each step that was made, and of each sample."""

    sizes: np.ndarray
    kept: np.ndarray
    further: np.ndarray
    norms: np.ndarray
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

    def report(self, metrics: Metrics, head: NumpyDistribution, clip_range: float, ent_coef: float, vf_coef: float) -> None:
        """
        :param metrics: They get the means of each minibatch
        :param head: What the outputs mean
        :param clip_range: Of the ratios
        :param ent_coef: Coefficient of the entropy loss
        :param vf_coef: Coefficient of the value loss
        """
        weights = 1.0 if self.weights is None else self.weights
        policy_loss = -self._means(self.objectives * weights)
        value_loss = self._means(np.square(self.errors) * weights)
        entropy_loss = -self._means(head.entropies(self.described))
        means = {
            "policy_gradient_loss": policy_loss,
            "value_loss": value_loss,
            "entropy_loss": entropy_loss,
            "clip_fraction": self._means(np.abs(self.ratios - 1) > clip_range),
            "loss": policy_loss + ent_coef * entropy_loss + vf_coef * value_loss + self.further[self.kept],
            "grad_norm": self.norms,
        }
        for name, values in means.items():
            if len(values):
                metrics[name].append(th.from_numpy(values))

    def report_last(self, metrics: Metrics, head: NumpyDistribution) -> None:
        """
        :param metrics: They get what is measured in the last epoch alone
        :param head: What the outputs mean
        """
        approx_kl = self._means(self.ratios - 1 - self.log_ratios)
        samples = np.repeat(self.kept, self.sizes)
        if len(approx_kl):
            metrics["approx_kl"].append(th.from_numpy(approx_kl))
            metrics["ratio"].append(th.from_numpy(self.ratios[samples]))
        laws = head.parameters(self.described)
        if laws is not None and not metrics["law"]:
            metrics["law"].append(laws[samples])

    def _means(self, values: np.ndarray) -> np.ndarray:
        """Of the minibatches that count."""
        return mean_of_each(values, self.sizes)[self.kept].astype(np.float32)


def mean_of_each(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """
    :param values: Shape ``(sizes.sum(),)``
    :param sizes: Of its parts
    :return: The mean of each part, in float64
    """
    if sizes.min() == sizes.max():
        return np.add.reduce(values.reshape(len(sizes), -1), axis=1, dtype=np.float64) / sizes
    return np.add.reduceat(values, np.cumsum(sizes) - sizes, dtype=np.float64) / sizes


def normalize_each(advantages: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """
    :param advantages: Shape ``(sizes.sum(),)``
    :param sizes: Of the minibatches
    :return: Each minibatch by itself as in :func:`sb3_ppo_ext.update.advantages.normalize`
    """
    centred = advantages - np.repeat(mean_of_each(advantages, sizes), sizes)
    # Of the sample, that is by n - 1; a single advantage stays as it is.
    variances = mean_of_each(np.square(centred), sizes) * sizes / np.maximum(sizes - 1, 1)
    centred /= np.repeat(np.sqrt(variances) + 1e-8, sizes)
    if sizes.min() == 1:
        centred = np.where(np.repeat(sizes > 1, sizes), centred, advantages)
    return centred.astype(np.float32)

"""Drawing minibatches from a rollout: shuffled, or as prioritised segments of trajectories."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import RolloutBufferSamples

# Indices of the samples of a minibatch in the flattened rollout (``env * n_steps + step``), and their importance weights
Draw = tuple[np.ndarray, np.ndarray | None]


class Minibatch(NamedTuple):
    """
    A minibatch of the rollout.

    :param data: SB3's ``RolloutBufferSamples``, with the advantages as the policy loss uses them
    :param weights: Importance weights, shape ``(batch_size,)``, ``None`` for equal weights
    :param old_distribution: Parameters of the action distributions before the update, shape ``(batch_size, n)``, ``None`` if
        no loss reads them
    """

    data: RolloutBufferSamples
    weights: th.Tensor | None = None
    old_distribution: th.Tensor | None = None


def shuffled(n_samples: int, batch_size: int) -> Iterator[Draw]:
    """
    Draw the minibatches of one epoch, with every sample once, in the same order as SB3.

    :param n_samples: Number of samples in the rollout
    :param batch_size: Number of samples in a minibatch; the last one may be smaller
    :return: Draws of the epoch, without weights
    """
    indices = np.random.permutation(n_samples)
    for start in range(0, n_samples, batch_size):
        yield indices[start : start + batch_size], None


class PrioritizedSegments:
    """
    Draws segments of trajectories, those with large advantages more often.

    A segment consists of ``length`` consecutive steps of one environment (the last one of a rollout may be shorter). Its
    probability ``p`` is proportional to ``(sum |A|)^alpha``, mixed with a uniform part of :attr:`UNIFORM`. The segments of a
    minibatch are drawn without replacement. A segment that is drawn with probability ``q`` has the weight ``q^-beta``, scaled
    to a mean of 1 in the minibatch. If few of the segments are drawn, this is the weight ``(N p)^-beta`` of prioritised
    replay; if many are drawn, the latter would overcorrect, since q cannot exceed 1.

    Papers: https://arxiv.org/abs/1511.05952 (weights); segments as in PufferLib, https://github.com/PufferAI/PufferLib

    :param advantages: Raw advantages, shape ``(n_steps, n_envs)``
    :param length: Number of steps in a segment, at least 1
    :param alpha: Exponent of the priorities: 0 for uniform, 1 for proportional to ``sum |A|``
    :param beta: Exponent of the importance weights, in [0, 1]: 0 for no correction, 1 for a full correction in expectation
    """

    UNIFORM = 0.05

    def __init__(self, advantages: np.ndarray, length: int, alpha: float, beta: float):
        n_steps, n_envs = advantages.shape
        starts = np.arange(0, n_steps, length)
        sums = np.add.reduceat(np.abs(advantages), starts, axis=0).T.flatten().astype(np.float64)
        steps = np.minimum(starts + length, n_steps) - starts
        self.length, self.beta = length, beta
        self.firsts = (np.arange(n_envs)[:, np.newaxis] * n_steps + starts).flatten()
        self.lengths = np.tile(steps, n_envs)
        self.probabilities = self._probabilities(sums, alpha)

    def _probabilities(self, sums: np.ndarray, alpha: float) -> np.ndarray:
        n = len(sums)
        # Sums are scaled first so that the power cannot overflow. They are ignored if all are 0, or one is not finite.
        priorities = (sums / sums.max()) ** alpha if 0 < sums.max() < np.inf else np.ones(n)
        probabilities: np.ndarray = (1 - self.UNIFORM) * priorities / priorities.sum() + self.UNIFORM / n
        return probabilities

    def epoch(self, batch_size: int) -> Iterator[Draw]:
        """
        Draw as many minibatches as in an epoch that draws each sample once. Some samples are drawn repeatedly, others not at
        all.

        :param batch_size: Number of samples in a minibatch, which consists of as many whole segments as fit, at least one
        :return: Draws of the epoch, with importance weights
        """
        n = len(self.firsts)
        n_drawn = min(max(batch_size // self.length, 1), n)
        weights = inclusion_probabilities(self.probabilities, n_drawn) ** -self.beta
        for _ in range(-(-self.lengths.sum() // batch_size)):
            # The first arrivals of an exponential race are a sample without replacement (Efraimidis and Spirakis, 2006).
            arrivals = np.random.exponential(size=n) / self.probabilities
            drawn = np.argpartition(arrivals, n_drawn - 1)[:n_drawn]
            yield self._samples(drawn, weights[drawn])

    def _samples(self, drawn: np.ndarray, weights: np.ndarray) -> Draw:
        lengths = self.lengths[drawn]
        indices = np.concatenate([np.arange(first, first + n) for first, n in zip(self.firsts[drawn], lengths, strict=True)])
        weights = np.repeat(weights, lengths)
        return indices, (weights / weights.mean()).astype(np.float32)


def inclusion_probabilities(probabilities: np.ndarray, n_drawn: int) -> np.ndarray:
    """
    Probability that each of N items is included in a sample drawn without replacement. It is approximated by replacing the
    time t of the ``n_drawn``-th arrival of an exponential race by a constant: ``q_i = 1 - exp(-t p_i)``, with t such that
    ``sum(q) = n_drawn``.

    :param probabilities: Probabilities of the first draw, positive, shape ``(N,)``, which sum to 1
    :param n_drawn: Number of items drawn, from 1 to N
    :return: Inclusion probabilities, shape ``(N,)``
    """
    if n_drawn >= len(probabilities):
        return np.ones_like(probabilities)
    low, high = 0.0, 1.0
    while -np.expm1(-high * probabilities).sum() < n_drawn:
        low, high = high, 2 * high
    for _ in range(60):
        time = (low + high) / 2
        low, high = (time, high) if -np.expm1(-time * probabilities).sum() < n_drawn else (low, time)
    return -np.expm1(-high * probabilities)

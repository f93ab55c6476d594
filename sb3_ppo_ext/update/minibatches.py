"""Drawing minibatches from a rollout: shuffled, or as prioritised segments of trajectories."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from sb3_ppo_ext.distributed.ranks import Ranks

# Indices of the samples of a minibatch in the flattened rollout (``env * n_steps + step``), and their importance weights
Draw = tuple[np.ndarray, np.ndarray | None]


class Minibatch(NamedTuple):
    """
    A minibatch of the rollout.

    :param data: SB3's ``RolloutBufferSamples``, with the advantages as the policy loss uses them
    :param weights: Importance weights, shape ``(batch_size,)``, ``None`` for equal weights
    :param old_distribution: Parameters of the action distributions before the update, shape ``(batch_size, n)``, ``None`` if
        no loss reads them
    :param next_observations: Observations that follow those of the samples, and the observations of the samples themselves
        where an episode or the rollout ends; ``None`` if no loss reads them
    :param continues: Whether the episode continues at these, shape ``(batch_size,)``; ``None`` if no loss reads them
    """

    data: RolloutBufferSamples
    weights: th.Tensor | None = None
    old_distribution: th.Tensor | None = None
    next_observations: Any = None
    continues: th.Tensor | None = None


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
        # Where random numbers come from
        self.random: Any = np.random
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
            arrivals = self.random.exponential(size=n) / self.probabilities
            drawn = np.argpartition(arrivals, n_drawn - 1)[:n_drawn]
            yield self._samples(drawn, weights[drawn])

    def _samples(self, drawn: np.ndarray, weights: np.ndarray) -> Draw:
        lengths = self.lengths[drawn]
        indices = np.concatenate([np.arange(first, first + n) for first, n in zip(self.firsts[drawn], lengths, strict=True)])
        weights = np.repeat(weights, lengths)
        return indices, (weights / weights.mean()).astype(np.float32)


class SharedPrioritizedSegments(PrioritizedSegments):
    """
    :class:`PrioritizedSegments` of all ranks of a distributed training. Each rank makes the same draws and gets its own part
    of them, so that a rank with larger advantages gets more samples.

    :param advantages: Raw advantages of this rank, shape ``(n_steps, n_envs)``
    :param length: Number of steps in a segment, at least 1
    :param alpha: Exponent of the priorities
    :param beta: Exponent of the importance weights
    :param ranks: Ranks of the training
    """

    # Parts of draws are of any length.
    is_even = False

    def __init__(self, advantages: np.ndarray, length: int, alpha: float, beta: float, ranks: Ranks):
        super().__init__(np.concatenate(ranks.gather(advantages), axis=1), length, alpha, beta)
        self.ranks, self.n_own = ranks, advantages.size
        self.random = np.random.RandomState(ranks.gather(np.random.randint(2**31))[0])

    def epoch(self, batch_size: int) -> Iterator[Draw]:
        """
        :param batch_size: Number of samples of this rank in a minibatch, on average
        :return: Draws of the epoch. One that has no sample of this rank is replaced by a sample with the weight 0
        """
        for indices, weights in super().epoch(batch_size * self.ranks.size):
            assert weights is not None
            own = indices // self.n_own == self.ranks.index
            if own.any():
                yield indices[own] - self.ranks.index * self.n_own, weights[own]
            else:
                yield np.zeros(1, indices.dtype), np.zeros(1, weights.dtype)


def n_counted(indices: Any, weights: Any) -> int:
    """
    :param indices: Indices of a draw
    :param weights: Weights of the draw, ``None`` for equal weights
    :return: Number of its samples; 0 for a draw that stands for an empty one
    """
    return 0 if len(indices) == 1 and weights is not None and weights[0] == 0 else len(indices)


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

"""How minibatches are drawn from a rollout: shuffled, or as segments of prioritised trajectories."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import RolloutBufferSamples

# A minibatch is drawn as the indices of its samples in the flattened rollout (``env * n_steps + step``), with their weights.
Draw = tuple[np.ndarray, np.ndarray | None]


class Minibatch(NamedTuple):
    """
    What the loss reads.

    :param data: SB3's samples, with the advantages as the policy loss uses them
    :param weights: Importance weights, shape ``(batch_size,)``, ``None`` for equal ones
    :param old_distribution: Parameters of the distributions that the policy had before the update, shape
        ``(batch_size, n)``, ``None`` if nobody asks for them
    """

    data: RolloutBufferSamples
    weights: th.Tensor | None = None
    old_distribution: th.Tensor | None = None


def shuffled(n_samples: int, batch_size: int) -> Iterator[Draw]:
    """
    One epoch: every sample once, in the order that SB3 draws.

    :param n_samples: Of the rollout
    :param batch_size: The last minibatch holds what is left
    """
    indices = np.random.permutation(n_samples)
    for start in range(0, n_samples, batch_size):
        yield indices[start : start + batch_size], None


def shuffled_segments(n_steps: int, n_envs: int, length: int, batch_size: int) -> Iterator[Draw]:
    """
    One epoch of successive steps: every sample once.

    :param n_steps: Of the rollout
    :param n_envs: Environments
    :param length: Steps of one environment that stay together, the last ones of a rollout may be fewer
    :param batch_size: In samples; a minibatch holds as many whole segments as fit in, at least one
    """
    starts = np.random.permutation(np.add.outer(np.arange(n_envs) * n_steps, np.arange(0, n_steps, length)).flatten())
    for drawn in np.array_split(starts, -(-len(starts) // max(batch_size // length, 1))):
        yield np.concatenate([np.arange(first, first + min(length, n_steps - first % n_steps)) for first in drawn]), None


class PrioritizedSegments:
    """
    Draws whole pieces of trajectories, those with large advantages more often.

    A segment is ``length`` successive steps of one environment (the last one of a rollout may be shorter). Its priority is
    ``p = (sum |A|)^alpha``, normalised, of which :attr:`UNIFORM` is uniform. A minibatch draws segments without
    replacement. A segment that gets into a minibatch with probability ``q`` weighs ``q^-beta``, scaled to a mean of 1 in
    the minibatch. As long as few of the segments are drawn, this is ``(N p)^-beta`` of prioritised replay; where many are,
    that would undo more than what the priorities have done, for q cannot exceed 1.

    Papers: https://arxiv.org/abs/1511.05952 (weights); segments as in PufferLib, https://github.com/PufferAI/PufferLib

    :param advantages: As estimated, shape ``(n_steps, n_envs)``
    :param length: Steps in a segment, at least 1
    :param alpha: 0 for uniform, 1 for proportional to ``sum |A|``
    :param beta: In [0, 1], 1 undoes in expectation what the priorities have done
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
        # Scaled first, so that no power overflows; nothing can be preferred among zeros, nor where one is not finite
        priorities = (sums / sums.max()) ** alpha if 0 < sums.max() < np.inf else np.ones(n)
        probabilities: np.ndarray = (1 - self.UNIFORM) * priorities / priorities.sum() + self.UNIFORM / n
        return probabilities

    def epoch(self, batch_size: int) -> Iterator[Draw]:
        """
        As many minibatches as when each sample is drawn once; some are drawn several times then, and some not at all.

        :param batch_size: In samples; a minibatch holds as many whole segments as fit in, at least one
        """
        n = len(self.firsts)
        n_drawn = min(max(batch_size // self.length, 1), n)
        weights = inclusion_probabilities(self.probabilities, n_drawn) ** -self.beta
        for _ in range(-(-self.lengths.sum() // batch_size)):
            # The first arrivals of an exponential race are a draw without replacement (Efraimidis and Spirakis, 2006).
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
    How probable it is that each of N things is among those drawn one after the other without replacement. The time at which
    the race has ``n_drawn`` arrivals is taken for its expectation: ``q_i = 1 - exp(-t p_i)``, where ``sum(q) = n_drawn``.

    :param probabilities: Of the first draw, positive, shape ``(N,)``, summing to 1
    :param n_drawn: Between 1 and N
    :return: Shape ``(N,)``
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

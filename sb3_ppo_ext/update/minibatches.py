"""Drawing minibatches from a rollout: shuffled, or as prioritised segments of trajectories."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import PyTorchObs, RolloutBufferSamples

from sb3_ppo_ext.distributed.ranks import Ranks

# Indices of the samples of a minibatch in the flattened rollout (``env * n_steps + step``), and their importance weights
Draw = tuple[th.Tensor, th.Tensor | None]


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
    next_observations: PyTorchObs | None = None
    continues: th.Tensor | None = None


class PrioritizedSegments:
    """
    Draws segments of trajectories, those with large advantages more often, on the device of the advantages. If the number of
    steps is not a multiple of the length, the host has to wait for each draw.

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

    def __init__(self, advantages: th.Tensor, length: int, alpha: float, beta: float):
        (n_steps, n_envs), device = advantages.shape, advantages.device
        self.n_samples, self.length, self.beta = n_steps * n_envs, length, beta
        starts = th.arange(0, n_steps, length, device=device)
        self.is_even = n_steps % length == 0
        # Whether draws consist of blocks of this length
        self.is_whole = self.is_even
        padding = -n_steps % length
        absolute = th.nn.functional.pad(advantages.abs().T, (0, padding))
        sums = absolute.reshape(n_envs, len(starts), length).sum(dim=2).flatten()
        self.firsts = (th.arange(n_envs, device=device).unsqueeze(1) * n_steps + starts).flatten()
        self.lengths = (n_steps - starts).clamp(max=length).repeat(n_envs)
        self.probabilities = self._probabilities(sums, alpha)
        # Where random numbers come from, `None` for the generator of the device
        self.generator: th.Generator | None = None

    def _probabilities(self, sums: th.Tensor, alpha: float) -> th.Tensor:
        largest, n = sums.max(), len(sums)
        # Sums are scaled first so that the power cannot overflow. They are ignored if all are 0, or one is not finite.
        is_usable = (largest > 0) & th.isfinite(largest)
        priorities = th.where(is_usable, (sums / largest) ** float(alpha), 1.0)
        return (1 - self.UNIFORM) * priorities / priorities.sum() + self.UNIFORM / n

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
        for _ in range(-(-self.n_samples // batch_size)):
            # The first arrivals of an exponential race are a sample without replacement (Efraimidis and Spirakis, 2006).
            arrivals = th.empty_like(self.probabilities).exponential_(generator=self.generator) / self.probabilities
            drawn = arrivals.topk(n_drawn, largest=False, sorted=False).indices
            yield self._samples(drawn, weights[drawn])

    def _samples(self, drawn: th.Tensor, weights: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        steps = th.arange(self.length, device=drawn.device)
        indices = self.firsts[drawn].unsqueeze(1) + steps
        weights = weights.unsqueeze(1).expand_as(indices)
        if not self.is_even:
            is_in_segment = steps < self.lengths[drawn].unsqueeze(1)
            indices, weights = indices[is_in_segment], weights[is_in_segment]
        weights = weights.flatten()
        return indices.flatten(), weights / weights.mean()


class SharedPrioritizedSegments(PrioritizedSegments):
    """
    :class:`PrioritizedSegments` of all ranks of a distributed training. Each rank makes the same draws and gets its own part
    of them, so that a rank with larger advantages gets more samples.

    :param advantages: Raw advantages of this rank, on the host, shape ``(n_steps, n_envs)``
    :param length: Number of steps in a segment, at least 1
    :param alpha: Exponent of the priorities
    :param beta: Exponent of the importance weights
    :param ranks: Ranks of the training
    """

    def __init__(self, advantages: th.Tensor, length: int, alpha: float, beta: float, ranks: Ranks):
        of_all = np.concatenate(ranks.gather(advantages.numpy()), axis=1)
        super().__init__(th.from_numpy(of_all), length, alpha, beta)
        self.ranks, self.n_own = ranks, advantages.numel()
        # Parts of draws are of any length.
        self.is_whole = False
        self.generator = th.Generator().manual_seed(ranks.gather(np.random.randint(2**31))[0])

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
                yield indices[:1] * 0, weights[:1] * 0


def n_counted(n: int, weights: np.ndarray | th.Tensor | None) -> int:
    """
    :param n: Number of indices in a draw
    :param weights: Weights of the draw, a tensor or an array, ``None`` for equal weights
    :return: Number of its samples; 0 for a draw that stands for an empty one
    """
    return 0 if n == 1 and weights is not None and weights[0] == 0 else n


def inclusion_probabilities(probabilities: th.Tensor, n_drawn: int) -> th.Tensor:
    """
    Probability that each of N items is included in a sample drawn without replacement. It is approximated by replacing the
    time t of the ``n_drawn``-th arrival of an exponential race by a constant: ``q_i = 1 - exp(-t p_i)``, with t such that
    ``sum(q) = n_drawn``.

    :param probabilities: Probabilities of the first draw, positive, shape ``(N,)``, which sum to 1
    :param n_drawn: Number of items drawn, from 1 to N
    :return: Inclusion probabilities, shape ``(N,)``
    """
    n = len(probabilities)
    if n_drawn >= n:
        return th.ones_like(probabilities)
    # At this time, less than one item is expected not to have arrived.
    low, high = th.zeros_like(probabilities[0]), math.log(n + 1) / probabilities.min()
    for _ in range(40):
        time = (low + high) / 2
        too_early = -th.expm1(-time * probabilities).sum() < n_drawn
        low, high = th.where(too_early, time, low), th.where(too_early, high, time)
    return -th.expm1(-high * probabilities)

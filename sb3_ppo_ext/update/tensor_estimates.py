"""Estimates from a rollout on the device of the policy, without a transfer to the host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch as th

from sb3_ppo_ext.update.advantages import vtrace_of_tensors
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.minibatches import PrioritizedSegments
from sb3_ppo_ext.update.tensor_rollout import TensorRollout


class TensorPrioritizedSegments:
    """
    :class:`~sb3_ppo_ext.update.minibatches.PrioritizedSegments` drawn on the device of the advantages. If the number of steps
    is not a multiple of the length, the host has to wait for each draw.

    :param advantages: Raw advantages, shape ``(n_steps, n_envs)``
    :param length: Number of steps in a segment, at least 1
    :param alpha: Exponent of the priorities
    :param beta: Exponent of the importance weights
    """

    def __init__(self, advantages: th.Tensor, length: int, alpha: float, beta: float):
        (n_steps, n_envs), device = advantages.shape, advantages.device
        self.n_samples, self.length, self.beta = n_steps * n_envs, length, beta
        starts = th.arange(0, n_steps, length, device=device)
        self.is_even = n_steps % length == 0
        padding = -n_steps % length
        absolute = th.nn.functional.pad(advantages.abs().T, (0, padding))
        sums = absolute.reshape(n_envs, len(starts), length).sum(dim=2).flatten()
        self.firsts = (th.arange(n_envs, device=device).unsqueeze(1) * n_steps + starts).flatten()
        self.lengths = (n_steps - starts).clamp(max=length).repeat(n_envs)
        self.probabilities = self._probabilities(sums, alpha)

    def _probabilities(self, sums: th.Tensor, alpha: float) -> th.Tensor:
        largest, n = sums.max(), len(sums)
        # Sums are scaled first so that the power cannot overflow. They are ignored if all are 0, or one is not finite.
        is_usable = (largest > 0) & th.isfinite(largest)
        priorities = th.where(is_usable, (sums / largest) ** float(alpha), 1.0)
        uniform = PrioritizedSegments.UNIFORM
        return (1 - uniform) * priorities / priorities.sum() + uniform / n

    def epoch(self, batch_size: int) -> Iterator[tuple[th.Tensor, th.Tensor]]:
        """
        :param batch_size: Number of samples in a minibatch
        :return: Draws of the epoch, with importance weights, see ``PrioritizedSegments.epoch``
        """
        n = len(self.firsts)
        n_drawn = min(max(batch_size // self.length, 1), n)
        weights = inclusion_probabilities(self.probabilities, n_drawn) ** -self.beta
        for _ in range(-(-self.n_samples // batch_size)):
            arrivals = th.empty_like(self.probabilities).exponential_() / self.probabilities
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


def inclusion_probabilities(probabilities: th.Tensor, n_drawn: int) -> th.Tensor:
    """
    As in :mod:`sb3_ppo_ext.update.minibatches`, with a fixed number of operations.

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


class TensorEstimates(Estimates):
    """Estimates from a :class:`~sb3_ppo_ext.update.tensor_rollout.TensorRollout`, computed on its device."""

    rollout: TensorRollout
    segments_class = TensorPrioritizedSegments

    def _raw_advantages(self) -> Any:
        return self.rollout.buffer.flat(self.rollout.buffer.tensors["advantages"])

    def _vtrace(self) -> tuple[Any, Any]:
        buffer, config = self.rollout.buffer, self.config
        values, log_probs, last_values, rewards = self._under_current_policy()
        estimated = vtrace_of_tensors(
            rewards,
            values,
            log_probs - buffer.tensors["log_probs"],
            buffer.tensors["episode_starts"],
            last_values,
            th.as_tensor(self.rollout.last_dones, device=buffer.device),
            buffer.gamma,
            buffer.gae_lambda,
            config.vtrace_rho,
            config.vtrace_c,
        )
        advantages, returns = (buffer.flat(part) for part in estimated)
        return advantages, returns

    def _to_estimate(self, evaluated: th.Tensor) -> Any:
        return evaluated

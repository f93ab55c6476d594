"""Gradients by autograd, minibatch by minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.common.observations import in_channels_last, map_observations
from sb3_ppo_ext.update.advantages import normalize
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.losses import AUXILIARY_LOSSES
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.minibatches import Minibatch
from sb3_ppo_ext.update.ppo_loss import evaluate, ppo_loss
from sb3_ppo_ext.update.update import GradientSource

# Adds the gradient of a minibatch, times its share of the step, and returns what was measured.
Differentiate: TypeAlias = Callable[[Minibatch, float], dict[str, th.Tensor]]
LOSS_TERMS = ("policy_gradient_loss", "value_loss", "entropy_loss", *AUXILIARY_LOSSES, "extra_actor_loss")


class Step(NamedTuple):
    """
    The minibatches of one step of the optimiser.

    :param minibatches: One, or several whose gradients are accumulated
    :param shares: The part that each of them has of the samples, summing to 1
    """

    minibatches: list[Minibatch]
    shares: list[float]

    @classmethod
    def of(cls, minibatches: list[Minibatch]) -> Step:
        """
        :param minibatches: At least one
        """
        sizes = [len(minibatch.data.advantages) for minibatch in minibatches]
        return cls(minibatches, [size / sum(sizes) for size in sizes])


class BackwardLoss:
    """
    The loss, differentiated by autograd as SB3 does.

    :param policy: Policy that is updated
    :param config: Options of the update
    """

    def __init__(self, policy: ActorCriticPolicy, config: UpdateConfig):
        self.policy, self.config = policy, config

    def __call__(self, minibatch: Minibatch, share: float) -> dict[str, th.Tensor]:
        """
        :param minibatch: Of the rollout
        :param share: Its part of the step
        :return: What was measured
        """
        config = self.config
        inputs = evaluate(self.policy, minibatch, config.discrete_actions)
        loss, measured = ppo_loss(inputs, config.loss, minibatch.weights, config.extra_actor_loss)
        (loss if share == 1 else share * loss).backward()
        return measured


class AutogradGradients(GradientSource):
    """
    A ``GradientSource`` of minibatches that are gathered one after the other.

    :param differentiate: Adds the gradient of a minibatch
    :param config: Options of the update
    :param estimates: Advantages of the rollout, and what follows from them
    :param metrics: Where to measure
    :param channels_last: Whether images are put into the layout in which convolutions are faster on the CPU
    """

    def __init__(
        self,
        differentiate: Differentiate,
        config: UpdateConfig,
        estimates: Estimates,
        metrics: Metrics,
        channels_last: bool = False,
    ):
        self.differentiate, self.config, self.estimates, self.metrics = differentiate, config, estimates, metrics
        self.channels_last = channels_last
        self.lengths_before: dict[str, int] = {}

    # Minibatches

    def steps(self) -> Iterator[Step]:
        """:return: The steps of one epoch"""
        rollout, config = self.estimates.rollout, self.config
        if not rollout.is_indexable:
            for data in rollout.buffer.get(config.batch_size):
                yield Step.of(self._normalized([Minibatch(data)]))
            return
        for draw in rollout.draws(config.step_size, self.estimates.segments):
            yield Step.of(self._split(*draw))

    def _split(self, indices: np.ndarray, weights: np.ndarray | None) -> list[Minibatch]:
        """One draw, normalised as a whole, so that accumulated gradients are those of one large minibatch."""
        size = self.config.batch_size
        minibatches = self._normalized([self._gather(indices[i : i + size]) for i in range(0, len(indices), size)])
        if weights is not None:
            parts = self.estimates.rollout.buffer.to_torch(weights).split(size)
            minibatches = [m._replace(weights=part) for m, part in zip(minibatches, parts, strict=True)]
        return minibatches

    def _gather(self, indices: np.ndarray) -> Minibatch:
        estimates = self.estimates
        data: Any = estimates.rollout.samples(indices)
        if self.channels_last:
            data = data._replace(observations=map_observations(in_channels_last, data.observations))
        if estimates.advantages is not None:
            data = data._replace(advantages=estimates.advantages[indices])
        if estimates.returns is not None:
            data = data._replace(returns=estimates.returns[indices])
        old = None if estimates.old_distribution is None else estimates.old_distribution[indices]
        return Minibatch(data, old_distribution=old)

    def _normalized(self, minibatches: list[Minibatch]) -> list[Minibatch]:
        if not self.config.normalizes_minibatches:
            return minibatches
        advantages = [minibatch.data.advantages for minibatch in minibatches]
        sizes = [len(part) for part in advantages]
        parts = normalize(advantages[0] if len(advantages) == 1 else th.cat(advantages)).split(sizes)
        return [m._replace(data=m.data._replace(advantages=part)) for m, part in zip(minibatches, parts, strict=True)]

    # Gradients

    def add(self, step: Step) -> None:
        """Leave the gradient of a step's loss in the policy's parameters."""
        self.lengths_before = self.metrics.lengths()
        for minibatch, share in zip(step.minibatches, step.shares, strict=True):
            self.metrics.add(self.differentiate(minibatch, share))

    def approximate_kl(self, step: Step) -> float:
        """:return: That of all samples of the step"""
        return self.metrics.weighted("approx_kl", step.shares).item()

    def clip_fraction(self, step: Step) -> float:
        """:return: That of all samples of the step"""
        return self.metrics.weighted("clip_fraction", step.shares).item()

    def terms(self, step: Step) -> dict[str, float]:
        """:return: The losses of the step by name, of several minibatches the first that is not finite"""
        before = self.lengths_before
        measured = (name for name in LOSS_TERMS if len(self.metrics[name]) > before.get(name, 0))
        return {name: self.metrics.bad_since(before, name) for name in measured}

    def accept(self, step: Step, norms: dict[str, Any]) -> bool:
        # One wait for the device, whatever the sum is made of
        if not math.isfinite(sum(norms.values()) + self.metrics.weighted("loss", step.shares)):
            return False
        self.metrics.add({name: th.as_tensor(norm, dtype=th.float32) for name, norm in norms.items()})
        return True

    def forget(self, step: Step) -> None:
        """Measure nothing of a step that is not made."""
        self.metrics.forget_since(self.lengths_before)

    def end_epoch(self) -> None:
        """All is measured already."""

    def finish(self) -> None:
        """All is measured already."""

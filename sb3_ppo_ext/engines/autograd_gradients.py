"""Gradients computed by autograd, one minibatch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.distributed.statistics import mean_and_std_of_each
from sb3_ppo_ext.update.advantages import normalize, standardize
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.extra_losses import LOGGED_LOSSES
from sb3_ppo_ext.update.losses import PENALTIES
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.minibatch_loss import evaluate, ppo_loss
from sb3_ppo_ext.update.minibatches import Minibatch, n_counted
from sb3_ppo_ext.update.update import GradientSource

# Adds the gradient of a minibatch, scaled by its share of the step, and returns metrics by name.
Differentiate: TypeAlias = Callable[[Minibatch, float], dict[str, th.Tensor]]
# Mean and standard deviation of advantages
Statistics: TypeAlias = tuple[th.Tensor, th.Tensor]
LOSS_TERMS = ("policy_gradient_loss", "value_loss", "entropy_loss", *PENALTIES, *LOGGED_LOSSES, "extra_actor_loss")


class Step(NamedTuple):
    """
    The minibatches of one step of the optimiser.

    :param minibatches: One minibatch, or several with gradients that are accumulated
    :param shares: Fraction of the samples of the step in each minibatch; the fractions sum to 1
    :param n_samples: Number of samples of the step
    """

    minibatches: list[Minibatch]
    shares: list[float]
    n_samples: int

    @classmethod
    def of(cls, minibatches: list[Minibatch]) -> Step:
        """
        :param minibatches: Minibatches of the step, at least one
        :return: Step with these minibatches
        """
        sizes = [len(minibatch.data.advantages) for minibatch in minibatches]
        return cls(minibatches, [size / sum(sizes) for size in sizes], sum(sizes))


class BackwardLoss:
    """
    Adds the gradient of a minibatch with ``loss.backward()``, as SB3 does.

    :param policy: Policy that is updated
    :param config: Options of the update
    """

    def __init__(self, policy: ActorCriticPolicy, config: UpdateConfig):
        self.policy, self.config = policy, config

    def __call__(self, minibatch: Minibatch, share: float) -> dict[str, th.Tensor]:
        """
        :param minibatch: Minibatch of the rollout
        :param share: Fraction of the samples of the step in this minibatch, by which its gradient is scaled
        :return: Metrics by name
        """
        config = self.config
        inputs = evaluate(self.policy, minibatch, config.discrete_actions)
        loss, measured = ppo_loss(inputs, config.loss, config.extra_actor_loss)
        if config.loss_scale is not None:
            loss = loss * config.loss_scale.scale
        (loss if share == 1 else share * loss).backward()
        return measured


class AutogradGradients(GradientSource):
    """
    A ``GradientSource`` that gathers and differentiates one minibatch at a time.

    :param differentiate: Function that adds the gradient of a minibatch and returns metrics
    :param config: Options of the update
    :param estimates: Advantages, returns and priorities of the rollout
    :param metrics: Metrics that measurements are added to
    :param prepare: Function of the observations of a minibatch that brings them into the form that the engine evaluates
    """

    def __init__(
        self,
        differentiate: Differentiate,
        config: UpdateConfig,
        estimates: Estimates,
        metrics: Metrics,
        prepare: Callable[[Any], Any] | None = None,
    ):
        self.differentiate, self.config, self.estimates, self.metrics = differentiate, config, estimates, metrics
        self.prepare = prepare
        self.lengths_before: dict[str, int] = {}

    # Minibatches

    def steps(self) -> Iterator[Step]:
        """:return: Steps of one epoch"""
        rollout, config = self.estimates.rollout, self.config
        if not rollout.is_indexable:
            for data in rollout.buffer.get(config.batch_size):
                yield Step.of(self._normalized([Minibatch(data)]))
            return
        draws: Any = rollout.draws(config.step_size, self.estimates.segments)
        if config.ranks.are_several:
            draws = list(draws)
        statistics = self._statistics(draws) if config.ranks.are_several and config.normalizes_minibatches else repeat(None)
        for (indices, weights), of_all in zip(draws, statistics, strict=False):
            step = Step.of(self._split(indices, weights, of_all))
            yield step._replace(n_samples=n_counted(indices, weights)) if config.ranks.are_several else step

    def _statistics(self, draws: list[Any]) -> Iterator[Statistics]:
        """Mean and standard deviation of the advantages of each draw, over the samples of all ranks."""
        advantages = self.estimates.advantages_to_normalize()
        counts = [n_counted(*draw) for draw in draws]
        parts = [advantages[indices[:n]] for (indices, _), n in zip(draws, counts, strict=True)]
        own_means = th.stack([part.sum() / max(len(part), 1) for part in parts])
        squares = th.stack([(part - mean).square().sum() for part, mean in zip(parts, own_means, strict=True)])
        own = th.stack([own_means.new_tensor([float(n) for n in counts]), own_means, squares])
        means, stds = mean_and_std_of_each(own, self.config.ranks)
        return zip(means, stds, strict=True)

    def _split(self, indices: np.ndarray, weights: np.ndarray | None, of_all: Statistics | None = None) -> list[Minibatch]:
        """Minibatches of a draw. Advantages are normalised over all of them, for the same gradient as one large minibatch."""
        size = self.config.batch_size if weights is None or not self.config.ranks.are_several else len(indices)
        minibatches = self._normalized([self._gather(indices[i : i + size]) for i in range(0, len(indices), size)], of_all)
        if weights is not None:
            parts = self.estimates.rollout.buffer.to_torch(weights).split(size)
            minibatches = [m._replace(weights=part) for m, part in zip(minibatches, parts, strict=True)]
        return minibatches

    def _gather(self, indices: np.ndarray) -> Minibatch:
        estimates = self.estimates
        data: Any = estimates.rollout.samples(indices)
        if self.prepare is not None:
            data = data._replace(observations=self.prepare(data.observations))
        if estimates.advantages is not None:
            data = data._replace(advantages=estimates.advantages[indices])
        if estimates.returns is not None:
            data = data._replace(returns=estimates.returns[indices])
        old = None if estimates.old_distribution is None else estimates.old_distribution[indices]
        minibatch = Minibatch(data, old_distribution=old)
        return self._with_next(minibatch, indices) if self.config.reads_next else minibatch

    def _with_next(self, minibatch: Minibatch, indices: np.ndarray) -> Minibatch:
        rollout = self.estimates.rollout
        following = rollout.next_observations(indices)
        return minibatch._replace(
            next_observations=following if self.prepare is None else self.prepare(following),
            continues=th.as_tensor(rollout.continues(indices)).to(minibatch.data.old_log_prob.device),
        )

    def _normalized(self, minibatches: list[Minibatch], of_all: Statistics | None = None) -> list[Minibatch]:
        if not self.config.normalizes_minibatches:
            return minibatches
        advantages = [minibatch.data.advantages for minibatch in minibatches]
        sizes = [len(part) for part in advantages]
        joined = advantages[0] if len(advantages) == 1 else th.cat(advantages)
        parts = (normalize(joined) if of_all is None else standardize(joined, *of_all)).split(sizes)
        return [m._replace(data=m.data._replace(advantages=part)) for m, part in zip(minibatches, parts, strict=True)]

    # Gradients

    def add(self, step: Step) -> None:
        """Add the gradient of the loss of a step to ``grad`` of the parameters."""
        self.lengths_before = self.metrics.lengths()
        for minibatch, share in zip(step.minibatches, step.shares, strict=True):
            self.metrics.add(self.differentiate(minibatch, share))

    def count(self, step: Step) -> int:
        """:return: Number of samples in the step"""
        return step.n_samples

    def loss_of(self, step: Step) -> th.Tensor:
        """:return: Mean loss over all samples of the step"""
        return self.metrics.weighted("loss", step.shares)

    def approximate_kl(self, step: Step) -> float:
        """:return: Estimated KL divergence over all samples of the step, in nats"""
        return self.metrics.weighted("approx_kl", step.shares).item()

    def clip_fraction(self, step: Step) -> float:
        """:return: Fraction of clipped samples among all samples of the step"""
        return self.metrics.weighted("clip_fraction", step.shares).item()

    def terms(self, step: Step) -> dict[str, float]:
        """:return: Losses of the step by name: for several minibatches, the first value that is not finite"""
        before = self.lengths_before
        measured = (name for name in LOSS_TERMS if len(self.metrics[name]) > before.get(name, 0))
        return {name: self.metrics.bad_since(before, name) for name in measured}

    def accept(self, step: Step, norms: dict[str, Any]) -> bool:
        # The sum is tested, so that there is only one synchronisation with the device.
        if not math.isfinite(sum(norms.values()) + self.loss_of(step)):
            return False
        self.metrics.add({name: th.as_tensor(norm, dtype=th.float32) for name, norm in norms.items()})
        return True

    def forget(self, step: Step) -> None:
        """Discard the metrics of a step that is skipped."""
        self.metrics.forget_since(self.lengths_before)

    def end_epoch(self) -> None:
        """Nothing to do, since metrics are added during the steps."""

    def finish(self) -> None:
        """Nothing to do, since metrics are added during the steps."""

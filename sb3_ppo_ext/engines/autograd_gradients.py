"""Gradients computed by autograd, one minibatch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_ppo_ext.distributed.statistics import mean_and_std_of_each
from sb3_ppo_ext.update.advantages import normalize, standardize
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.extra_losses import LOGGED_LOSSES
from sb3_ppo_ext.update.loop import GradientSource, Measured
from sb3_ppo_ext.update.losses import PENALTIES
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.minibatch_loss import evaluate, ppo_loss
from sb3_ppo_ext.update.minibatches import Minibatch, n_counted

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
    :param prepare: Function of the observations of a minibatch that brings them into the form that the engine evaluates
    """

    def __init__(
        self,
        differentiate: Differentiate,
        config: UpdateConfig,
        estimates: Estimates,
        prepare: Callable[[PyTorchObs], PyTorchObs] | None = None,
    ):
        self.differentiate, self.config, self.estimates, self.prepare = differentiate, config, estimates, prepare

    # Minibatches

    def steps(self) -> Iterator[Step]:
        rollout, config = self.estimates.rollout, self.config
        if not rollout.is_indexable:
            for data in rollout.buffer.get(config.batch_size):
                yield Step.of(self._normalized([Minibatch(data)]))
            return
        draws: Any = rollout.draws(config.step_size, config.batch_size, self.estimates.segments)
        if config.ranks.are_several:
            draws = list(draws)
        statistics = self._statistics(draws) if config.ranks.are_several and config.normalizes_minibatches else repeat(None)
        for (indices, weights), of_all in zip(draws, statistics, strict=False):
            step = Step.of(self._split(indices, weights, of_all))
            yield step._replace(n_samples=n_counted(len(indices), weights)) if config.ranks.are_several else step

    def _statistics(self, draws: list[Any]) -> Iterator[Statistics]:
        """Mean and standard deviation of the advantages of each draw, over the samples of all ranks."""
        advantages = self.estimates.advantages_to_normalize()
        counts = [n_counted(len(indices), weights) for indices, weights in draws]
        parts = [_taken(advantages, indices[:n]) for (indices, _), n in zip(draws, counts, strict=True)]
        own_means = th.stack([part.sum() / max(len(part), 1) for part in parts])
        squares = th.stack([(part - mean).square().sum() for part, mean in zip(parts, own_means, strict=True)])
        own = th.stack([own_means.new_tensor([float(n) for n in counts]), own_means, squares])
        means, stds = mean_and_std_of_each(own, self.config.ranks)
        return zip(means, stds, strict=True)

    def _split(self, indices: th.Tensor, weights: th.Tensor | None, of_all: Statistics | None = None) -> list[Minibatch]:
        """Minibatches of a draw. Advantages are normalised over all of them, for the same gradient as one large minibatch."""
        # A block of successive steps stays whole.
        length = self.estimates.rollout.length
        size = max(self.config.batch_size // length, 1) * length
        if weights is not None and self.config.ranks.are_several:
            size = len(indices)
        minibatches = self._normalized([self._gather(indices[i : i + size]) for i in range(0, len(indices), size)], of_all)
        if weights is not None:
            parts = weights.to(self.estimates.rollout.buffer.device).split(size)
            minibatches = [m._replace(weights=part) for m, part in zip(minibatches, parts, strict=True)]
        return minibatches

    def _gather(self, indices: th.Tensor) -> Minibatch:
        estimates = self.estimates
        data: Any = estimates.rollout.samples(indices)
        if self.prepare is not None:
            data = data._replace(observations=self.prepare(data.observations))
        if estimates.advantages is not None:
            data = data._replace(advantages=_taken(estimates.advantages, indices))
        if estimates.returns is not None:
            data = data._replace(returns=_taken(estimates.returns, indices))
        old = None if estimates.old_distribution is None else _taken(estimates.old_distribution, indices)
        minibatch = Minibatch(data, old_distribution=old)
        return self._with_next(minibatch, indices) if self.config.reads_next else minibatch

    def _with_next(self, minibatch: Minibatch, indices: th.Tensor) -> Minibatch:
        rollout = self.estimates.rollout
        following = rollout.next_observations(indices)
        return minibatch._replace(
            next_observations=following if self.prepare is None else self.prepare(following),
            continues=rollout.continues(indices).to(minibatch.data.old_log_prob.device, non_blocking=True),
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

    def add(self, step: Step) -> Measured:
        metrics = Metrics()
        for minibatch, share in zip(step.minibatches, step.shares, strict=True):
            metrics.add(self.differentiate(minibatch, share))
        loss, kl, clipped = (metrics.weighted(name, step.shares) for name in ("loss", "approx_kl", "clip_fraction"))
        return Measured(loss, kl, clipped, step.n_samples, lambda: _terms(metrics), metrics)

    def forget(self) -> None:
        """Nothing to do, since nothing is kept of a step."""

    def finish(self, metrics: Metrics) -> None:
        """Nothing to do, since nothing is kept."""


def _terms(metrics: Metrics) -> dict[str, float]:
    """Losses of a step by name: for several minibatches, the first value that is not finite."""
    measured = {name: [value.item() for value in metrics[name]] for name in LOSS_TERMS if metrics[name]}
    return {name: next((v for v in values if not math.isfinite(v)), values[-1]) for name, values in measured.items()}


def _taken(numbers: th.Tensor, indices: th.Tensor) -> th.Tensor:
    """Numbers of the samples at some indices, which may have been drawn on the host."""
    return numbers[indices.to(numbers.device, non_blocking=True)]

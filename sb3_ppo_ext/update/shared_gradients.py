"""Gradients of a distributed training: those of all ranks together, in one exchange for each step of the optimiser."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch as th
from torch import nn

from sb3_ppo_ext.distributed.ranks import SINGLE, Averager, Ranks
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.metrics import OF_SAMPLES, Metrics
from sb3_ppo_ext.update.update import GradientSource, Stepper


class GradientAverage:
    """
    Averages gradients, and a few numbers, over the samples of all ranks.

    :param policy: Policy with the gradients
    :param ranks: Ranks of the training
    """

    def __init__(self, policy: nn.Module, ranks: Ranks):
        self.ranks = ranks
        self.learned = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.zeros: dict[nn.Parameter, th.Tensor] = {}
        # Gradients of the last call, whose memory is often the same again, and the function that averages them
        self.gradients: list[th.Tensor] = []
        self.averager: Averager = SINGLE.averager([], 0)

    def __call__(self, n_samples: int, numbers: list[float]) -> list[float]:
        """
        Set ``grad`` of the parameters to the averages.

        :param n_samples: Number of samples of this rank
        :param numbers: Means over these samples, as many in each call
        :return: Means over the samples of all ranks
        """
        has_gradient = [1.0 if parameter.grad is not None else 0.0 for parameter in self.learned]
        gradients = [self._zeros(p) if (gradient := p.grad) is None else gradient for p in self.learned]
        if len(gradients) != len(self.gradients) or any(map(operator.is_not, gradients, self.gradients)):
            self.gradients = gradients
            self.averager = self.ranks.averager(gradients, len(numbers) + len(gradients))
        means = self.averager([*numbers, *has_gradient], n_samples)
        for parameter, gradient, fraction in zip(self.learned, gradients, means[len(numbers) :], strict=True):
            # A parameter that no loss depends on has no gradient on any rank, and its optimiser leaves it as it is.
            if fraction == 0:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = gradient.clone()
        return means[: len(numbers)]

    def _zeros(self, parameter: nn.Parameter) -> th.Tensor:
        """What a parameter without a gradient contributes to the averages."""
        if parameter not in self.zeros:
            self.zeros[parameter] = th.empty_like(parameter, requires_grad=False)
        return self.zeros[parameter].zero_()


class SharedGradients(GradientSource):
    """
    A ``GradientSource`` with the gradients of all ranks. What decides about a step is the same on each of them.

    :param source: Source of the gradients of this rank
    :param stepper: Stepper of the optimiser
    :param policy: Policy that is updated
    :param config: Options of the update
    :param metrics: Metrics of the update, averaged over the ranks at its end
    """

    def __init__(self, source: Any, stepper: Stepper, policy: nn.Module, config: UpdateConfig, metrics: Metrics):
        self.source, self.stepper, self.config, self.metrics = source, stepper, config, metrics
        self.average = GradientAverage(policy, config.ranks)
        # Means over the samples of all ranks in the current step
        self.kl = self.clipped = self.loss_of_all = 0.0
        # Number of samples of this rank in each step of the update
        self.counts: list[int] = []

    def steps(self) -> Iterator[Any]:
        """:return: Steps of one epoch"""
        yield from self.source.steps()

    def add(self, step: Any) -> None:
        """Compute the gradient of the loss of a step, and average it over the ranks."""
        self.source.add(step)
        self.stepper.show_gradients()
        count = self.source.count(step)
        numbers = [float(self.source.loss_of(step))]
        if self.config.target_kl is not None:
            numbers.append(self.source.approximate_kl(step))
        if self.config.max_clip_fraction is not None:
            numbers.append(self.source.clip_fraction(step))
        self.loss_of_all, *decisive = self.average(count, numbers)
        self.kl, self.clipped = (decisive[0], decisive[-1]) if decisive else (0.0, 0.0)
        self.counts.append(count)
        if count == 0:
            for name in OF_SAMPLES:
                del self.metrics[name][-1:]

    def count(self, step: Any) -> int:
        """:return: Number of samples of this rank"""
        return int(self.source.count(step))

    def loss_of(self, step: Any) -> float:
        """:return: A number that is finite if the losses of all ranks are"""
        return self.loss_of_all

    def approximate_kl(self, step: Any) -> float:
        """:return: Estimated KL divergence over the samples of all ranks"""
        return self.kl

    def clip_fraction(self, step: Any) -> float:
        """:return: Fraction of clipped samples among those of all ranks"""
        return self.clipped

    def terms(self, step: Any) -> dict[str, float]:
        """:return: Losses of the step on this rank"""
        terms: dict[str, float] = self.source.terms(step)
        return terms

    def accept(self, step: Any, norms: dict[str, Any]) -> bool:
        if not math.isfinite(sum(float(norm) for norm in norms.values()) + self.loss_of_all):
            return False
        return bool(self.source.accept(step, norms))

    def forget(self, step: Any) -> None:
        """Discard the metrics of a step that is skipped."""
        self.source.forget(step)
        self.counts.pop()

    def end_epoch(self) -> None:
        """Called after each epoch."""
        self.source.end_epoch()

    def finish(self) -> None:
        """Average the metrics over the ranks."""
        self.source.finish()
        counts = np.array(self.counts, np.float64) if self.config.priority_alpha > 0 else None
        self.metrics.average(self.config.ranks, counts)

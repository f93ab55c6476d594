"""Averages over the ranks of a distributed training: gradients, and what decides about a step of the optimiser."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch as th
from torch import nn

from sb3_ppo_ext.distributed.ranks import SINGLE, Averager, Ranks
from sb3_ppo_ext.update.config import UpdateConfig


class AverageOnHost:
    """
    Averages gradients, and what decides about a step, over the samples of all ranks, in memory that they share.

    :param policy: Policy with the gradients
    :param config: Options of the update
    :param stepper: Stepper of the optimiser
    """

    def __init__(self, policy: nn.Module, config: UpdateConfig, stepper: Any):
        self.ranks, self.stepper = config.ranks, stepper
        self.names = ["loss"]
        self.names += [] if config.target_kl is None else ["kl"]
        self.names += [] if config.max_clip_fraction is None else ["clip_fraction"]
        self.learned = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.zeros: dict[nn.Parameter, th.Tensor] = {}
        # Gradients of the last call, whose memory is often the same again, and the function that averages them
        self.gradients: list[th.Tensor] = []
        self.averager: Averager = SINGLE.averager([], 0)

    def __call__(self, measured: Any) -> Any:
        """
        Set ``grad`` of the parameters to the averages.

        :param measured: ``Measured`` of this rank
        :return: The same, with what decides about the step averaged
        """
        self.stepper.show_gradients()
        numbers = [float(getattr(measured, name)) for name in self.names]
        has_gradient = [1.0 if parameter.grad is not None else 0.0 for parameter in self.learned]
        gradients = [self._zeros(p) if (gradient := p.grad) is None else gradient for p in self.learned]
        if len(gradients) != len(self.gradients) or any(map(operator.is_not, gradients, self.gradients)):
            self.gradients = gradients
            self.averager = self.ranks.averager(gradients, len(numbers) + len(gradients))
        means = self.averager([*numbers, *has_gradient], measured.n)
        for parameter, gradient, fraction in zip(self.learned, gradients, means[len(numbers) :], strict=True):
            # A parameter that no loss depends on has no gradient on any rank, and its optimiser leaves it as it is.
            if fraction == 0:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = gradient.clone()
        return measured._replace(**dict(zip(self.names, means[: len(numbers)], strict=True)))

    def _zeros(self, parameter: nn.Parameter) -> th.Tensor:
        """What a parameter without a gradient contributes to the averages."""
        if parameter not in self.zeros:
            self.zeros[parameter] = th.empty_like(parameter, requires_grad=False)
        return self.zeros[parameter].zero_()


def average_on_device(ranks: Ranks, gradients: th.Tensor, measured: Any) -> Any:
    """
    Average a step over the ranks, with all scalar metrics, in one exchange.

    :param ranks: Ranks of the training
    :param gradients: All gradients in one tensor, which becomes the average
    :param measured: ``Measured`` of this rank
    :return: The same, averaged over the ranks
    """
    scalars = [(name, i) for name, values in measured.metrics.items() for i, value in enumerate(values) if value.ndim == 0]
    numbers = [measured.loss, measured.kl, measured.clip_fraction, *(measured.metrics[name][i] for name, i in scalars)]
    numbers = [number.detach().to(gradients) for number in numbers]
    total = ranks.sum(th.cat([gradients, th.stack([*numbers, th.ones_like(numbers[0])])]) * measured.n)
    means = total / total[-1]
    n = len(gradients)
    gradients.copy_(means[:n])
    loss, kl, clip_fraction, *others = means[n:-1]
    for (name, i), mean in zip(scalars, others, strict=True):
        measured.metrics[name][i] = mean
    return measured._replace(loss=loss, kl=kl, clip_fraction=clip_fraction)


def make_average(policy: nn.Module, config: UpdateConfig, stepper: Any) -> Callable[[Any], Any]:
    """
    :param policy: Policy that is updated
    :param config: Options of the update, with several ranks
    :param stepper: Stepper of the optimiser
    :return: Function that averages what has been measured in a step, and the gradients
    """
    if stepper.is_on_device:
        return partial(average_on_device, config.ranks, stepper.gradients)
    return AverageOnHost(policy, config, stepper)

"""Steps of the optimiser that the extension module makes by itself, many in a call."""

from __future__ import annotations

import math
from typing import Any

from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.native.epoch import NativeMinibatches
from sb3_ppo_ext.engines.native.policy import BLOCK, NativePolicy
from sb3_ppo_ext.engines.optimizer_steps import FusedAdamStepper
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.loop import Stepper

# Largest number of steps that are made in a call, as in `csrc/steps.h`: signals and other threads wait for its end.
MAX_STEPS = 64


class CompiledSteps:
    """
    Makes the steps of an epoch that need no decision of the loop. A step that is past ``target_kl``, or not finite, is left to
    the loop, which evaluates it once more.

    :param native: Policy on the extension module
    :param minibatches: Minibatches of the epoch
    :param loss: Loss of the extension module for these minibatches
    :param stepper: Stepper with the optimiser of the extension module
    :param config: Options of the update
    :param ends: Number of samples in each step and those before it
    """

    def __init__(
        self,
        native: NativePolicy,
        minibatches: NativeMinibatches,
        loss: Any,
        stepper: FusedAdamStepper,
        config: UpdateConfig,
        ends: tuple[int, ...],
    ):
        self.stepper, self.config, self.ends, self.statistics = stepper, config, ends, native.critic.statistics
        networks, samples = (native.actor.network, native.critic.network), minibatches.samples
        self.steps = extension.module.Steps(*networks, loss, stepper.adam, samples.features, samples.invalid, BLOCK)

    def make(self, first: int) -> list[float]:
        """
        :param first: Number of a step in the epoch
        :return: Norms of the gradients of the steps that were made, from this one on: at most :data:`MAX_STEPS`
        """
        config, stepper = self.config, self.stepper
        max_kl = math.inf if config.target_kl is None else 1.5 * config.target_kl
        mean, std = (0.0, 1.0) if self.statistics is None else (array.item() for array in self.statistics)
        limits = config.batch_size, config.max_grad_norm, max_kl, std, mean
        norms: list[float] = self.steps.make(self.ends, first, stepper.n_steps + 1, *limits, *stepper.options())
        stepper.n_steps += len(norms)
        return norms


def compiled_steps(
    native: NativePolicy,
    minibatches: NativeMinibatches,
    loss: Any,
    stepper: Stepper,
    config: UpdateConfig,
    ends: tuple[int, ...],
) -> CompiledSteps | None:
    """
    :return: :class:`CompiledSteps` of the same arguments; ``None`` if each step has parts that are computed elsewhere
    """
    is_elsewhere = native.threads is not None or native.is_asymmetric or config.ranks.are_several
    if loss is None or is_elsewhere or not isinstance(stepper, FusedAdamStepper):
        return None
    return CompiledSteps(native, minibatches, loss, stepper, config, ends)

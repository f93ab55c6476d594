"""Steps of the optimiser that the extension module makes by itself, many in a call."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.native.epoch import NativeMinibatches
from sb3_ppo_ext.engines.native.policy import BLOCK, NativePolicy
from sb3_ppo_ext.engines.optimizer_steps import FusedAdamStepper
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.loop import Stepper

# What is made in a call, at least one step, since signals and other threads wait for its end: so many samples, and so many
# steps at most, as in `csrc/steps.h`
MAX_SAMPLES, MAX_STEPS = 4096, 64


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

    def make(self, first: int) -> tuple[list[float], int]:
        """
        :param first: Number of a step in the epoch
        :return: Norms of the gradients of the steps that were made, from this one on, and the number of steps that were asked
            for: where it is larger, the next step is left to the loop
        """
        start = self.ends[first - 1] if first else 0
        last = min(first + MAX_STEPS, max(first + 1, bisect_right(self.ends, start + MAX_SAMPLES)))
        config, stepper = self.config, self.stepper
        max_kl = math.inf if config.target_kl is None else 1.5 * config.target_kl
        mean, std = (0.0, 1.0) if self.statistics is None else (array.item() for array in self.statistics)
        limits = config.batch_size, config.max_grad_norm, max_kl, std, mean
        norms: list[float] = self.steps.make(self.ends[:last], first, stepper.n_steps + 1, *limits, *stepper.options())
        stepper.n_steps += len(norms)
        return norms, last - first


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

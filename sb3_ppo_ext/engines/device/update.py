"""An update whose decisions are made on the device, so that the host does not wait for them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.common.guards import refuse_gradient
from sb3_ppo_ext.engines.autograd_gradients import LOSS_TERMS, AutogradGradients, Step
from sb3_ppo_ext.engines.device.steppers import MaskedStepper
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.metrics import OF_SAMPLES, Metrics
from sb3_ppo_ext.update.update import UpdateResult

N_FLAGS, FROZEN = 5, 3


class RecordedStep(NamedTuple):
    """
    What is known about a step of the optimiser, on the device.

    :param epoch: Epoch of the step
    :param names: Names of the numbers after the flags
    :param numbers: Whether the step comes before any stop, whether it is past ``target_kl``, whether its loss and gradients
        are finite, whether the actor was frozen, whether the gradients are too large for float16; then scalar metrics
    :param vectors: Metrics that are not scalars
    """

    epoch: int
    names: list[str]
    numbers: th.Tensor
    vectors: dict[str, list[th.Tensor]]


class DeviceUpdate:
    """
    One update of the policy. Steps after ``target_kl`` is exceeded, and steps that are not finite, are computed, but change
    nothing. The host learns of it at the end, and after the first, second, fourth, eighth, ... epoch if there is a
    ``target_kl``, in order to leave out the remaining epochs.

    :param policy: Policy that is updated
    :param config: Options of the update
    :param estimates: Advantages, returns and priorities of the rollout
    :param gradients: Source of the gradients
    :param stepper: Stepper that makes the steps of the optimiser
    :param result: Result, filled in at the end of the update
    """

    def __init__(
        self,
        policy: ActorCriticPolicy,
        config: UpdateConfig,
        estimates: Estimates,
        gradients: AutogradGradients,
        stepper: MaskedStepper,
        result: UpdateResult,
    ):
        self.policy, self.config, self.estimates = policy, config, estimates
        self.gradients, self.stepper, self.result = gradients, stepper, result
        self.has_stopped, self.is_frozen, self.never = (th.zeros((), dtype=th.bool, device=policy.device) for _ in range(3))
        self.steps: list[RecordedStep] = []

    def run(self) -> None:
        """
        Run all epochs, unless ``target_kl`` stops the update early.

        :raises ValueError: if a loss or gradient is not finite, with ``bad_gradients="raise"``
        """
        try:
            self._run_epochs()
        finally:
            self.stepper.stop_watching()
        self._read()
        if self.config.ranks.are_several:
            self.result.metrics.average(self.config.ranks, None)

    def _run_epochs(self) -> None:
        for epoch in range(self.config.n_epochs):
            self.estimates.begin_epoch(epoch)
            for step in self.gradients.steps():
                self._step(step, epoch)
            is_read = self.config.target_kl is not None and (epoch + 1) & epoch == 0 and epoch + 1 < self.config.n_epochs
            if is_read and self.has_stopped.item():
                break

    def _step(self, step: Step, epoch: int) -> None:
        config, stepper = self.config, self.stepper
        stepper.zero_grad()
        measured = self.gradients.metrics = Metrics()
        self.gradients.add(step)
        if config.ranks.are_several:
            self._average(step, measured)
        is_before_stop, is_past = ~self.has_stopped, self.never
        if config.target_kl is not None:
            is_past = measured.weighted("approx_kl", step.shares) > 1.5 * config.target_kl
        goes_on = is_before_stop & ~is_past
        if config.max_clip_fraction is not None:
            is_clipped = measured.weighted("clip_fraction", step.shares) > config.max_clip_fraction
            self.is_frozen = self.is_frozen | (goes_on & is_clipped)
            stepper.freeze_actor(self.is_frozen)
        if config.loss_scale is not None:
            stepper.unscale(config.loss_scale.scale)
        norms = stepper.clip(config.max_grad_norm)
        loss = measured.weighted("loss", step.shares)
        is_finite = th.isfinite(th.stack([*norms.values(), loss]).sum())
        has_stopped, overflows = self.has_stopped | is_past, self.never
        if config.loss_scale is not None:
            overflows = goes_on & ~is_finite & th.isfinite(loss)
            config.loss_scale.update(overflows, goes_on & is_finite)
        if config.bad_gradients == "raise":
            is_bad = goes_on & ~(is_finite | overflows)
            stepper.keep_bad_gradients(is_bad)
            has_stopped = has_stopped | is_bad
        stepper.step(goes_on & is_finite)
        self._record(epoch, measured, norms, [is_before_stop, is_past, is_finite, self.is_frozen, overflows])
        self.has_stopped = has_stopped

    def _average(self, step: Step, measured: Metrics) -> None:
        """Average the gradients and the metrics over the samples of all ranks, in one exchange."""
        scalars = [(name, i) for name, values in measured.items() for i, value in enumerate(values) if value.ndim == 0]
        gradients = self.stepper.gradients
        numbers = [measured[name][i].detach().to(gradients) for name, i in scalars]
        flat = th.cat([gradients, th.stack([*numbers, th.ones_like(numbers[0])])]) * step.n_samples
        total = self.config.ranks.sum(flat)
        total = total / total[-1]
        gradients.copy_(total[: len(gradients)])
        for (name, i), mean in zip(scalars, total[len(gradients) : -1], strict=True):
            measured[name][i] = mean
        if step.n_samples == 0:  # a sample that stands for an empty minibatch
            for name in OF_SAMPLES:
                measured[name].clear()

    def _record(self, epoch: int, measured: Metrics, norms: dict[str, th.Tensor], flags: list[th.Tensor]) -> None:
        scalars = [(name, value) for name, values in measured.items() for value in values if value.ndim == 0]
        vectors = {name: values for name, values in measured.items() if values and values[0].ndim > 0}
        scalars += [(f"|{name}", norm) for name, norm in norms.items()]
        numbers = th.stack([flag.float() for flag in flags] + [value.detach().float() for _, value in scalars])
        self.steps.append(RecordedStep(epoch, [name for name, _ in scalars], numbers, vectors))

    # At the end

    def _read(self) -> None:
        """Transfer all decisions and metrics at once, and give the result the metrics of the steps that were made."""
        lengths = [len(step.numbers) for step in self.steps]
        numbers = th.cat([step.numbers for step in self.steps]).cpu().split(lengths)
        made, frozen, epoch, bad = 0, 0, -1, None
        for step, values in zip(self.steps, numbers, strict=True):
            is_before_stop, is_past, is_finite, is_frozen, overflows = (bool(flag) for flag in values[:N_FLAGS].tolist())
            if not is_before_stop:
                break
            if step.epoch != epoch:
                epoch = step.epoch
                self.result.metrics.begin_epoch()
            if is_past:
                self._add(step, values, with_norms=False)
                self._print_stop(step, values)
                break
            if is_finite:
                made, frozen = made + 1, frozen + is_frozen
                self._add(step, values, with_norms=True, is_frozen=is_frozen)
                if self.config.max_clip_fraction is not None:
                    self.result.metrics["actor_frozen"].append(values[FROZEN])
            elif overflows:
                self._add(step, values, with_norms=False)
            elif self.config.bad_gradients == "raise":
                bad = step, values
                break
            else:
                self.result.n_skipped += 1
        self.stepper.close(len(self.steps) - made, frozen)
        self.result.n_epochs = epoch + (bad is None)
        if bad is not None:
            self._refuse(*bad)

    def _add(self, step: RecordedStep, values: th.Tensor, with_norms: bool, is_frozen: bool = False) -> None:
        # The gradients of a frozen actor, which are zeros here, have no norm.
        left_out = "|grad_norm" if is_frozen and "|critic_grad_norm" in step.names else None
        for name, value in zip(step.names, values[N_FLAGS:], strict=True):
            if not name.startswith("|"):
                self.result.metrics[name].append(value)
            elif with_norms and name != left_out:
                self.result.metrics[name[1:]].append(value)
        for name, vectors in step.vectors.items():
            self.result.metrics[name].extend(vectors)

    def _print_stop(self, step: RecordedStep, values: th.Tensor) -> None:
        if self.config.verbose >= 1:
            approx_kl = values[N_FLAGS + step.names.index("approx_kl")].item()
            print(f"Early stopping at step {step.epoch} due to reaching max kl: {approx_kl:.2f}")

    def _refuse(self, step: RecordedStep, values: th.Tensor) -> None:
        measured: dict[str, float] = {}
        for name, value in zip(step.names, values[N_FLAGS:].tolist(), strict=True):
            if math.isfinite(measured.get(name, 0.0)):
                measured[name] = value
        terms = {name: measured[name] for name in LOSS_TERMS if name in measured}
        self.stepper.show_bad_gradients()
        refuse_gradient(self.policy, terms, step.epoch, self.config.num_timesteps)

"""
The update of the policy from a rollout: epochs, steps of the optimiser, early stopping and skipped steps.

Decisions about a step are Python's booleans, read at once, where the stepper lies on the host. For a stepper on a device they
are tensors: steps that should not have been made change nothing there, and the host learns of it at the end, and now and then.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.common.guards import refuse_gradient
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.metrics import OF_SAMPLES, Metrics
from sb3_ppo_ext.update.rank_averages import make_average

# A number or a scalar tensor; a decision, or a scalar tensor on the device
Number: TypeAlias = Any
Decision: TypeAlias = Any


class Measured(NamedTuple):
    """
    What has been measured in a step of the optimiser, over all of its samples.

    :param loss: Loss, or another number that is finite if the loss is
    :param kl: Estimated KL divergence, see :func:`sb3_ppo_ext.update.losses.approximate_kl`; needed for ``target_kl``
    :param clip_fraction: Fraction of clipped samples, see :func:`sb3_ppo_ext.update.losses.clip_fraction`; needed for
        ``max_clip_fraction``
    :param n: Number of samples
    :param terms: Function that returns the losses by name: of several minibatches, the first value that is not finite
    :param metrics: What is logged of the step, as far as the source does not keep it for :meth:`GradientSource.finish`
    """

    loss: Number
    kl: Number
    clip_fraction: Number
    n: int
    terms: Callable[[], dict[str, float]]
    metrics: Metrics


class GradientSource(Protocol):
    """
    Computes gradients. A *step* stands for the minibatches of one step of the optimiser, in a form that the source chooses.
    """

    def steps(self) -> Iterator[Any]:
        """:return: Steps of one epoch; the iterator is closed after the last one that is made"""

    def add(self, step: Any) -> Measured:
        """
        Store the gradient of the loss of a step in ``grad`` of the parameters, or in the memory of the stepper.

        :param step: Step of the optimiser
        :return: What has been measured
        """

    def forget(self) -> None:
        """Discard what is kept of the last step, which is skipped."""

    def finish(self, metrics: Metrics) -> None:
        """
        Called at the end of the update.

        :param metrics: Metrics to which the source adds what it has kept
        """


class Stepper(Protocol):
    """Makes the steps of the optimiser."""

    # Whether decisions stay on the device
    is_on_device: ClassVar[bool] = False

    def zero_grad(self) -> None:
        """Called before the gradients of each step are computed."""

    def freeze_actor(self, is_frozen: Decision) -> None:
        """
        :param is_frozen: Whether the actor is left as it is in this step
        """

    def clip(self, max_norm: float) -> dict[str, Number]:
        """:return: Norms of the gradients before clipping, by name"""

    def step(self, is_made: Decision) -> None:
        """
        Make a step with the clipped gradients.

        :param is_made: Whether the step is made
        """

    def show_gradients(self) -> None:
        """Set ``grad`` of the parameters, if the gradients are stored elsewhere."""

    def close(self) -> None:
        """Called at the end of the update, even if it raises an error."""


@dataclass
class UpdateResult:
    """
    The result of an update.

    :param metrics: Metrics of the update
    :param n_epochs: Number of epochs that were started
    :param n_skipped: Number of steps that were skipped because their loss or gradient was not finite
    """

    metrics: Metrics
    n_epochs: int = 0
    n_skipped: int = 0


class Outcome(NamedTuple):
    """
    What has become of a step: the decisions about it, and what is logged.

    :param epoch: Epoch of the step
    :param decisions: Whether the step comes before any stop, is past ``target_kl``, is finite, has a frozen actor, and has
        gradients that are too large for float16
    :param norms: Norms of the gradients
    :param measured: What has been measured
    """

    epoch: int
    decisions: list[Decision]
    norms: dict[str, Number]
    measured: Measured


class Update:
    """
    One update of the policy.

    :param policy: Policy that is updated
    :param config: Options of the update
    :param estimates: Advantages, returns and priorities of the rollout
    :param gradients: Source of the gradients
    :param stepper: Stepper that makes the steps of the optimiser
    :param result: Result, filled in during the update, so that it is valid even if the update raises an error
    """

    def __init__(
        self,
        policy: ActorCriticPolicy,
        config: UpdateConfig,
        estimates: Estimates,
        gradients: GradientSource,
        stepper: Any,
        result: UpdateResult,
    ):
        self.policy, self.config, self.estimates = policy, config, estimates
        self.gradients, self.stepper, self.result = gradients, stepper, result
        self.is_on_device: bool = stepper.is_on_device
        no: Decision = th.zeros((), dtype=th.bool, device=policy.device) if self.is_on_device else False
        # Above `max_clip_fraction`, only the critic keeps learning.
        self.no, self.has_stopped, self.actor_is_frozen = no, no, no
        self.average = make_average(policy, config, stepper) if config.ranks.are_several else None
        # Steps about which the host does not know yet
        self.unknown: list[Outcome] = []
        self.norms: dict[str, list[Number]] = defaultdict(list)
        # Number of samples of this rank in each step that is logged
        self.counts: list[int] = []

    def run(self) -> None:
        """
        Run all epochs, unless ``target_kl`` stops the update early.

        :raises ValueError: if a loss or gradient is not finite, with ``bad_gradients="raise"``
        """
        try:
            self._run_epochs()
        finally:
            self.stepper.close()
        if self.is_on_device:
            self._learn_outcomes()
        metrics, config = self.result.metrics, self.config
        self.gradients.finish(metrics)
        for name, norms in self.norms.items():
            are_tensors = isinstance(norms[0], th.Tensor)
            metrics[name].append(th.stack(norms).float() if are_tensors else th.tensor(norms, dtype=th.float32))
        if config.ranks.are_several:
            metrics.average(config.ranks, np.array(self.counts, np.float64) if config.priority_alpha > 0 else None)

    def _run_epochs(self) -> None:
        for epoch in range(self.config.n_epochs):
            if self.estimates.rollout.is_indexable:
                self.estimates.begin_epoch(epoch)
            self.result.metrics.begin_epoch()
            with closing(self.gradients.steps()) as steps:  # type: ignore[type-var]
                for step in steps:
                    self._step(step, epoch)
                    if self.has_stopped is True:
                        break
            if not self.is_on_device:
                self.result.n_epochs = epoch + 1
            if self._is_last(epoch):
                break

    def _is_last(self, epoch: int) -> bool:
        """Whether the update has stopped; on a device, it is asked after the first, second, fourth, eighth, ... epoch."""
        is_asked = self.config.target_kl is not None and (epoch + 1) & epoch == 0 and epoch + 1 < self.config.n_epochs
        return bool(self.has_stopped) if is_asked or not self.is_on_device else False

    def _step(self, step: Any, epoch: int) -> None:
        config, stepper = self.config, self.stepper
        stepper.zero_grad()
        measured = self.gradients.add(step)
        if self.average is not None:
            measured = self.average(measured)

        # NaN is not past the KL divergence, but a step that is not finite
        is_past = self._decide(measured.kl > 1.5 * config.target_kl) if config.target_kl is not None else self.no
        if is_past is True:
            self.has_stopped = True
            return self._log(epoch, measured, {}, True, False, False, False)
        is_before_stop = _not(self.has_stopped)
        goes_on = is_before_stop & _not(is_past)

        if config.max_clip_fraction is not None:
            # In float32 on every engine, in which a fraction equal to the limit is not above it
            fraction = measured.clip_fraction if self.is_on_device else np.float32(float(measured.clip_fraction))
            is_clipped = self._decide(fraction > np.float32(config.max_clip_fraction).item())
            self.actor_is_frozen = self.actor_is_frozen | (goes_on & is_clipped)
            stepper.freeze_actor(self.actor_is_frozen)
        if config.loss_scale is not None:
            stepper.unscale(config.loss_scale.scale)
        norms = stepper.clip(config.max_grad_norm)

        # The sum is tested, so that there is only one synchronisation with the device.
        is_finite = self._is_finite(sum(norms.values()) + measured.loss)
        overflows = self.no
        if config.loss_scale is not None:
            overflows = goes_on & _not(is_finite) & self._is_finite(measured.loss)
            config.loss_scale.update(overflows, goes_on & is_finite)
        self.has_stopped = self.has_stopped | is_past
        if self.is_on_device and config.bad_gradients == "raise":
            is_bad = goes_on & _not(is_finite | overflows)
            stepper.keep_bad_gradients(is_bad)
            self.has_stopped = self.has_stopped | is_bad

        stepper.step(goes_on & is_finite)
        if self.is_on_device:
            self._note(epoch, measured, norms, [is_before_stop, is_past, is_finite, self.actor_is_frozen, overflows])
        else:
            self._log(epoch, measured, norms, False, is_finite, self.actor_is_frozen, False)

    def _decide(self, decision: Decision) -> Decision:
        return decision if self.is_on_device else bool(decision)

    def _is_finite(self, number: Number) -> Decision:
        return th.isfinite(number) if self.is_on_device else math.isfinite(number)

    # What has become of the steps

    def _note(self, epoch: int, measured: Measured, norms: dict[str, Number], decisions: list[Decision]) -> None:
        """Keep on the device what is known of a step."""
        scalars = [value for _, value in _scalars(measured.metrics)]
        numbers = [part.detach().float() for part in (*decisions, *norms.values(), *scalars)]
        self.unknown.append(Outcome(epoch, [th.stack(numbers)], norms, measured))

    def _learn_outcomes(self) -> None:
        """Transfer all decisions and metrics at once, and log the steps up to the one that stops the update."""
        numbers = th.cat([outcome.decisions[0] for outcome in self.unknown]).cpu()
        n_made = n_frozen = 0
        lengths = [len(outcome.decisions[0]) for outcome in self.unknown]
        try:
            for outcome, values in zip(self.unknown, numbers.split(lengths), strict=True):
                known = _known(outcome, values)
                is_before_stop, is_past, is_finite, is_frozen, overflows = known.decisions
                if not is_before_stop:
                    break
                if outcome.epoch != self.result.n_epochs or n_made == 0:
                    self.result.n_epochs = outcome.epoch
                    self.result.metrics.begin_epoch()
                if is_finite and not is_past:
                    n_made, n_frozen = n_made + 1, n_frozen + is_frozen
                self._log(known.epoch, known.measured, known.norms, is_past, is_finite, is_frozen, overflows)
            self.result.n_epochs += 1
        finally:
            self.stepper.correct_counts(len(self.unknown) - n_made, n_frozen)

    def _log(
        self,
        epoch: int,
        measured: Measured,
        norms: dict[str, Number],
        is_past: bool,
        is_finite: bool,
        is_frozen: bool,
        overflows: bool,
    ) -> None:
        config = self.config
        if not (is_past or is_finite or overflows):
            self._skip(measured, epoch)
            return
        for name, values in measured.metrics.items():
            if measured.n > 0 or name not in OF_SAMPLES:  # One sample stands for none.
                self.result.metrics[name].extend(values)
        self.counts.append(measured.n)
        if is_past:
            if config.verbose >= 1:
                print(f"Early stopping at step {epoch} due to reaching max kl: {float(measured.kl):.2f}")
        elif is_finite:
            for name, norm in norms.items():
                # The gradients of a frozen actor have no norm.
                if not (is_frozen and name == "grad_norm" and "critic_grad_norm" in norms):
                    self.norms[name].append(norm)
            if config.max_clip_fraction is not None:
                self.result.metrics["actor_frozen"].append(th.tensor(float(is_frozen)))

    def _skip(self, measured: Measured, epoch: int) -> None:
        """Skip a step that is not finite, or raise an error."""
        if self.config.bad_gradients == "raise":
            self.stepper.show_gradients()
            refuse_gradient(self.policy, measured.terms(), epoch, self.config.num_timesteps)
        self.result.n_skipped += 1
        self.gradients.forget()


def _not(decision: Decision) -> Decision:
    return decision ^ True


def _scalars(metrics: Metrics) -> list[tuple[str, th.Tensor]]:
    return [(name, value) for name, values in metrics.items() for value in values if value.ndim == 0]


def _known(outcome: Outcome, values: th.Tensor) -> Outcome:
    """An outcome whose numbers have been transferred to the host."""
    n, names = 5, list(outcome.norms)
    decisions, norms, scalars = values[:n].bool().tolist(), values[n : n + len(names)], values[n + len(names) :]
    measured, metrics = outcome.measured, Metrics()
    metrics.update({name: parts for name, parts in measured.metrics.items() if parts and parts[0].ndim > 0})
    for (name, _), value in zip(_scalars(measured.metrics), scalars, strict=True):
        metrics[name].append(value)
    return Outcome(outcome.epoch, decisions, dict(zip(names, norms, strict=True)), measured._replace(metrics=metrics))

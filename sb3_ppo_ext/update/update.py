"""One update of the policy from one rollout: epochs, steps of the optimiser, and what ends or skips them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.common.guards import refuse_gradient
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.optimizers import critic_parameters


class GradientSource(Protocol):
    """
    Where gradients come from. A *step* is whatever the source makes one step of the optimiser of: some minibatches.
    """

    def steps(self) -> Iterator[Any]:
        """:return: The steps of one epoch"""

    def add(self, step: Any) -> None:
        """Leave the gradient of a step's loss in the policy's parameters, or where the stepper finds it."""

    def approximate_kl(self, step: Any) -> float:
        """:return: See :func:`sb3_ppo_ext.update.losses.approximate_kl`, of all samples of the step"""

    def clip_fraction(self, step: Any) -> float:
        """:return: See :func:`sb3_ppo_ext.update.losses.clip_fraction`, of all samples of the step"""

    def terms(self, step: Any) -> dict[str, float]:
        """:return: The losses of the step by name, of several minibatches the first that is not finite"""

    def accept(self, step: Any, norms: dict[str, Any]) -> bool:
        """
        Measure the norms of the gradients, if the step is to be made.

        :return: Whether they, and the loss of the step, are finite
        """

    def forget(self, step: Any) -> None:
        """Measure nothing of a step that is not made."""

    def end_epoch(self) -> None:
        """Called after each epoch."""

    def finish(self) -> None:
        """Called at the end of the update."""


class Stepper(Protocol):
    """Who makes the steps of the optimiser."""

    def zero_grad(self) -> None:
        """Called before each step's gradients are computed."""

    def clip(self, max_norm: float) -> dict[str, Any]:
        """:return: Norms of the gradients before they are clipped, numbers or scalar tensors by name"""

    def step(self) -> None:
        """Make a step, with the gradients as they were clipped."""

    def show_gradients(self) -> None:
        """Let the parameters have their gradients, where these lie elsewhere."""

    def close(self) -> None:
        """Called at the end of the update, also if it raises."""


@dataclass
class UpdateResult:
    """
    What came of an update.

    :param metrics: What was measured
    :param n_epochs: Epochs that were begun
    :param n_skipped: Steps that were left out since their loss or gradient was not finite
    """

    metrics: Metrics
    n_epochs: int = 0
    n_skipped: int = 0


class Update:
    """
    One update.

    :param policy: Policy that is updated
    :param config: Options
    :param estimates: Advantages of the rollout, and what follows from them
    :param gradients: Where gradients come from
    :param stepper: Who makes the steps
    :param result: What is counted and measured on the way, also if the update raises
    """

    def __init__(
        self,
        policy: ActorCriticPolicy,
        config: UpdateConfig,
        estimates: Estimates,
        gradients: GradientSource,
        stepper: Stepper,
        result: UpdateResult,
    ):
        self.policy, self.config, self.estimates = policy, config, estimates
        self.gradients, self.stepper, self.result, self.metrics = gradients, stepper, result, result.metrics
        # Past `max_clip_fraction` the critic learns on alone.
        self.actor_is_frozen = False

    def run(self) -> None:
        """Make all epochs."""
        try:
            for epoch in range(self.config.n_epochs):
                self.metrics.begin_epoch()
                if self.estimates.rollout.is_indexable:
                    self.estimates.begin_epoch(epoch)
                go_on = all(self._step(step, epoch) for step in self.gradients.steps())
                self.gradients.end_epoch()
                self.result.n_epochs += 1
                if not go_on:
                    break
            self.gradients.finish()
        finally:
            self.stepper.close()

    def _step(self, step: Any, epoch: int) -> bool:
        """
        :return: False if ``target_kl`` ends the update, and the step was not made
        """
        config, gradients, stepper = self.config, self.gradients, self.stepper
        stepper.zero_grad()
        gradients.add(step)
        if config.target_kl is not None and self._is_past_target_kl(gradients.approximate_kl(step), epoch):
            return False
        if config.max_clip_fraction is not None:
            self._freeze_actor(gradients.clip_fraction(step))
        norms = stepper.clip(config.max_grad_norm)
        if gradients.accept(step, norms):
            if config.max_clip_fraction is not None:
                self.metrics["actor_frozen"].append(th.tensor(float(self.actor_is_frozen)))
            stepper.step()
        else:
            self._skip(step, epoch)
        return True

    def _is_past_target_kl(self, approx_kl: float, epoch: int) -> bool:
        assert self.config.target_kl is not None
        if approx_kl <= 1.5 * self.config.target_kl:
            return False
        if self.config.verbose >= 1:
            print(f"Early stopping at step {epoch} due to reaching max kl: {approx_kl:.2f}")
        return True

    def _skip(self, step: Any, epoch: int) -> None:
        """Leave a step out that is not finite, or raise."""
        if self.config.bad_gradients == "raise":
            self.stepper.show_gradients()
            refuse_gradient(self.policy, self.gradients.terms(step), epoch, self.config.num_timesteps)
        self.result.n_skipped += 1
        self.gradients.forget(step)

    def _freeze_actor(self, clip_fraction: float) -> None:
        assert self.config.max_clip_fraction is not None
        if not self.actor_is_frozen:
            self.actor_is_frozen = clip_fraction > self.config.max_clip_fraction
        if self.actor_is_frozen:
            of_critic = critic_parameters(self.policy)
            for parameter in self.policy.parameters():
                if parameter not in of_critic:
                    # Without a gradient no optimiser touches it, nor its moments.
                    parameter.grad = None

"""The update of the policy from a rollout: epochs, steps of the optimiser, early stopping and skipped steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.common.guards import refuse_gradient
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.optimizers import critic_parameters


class GradientSource(Protocol):
    """
    Computes gradients. A *step* stands for the minibatches of one step of the optimiser, in a form that the source chooses.
    """

    def steps(self) -> Iterator[Any]:
        """:return: Steps of one epoch"""

    def add(self, step: Any) -> None:
        """Store the gradient of the loss of a step in ``grad`` of the parameters, or in the memory of the stepper."""

    def count(self, step: Any) -> int:
        """:return: Number of samples in the step"""

    def loss_of(self, step: Any) -> Any:
        """:return: Loss of the step, or another number that is finite if the loss is: a number or a scalar tensor"""

    def approximate_kl(self, step: Any) -> float:
        """:return: Estimated KL divergence of the step, see :func:`sb3_ppo_ext.update.losses.approximate_kl`"""

    def clip_fraction(self, step: Any) -> float:
        """:return: Fraction of clipped samples in the step, see :func:`sb3_ppo_ext.update.losses.clip_fraction`"""

    def terms(self, step: Any) -> dict[str, float]:
        """:return: Losses of the step by name: for several minibatches, the first value that is not finite"""

    def accept(self, step: Any, norms: dict[str, Any]) -> bool:
        """
        Record the norms of the gradients, if the step can be made.

        :return: Whether the norms and the loss of the step are finite
        """

    def forget(self, step: Any) -> None:
        """Discard the metrics of a step that is skipped."""

    def end_epoch(self) -> None:
        """Called after each epoch."""

    def finish(self) -> None:
        """Called at the end of the update."""


class Stepper(Protocol):
    """Makes the steps of the optimiser."""

    def zero_grad(self) -> None:
        """Called before the gradients of each step are computed."""

    def clip(self, max_norm: float) -> dict[str, Any]:
        """:return: Norms of the gradients before clipping, numbers or scalar tensors by name"""

    def step(self) -> None:
        """Make a step with the clipped gradients."""

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
        stepper: Stepper,
        result: UpdateResult,
    ):
        self.policy, self.config, self.estimates = policy, config, estimates
        self.gradients, self.stepper, self.result, self.metrics = gradients, stepper, result, result.metrics
        # Above `max_clip_fraction`, only the critic keeps learning.
        self.actor_is_frozen = False

    def run(self) -> None:
        """Run all epochs, unless ``target_kl`` stops the update early."""
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
        :return: False if ``target_kl`` stops the update before this step is made
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
        if not approx_kl > 1.5 * self.config.target_kl:  # NaN is not past it, but a step that is not finite
            return False
        if self.config.verbose >= 1:
            print(f"Early stopping at step {epoch} due to reaching max kl: {approx_kl:.2f}")
        return True

    def _skip(self, step: Any, epoch: int) -> None:
        """Skip a step that is not finite, or raise an error."""
        if self.config.bad_gradients == "raise":
            self.stepper.show_gradients()
            refuse_gradient(self.policy, self.gradients.terms(step), epoch, self.config.num_timesteps)
        self.result.n_skipped += 1
        self.gradients.forget(step)

    def _freeze_actor(self, clip_fraction: float) -> None:
        assert self.config.max_clip_fraction is not None
        if not self.actor_is_frozen:
            # In float32 on every engine, in which a fraction equal to the limit is not above it
            self.actor_is_frozen = bool(np.float32(clip_fraction) > np.float32(self.config.max_clip_fraction))
        if self.actor_is_frozen:
            of_critic = critic_parameters(self.policy)
            for parameter in self.policy.parameters():
                if parameter not in of_critic:
                    # An optimiser leaves a parameter without a gradient, and its moments, unchanged.
                    parameter.grad = None

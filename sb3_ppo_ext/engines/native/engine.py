"""``backend="native"``: MLP policies on the CPU, computed by the extension module in C in rollouts and updates."""

from __future__ import annotations

import torch as th
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.common.user_code import is_replaced, replaced_method
from sb3_ppo_ext.engines.engine import Engine, Setup
from sb3_ppo_ext.engines.native.actor import NativeActor
from sb3_ppo_ext.engines.native.gradients import AnalyticGradients
from sb3_ppo_ext.engines.native.muon import NativeMuonStepper
from sb3_ppo_ext.engines.native.policy import NativePolicy, unsupported_reason
from sb3_ppo_ext.engines.optimizer_steps import FusedAdamStepper, GradientMemory, TorchStepper, can_fuse_steps
from sb3_ppo_ext.rollout.actors import Actor, RolloutConfig
from sb3_ppo_ext.rollout.buffer import BUFFER_METHODS, TensorRolloutBuffer
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates, Evaluate
from sb3_ppo_ext.update.loop import GradientSource, Stepper
from sb3_ppo_ext.update.rollout_data import Rollout


class NativeEngine(Engine):
    """
    The extension module computes networks, GAE, Adam and most losses; NumPy and autograd differentiate the others.

    :param policy: Policy that acts and is updated, with which the engine shares the memory of the parameters
    """

    def __init__(self, policy: ActorCriticPolicy):
        super().__init__(policy)
        self.native = NativePolicy(policy)
        # The actor of a rollout from which no update has been made
        self.actor: NativeActor | None = None

    @classmethod
    def unsupported_reason(cls, setup: Setup) -> str | None:
        if setup.has_extra_loss:
            return (
                "`extra_actor_loss` may differentiate more of the policy than its outputs, the only part that this backend can"
            )
        if setup.has_extra_losses:
            return "`auxiliary_losses` evaluates the policy at further observations, which this backend cannot"
        if (reason := unsupported_reason(setup.policy)) is not None:
            return reason
        if is_replaced(setup.policy.optimizer, "zero_grad"):
            return "`zero_grad` of the optimiser was replaced, and this backend would not call it"
        if type(setup.buffer) not in (RolloutBuffer, DictRolloutBuffer, TensorRolloutBuffer):
            return f"the rollout buffer is a {type(setup.buffer).__name__}, and this backend reads only SB3's rollout buffers"
        if (name := replaced_method(BUFFER_METHODS, setup.buffer)) is not None:
            return f"`{name}` of the rollout buffer was replaced, and this backend would not call it"
        return None

    def is_for(self, policy: ActorCriticPolicy) -> bool:
        return self.native.is_of(policy)

    def make_actor(self, buffer: RolloutBuffer, config: RolloutConfig) -> Actor:
        self.actor = NativeActor(self.native, buffer, config)
        return self.actor

    def make_stepper(self, config: UpdateConfig) -> Stepper:
        memory = GradientMemory([(parameter, th.from_numpy(gradient)) for parameter, gradient in self.native.parameters()])
        if can_fuse_steps(self.policy, memory, config):
            return FusedAdamStepper(self.policy.optimizer, memory, is_overwritten=True)
        if NativeMuonStepper.takes(self.policy.optimizer, memory, config):
            return NativeMuonStepper(self.policy.optimizer, memory)
        return TorchStepper(self.policy)

    def make_evaluate(self, rollout: Rollout) -> Evaluate:
        native, actor, self.actor = self.native, self.actor, None
        is_estimated = actor is not None and actor.has_estimated(rollout.buffer)

        def evaluate(epoch: int) -> tuple[th.Tensor, th.Tensor]:
            if epoch == 0 and is_estimated:
                return rollout.columns["values"], rollout.columns["log_probs"]
            native.pack()
            evaluated = native.values_and_log_probs(rollout.buffer.observations, rollout.buffer.actions)
            values, log_probs = (rollout.time_major(th.from_numpy(part)) for part in evaluated)
            return values, log_probs

        return evaluate

    def make_gradients(self, config: UpdateConfig, estimates: Estimates, stepper: Stepper) -> GradientSource:
        # The next rollout is evaluated by these threads as well.
        self.native.use_threads(config.native_threads)
        return AnalyticGradients(self.native, config, estimates, stepper)

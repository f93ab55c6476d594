"""``backend="eager"``: PyTorch's eager mode, equal to SB3's PPO and sb3-contrib's RecurrentPPO bit for bit."""

from __future__ import annotations

from sb3_ppo_ext.engines.autograd_gradients import AutogradGradients, BackwardLoss
from sb3_ppo_ext.engines.engine import Engine, Setup
from sb3_ppo_ext.engines.optimizer_steps import TorchStepper
from sb3_ppo_ext.memory.recurrence import padded
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.update import GradientSource, Stepper


class EagerEngine(Engine):
    """The reference engine: gradients by autograd, optimiser steps by PyTorch."""

    keeps_float32 = False  # as SB3

    @classmethod
    def unsupported_reason(cls, setup: Setup) -> str | None:
        return None  # It supports everything that SB3 supports.

    def make_stepper(self, config: UpdateConfig) -> Stepper:
        return TorchStepper(self.policy)

    def make_gradients(self, config: UpdateConfig, estimates: Estimates, stepper: Stepper, metrics: Metrics) -> GradientSource:
        prepare = padded if self.policy.device.type == "cpu" else None
        return AutogradGradients(BackwardLoss(self.policy, config), config, estimates, metrics, prepare)

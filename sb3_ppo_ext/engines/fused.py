"""``backend="fused"``: gradients by PyTorch; gradient clipping and Adam fused in the extension module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.common.observations import images_in_channels_last, takes_channels_last
from sb3_ppo_ext.common.user_code import is_replaced
from sb3_ppo_ext.engines.autograd_gradients import AutogradGradients, BackwardLoss
from sb3_ppo_ext.engines.engine import Engine, Setup
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.optimizer_steps import FusedAdamStepper, GradientMemory, TorchStepper
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.update import GradientSource, Stepper


def can_fuse_steps(policy: ActorCriticPolicy, memory: GradientMemory, config: UpdateConfig) -> bool:
    """
    :param policy: Policy that is updated
    :param memory: Trainable parameters of the policy, with their gradients
    :param config: Options of the update
    :return: Whether the extension module can make the steps of the policy's optimiser
    """
    # A fused step updates all parameters, so that it cannot leave out those of a frozen actor.
    return config.max_clip_fraction is None and FusedAdamStepper.takes(policy.optimizer, memory)


def image_layout(policy: ActorCriticPolicy) -> Callable[[Any], Any] | None:
    """
    :param policy: Policy that is updated
    :return: Function that brings the images of a minibatch into the memory format in which convolutions are fastest, ``None``
        if code that is not SB3's reads them, which may depend on the format
    """
    is_known = not any(is_replaced(policy, name) for name in ("evaluate_actions", "extract_features"))
    takes = takes_channels_last(policy.pi_features_extractor, policy.vf_features_extractor)
    return images_in_channels_last if is_known and takes else None


class FusedEngine(Engine):
    """Gradients by autograd; clipping and Adam by the extension module, or by PyTorch for other optimisers."""

    @classmethod
    def unsupported_reason(cls, setup: Setup) -> str | None:
        if any(p.dtype != th.float32 or not p.is_contiguous() for p in setup.policy.parameters()):
            return "the policy has parameters that are not contiguous float32, the only ones that this backend supports"
        return extension.unsupported_reason(setup.policy)

    def make_stepper(self, config: UpdateConfig) -> Stepper:
        memory = GradientMemory.of(self.policy)
        if can_fuse_steps(self.policy, memory, config):
            return FusedAdamStepper(self.policy.optimizer, memory)
        return TorchStepper(self.policy)

    def make_gradients(self, config: UpdateConfig, estimates: Estimates, stepper: Stepper, metrics: Metrics) -> GradientSource:
        return AutogradGradients(
            BackwardLoss(self.policy, config), config, estimates, metrics, prepare=image_layout(self.policy)
        )

"""Which engine computes rollouts and updates."""

from typing import Any

import torch as th
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_ppo_ext.native_policy import why_no_module, why_not

BACKENDS = ("auto", "eager", "lean", "native")


def why_not_native(model: Any, own_loss: bool) -> str | None:
    """
    :param model: A ``PPOExt`` with its policy
    :param own_loss: Whether a subclass adds a loss of its own
    :return: What keeps the model from ``backend="native"``, ``None`` if nothing does
    """
    if own_loss:
        return "`extra_actor_loss` may differentiate more of the policy than its outputs"
    if type(model.rollout_buffer) not in (RolloutBuffer, DictRolloutBuffer):
        return f"{type(model.rollout_buffer).__name__} is not SB3's"
    return why_not(model.policy)


def why_not_lean(model: Any) -> str | None:
    """
    :param model: A ``PPOExt`` with its policy
    :return: What keeps the model from ``backend="lean"``, ``None`` if nothing does
    """
    parameters = list(model.policy.parameters())
    if any(parameter.dtype != th.float32 or not parameter.is_contiguous() for parameter in parameters):
        return "the policy has parameters that are not float32"
    return why_no_module(model.policy)

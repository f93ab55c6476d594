"""Which engine computes rollouts and updates."""

from typing import Any

import torch as th
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_ppo_ext.engines.native.policy import why_no_module, why_not

BACKENDS = ("auto", "eager", "fused", "native", "compile")


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


def why_not_fused(model: Any) -> str | None:
    """
    :param model: A ``PPOExt`` with its policy
    :return: What keeps the model from ``backend="fused"``, ``None`` if nothing does
    """
    parameters = list(model.policy.parameters())
    if any(parameter.dtype != th.float32 or not parameter.is_contiguous() for parameter in parameters):
        return "the policy has parameters that are not float32"
    return why_no_module(model.policy)


def why_not_compile(model: Any) -> str | None:
    """
    :param model: A ``PPOExt`` with its policy
    :return: What keeps the model from ``backend="compile"``, ``None`` if nothing is known that does
    """
    # Not at the top, for it takes seconds.
    from torch._dynamo import is_dynamo_supported
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._triton import has_triton

    if not is_dynamo_supported():
        return "`torch.compile` does not support this platform"
    if model.policy.device.type == "cuda":
        return None if has_triton() else f"{model.policy.device} has no Triton, which `torch.compile` needs there"
    try:
        get_cpp_compiler()
    except RuntimeError as error:
        return f"`torch.compile` needs a C++ compiler ({str(error).splitlines()[0]})"
    return None

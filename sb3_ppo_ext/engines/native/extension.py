"""The extension module in C, where a compiler took it."""

from typing import Any

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

# What is in `csrc`, see `_mlp.pyi`; None without it
module: Any
try:
    from sb3_ppo_ext.engines.native import _mlp as module
except ImportError:  # no compiler took it
    module = None


def unsupported_reason(policy: ActorCriticPolicy) -> str | None:
    """
    :param policy: An actor-critic policy
    :return: What keeps the extension module from its parameters, ``None`` if nothing does
    """
    if module is None:
        return "the extension module was not built, for want of a C compiler"
    return None if policy.device.type == "cpu" else f"the policy is on {policy.device}"


def is_readable(parameter: nn.Parameter) -> bool:
    """
    :param parameter: Of a policy
    :return: Whether the extension module can read and write it
    """
    return parameter.device.type == "cpu" and parameter.dtype == th.float32 and parameter.is_contiguous()

"""Access to the extension module in C, if it was built."""

from typing import Any

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

# The compiled code of `csrc`, see `_mlp.pyi`; None if it was not built
module: Any
try:
    from sb3_ppo_ext.engines.native import _mlp as module
except ImportError:  # built without a C compiler
    module = None


def unsupported_reason(policy: ActorCriticPolicy) -> str | None:
    """
    :param policy: Actor-critic policy
    :return: Reason why the extension module cannot use the parameters of the policy, ``None`` if it can
    """
    if module is None:
        return "the extension module was not built, since there was no C compiler"
    return None if policy.device.type == "cpu" else f"the policy is on {policy.device}"


def is_readable(parameter: nn.Parameter) -> bool:
    """
    :param parameter: Parameter of a policy
    :return: Whether the extension module can read and write the parameter
    """
    return parameter.device.type == "cpu" and parameter.dtype == th.float32 and parameter.is_contiguous()

"""Access to the extension module in C, if it was built."""

import warnings
from functools import cache
from typing import Any

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

# The compiled code of `csrc`, see `_mlp.pyi`; None if it was not built
module: Any
why_missing = ""
try:
    from sb3_ppo_ext.engines.native import _mlp as module
except ImportError as error:  # built without a C compiler, or for another Python
    module, why_missing = None, str(error)


@cache
def warn_if_missing() -> None:
    """Say once in a process that the extension module is missing, and how to build it."""
    if module is None:
        warnings.warn(
            f"The C extension module of sb3_ppo_ext is missing ({why_missing}): training on the CPU takes several times as "
            "long. Install a C compiler (`apt install gcc`, `xcode-select --install`), and then repeat the installation, for "
            "instance with `pip install --force-reinstall --no-deps .` in the folder with the source code. "
            '`backend="eager"` does without the module, and without this warning.',
            stacklevel=5,
        )


def unsupported_reason(policy: ActorCriticPolicy) -> str | None:
    """
    :param policy: Actor-critic policy
    :return: Reason why the extension module cannot use the parameters of the policy, ``None`` if it can
    """
    if module is None:
        return "the extension module was not built, since there was no C compiler"
    return (
        None if policy.device.type == "cpu" else f"the policy is on {policy.device}, and this backend computes only on the CPU"
    )


def is_readable(parameter: nn.Parameter) -> bool:
    """
    :param parameter: Parameter of a policy
    :return: Whether the extension module can read and write the parameter
    """
    return parameter.device.type == "cpu" and parameter.dtype == th.float32 and parameter.is_contiguous()

"""Networks of a policy in a type of lower precision."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch as th
from torch import nn

AmpDtype: TypeAlias = Literal["bfloat16", "float16"]
# Modules whose outputs are used in float32
NETWORKS = (
    "pi_features_extractor",
    "vf_features_extractor",
    "mlp_extractor.policy_net",
    "mlp_extractor.value_net",
    "action_net",
    "value_net",
)
# Their linear layers compute in lower precision, their attention in float32.
TRANSFORMERS = ("pi_transformer", "vf_transformer")


class Autocast:
    """
    Lets a module compute in a type of lower precision, and return float32. Its parameters stay in float32.

    See https://docs.pytorch.org/docs/stable/amp.html

    :param dtype: Type of lower precision
    """

    def __init__(self, dtype: th.dtype):
        self.dtype = dtype
        self.contexts: list[th.autocast] = []

    def enter(self, module: nn.Module, inputs: object) -> None:
        """
        :param module: Module that is about to compute
        :param inputs: Its inputs
        """
        device = next(module.parameters()).device.type
        context = th.autocast(device, self.dtype)
        context.__enter__()
        self.contexts.append(context)

    def leave(self, module: nn.Module, inputs: object, output: Any) -> Any:
        """
        :param module: Module that has computed, or failed
        :param inputs: Its inputs
        :param output: Its output
        :return: Output in float32
        """
        self.contexts.pop().__exit__(None, None, None)
        return output.float() if isinstance(output, th.Tensor) else output


def set_precision(policy: nn.Module, dtype: AmpDtype | None) -> None:
    """
    Let the networks of a policy compute in a type of lower precision. Action distributions, losses and parameters stay in
    float32.

    :param policy: Policy of SB3 or of this package
    :param dtype: Name of the type, ``None`` for float32
    """
    for handle in vars(policy).pop("_autocast_handles", ()):
        handle.remove()
    if dtype is None:
        return
    handles = policy._autocast_handles = []  # type: ignore[assignment]
    modules = [_find(policy, name) for name in NETWORKS]
    for transformer in (_find(policy, name) for name in TRANSFORMERS):
        modules += [module for module in transformer.modules() if isinstance(module, nn.Linear)]
    for module in dict.fromkeys(module for module in modules if any(True for _ in module.parameters())):
        autocast = Autocast(getattr(th, dtype))
        handles.append(module.register_forward_pre_hook(autocast.enter))
        handles.append(module.register_forward_hook(autocast.leave, always_call=True))


def _find(policy: nn.Module, name: str) -> nn.Module:
    try:
        return policy.get_submodule(name)
    except AttributeError:  # a policy with other submodules
        return nn.Module()


class LossScale:
    """
    Factor of the loss with ``amp_dtype="float16"``, whose smallest numbers are too large for many gradients. It is halved when
    a gradient overflows, whose step is left out, and doubled after :attr:`INTERVAL` steps without that, on the device of the
    policy, so that the host need not wait.

    Paper: https://arxiv.org/abs/1710.03740
    """

    INITIAL, INTERVAL = 2.0**16, 2000

    def __init__(self) -> None:
        self.scale, self.n_good = th.tensor(self.INITIAL), th.tensor(0.0)

    def to(self, device: th.device) -> LossScale:
        """
        :param device: Device of the policy
        :return: This object, with its tensors on the device
        """
        self.scale, self.n_good = self.scale.to(device), self.n_good.to(device)
        return self

    def update(self, overflows: th.Tensor, is_made: th.Tensor) -> None:
        """
        :param overflows: Whether a gradient has overflowed, a scalar
        :param is_made: Whether the step is made, a scalar
        """
        n_good = th.where(overflows, 0.0, self.n_good + is_made.float())
        grows = n_good >= self.INTERVAL
        self.scale = th.where(overflows, self.scale / 2, th.where(grows, self.scale * 2, self.scale))
        self.n_good = th.where(grows, 0.0, n_good)

    def state_dict(self) -> dict[str, float]:
        """:return: The factor, and the number of steps since it was changed"""
        return {"scale": self.scale.item(), "n_good": self.n_good.item()}

    def load_state_dict(self, state: dict[str, float], strict: bool = True) -> None:
        """
        :param state: State from :meth:`state_dict`
        :param strict: Unused, for compatibility with ``th.nn.Module``
        """
        self.scale, self.n_good = (self.scale.new_tensor(float(state[name])) for name in ("scale", "n_good"))

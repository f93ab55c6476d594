"""The engine on PyTorch: ``backend="eager"``, ``"fused"``, ``"device"`` and ``"compile"`` are spellings of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_ppo_ext.common.observations import images_in_channels_last, takes_channels_last
from sb3_ppo_ext.common.user_code import is_replaced
from sb3_ppo_ext.engines.autograd_gradients import AutogradGradients, BackwardLoss, Differentiate
from sb3_ppo_ext.engines.compiled import CompiledAct, CompiledBackward, CompiledLoss, compiler_is_missing
from sb3_ppo_ext.engines.engine import Engine, Setup
from sb3_ppo_ext.engines.masked_steps import MaskedStepper, make_masked_stepper
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.optimizer_steps import FusedAdamStepper, GradientMemory, TorchStepper, can_fuse_steps
from sb3_ppo_ext.memory.recurrence import padded
from sb3_ppo_ext.memory.recurrent_policies import RecurrentPolicyMixin
from sb3_ppo_ext.rollout.actors import Act
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.loop import GradientSource

# Where rollouts lie: on the host, on the device of the policy, or there if that or the environment is not NumPy's
Rollouts = Literal["host", "device", "device if elsewhere"]


class TorchEngine(Engine):
    """
    Gradients by autograd, or by a compiled function. Where rollouts stay on a device other than the CPU, so do all decisions
    of an update.

    :param policy: Policy that acts and is updated
    """

    # Who makes steps of Adam on the CPU: PyTorch, or the extension module
    steps: ClassVar[Literal["torch", "fused"]] = "fused"
    # Whether acting and the loss are compiled
    graph: ClassVar[Literal["compile"] | None] = None
    rollouts: ClassVar[Rollouts] = "host"

    def __init__(self, policy: ActorCriticPolicy):
        super().__init__(policy)
        self._compiled: CompiledLoss | None = None
        self._act: CompiledAct | None = None

    @property
    def compiled(self) -> CompiledLoss:
        """The compiled loss, which is kept as long as the engine is."""
        if self._compiled is None:
            self._compiled = CompiledLoss(self.policy)
        return self._compiled

    @classmethod
    def is_automatic(cls, setup: Setup) -> bool:
        return cls.rollouts == "host" or setup.has_amp or _is_elsewhere(setup)

    @classmethod
    def keeps_rollouts_on_device(cls, setup: Setup) -> bool:
        if cls.rollouts == "device if elsewhere":
            return _is_elsewhere(setup) and not_on_device(setup) is None
        return cls.rollouts == "device"

    def make_act(self) -> Act:
        if self.graph is None:
            return self.policy
        if self._act is None:
            self._act = CompiledAct(self.policy)
        return self._act

    def make_stepper(self, config: UpdateConfig) -> MaskedStepper | FusedAdamStepper | TorchStepper:
        is_waited_for = self.policy.device.type == "cpu" and config.loss_scale is None
        if self.rollouts != "host" and not is_waited_for:
            return make_masked_stepper(self.policy, can_freeze=config.max_clip_fraction is not None)
        memory = GradientMemory.of(self.policy)
        if self.steps == "fused" and can_fuse_steps(self.policy, memory, config):
            return FusedAdamStepper(self.policy.optimizer, memory)
        return TorchStepper(self.policy, None if self.graph is None else memory)

    def make_gradients(self, config: UpdateConfig, estimates: Estimates, stepper: Any) -> GradientSource:
        prepare = None if stepper.is_on_device else self._prepare()
        return AutogradGradients(self._make_backward(config, stepper.memory), config, estimates, prepare)

    def _make_backward(self, config: UpdateConfig, memory: GradientMemory) -> Differentiate:
        # Each minibatch of a recurrent policy has sequences of other lengths, for which the loss would be compiled again.
        if self.graph is None or isinstance(self.policy, RecurrentPolicyMixin):
            return BackwardLoss(self.policy, config)
        return CompiledBackward(self.compiled, config, memory)

    def _prepare(self) -> Callable[[PyTorchObs], PyTorchObs] | None:
        """Function that brings the observations of a minibatch into the form that is evaluated."""
        if self.steps == "torch":
            return padded if self.policy.device.type == "cpu" else None
        return image_layout(self.policy)


class EagerEngine(TorchEngine):
    """The reference: equal to SB3's PPO and sb3-contrib's RecurrentPPO bit for bit."""

    steps = "torch"
    keeps_float32 = False  # as SB3

    @classmethod
    def unsupported_reason(cls, setup: Setup) -> str | None:
        return None  # It supports everything that SB3 supports.


class FusedEngine(TorchEngine):
    """Clipping and Adam by the extension module, or by PyTorch for other optimisers."""

    @classmethod
    def unsupported_reason(cls, setup: Setup) -> str | None:
        if any(p.dtype != th.float32 or not p.is_contiguous() for p in setup.policy.parameters()):
            return "the policy has parameters that are not contiguous float32, the only ones that this backend supports"
        return extension.unsupported_reason(setup.policy)


class DeviceEngine(TorchEngine):
    """Rollouts and updates stay on the device of the policy."""

    rollouts = "device"
    supports_amp = True

    @classmethod
    def unsupported_reason(cls, setup: Setup) -> str | None:
        return not_on_device(setup)


class CompiledEngine(TorchEngine):
    """Acting and the loss are compiled by ``torch.compile``."""

    graph = "compile"
    rollouts = "device if elsewhere"

    @classmethod
    def unsupported_reason(cls, setup: Setup) -> str | None:
        return compiler_is_missing(setup.policy)


def not_on_device(setup: Setup) -> str | None:
    """
    :param setup: Policy and buffer to support
    :return: Reason why rollouts cannot stay on the device of the policy, ``None`` if they can
    """
    if type(setup.buffer) is not TensorRolloutBuffer:
        return f"the rollout buffer is a {type(setup.buffer).__name__}, and this backend fills only its own"
    if is_replaced(setup.buffer, "add"):
        return f"`add` of the {type(setup.buffer).__name__} was replaced, which this backend does not call"
    if len({parameter.dtype for parameter in setup.policy.parameters()}) != 1:
        return "the policy has parameters of several types, and this backend needs a single one"
    if setup.has_amp and "_orig_mod" in setup.policy._modules:
        return "the policy is in the wrapper of `torch.compile`, which cannot trace a change of precision"
    return None


def _is_elsewhere(setup: Setup) -> bool:
    return setup.has_tensor_env or setup.policy.device.type != "cpu"


def image_layout(policy: ActorCriticPolicy) -> Callable[[PyTorchObs], PyTorchObs] | None:
    """
    :param policy: Policy that is updated
    :return: Function that brings the images of a minibatch into the memory format in which convolutions are fastest, ``None``
        if code that is not SB3's reads them, which may depend on the format
    """
    is_known = not any(is_replaced(policy, name) for name in ("evaluate_actions", "extract_features"))
    takes = takes_channels_last(policy.pi_features_extractor, policy.vf_features_extractor)
    return images_in_channels_last if is_known and takes else None

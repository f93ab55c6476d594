"""``backend="device"``: rollouts and updates that stay on the device of the policy."""

from __future__ import annotations

from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_ppo_ext.common.user_code import is_replaced
from sb3_ppo_ext.engines.autograd_gradients import AutogradGradients, BackwardLoss, Differentiate
from sb3_ppo_ext.engines.device.actor import DeviceActor
from sb3_ppo_ext.engines.device.steppers import make_masked_stepper
from sb3_ppo_ext.engines.device.update import DeviceUpdate
from sb3_ppo_ext.engines.engine import Setup
from sb3_ppo_ext.engines.fused import FusedEngine
from sb3_ppo_ext.engines.optimizer_steps import GradientMemory
from sb3_ppo_ext.memory.recurrent_buffers import RecurrentBufferMixin
from sb3_ppo_ext.memory.sequence_buffers import SequenceDictRolloutBuffer, SequenceRolloutBuffer
from sb3_ppo_ext.rollout.actors import Actor, RolloutConfig
from sb3_ppo_ext.update.advantages import AdvantageNormalizer
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.rollout_data import Rollout
from sb3_ppo_ext.update.tensor_estimates import TensorEstimates
from sb3_ppo_ext.update.tensor_rollout import TensorRollout, TensorRolloutBuffer
from sb3_ppo_ext.update.tensor_sequences import TensorSequenceBuffer, TensorSequenceRollout
from sb3_ppo_ext.update.update import UpdateResult

KNOWN_BUFFERS = (
    *(RolloutBuffer, DictRolloutBuffer, SequenceRolloutBuffer, SequenceDictRolloutBuffer),
    *(TensorRolloutBuffer, TensorSequenceBuffer),
)


class DeviceEngine(FusedEngine):
    """
    Gradients by autograd from a rollout that stays on the device. On the CPU, where nothing has to be waited for, updates are
    those of ``backend="fused"``; on other devices, all decisions of an update are made there.
    """

    supports_amp = True

    @classmethod
    def unsupported_reason(cls, setup: Setup) -> str | None:
        if isinstance(setup.buffer, RecurrentBufferMixin):
            return (
                f"{type(setup.policy).__name__} is recurrent, and this backend supports policies without an LSTM or GRU alone"
            )
        if type(setup.buffer) not in KNOWN_BUFFERS:
            return (
                f"the rollout buffer is a {type(setup.buffer).__name__}, and this backend replaces SB3's rollout buffers alone"
            )
        if is_replaced(setup.buffer, "add"):
            return f"`add` of the {type(setup.buffer).__name__} was replaced, which this backend does not call"
        if len({parameter.dtype for parameter in setup.policy.parameters()}) != 1:
            return "the policy has parameters of several types, and this backend needs a single one"
        if setup.has_amp and "_orig_mod" in setup.policy._modules:
            return "the policy is in the wrapper of `torch.compile`, which cannot trace a change of precision"
        return None

    @classmethod
    def is_automatic(cls, setup: Setup) -> bool:
        return setup.has_tensor_env or setup.has_amp or setup.policy.device.type != "cpu"

    @classmethod
    def keeps_rollouts_on_device(cls, setup: Setup) -> bool:
        return True

    def make_actor(self, buffer: RolloutBuffer, config: RolloutConfig) -> Actor:
        return (
            DeviceActor(buffer, config, self)
            if isinstance(buffer, TensorRolloutBuffer)
            else super().make_actor(buffer, config)
        )

    def update(
        self,
        rollout: Rollout,
        config: UpdateConfig,
        normalizer: AdvantageNormalizer | None = None,
        result: UpdateResult | None = None,
    ) -> UpdateResult:
        """
        Update the policy.

        :param rollout: Full rollout, collected by the policy
        :param config: Options of the update
        :param normalizer: Moving averages for ``advantage_norm="ema"``
        :param result: Result to fill in; ``None`` for a new one
        :return: Result of the update
        :raises ValueError: if a loss or gradient is not finite, with ``bad_gradients="raise"``
        """
        is_waited_for = self.policy.device.type == "cpu" and config.loss_scale is None
        if is_waited_for or not isinstance(rollout, TensorRollout):
            return super().update(rollout, config, normalizer, result)
        result = UpdateResult(Metrics()) if result is None else result
        estimates = self.make_estimates(rollout, config, result.metrics, normalizer)
        stepper = make_masked_stepper(self.policy, can_freeze=config.max_clip_fraction is not None)
        differentiate = self.make_backward(config, GradientMemory(list(zip(stepper.learned, stepper.views, strict=True))))
        gradients = AutogradGradients(differentiate, config, estimates, result.metrics)
        DeviceUpdate(self.policy, config, estimates, gradients, stepper, result).run()
        return result

    def make_backward(self, config: UpdateConfig, memory: GradientMemory) -> Differentiate:
        """
        :param config: Options of the update
        :param memory: Memory of the gradients
        :return: Function that adds the gradient of a minibatch
        """
        return BackwardLoss(self.policy, config)

    def make_estimates(
        self, rollout: Rollout, config: UpdateConfig, metrics: Metrics, normalizer: AdvantageNormalizer | None
    ) -> Estimates:
        """
        :param rollout: Full rollout, collected by the policy
        :param config: Options of the update
        :param metrics: Metrics that measurements are added to
        :param normalizer: Moving averages for ``advantage_norm="ema"``, ``None`` for other kinds of normalisation
        :return: Estimates from the whole rollout
        """
        if not isinstance(rollout, TensorRollout):
            return super().make_estimates(rollout, config, metrics, normalizer)
        if isinstance(rollout, TensorSequenceRollout):
            rollout.batch_size = config.batch_size
        return TensorEstimates(self.policy, rollout, config, metrics, normalizer)

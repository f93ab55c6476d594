"""What an engine is: who acts, where the rollout lies, where gradients come from, and who makes the steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.memory.sequence_buffers import SequenceBufferMixin
from sb3_ppo_ext.rollout.actors import Actor, HistoryActor, PolicyActor, RolloutConfig
from sb3_ppo_ext.update.advantages import AdvantageNormalizer
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.rollout_data import Rollout
from sb3_ppo_ext.update.update import GradientSource, Stepper, Update, UpdateResult


class Setup(NamedTuple):
    """
    What an engine is asked to compute for.

    :param policy: Policy that acts and is updated
    :param buffer: Where its rollouts are kept
    :param has_extra_loss: Whether a subclass adds a loss of its own, which may differentiate anything of the policy
    """

    policy: ActorCriticPolicy
    buffer: RolloutBuffer
    has_extra_loss: bool = False


class Engine(ABC):
    """
    Computes rollouts and updates of one policy. A backend is a subclass and a row in ``sb3_ppo_ext.engines.registry``.

    :param policy: A policy that :meth:`unsupported_reason` has nothing against
    """

    # Whether rollout buffers hold observations in float32, as the policy reads them, where the environment has float64
    keeps_float32: ClassVar[bool] = True

    def __init__(self, policy: ActorCriticPolicy):
        self.policy = policy

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, setup: Setup) -> str | None:
        """
        :param setup: What is to be computed
        :return: What keeps the engine from it, as part of a sentence; ``None`` if nothing does
        """

    def is_for(self, policy: ActorCriticPolicy) -> bool:
        """
        :param policy: The policy of the model as it is now, which the backend supports
        :return: Whether this engine can go on with it; if not, a new one is made
        """
        return policy is self.policy

    def make_actor(self, buffer: RolloutBuffer, config: RolloutConfig) -> Actor:
        """
        :param buffer: To be filled with a rollout
        :param config: Options of the rollout
        :return: What acts and records while it is collected
        """
        return HistoryActor(buffer, config) if isinstance(buffer, SequenceBufferMixin) else PolicyActor(buffer, config)

    @abstractmethod
    def make_stepper(self, config: UpdateConfig) -> Stepper:
        """
        :param config: Options of the update
        :return: Who makes the steps of the optimiser
        """

    @abstractmethod
    def make_gradients(self, config: UpdateConfig, estimates: Estimates, stepper: Stepper, metrics: Metrics) -> GradientSource:
        """
        :param config: Options of the update
        :param estimates: Advantages of the rollout, and what follows from them
        :param stepper: Who makes the steps
        :param metrics: Where to measure
        :return: Where gradients come from
        """

    def place(self, rollout: Rollout) -> None:
        """
        Decide where the samples of a rollout lie.

        :param rollout: A full one
        """
        if self.policy.device.type != "cpu":
            rollout.copy_to_device()

    def update(
        self,
        rollout: Rollout,
        config: UpdateConfig,
        normalizer: AdvantageNormalizer | None = None,
        result: UpdateResult | None = None,
    ) -> UpdateResult:
        """
        Update the policy.

        :param rollout: A full one, which the policy collected
        :param config: Options of the update
        :param normalizer: Moving averages for ``advantage_norm="ema"``
        :param result: Where to count and measure, so that what was done is known even if the update raises
        :return: What came of it
        :raises ValueError: if a loss or gradient is not finite, with ``bad_gradients="raise"``
        """
        result = UpdateResult(Metrics()) if result is None else result
        self.place(rollout)
        estimates = Estimates(self.policy, rollout, config, result.metrics, normalizer)
        stepper = self.make_stepper(config)
        gradients = self.make_gradients(config, estimates, stepper, result.metrics)
        Update(self.policy, config, estimates, gradients, stepper, result).run()
        return result

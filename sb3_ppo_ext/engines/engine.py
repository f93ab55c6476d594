"""The interface of an engine: actor, placement of the rollout, source of the gradients, and stepper."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from sb3_ppo_ext.rollout.actors import Act, Actor, RolloutConfig, make_actor
from sb3_ppo_ext.update.advantages import AdvantageNormalizer
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates, Evaluate
from sb3_ppo_ext.update.loop import GradientSource, Stepper, Update, UpdateResult
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.rollout_data import Rollout


class Setup(NamedTuple):
    """
    What an engine must support.

    :param policy: Policy that acts and is updated
    :param buffer: Buffer for the rollouts
    :param has_extra_loss: Whether a subclass of ``PPOExt`` adds a loss, which may differentiate any part of the policy
    :param has_extra_losses: Whether losses evaluate the policy at further observations
    :param has_amp: Whether the networks compute in a type of lower precision
    :param has_tensor_env: Whether the steps of the environment are tensors
    """

    policy: ActorCriticPolicy
    buffer: RolloutBuffer
    has_extra_loss: bool = False
    has_extra_losses: bool = False
    has_amp: bool = False
    has_tensor_env: bool = False


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """
    :param parameter: Parameter of a policy
    :return: Whether autograd calls a hook with its gradient (``register_hook`` and ``register_post_accumulate_grad_hook``)
    """
    return any(getattr(parameter, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))


class Engine(ABC):
    """
    Computes rollouts and updates of one policy. A backend is a subclass and a row in ``sb3_ppo_ext.engines.registry``.

    :param policy: Policy for which :meth:`unsupported_reason` returns ``None``
    """

    # Whether rollout buffers hold observations in float32, as the policy reads them, where the environment has float64
    keeps_float32: ClassVar[bool] = True
    # Whether networks may compute in a type of lower precision
    supports_amp: ClassVar[bool] = False

    def __init__(self, policy: ActorCriticPolicy):
        self.policy = policy

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, setup: Setup) -> str | None:
        """
        :param setup: Policy and buffer to support
        :return: Reason why the engine does not support the setup, as part of a sentence; ``None`` if it does
        """

    @classmethod
    def is_automatic(cls, setup: Setup) -> bool:
        """
        :param setup: Policy and buffer that the engine supports
        :return: Whether ``backend="auto"`` may choose the engine
        """
        return True

    @classmethod
    def keeps_rollouts_on_device(cls, setup: Setup) -> bool:
        """
        :param setup: Policy and buffer that the engine supports
        :return: Whether the engine needs a rollout buffer in tensors
        """
        return False

    def is_for(self, policy: ActorCriticPolicy) -> bool:
        """
        :param policy: Current policy of the model, which the backend supports
        :return: Whether this engine can be used for the policy; if not, a new engine is created
        """
        return policy is self.policy

    def make_actor(self, buffer: RolloutBuffer, config: RolloutConfig) -> Actor:
        """
        :param buffer: Buffer to fill with a rollout
        :param config: Options of the rollout
        :return: Actor that chooses actions and records transitions while the rollout is collected
        """
        act = self.make_act()
        return make_actor(buffer, config, None if act is self.policy else act)

    def make_act(self) -> Act:
        """
        :return: Function from observations on the device to actions, values and log probabilities, as ``forward`` of SB3's
            policies
        """
        return self.policy

    @abstractmethod
    def make_stepper(self, config: UpdateConfig) -> Stepper:
        """
        :param config: Options of the update
        :return: Stepper that makes the steps of the optimiser
        """

    def make_evaluate(self, rollout: Rollout) -> Evaluate | None:
        """
        :param rollout: Full rollout
        :return: Function that evaluates the current policy on it, ``None`` for the policy's own
        """
        return None

    @abstractmethod
    def make_gradients(self, config: UpdateConfig, estimates: Estimates, stepper: Stepper) -> GradientSource:
        """
        :param config: Options of the update
        :param estimates: Advantages, returns and priorities of the rollout
        :param stepper: Stepper that makes the steps of the optimiser
        :return: Source of the gradients
        """

    def place(self, rollout: Rollout) -> None:
        """
        Move the samples of a rollout to the device where minibatches are gathered.

        :param rollout: Full rollout
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

        :param rollout: Full rollout, collected by the policy
        :param config: Options of the update
        :param normalizer: Moving averages for ``advantage_norm="ema"``
        :param result: Result to fill in, so that it is available even if the update raises an error; ``None`` for a new one
        :return: Result of the update
        :raises ValueError: if a loss or gradient is not finite, with ``bad_gradients="raise"``
        """
        result = UpdateResult(Metrics()) if result is None else result
        self.place(rollout)
        estimates = Estimates(self.policy, rollout, config, result.metrics, normalizer, self.make_evaluate(rollout))
        stepper = self.make_stepper(config)
        gradients = self.make_gradients(config, estimates, stepper)
        Update(self.policy, config, estimates, gradients, stepper, result).run()
        return result

"""What losses that evaluate the policy at further observations have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch as th
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext.common.type_aliases import Arrays, Kwargs
from sb3_ppo_ext.memory.recurrence import RecurrentSequences
from sb3_ppo_ext.memory.windows import Sequences
from sb3_ppo_ext.update.losses import LossConfig, LossInputs, check_differentiable


class PolicyView(NamedTuple):
    """
    A policy, and observations in the form in which it takes them.

    :param observations: Observations of a minibatch
    :param next_observations: Observations that follow them, and the same observations where an episode or the rollout ends;
        ``None`` if no loss reads them
    :param continues: Whether the episode continues at these, shape ``(batch_size,)``; ``None`` if no loss reads them
    :param evaluate_actions: Function of observations and actions that returns values, log probabilities and entropies
    :param get_distribution: Function of observations that returns action distributions, which the next call overwrites
    """

    observations: PyTorchObs
    next_observations: Arrays
    continues: th.Tensor | None
    evaluate_actions: Callable[[PyTorchObs, th.Tensor], tuple[th.Tensor, th.Tensor, th.Tensor | None]]
    get_distribution: Callable[[PyTorchObs], Distribution]


class PolicyInputs(LossInputs, Protocol):
    """A minibatch, and the policy that is updated."""

    @property
    def actions(self) -> th.Tensor:
        """Actions in the form that ``evaluate_actions`` takes."""

    @property
    def weights(self) -> th.Tensor | None:
        """Importance weights with mean 1, shape ``(batch_size,)``, ``None`` for equal weights."""

    @property
    def view(self) -> PolicyView:
        """The policy, and the observations of the minibatch."""


class ExtraLoss(ABC):
    """
    A loss that evaluates the policy at further observations. It is a mean over the samples of a minibatch.

    :param coef: Coefficient
    """

    # Names of its keyword arguments in the option ``auxiliary_losses``, in addition to ``coef``
    keywords: ClassVar[tuple[str, ...]] = ()
    # Advice to the user who has left one out
    remedy: ClassVar[str] = "give a number, or a dictionary with `coef`"
    # Whether it reads the observations that follow those of the minibatch
    reads_next: ClassVar[bool] = False

    def __init__(self, coef: float):
        self.coef = coef

    @classmethod  # noqa: B027  # There may be none.
    def check(cls, where: str, keywords: Mapping[str, object]) -> None:
        """
        Check its keyword arguments, as far as it can be done without a policy.

        :param where: Name of the loss in messages
        :param keywords: Its keyword arguments
        :raises ValueError: if one of them is not valid
        """

    @classmethod
    def make(
        cls, where: str, coef: float, keywords: Kwargs, policy: ActorCriticPolicy, normalizer: VecNormalize | None
    ) -> ExtraLoss:
        """
        :param where: Name of the loss in messages
        :param coef: Coefficient
        :param keywords: Keyword arguments
        :param policy: Policy that is updated
        :param normalizer: ``VecNormalize`` that has normalised the observations of the policy, ``None`` if there is none
        :return: The loss
        :raises ValueError: if it does not fit the policy or its spaces
        """
        return cls(coef)

    @abstractmethod
    def value(self, inputs: PolicyInputs, config: LossConfig) -> th.Tensor:
        """
        :param inputs: Minibatch, and the policy
        :param config: Options of the loss of PPO
        :return: Scalar to minimise
        """


def extra_losses(
    losses: Mapping[str, ExtraLoss], inputs: PolicyInputs, config: LossConfig
) -> Iterator[tuple[str, float, th.Tensor]]:
    """
    :param losses: Losses by name
    :param inputs: Minibatch, and the policy
    :param config: Options of the loss of PPO
    :return: Name in the log, coefficient and value of each loss
    :raises ValueError: if the policy does not provide its action distribution with a gradient
    """
    for name, loss in losses.items():
        check_differentiable(f"auxiliary_losses[{name!r}]", loss.coef, inputs)
        yield log_name(name), loss.coef, loss.value(inputs, config)


def log_name(name: str) -> str:
    """
    :param name: Name of a loss
    :return: Name of its value in the log, under ``train/``
    """
    return f"{name}_loss"


def map_observed(function: Callable[[Any], Any], observations: object) -> Arrays:
    """
    :param function: Function of observations
    :param observations: Observations, or the sequences of them that a history-based policy reads
    :return: Results of the function, in the same form
    """
    if isinstance(observations, Sequences | RecurrentSequences):
        return observations._replace(observations=function(observations.observations))
    return function(observations)

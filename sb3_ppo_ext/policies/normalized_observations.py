"""Policies that normalise observations themselves, with the statistics of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.common.utils import is_vectorized_observation

from sb3_ppo_ext.common.type_aliases import Arrays, Kwargs
from sb3_ppo_ext.common.validation import described
from sb3_ppo_ext.envs.normalizer import Normalizer
from sb3_ppo_ext.policies.saved_policies import SavedPolicy


class NormalizedObservationsMixin(SavedPolicy):
    """
    Mixin for policies of a model that normalises observations. What takes observations of the environment normalises them:
    ``predict`` and ``obs_to_tensor``. What takes the tensors that ``obs_to_tensor`` returns, or those of the rollout buffer,
    does not: ``forward``, ``evaluate_actions``, ``get_distribution`` and ``predict_values``.

    :param observation_space: Observation space
    :param action_space: Action space
    :param lr_schedule: Learning rate schedule
    :param normalization: Plain data of a :class:`~sb3_ppo_ext.envs.normalizer.Normalizer`, ``None`` for none
    :param kwargs: Keyword arguments of SB3's policy
    """

    #: Statistics of the observations, which the model shares; ``None`` if they are not normalised
    normalizer: Normalizer | None = None

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *args: Any,
        normalization: Kwargs | None = None,
        **kwargs: Any,
    ):
        super().__init__(observation_space, action_space, lr_schedule, *args, **kwargs)
        self.normalizer = None if normalization is None else Normalizer.from_plain(normalization)

    def obs_to_tensor(self, observation: np.ndarray | dict[str, np.ndarray]) -> tuple[PyTorchObs, bool]:
        """
        Convert observations of the environment to what the networks read: normalised, on the device of the policy.

        :param observation: Observation of one environment, or of several
        :return: Tensors with a first dimension over environments, and whether there are several
        :raises ValueError: if observations have another shape than those of the environment
        """
        self._check_shapes(observation)
        return super().obs_to_tensor(self.normalized(observation))

    def normalized(self, observation: Arrays) -> Arrays:
        """
        :param observation: Observations of the environment, in arrays or tensors
        :return: Observations as the networks read them
        """
        return observation if self.normalizer is None else self.normalizer.observations(observation)

    def _check_shapes(self, observation: Arrays) -> None:
        """Before the statistics are broadcast to another shape, and then have it."""
        if self.normalizer is None:
            return
        spaces_of_parts = getattr(self.observation_space, "spaces", None)
        for key, part in self.normalizer.parts(observation).items():
            space = self.observation_space if spaces_of_parts is None else spaces_of_parts.get(key)
            if space is None:
                raise ValueError(f"Error: Unexpected observation {described(observation)} for {self.observation_space}")
            is_vectorized_observation(part if isinstance(part, th.Tensor) else np.asarray(part), space)  # type: ignore[arg-type]

    def _get_constructor_parameters(self) -> Kwargs:
        given = {} if self.normalizer is None else {"normalization": self.normalizer.plain()}
        return {**super()._get_constructor_parameters(), **given}


def inputs_of(policy: ActorCriticPolicy, observations: Arrays) -> tuple[PyTorchObs | th.Tensor, bool]:
    """
    ``obs_to_tensor`` for observations that have been normalised when they were collected.

    :param policy: Policy
    :param observations: Observations of several environments, as the policy reads them
    :return: Tensors on the device of the policy, and whether there are several
    """
    if not isinstance(policy, NormalizedObservationsMixin) or policy.normalizer is None:
        return policy.obs_to_tensor(observations)
    normalizer, policy.normalizer = policy.normalizer, None  # A subclass may have a method of its own.
    try:
        return policy.obs_to_tensor(observations)
    finally:
        policy.normalizer = normalizer

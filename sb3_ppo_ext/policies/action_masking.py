"""Policies that choose only valid actions: the observations that they read are dictionaries with a mask of the actions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule

from sb3_ppo_ext.common.action_masks import OBSERVATION, choices_of
from sb3_ppo_ext.common.type_aliases import Arrays, Kwargs
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributions.masked import MaskedDistribution, make_masked_distribution
from sb3_ppo_ext.policies.observation_keys import KEYWORDS, ObservationKeysMixin, select


class ActionMaskingMixin(ObservationKeysMixin):
    """
    Mixin that gives an actor-critic policy of SB3 masks of invalid actions. Actor and critic do not read the mask as a
    feature. If nothing is left but the key ``"observation"``, they read that part as a policy without masks reads its
    observation.

    :param observation_space: Observation space
    :param args: Further positional arguments of SB3's policy
    :param action_mask_key: Key of the mask in the observations, which are dictionaries; ``None`` if all actions are valid
    :param kwargs: Keyword arguments of SB3's policy
    :raises ValueError: if the observation space has no such mask for this action space
    """

    def __init__(self, observation_space: Any, *args: Any, action_mask_key: str | None = None, **kwargs: Any):
        self.action_mask_key = action_mask_key
        # Who names keys reads dictionaries.
        has_keys = any(kwargs.get(name) is not None for name in KEYWORDS)
        self._has_one_part = (
            action_mask_key is not None and not has_keys and {*observation_space} == {OBSERVATION, action_mask_key}
        )
        super().__init__(observation_space, *args, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        if self.action_mask_key is not None:
            self.action_dist: Any = make_masked_distribution(self.action_space)
        super()._build(lr_schedule)

    @property
    def _not_read(self) -> tuple[str, ...]:
        return () if self.action_mask_key is None else (self.action_mask_key,)

    def _as_read(self, parts: Arrays) -> Any:
        return parts[OBSERVATION] if self._has_one_part else parts

    def use_masks(self, obs: object) -> None:
        """
        Mask the next action distribution.

        :param obs: Observations
        """
        if isinstance(self.action_dist, MaskedDistribution):
            masks = self._masks_of(obs)
            self.action_dist.masks = masks.reshape(len(masks), -1) != 0

    def _masks_of(self, obs: Arrays) -> th.Tensor:
        """Masks of the actions that the policy is asked for, shape ``(n_samples, n_choices)``."""
        key: Any = self.action_mask_key
        masks: th.Tensor = select("action distribution", obs, [key])[key]
        return masks

    def forward(self, obs: th.Tensor, deterministic: bool = False) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        :param obs: Observations
        :param deterministic: Whether to return the deterministic action instead of a sample
        :return: Actions, shape ``(batch_size, *action_shape)``, values, shape ``(batch_size, 1)``, and log probabilities
        """
        self.use_masks(obs)
        return super().forward(obs, deterministic)

    def get_distribution(self, obs: PyTorchObs) -> Distribution:
        """
        :param obs: Observations
        :return: Action distribution of these observations
        """
        self.use_masks(obs)
        return super().get_distribution(obs)

    def _get_constructor_parameters(self) -> Kwargs:
        given = {} if self.action_mask_key is None else {"action_mask_key": self.action_mask_key}
        return {**super()._get_constructor_parameters(), **given}


def masked_observation(
    policy: BasePolicy, observation: Arrays, masks: np.ndarray | None, in_observation: bool
) -> dict[str, Arrays]:
    """
    :param policy: Policy with masks
    :param observation: Observation as ``predict`` takes it
    :param masks: Masks as ``predict`` takes them, ``None`` for none
    :param in_observation: Whether the observation has masks, which ``masks`` replace
    :return: Observation with masks
    :raises ValueError: if the masks do not fit, or leave no choice for an action
    """
    if masks is None and in_observation:
        return observation
    choices = choices_of(policy.action_space)
    parts: Arrays = observation if isinstance(observation, Mapping) else {OBSERVATION: observation}
    first = np.asarray(next(iter(parts.values())))
    batch = (len(first),) if policy.is_vectorized_observation(dict(parts)) else ()
    if masks is None:
        warnings.warn(
            "`predict` was called without `action_masks`, so that it can choose invalid actions. Where they cannot be given, "
            "as in SB3's `evaluate_policy` and RL Zoo, masks can be part of the observation: see `ActionMaskWrapper`.",
            stacklevel=3,
        )
        masks = np.ones((*batch, sum(choices)), bool)
    array = np.asarray(masks)
    if array.size != sum(choices) * math.prod(batch):
        refuse("action_masks", masks, f"its shape is {array.shape}; give {sum(choices)} numbers for each observation")
    array = (array != 0).reshape(*batch, sum(choices))
    if not all(part.any(axis=-1).all() for part in np.split(array, np.cumsum(choices)[:-1], axis=-1)):
        refuse("action_masks", masks, "it leaves no choice for an action; let at least one be valid")
    return {**parts, policy.action_mask_key: array}


def check_mask_key(key: str, observation_space: Any, action_space: Any) -> None:
    """
    :param key: Key of the mask in the observations
    :param observation_space: Observation space
    :param action_space: Action space
    :raises ValueError: if the observations have no mask for these actions under this key, or nothing else
    """
    remedy = f"the observation space is {observation_space}; give the key of the mask of the actions"
    if not isinstance(observation_space, spaces.Dict) or key not in observation_space.spaces:
        refuse("action_mask_key", key, remedy)
    n, part = sum(choices_of(action_space)), observation_space[key]
    if not isinstance(part, spaces.Box | spaces.MultiBinary) or int(np.prod(part.shape)) != n:
        refuse("action_mask_key", key, f"{part} is no mask for {action_space}: it needs {n} numbers, `MultiBinary({n})`")
    if len(observation_space) == 1:
        refuse("action_mask_key", key, "the observations have nothing but the mask; give the policy something to read")

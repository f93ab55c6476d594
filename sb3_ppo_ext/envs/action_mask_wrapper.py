"""A Gymnasium wrapper that makes the mask of the valid actions part of the observation."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from sb3_ppo_ext.common.action_masks import ACTION_MASK, MASKABLE, METHOD, add_mask, with_mask
from sb3_ppo_ext.common.type_aliases import Arrays, Info, Kwargs
from sb3_ppo_ext.common.validation import refuse


class ActionMaskWrapper(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """
    Makes what the method ``action_masks`` of an environment returns part of the observation, under the key ``KEY``. With
    ``action_masking=True`` and ``action_mask_key="action_mask"``, a policy then chooses valid actions wherever it acts, with a
    memory as well, and also in ``evaluate_policy``, ``EvalCallback`` and RL Zoo, which pass no masks to ``predict``.
    Environments in other processes send the masks along with the observations.

    A dictionary gets a further key. Any other observation becomes a dictionary with the keys ``"observation"`` and ``KEY``,
    which ``MlpPolicy`` and ``CnnPolicy`` read as they would read the observation itself.

    :param env: Environment of Gymnasium with a method ``action_masks``, its own or that of a wrapper such as sb3-contrib's
        ``ActionMasker``
    :raises ValueError: if it has no such method, or its actions cannot be masked, or it has the key already
    """

    KEY = ACTION_MASK

    def __init__(self, env: gym.Env):
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        if not env.has_wrapper_attr(METHOD):
            refuse("env", env, f"it has no method `{METHOD}`; give it one, or wrap it in sb3-contrib's `ActionMasker` first")
        if not isinstance(env.action_space, MASKABLE):
            refuse(
                "env",
                env,
                f"its action space is {env.action_space}, and masks are for Discrete, MultiDiscrete and MultiBinary",
            )
        self.observation_space = with_mask(env.observation_space, env.action_space)
        (self._n_choices,) = self.observation_space[self.KEY].shape or (0,)

    def reset(self, *, seed: int | None = None, options: Kwargs | None = None) -> tuple[Arrays, Info]:
        """
        :param seed: Seed of the environment
        :param options: Options of the environment
        :return: Observation with the mask, and the info
        """
        observation, info = self.env.reset(seed=seed, options=options)
        return self._masked(observation), info

    def step(self, action: Arrays) -> tuple[Arrays, SupportsFloat, bool, bool, Info]:
        """
        :param action: Action
        :return: Observation with the mask, and reward, terminated, truncated and info as they are
        """
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._masked(observation), reward, terminated, truncated, info

    def _masked(self, observation: object) -> dict[str, object]:
        mask = np.array(self.env.get_wrapper_attr(METHOD)(), np.int8)
        if mask.size != self._n_choices:
            refuse(METHOD, mask.shape, f"give {self._n_choices} numbers, one for each choice of each action")
        return add_mask(observation, mask.reshape(-1))

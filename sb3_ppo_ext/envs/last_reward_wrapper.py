"""A Gymnasium wrapper that makes the last reward part of the observation."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sb3_ppo_ext.common.type_aliases import Arrays, Info, Kwargs
from sb3_ppo_ext.common.validation import refuse


class LastRewardWrapper(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """
    Makes the reward of the last step part of the observation, 0 at the start of an episode. A policy then sees it wherever it
    acts, also in ``evaluate_policy``, ``EvalCallback`` and RL Zoo, which pass no rewards to ``predict``.

    A vector becomes one element longer, and a dictionary gets a further key. Any other observation, such as an image, becomes
    a dictionary with the keys ``"obs"`` and ``KEY``, for ``MultiInputPolicy`` and ``MultiInputTransformerPolicy``.

    :param env: Environment of Gymnasium
    :raises ValueError: if its observations are dictionaries that have the key already
    """

    KEY = "last_reward"

    def __init__(self, env: gym.Env):
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        space = env.observation_space
        self._is_vector = isinstance(space, spaces.Box) and len(space.shape) == 1
        self.observation_space = self._longer(space) if self._is_vector else self._with_key(space)

    def reset(self, *, seed: int | None = None, options: Kwargs | None = None) -> tuple[Arrays, Info]:
        """
        :param seed: Seed of the environment
        :param options: Options of the environment
        :return: Observation with the last reward 0, and the info
        """
        observation, info = self.env.reset(seed=seed, options=options)
        return self._joined(observation, 0.0), info

    def step(self, action: Arrays) -> tuple[Arrays, SupportsFloat, bool, bool, Info]:
        """
        :param action: Action
        :return: Observation with the reward of this step, and reward, terminated, truncated and info as they are
        """
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._joined(observation, reward), reward, terminated, truncated, info

    @staticmethod
    def _longer(space: Any) -> spaces.Box:
        dtype: Any = np.result_type(space.dtype, np.float32).type
        low, high = (np.append(part, end).astype(dtype) for part, end in ((space.low, -np.inf), (space.high, np.inf)))
        return spaces.Box(low, high, dtype=dtype)

    def _with_key(self, space: spaces.Space) -> spaces.Dict:
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"obs": space}
        if self.KEY in parts:
            refuse("env", self.env, f"its observations have the key {self.KEY!r} already, so that no wrapper is needed")
        return spaces.Dict({**parts, self.KEY: spaces.Box(-np.inf, np.inf, (1,), np.float32)})

    def _joined(self, observation: Arrays, reward: SupportsFloat) -> Arrays:
        if self._is_vector:
            return np.append(observation, float(reward)).astype(self.observation_space.dtype)
        parts = observation if isinstance(self.env.observation_space, spaces.Dict) else {"obs": observation}
        return {**parts, self.KEY: np.array([reward], np.float32)}

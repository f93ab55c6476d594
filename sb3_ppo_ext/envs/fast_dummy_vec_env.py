"""A ``DummyVecEnv`` with fewer copies."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from copy import copy, deepcopy

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.util import dict_to_obs

from sb3_ppo_ext.common.guards import EnvironmentDataError
from sb3_ppo_ext.common.reward_errors import describe_bad_reward
from sb3_ppo_ext.common.type_aliases import Arrays

# Types of values that nobody can change
IMMUTABLE = frozenset((bool, int, float, str, bytes, type(None), np.bool_, np.float32, np.float64, np.int32, np.int64))


class FastDummyVecEnv(DummyVecEnv):
    """
    SB3's ``DummyVecEnv`` with deep copies only of those infos whose values can change. An observation with too few numbers,
    which NumPy would repeat, raises a ``ValueError``.

    :param env_fns: Functions that create the environments
    :raises ValueError: if they return the same environment twice
    """

    # Index of the first environment among those of several processes, and of the one that steps, among those of this one
    _first = _active = 0

    def __init__(self, env_fns: list[Callable[[], gym.Env]]):
        super().__init__(env_fns)
        self._buffers = [(key, buffer, buffer.shape[1:]) for key, buffer in self.buf_obs.items()]

    def step_wait(self) -> VecEnvStepReturn:
        # Most have nothing but whether the episode was truncated.
        self.buf_infos = [info if len(info) == 1 else detached(info) for info in self.step_envs(self.actions)]
        return self._obs_from_buf(), self.buf_rews.copy(), self.buf_dones.copy(), self.buf_infos

    def step_envs(self, actions: Arrays) -> list[dict[str, object]]:
        """
        Step all environments, and write observations, rewards and ends of episodes into the buffers.

        :param actions: Action for each environment
        :return: Info of each environment, a new dictionary whose values are the objects that the environment returned
        """
        infos = []
        for index, env in enumerate(self.envs):
            self._active = index
            try:
                observation, reward, terminated, truncated, info = env.step(actions[index])
                self.buf_rews[index] = reward
            except (TypeError, ValueError) as error:
                if (wrong := describe_bad_reward(error, f"environment {self._first + index}")) is not None:
                    raise EnvironmentDataError(wrong) from error
                raise
            done = terminated or truncated
            # Copied, since an environment may return the same dictionary again.
            info = info.copy() if type(info) is dict else copy(info)
            info["TimeLimit.truncated"] = truncated and not terminated
            if done:
                # Copied, since an environment may write the next observation into the same array.
                info["terminal_observation"] = deepcopy(observation)
                observation, self.reset_infos[index] = env.reset()
            self.buf_dones[index] = done
            infos.append(info)
            self._save_obs(index, observation)
        return infos

    def _save_obs(self, env_idx: int, obs: Arrays) -> None:
        for key, buffer, shape in self._buffers:
            part = obs if key is None else obs[key]
            if (type(part) is not np.ndarray or part.shape != shape) and math.prod(np.shape(part)) != math.prod(shape):
                env = f"Environment {self._first + env_idx}"
                where = f"{env}: the observation" if key is None else f"{env}: {key!r}"
                raise EnvironmentDataError(
                    f"{where} has the shape {np.shape(part)}, and must have {shape}, that of its space."
                )
            buffer[env_idx] = part

    def _obs_from_buf(self) -> VecEnvObs:
        # The same as a deep copy, in a third of the time
        return dict_to_obs(self.observation_space, OrderedDict((key, buffer.copy()) for key, buffer, _ in self._buffers))


def detached(info: dict[str, object]) -> dict[str, object]:
    """
    :param info: Info of a step
    :return: The info, without objects that the environment may still change
    """
    return info if IMMUTABLE.issuperset(map(type, info.values())) else deepcopy(info)

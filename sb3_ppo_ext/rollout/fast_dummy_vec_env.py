"""A ``DummyVecEnv`` with fewer copies."""

from __future__ import annotations

from copy import deepcopy

from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn


class FastDummyVecEnv(DummyVecEnv):
    """
    SB3's ``DummyVecEnv`` without the deep copy of all infos at each step. Each step returns new info dictionaries, but their
    values are the objects that the environment returned.

    :param env_fns: Functions that create the environments
    :raises ValueError: if they return the same environment twice
    """

    def step_wait(self) -> VecEnvStepReturn:
        infos = []
        for index, env in enumerate(self.envs):
            observation, reward, terminated, truncated, info = env.step(self.actions[index])
            done = terminated or truncated
            # Copied, since an environment may return the same dictionary again.
            info = dict(info)
            info["TimeLimit.truncated"] = truncated and not terminated
            if done:
                # Copied, since an environment may write the next observation into the same array.
                info["terminal_observation"] = deepcopy(observation)
                observation, self.reset_infos[index] = env.reset()
            self.buf_rews[index], self.buf_dones[index] = reward, done
            infos.append(info)
            self._save_obs(index, observation)
        self.buf_infos = infos
        return self._obs_from_buf(), self.buf_rews.copy(), self.buf_dones.copy(), infos

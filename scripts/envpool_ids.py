"""
Registers the tasks of `default_split.py` that are in EnvPool (https://github.com/sail-sg/envpool) with Gymnasium: ``EnvPool/``
and their name there, with a dot for each slash. For ``--gym-packages envpool_ids``. Not a script.
"""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from default_split import HELD_OUT, MORE_DEVELOPMENT
from gymnasium import spaces

from sb3_ppo_ext.envs.envpool_vec_env import limit_of_pool

PREFIX = "EnvPool/"


class EnvPoolTask(gym.Env):
    """
    A pool with one environment, which begins anew when it is reset with a seed.

    :param name: Name of the task in EnvPool
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seed = 0
        self.pool = self._make()
        self._max_episode_steps = limit_of_pool(self.pool)
        # For some tasks of the DeepMind Control Suite, EnvPool declares other shapes than it returns.
        space = self.pool.observation_space
        self.observation_space = _space_of(self.reset()[0]) if isinstance(space, spaces.Dict) else space
        self.action_space = self.pool.action_space

    def _make(self) -> Any:
        import envpool  # type: ignore[import-not-found, import-untyped, unused-ignore]

        return envpool.make_gymnasium(self.name, num_envs=1, seed=self.seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.pool.close()
            self.seed = seed
            self.pool = self._make()
        observations, _ = self.pool.reset()
        return self._first(observations), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        actions = np.asarray(action, dtype=self.action_space.dtype)[None]
        observations, rewards, terminated, truncated, _ = self.pool.step(actions)
        return self._first(observations), float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    def close(self) -> None:
        self.pool.close()

    @staticmethod
    def _first(observations: Any) -> Any:
        if isinstance(observations, dict):
            return {name: np.atleast_1d(values[0]).astype(np.float32) for name, values in observations.items()}
        return observations[0]


def _space_of(observation: dict[str, np.ndarray]) -> spaces.Dict:
    """Unbounded numbers, in the shapes of an observation"""
    return spaces.Dict({name: spaces.Box(-np.inf, np.inf, value.shape) for name, value in observation.items()})


for task in (*MORE_DEVELOPMENT, *HELD_OUT):
    if task.startswith(PREFIX):
        gym.register(task, partial(EnvPoolTask, task.removeprefix(PREFIX).replace(".", "/")))

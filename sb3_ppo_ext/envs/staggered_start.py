"""A Gymnasium wrapper that lets copies of an environment be at different steps of their episodes."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from sb3_ppo_ext.common.type_aliases import Arrays, Info, Kwargs
from sb3_ppo_ext.envs.time_limits import time_limit_of

# Multiples of it, without their whole parts, are spread evenly, however many there are.
GOLDEN_RATIO = (5**0.5 - 1) / 2


class StaggeredStart(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """
    Truncates the first episode after a part of the time limit, which depends on the seed. Copies with successive seeds, as
    those of a vectorised environment, are then spread evenly over the steps of an episode, and stay so if episodes are equally
    long. Without it, all of them are at the same step, and a short rollout has only that part of an episode
    (`Bharthulwar et al., 2025 <https://arxiv.org/abs/2511.21011>`_).

    A reset in the middle of an episode counts as a start. Without a seed, the part is that of the start before, or else a
    random one. What is truncated is no episode for a ``Monitor`` inside the wrapper, as ``make_vec_env`` puts it.

    :param env: Environment of Gymnasium; one without a time limit is left as it is
    """

    def __init__(self, env: gym.Env):
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.time_limit = time_limit_of(env)
        self.part = float(np.random.default_rng().random())
        # Steps of the first episode that are left, `None` in all others
        self.n_left: int | None = None
        self.has_ended = False

    def reset(self, *, seed: int | None = None, options: Kwargs | None = None) -> tuple[Arrays, Info]:
        """
        :param seed: Seed of the environment
        :param options: Options of the environment
        :return: First observation and info, as they are
        """
        if seed is not None:
            self.part = seed * GOLDEN_RATIO % 1
        is_start = self.time_limit is not None and not self.has_ended
        self.n_left = 1 + int(self.part * self.time_limit) if is_start else None  # type: ignore[operator]
        self.has_ended = False
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Arrays) -> tuple[Arrays, SupportsFloat, bool, bool, Info]:
        """
        :param action: Action
        :return: Results of the step, truncated where the first episode is
        """
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self.n_left is not None:
            self.n_left -= 1
            truncated = truncated or (self.n_left == 0 and not terminated)
        self.has_ended = terminated or truncated
        return observation, reward, terminated, truncated, info

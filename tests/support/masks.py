"""Environments that say which actions are valid."""

from copy import deepcopy

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv
from support.toys import VECTOR, ToyEnv

ACTIONS = {
    "discrete": spaces.Discrete(5),
    "multi-discrete": spaces.MultiDiscrete([3, 2, 4]),
    "multi-binary": spaces.MultiBinary(3),
}


def choices_of(space):
    if isinstance(space, spaces.Discrete):
        return [space.n]
    return list(space.nvec) if isinstance(space, spaces.MultiDiscrete) else [2] * space.n


class MaskedToy(ToyEnv):
    """A toy whose valid actions are random, at least one choice of each action. It refuses invalid ones."""

    def __init__(self, observation_space=VECTOR, action_space=ACTIONS["discrete"], **kwargs):
        super().__init__(deepcopy(observation_space), action_space, **kwargs)  # Each has a generator of its own.
        self.choices = choices_of(action_space)

    def reset(self, **kwargs):
        results = super().reset(**kwargs)
        self._draw()
        return results

    def _draw(self):
        masks = []
        for n in self.choices:
            mask = self.np_random.random(n) < 0.5
            mask[self.np_random.integers(n)] = True
            masks.append(mask)
        self.mask = np.concatenate(masks)

    def step(self, action):
        chosen = np.cumsum([0, *self.choices[:-1]]) + np.ravel(action)
        assert self.mask[chosen].all(), (self.mask, action)
        results = super().step(action)
        self._draw()
        return results

    def action_masks(self):
        return self.mask


def make_masked(n_envs=2, wrapper=None, vec_env_class=DummyVecEnv, **kwargs):
    def make():
        env = MaskedToy(**kwargs)
        return Monitor(env if wrapper is None else wrapper(env))

    return vec_env_class([make] * n_envs)

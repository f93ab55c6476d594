"""Hybrid action spaces: dictionaries and tuples of actions."""

from copy import deepcopy

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv
from support.toys import BOX_ACTION, VECTOR, ToyEnv

from sb3_ppo_ext import TensorStep, TensorVecEnv
from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace
from sb3_ppo_ext.distributions import hybrid_distribution

KICK = spaces.Dict({"kind": spaces.Discrete(3), "power": BOX_ACTION})
SPACES = {
    "dict": KICK,
    "tuple": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(-1.0, 1.0, (2, 2), np.float32), spaces.MultiDiscrete([3, 2]))),
    "all kinds": spaces.Dict(
        {
            "aim": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "buttons": spaces.MultiBinary(2),
            "gears": spaces.MultiDiscrete([2, 4]),
            "push": spaces.Box(0.0, 0.1, (1,), np.float64),
            "target": spaces.Discrete(3),
        }
    ),
    "nested": spaces.Tuple((spaces.Discrete(2), spaces.Dict(a=BOX_ACTION, b=spaces.Tuple((spaces.MultiBinary(1), KICK))))),
    "boxes": spaces.Dict(low=spaces.Box(-1.0, 1.0, (1,), np.float32), wide=spaces.Box(-4.0, 9.0, (2,), np.float32)),
    "integers": spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(3))),
}
# One of "all kinds"
ACTION = {
    "aim": np.float32([0.25, -0.5]),
    "buttons": np.int8([0, 1]),
    "gears": np.array([1, 3]),
    "push": np.array([0.0625]),
    "target": np.int64(2),
}
WITH_BOXES = [name for name in SPACES if name != "integers"]


class OnlyPart(gym.ActionWrapper):
    """A task whose action is the only part of a dictionary."""

    def __init__(self, env):
        super().__init__(env)
        self.action_space = spaces.Dict(only=deepcopy(env.action_space))

    def action(self, action):
        assert self.action_space.contains(action), action
        return action["only"]


def make_only_parts(action_space, n_envs=2, **kwargs):
    return DummyVecEnv([lambda: Monitor(OnlyPart(ToyEnv(action_space=action_space, **kwargs)))] * n_envs)


class Passing(gym.Env):
    """
    One of three team mates is free, at a distance that the player sees: it pays to pass to them, with the power that the
    distance needs. The reward is 1 for the best pass, and 0 for one to another mate.

    :param length: Number of passes of an episode
    """

    n_mates = 3
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as in Gymnasium
    observation_space = spaces.Box(-1.0, 1.0, (2 * n_mates,), np.float32)
    action_space = spaces.Dict(mate=spaces.Discrete(n_mates), power=spaces.Box(-1.0, 1.0, (1,), np.float32))

    def __init__(self, length=10, render_mode=None):
        self.length, self.render_mode = length, render_mode

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)

    def _observe(self):
        self.free = int(self.np_random.integers(self.n_mates))
        self.distances = self.np_random.uniform(-0.8, 0.8, self.n_mates)
        return np.concatenate([np.eye(self.n_mates)[self.free], self.distances]).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        miss = abs(float(action["power"][0]) - self.distances[self.free])
        reward = max(0.0, 1 - 2 * miss) if action["mate"] == self.free else 0.0
        return self._observe(), reward, False, self.t >= self.length, {}


class TensorPassing(TensorVecEnv):
    """The task of `Passing`, all copies at once, with actions in dictionaries or in tuples of tensors."""

    def __init__(self, num_envs=8, in_tuples=False, device="cpu"):
        space = Passing.action_space
        space = spaces.Tuple(tuple(space.spaces.values())) if in_tuples else space
        super().__init__(num_envs, Passing.observation_space, space, device)
        self.time = th.zeros(num_envs, dtype=th.int64, device=self.device)
        self.mates = th.arange(3, device=self.device)
        self.seen = []

    def _observe(self):
        self.free = (3 * th.rand(self.num_envs, device=self.device)).long()
        self.distances = 1.6 * th.rand(self.num_envs, 3, device=self.device) - 0.8
        return th.cat([(self.free[:, None] == self.mates).float(), self.distances], dim=1)

    def _reset(self, seed):
        self.time.zero_()
        return self._observe()

    def _step(self, actions):
        mate, power = actions if isinstance(actions, tuple) else (actions["mate"], actions["power"])
        self.seen.append((mate.clone(), power.clone()))
        assert power.shape == (self.num_envs, 1)
        miss = (power[:, 0] - self.distances.gather(1, self.free[:, None])[:, 0]).abs()
        rewards = th.where(mate == self.free, (1 - 2 * miss).clamp(min=0.0), 0.0)
        self.time += 1
        ended = self.time >= 10
        self.time.masked_fill_(ended, 0)
        return TensorStep(self._observe(), rewards, ended, th.zeros_like(ended))


if "Passing-v0" not in gym.registry:
    gym.register("Passing-v0", entry_point=Passing)


def integer_parts():
    """Parts of a distribution with four numbers for each observation, for its constructor."""
    space = spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2)))
    distribution = hybrid_distribution(FlatActionSpace(space), "gaussian", "mean")
    return list(zip(distribution.parts, distribution.distributions, strict=True))


def equal(expected, actual):
    """Whether two actions are the same, with the same types."""
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(equal(expected[key], actual[key]) for key in expected)
    if isinstance(expected, tuple):
        return len(expected) == len(actual) and all(map(equal, expected, actual))
    return np.asarray(expected).dtype == np.asarray(actual).dtype and np.array_equal(expected, actual)


def observe(n=None):
    """Observations of `ToyEnv`, the same ones each time."""
    rng = np.random.default_rng(0)
    return rng.uniform(-1, 1, VECTOR.shape if n is None else (n, *VECTOR.shape)).astype(np.float32)

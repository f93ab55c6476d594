"""Small environments, and recorders of logs and rollouts."""

import warnings

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
DICT = spaces.Dict({"camera": IMAGE, "joints": VECTOR, "gear": spaces.Discrete(3)})
BOX_ACTION = spaces.Box(np.float32([-1, -2]), np.float32([1, 3]), dtype=np.float32)


class ToyEnv(gym.Env):
    """
    Random observations, and a reward that depends on observation, action and time. Episodes are truncated
    after ``length`` steps, at the same step in all copies, and sometimes terminate earlier.
    """

    def __init__(self, observation_space=VECTOR, action_space=BOX_ACTION, length=7, p_end=0.05):
        self.observation_space = observation_space
        self.action_space = action_space
        self.length = length
        self.p_end = p_end

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        self.observation = self.observation_space.sample()
        return self.observation, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        first = next(iter(self.observation.values())) if isinstance(self.observation, dict) else self.observation
        reward = float(_sum(action) * np.mean(first) / 10 + self.t / self.length)
        self.observation = self.observation_space.sample()
        return self.observation, reward, bool(self.np_random.random() < self.p_end), self.t >= self.length, {}


class Samples(gym.Env):
    """Shows samples of its observation space, whatever the action, and has no masks. Episodes do not end."""

    def __init__(self, observation_space=VECTOR, action_space=None):
        self.observation_space, self.action_space = observation_space, action_space or spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(_sum(action)), False, False, {}


class Words(spaces.Space[str]):
    """Strings of a class of its own, like MiniGrid's missions."""

    def sample(self, mask=None, probability=None):
        return str(self.np_random.choice(["go to the red door", "Go to the blue door!"]))

    def contains(self, x):
        return isinstance(x, str)


def _sum(action):
    """Sum of all numbers of an action."""
    if isinstance(action, dict | tuple):
        return sum(_sum(part) for part in (action.values() if isinstance(action, dict) else action))
    return np.sum(np.asarray(action, dtype=float))


def make_toys(n_envs=2, vec_env_class=DummyVecEnv, **kwargs):
    return vec_env_class([lambda: Monitor(ToyEnv(**kwargs))] * n_envs)


class Brittle(ToyEnv):
    """Replaces the observation or the reward of one step, counted over all episodes, by a given value."""

    def __init__(self, observation=None, reward=None, at=10, **kwargs):
        super().__init__(**kwargs)
        self.bad_observation, self.bad_reward, self.at, self.age = observation, reward, at, 0

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        bad = self.age == self.at == 0
        self.age += bad
        return (self.bad_observation if bad else observation), info

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        self.age += 1
        if self.age == self.at:
            observation = observation if self.bad_observation is None else self.bad_observation
            reward = reward if self.bad_reward is None else self.bad_reward
        return observation, reward, terminated, truncated, info


class LogRecorder(KVWriter):
    """Keeps everything that is logged."""

    def __init__(self):
        self.dumps = []

    def write(self, key_values, key_excluded, step=0):
        self.dumps.append({"step": step, **key_values})

    def close(self):
        pass


def record_log(model):
    """Let a model log to a recorder alone, and return it."""
    log = LogRecorder()
    model.set_logger(Logger(None, [log]))
    return log


def warned(function):
    """What a function warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]


class Silent(BaseCallback):
    """A user's callback, which might do anything, and lets the training go on."""

    def _on_step(self):
        return True


class RolloutRecorder(BaseCallback):
    """Keeps the steps and rollouts; can stop the training at a step."""

    ARRAYS = ("observations", "actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns")
    LOCALS = ("obs_tensor", "actions", "values", "log_probs", "clipped_actions", "new_obs", "rewards", "dones", "n_steps")

    def __init__(self, stop_at=None):
        super().__init__()
        self.stop_at = stop_at
        self.rollouts = []
        self.steps = []

    def _on_step(self):
        self.steps.append({name: _copy(self.locals[name]) for name in self.LOCALS})
        return self.n_calls != self.stop_at

    def _on_rollout_end(self):
        buffer = self.model.rollout_buffer
        self.rollouts.append({name: _copy(getattr(buffer, name)) for name in self.ARRAYS})


def _copy(value):
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    return value.clone() if isinstance(value, th.Tensor) else np.copy(value)

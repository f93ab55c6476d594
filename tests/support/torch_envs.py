"""CartPole and Pendulum in PyTorch with the dynamics and time limits of Gymnasium's, and a toy, vectorised on any device."""

import math

import numpy as np
import torch as th
from gymnasium import spaces
from support.toys import BOX_ACTION, VECTOR

from sb3_ppo_ext import TensorStep, TensorVecEnv


class TorchEnv:
    """
    All copies step at once, without waiting for the device, and begin the next episode in the step in which one ends.

    The infos have the last observations of all copies as ``final_obs``. The state is written in place, and what a step returns
    is new.

    :param num_envs: Number of copies
    :param device: Device of all tensors
    :param max_episode_steps: Number of steps after which an episode is cut off, by default Gymnasium's
    :param dtype: Dtype of the state; observations are in float32
    :param gives_final: Whether the infos have the last observations
    :param has_own_generator: Whether random numbers are not those of PyTorch's default generator
    """

    n_states: int
    default_max_episode_steps: int

    def __init__(
        self, num_envs=4, device="cpu", max_episode_steps=None, dtype=th.float32, gives_final=True, has_own_generator=True
    ):
        self.num_envs, self.device, self.gives_final = num_envs, th.device(device), gives_final
        self.max_episode_steps = max_episode_steps or self.default_max_episode_steps
        # A simulated device has no generators of its own.
        self.generator = th.Generator(device=self.device) if has_own_generator else None
        self.state = th.zeros(self.n_states, num_envs, dtype=dtype, device=self.device)
        self.time = th.zeros(num_envs, dtype=th.int64, device=self.device)

    def first_states(self):
        """New states at the beginning of an episode, shape ``(n_states, num_envs)``."""
        scale = self._scale.reshape(-1, 1)
        uniform = th.rand(self.state.shape, generator=self.generator, dtype=self.state.dtype, device=self.device)
        return (2 * uniform - 1) * scale

    def reset(self, *, seed=None, options=None):
        """First observations and empty infos."""
        if seed is not None:
            self.generator is not None and self.generator.manual_seed(seed)
        self.state.copy_(self.first_states())
        self.time.zero_()
        return self.observe(self.state), {}

    def step(self, actions):
        """Observations, rewards, terminated, truncated and infos."""
        state, rewards, terminated = self.move(self.state, actions)
        self.time.add_(1)
        truncated = self.time >= self.max_episode_steps
        ended = terminated | truncated
        infos = {"final_obs": self.observe(state)} if self.gives_final else {}
        self.state.copy_(th.where(ended, self.first_states(), state))
        self.time.masked_fill_(ended, 0)
        return self.observe(self.state), rewards, terminated, truncated, infos


class TorchCartPole(TorchEnv):
    """Gymnasium's ``CartPole-v1``."""

    n_states, default_max_episode_steps = 4, 500
    _high = np.array([4.8, np.inf, 24 * math.pi / 180, np.inf], np.float32)
    single_observation_space = spaces.Box(-_high, _high, dtype=np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._scale = th.full((4,), 0.05, dtype=self.state.dtype, device=self.device)

    def observe(self, state):
        """Position, velocity, angle, angular velocity, shape ``(num_envs, 4)``."""
        return state.T.to(th.float32, copy=True, memory_format=th.contiguous_format)

    def move(self, state, actions):
        """State after an Euler step, rewards and terminated."""
        x, x_dot, theta, theta_dot = state
        force = 20.0 * actions.to(state.dtype) - 10.0
        cos, sin = theta.cos(), theta.sin()
        push = (force + 0.05 * theta_dot.square() * sin) / 1.1
        theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
        x_acc = push - 0.05 * theta_acc * cos / 1.1
        parts = [x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc]
        terminated = (parts[0].abs() > 2.4) | (parts[2].abs() > 12 * 2 * math.pi / 360)
        return th.stack(parts), th.ones(self.num_envs, device=self.device), terminated


class TorchPendulum(TorchEnv):
    """Gymnasium's ``Pendulum-v1``."""

    n_states, default_max_episode_steps = 2, 200
    single_observation_space = spaces.Box(-np.array([1, 1, 8], np.float32), np.array([1, 1, 8], np.float32), dtype=np.float32)
    single_action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._scale = th.ones(2, dtype=self.state.dtype, device=self.device)
        self._scale[0] = math.pi

    def observe(self, state):
        """Cosine and sine of the angle, angular velocity, shape ``(num_envs, 3)``."""
        angle, speed = state
        return th.stack([angle.cos(), angle.sin(), speed], dim=1).to(th.float32)

    def move(self, state, actions):
        """State after a step, rewards and terminated, which is never true."""
        angle, speed = state
        torque = actions[:, 0].to(state.dtype).clamp(-2.0, 2.0)
        distance = (angle + math.pi).remainder(2 * math.pi) - math.pi
        costs = distance.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = (speed + (15.0 * angle.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        never = th.zeros(self.num_envs, dtype=th.bool, device=self.device)
        return th.stack([angle + 0.05 * speed, speed]), -costs.to(th.float32), never


class ToyTensors(TensorVecEnv):
    """
    As `ToyEnv` a reward that depends on observation, action and time. Observations are a fixed sequence, so that it needs no
    generator.

    :param observation_space: ``VECTOR``, or a dictionary with it and a number of choices
    """

    def __init__(self, observation_space=VECTOR, action_space=BOX_ACTION, n_envs=2, length=5, device="cpu"):
        super().__init__(n_envs, observation_space, action_space, device)
        self.length = length
        self.age = 31 * th.arange(n_envs, device=self.device)
        self.time = th.zeros(n_envs, dtype=th.int64, device=self.device)

    def _observe(self):
        vector = (self.age[:, None] * th.arange(1, 4, device=self.device)).sin()
        if isinstance(self.observation_space, spaces.Dict):
            return {"gear": self.age % 3, "joints": vector}
        return vector

    def _reset(self, seed):
        self.time.zero_()
        return self._observe()

    def _step(self, actions):
        rewards = _sum(actions) * self.age.sin() / 10 + self.time / self.length
        self.age, self.time = self.age + 1, self.time + 1
        final = self._observe()
        terminated, truncated = self.age % 17 == 0, self.time >= self.length
        self.time = th.where(terminated | truncated, 0, self.time)
        self.age = th.where(terminated | truncated, self.age + 1, self.age)
        return TensorStep(self._observe(), rewards.float(), terminated, truncated, final)


def _sum(actions):
    """Sum of all numbers of each action, shape ``(n_envs,)``."""
    if isinstance(actions, dict):
        return sum(map(_sum, actions.values()))
    return actions.float().flatten(1).sum(1) if actions.dim() > 1 else actions.float()


class Broken(TorchPendulum):
    """Returns NaN from a copy at a step."""

    what, step_of_nan = "reward", 5

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.n = 0

    def step(self, actions):
        observations, rewards, *others = super().step(actions)
        self.n += 1
        if self.n == self.step_of_nan:
            (rewards if self.what == "reward" else observations)[3] = math.nan
        return observations, rewards, *others

"""Rollouts that stay on the device of the policy, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.user_code import is_replaced
from sb3_ppo_ext.update.advantages import gae_of_tensors
from sb3_ppo_ext.update.rollout_data import EVALUATION_BATCH, Rollout, refuse_incomplete

ARRAYS = ("observations", "actions", "rewards", "returns", "episode_starts", "values", "log_probs", "advantages")
# SB3 does not flatten them, since minibatches do not have them.
NEVER_FLAT = ("rewards", "episode_starts")


class TruncatedEpisodes(NamedTuple):
    """
    The truncated episodes of a rollout.

    :param rows: Positions of their last steps in the flattened rollout, ``step * n_envs + environment``, shape ``(n,)``
    :param observations: Their terminal observations, shape ``(n, *obs_shape)``
    :param values: Values of these observations when they were collected, shape ``(n,)``
    """

    rows: th.Tensor
    observations: Any
    values: th.Tensor


def _as_numpy(name: str) -> property:
    """Property of a buffer that reads a tensor as a NumPy array, and copies an array into the tensor."""

    def read(buffer: TensorRolloutBuffer) -> Any:
        return map_observations(lambda tensor: buffer.as_array(tensor, name), buffer.tensors[name])

    def write(buffer: TensorRolloutBuffer, values: Any) -> None:
        map_observations(buffer.fill, buffer.tensors[name], values)

    return property(read, write, doc=f"{name} as a NumPy array, see :class:`TensorRolloutBuffer`")


class TensorRolloutBuffer(RolloutBuffer):
    """
    A ``RolloutBuffer`` on the device of the policy, for all observation spaces.

    ``tensors`` has what SB3's buffer has as arrays, of shape ``(n_steps, n_envs, ...)``, under the same names. The attributes
    of SB3's buffer are NumPy arrays, made when they are read: on the CPU they share the memory of the tensors, elsewhere they
    are copies that cannot be written to. As in SB3, they are flattened after the update.

    :param args: Positional arguments of ``RolloutBuffer``
    :param kwargs: Keyword arguments of ``RolloutBuffer``
    """

    observations: Any = _as_numpy("observations")
    actions: Any = _as_numpy("actions")
    rewards: Any = _as_numpy("rewards")
    returns: Any = _as_numpy("returns")
    episode_starts: Any = _as_numpy("episode_starts")
    values: Any = _as_numpy("values")
    log_probs: Any = _as_numpy("log_probs")
    advantages: Any = _as_numpy("advantages")

    def __init__(self, *args: Any, **kwargs: Any):
        self.tensors: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        """Begin a new rollout. The memory is allocated once."""
        if not self.tensors:
            self._allocate()
        # Truncated episodes of the rollout, `None` if there are none
        self.truncated: TruncatedEpisodes | None = None
        self.generator_ready = False
        self.pos, self.full = 0, False

    def _allocate(self) -> None:
        self.tensors["observations"] = self.empty_observations()
        self.tensors["actions"] = self._empty((self.action_dim,), self.action_space.dtype)
        for name in ARRAYS[2:]:
            self.tensors[name] = self._empty((), np.float32)

    def empty_observations(self) -> Any:
        """:return: Zeros for the observations of a rollout, shape ``(n_steps, n_envs, *obs_shape)``"""
        space: Any = self.observation_space
        if isinstance(self.obs_shape, dict):
            return {key: self._empty(shape, space[key].dtype) for key, shape in self.obs_shape.items()}
        return self._empty(self.obs_shape, space.dtype)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> th.Tensor:
        of_numpy = th.from_numpy(np.zeros(0, dtype)).dtype
        return th.zeros((self.buffer_size, self.n_envs, *shape), dtype=of_numpy, device=self.device)

    def as_array(self, tensor: th.Tensor, name: str) -> np.ndarray:
        """
        :param tensor: Tensor of the buffer, shape ``(n_steps, n_envs, ...)``
        :param name: Name of the tensor
        :return: The same as an array, with the shape that SB3's buffer has at this time
        """
        array = tensor.detach().cpu().numpy()
        if self.device.type != "cpu":
            array.flags.writeable = False
        return self.swap_and_flatten(array) if self.generator_ready and name not in NEVER_FLAT else array

    def fill(self, tensor: th.Tensor, values: np.ndarray) -> None:
        """
        :param tensor: Tensor of the buffer, shape ``(n_steps, n_envs, ...)``
        :param values: Its new values, an array of the same shape
        """
        tensor.copy_(th.as_tensor(values).reshape(tensor.shape))

    def to_torch(self, array: Any, copy: bool = True) -> th.Tensor:
        """
        :param array: NumPy array, or a tensor, which is returned as it is
        :param copy: Whether an array is copied
        :return: Tensor on the device
        """
        return array if isinstance(array, th.Tensor) else super().to_torch(array, copy)

    def observe(self, observations: Any, starts: Any) -> Any:
        """
        Record the observations of the next step, before the environments overwrite them.

        :param observations: Tensors or arrays of shape ``(n_envs, *obs_shape)``
        :param starts: Whether each observation starts an episode, shape ``(n_envs,)``; ``None`` if that is recorded later
        :return: The recorded observations, on the device
        """
        rows = map_observations(lambda part: part[self.pos], self.tensors["observations"])
        map_observations(copy_into, rows, observations)
        if starts is not None:
            copy_into(self.tensors["episode_starts"][self.pos], starts)
        return rows

    def record(self, actions: th.Tensor, values: th.Tensor, log_probs: th.Tensor) -> None:
        """
        Record the output of the policy for the observations of the next step.

        :param actions: Actions, or latents of a bounded distribution, shape ``(n_envs, *action_shape)``
        :param values: Values of the observations, shape ``(n_envs, 1)``
        :param log_probs: Log probabilities of the actions, shape ``(n_envs,)``
        """
        for name, part in (("actions", actions), ("values", values), ("log_probs", log_probs)):
            copy_into(self.tensors[name][self.pos], part)

    def end_step(self, rewards: Any) -> None:
        """
        :param rewards: Rewards of the step, shape ``(n_envs,)``
        """
        copy_into(self.tensors["rewards"][self.pos], rewards)
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def add(self, obs: Any, action: Any, reward: Any, episode_start: Any, value: th.Tensor, log_prob: th.Tensor) -> None:
        """
        Add a step, as in SB3.

        :param obs: Observations, shape ``(n_envs, *obs_shape)``
        :param action: Actions, shape ``(n_envs, *action_shape)``
        :param reward: Rewards, shape ``(n_envs,)``
        :param episode_start: Whether each observation starts an episode, shape ``(n_envs,)``
        :param value: Values of the observations, shape ``(n_envs, 1)``
        :param log_prob: Log probabilities of the actions, shape ``(n_envs,)``
        """
        self.observe(obs, episode_start)
        self.record(th.as_tensor(action), value, log_prob)
        self.end_step(reward)

    def after(self, rows: th.Tensor, observations: Any, starts: th.Tensor) -> Any:
        """
        :param rows: Positions of steps in the flattened rollout, ``step * n_envs + environment``, shape ``(n,)``
        :param observations: Observations that follow these steps, shape ``(n, *obs_shape)``
        :param starts: Whether each of them starts an episode, shape ``(n,)``
        :return: Inputs of the policy for these observations
        """
        return observations

    def after_step(self, step: int, observations: Any, starts: th.Tensor) -> Any:
        """
        :param step: Step of the rollout
        :param observations: Observations that follow it, shape ``(n_envs, *obs_shape)``
        :param starts: Whether each of them starts an episode, shape ``(n_envs,)``
        :return: Inputs of the policy for these observations
        """
        rows = step * self.n_envs + th.arange(self.n_envs, device=self.device)
        return self.after(rows, observations, starts)

    def bootstrap(self, truncated: TruncatedEpisodes, gamma: float) -> None:
        """
        Add the discounted values of terminal observations to the last rewards of truncated episodes
        (`issue #633 <https://github.com/DLR-RM/stable-baselines3/issues/633>`_).

        :param truncated: Truncated episodes of the rollout
        :param gamma: Discount factor: the model's, as in SB3, and not the one that the buffer was created with
        """
        self.truncated = truncated
        self.add_to_rewards(self.tensors["rewards"], gamma * truncated.values)

    def add_to_rewards(self, rewards: th.Tensor, values: th.Tensor) -> None:
        """
        :param rewards: Rewards, modified in place, shape ``(n_steps, n_envs)``
        :param values: Summands at the ends of the truncated episodes, shape ``(n,)``
        """
        assert self.truncated is not None
        rewards.view(-1)[self.truncated.rows] += values

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: Any) -> None:
        """
        Estimate advantages (GAE) and returns, as in SB3.

        :param last_values: Values of the observations after the last step, shape ``(n_envs, 1)``
        :param dones: Whether the last step ended an episode, shape ``(n_envs,)``
        """
        tensors = self.tensors
        starts, values = tensors["episode_starts"], tensors["values"]
        dones = th.as_tensor(dones, device=self.device)
        last = last_values.detach().flatten()
        advantages = gae_of_tensors(tensors["rewards"], values, starts, last, dones, self.gamma, self.gae_lambda)
        tensors["advantages"].copy_(advantages)
        tensors["returns"].copy_(advantages + values)

    def flat(self, tensor: th.Tensor) -> th.Tensor:
        """
        :param tensor: One number per sample, shape ``(n_steps, n_envs)``
        :return: The same in the order of the samples, ``env * n_steps + step``, shape ``(n_envs * n_steps,)``
        """
        return tensor.T.reshape(-1)

    def get(self, batch_size: int | None = None) -> Iterator[RolloutBufferSamples]:  # type: ignore[override]
        """
        :param batch_size: Number of samples in a minibatch, ``None`` for all
        :return: Minibatches of one epoch, in the order of SB3's buffer
        """
        assert self.full, "the rollout is not complete"
        self.generator_ready = True
        n = self.buffer_size * self.n_envs
        for indices in permutation(n, self.device).split(batch_size or n):
            yield self._get_samples(indices)

    def _get_samples(self, batch_inds: Any, env: VecNormalize | None = None) -> RolloutBufferSamples:
        indices = th.as_tensor(batch_inds, device=self.device)
        rows = self._rows_of(indices)
        observations = map_observations(lambda tensor: tensor.flatten(0, 1)[rows], self.tensors["observations"])
        return self._samples(indices, observations)

    def _rows_of(self, indices: th.Tensor) -> th.Tensor:
        """Positions ``step * n_envs + env`` of samples that are counted as ``env * n_steps + step``."""
        return indices % self.buffer_size * self.n_envs + indices // self.buffer_size

    def _samples(self, indices: th.Tensor, observations: Any) -> RolloutBufferSamples:
        rows = self._rows_of(indices)
        names = ("actions", "values", "log_probs", "advantages", "returns")
        actions, *numbers = (self.tensors[name].flatten(0, 1)[rows] for name in names)
        return RolloutBufferSamples(observations, actions.float(), *numbers)


class TensorRollout(Rollout):
    """
    A rollout in a :class:`TensorRolloutBuffer`. Indices, and what is returned, are tensors.

    :param buffer: Full rollout buffer
    :param last_observations: Observations after the last step, tensors or arrays of shape ``(n_envs, *obs_shape)``
    :param last_dones: Whether the last step ended an episode, shape ``(n_envs,)``
    :param gamma: Discount factor
    """

    buffer: TensorRolloutBuffer

    def __init__(self, buffer: TensorRolloutBuffer, last_observations: Any, last_dones: Any, gamma: float):
        refuse_incomplete(buffer)
        self.buffer, self.gamma = buffer, gamma
        self.last_observations, self.last_dones = last_observations, last_dones
        self.is_indexable = not is_replaced(buffer, "get")
        self.samples: Callable[[Any], RolloutBufferSamples] = buffer._get_samples
        buffer.generator_ready = True

    def copy_to_device(self) -> None:
        """Nothing to do, since the rollout is on the device."""

    def draws(self, step_size: int, segments: Any = None) -> Iterator[Any]:
        """
        :param step_size: Number of samples in one step of the optimiser
        :param segments: Prioritised segments to draw from; ``None`` to draw each sample once
        :return: Indices and weights of the samples of each step in one epoch
        """
        if segments is not None:
            return iter(segments.epoch(step_size))
        return ((indices, None) for indices in permutation(self.n_samples, self.buffer.device).split(step_size))

    def continues(self, indices: Any) -> Any:
        """
        :param indices: Indices of samples in the flattened rollout, ``env * n_steps + step``, a tensor
        :return: Whether the next step of the rollout is in the same episode, shape ``(batch_size,)``
        """
        environments, steps = indices // self.buffer.buffer_size, indices % self.buffer.buffer_size
        following = (steps + 1).clamp(max=self.buffer.buffer_size - 1)
        return (following > steps) & (self.buffer.tensors["episode_starts"][following, environments] == 0)

    def next_observations(self, indices: Any) -> Any:
        """
        :param indices: Indices of samples in the flattened rollout, ``env * n_steps + step``, a tensor
        :return: Observations of the steps that follow, as the policy takes them, and those of the samples themselves where an
            episode or the rollout ends
        """
        # Not with `samples`, which may take blocks of successive samples alone
        return self.buffer._get_samples(indices + self.continues(indices)).observations

    def evaluate(self, function: Callable[[RolloutBufferSamples], th.Tensor | None]) -> th.Tensor | None:
        """
        Evaluate a function on the whole rollout, in batches.

        :param function: Function of samples, which returns a tensor with one row per sample, or ``None``
        :return: Concatenated results, with one row per sample; ``None`` if the function returns ``None``
        """
        parts = []
        for indices in th.arange(self.n_samples, device=self.buffer.device).split(16 * EVALUATION_BATCH):
            part = function(self.samples(indices))
            if part is None:
                return None
            parts.append(part)
        return th.cat(parts)

    def time_major(self, flat: Any) -> Any:
        """
        :param flat: One number per sample, shape ``(n_envs * n_steps,)``
        :return: The same numbers, shape ``(n_steps, n_envs)``
        """
        return flat.reshape(self.buffer.n_envs, self.buffer.buffer_size).T

    def last_values(self, policy: ActorCriticPolicy) -> Any:
        """
        :param policy: Policy with the critic that computes the values
        :return: Values of the observations after the last step, shape ``(n_envs,)``
        """
        buffer = self.buffer
        observations = map_observations(lambda part: th.as_tensor(part, device=buffer.device), self.last_observations)
        starts = th.as_tensor(self.last_dones, device=buffer.device)
        return policy.predict_values(buffer.after_step(buffer.buffer_size - 1, observations, starts)).flatten()

    def rewards(self, policy: ActorCriticPolicy) -> Any:
        """
        :param policy: Policy with the critic that evaluates the terminal observations of truncated episodes
        :return: Rewards, bootstrapped with these values where episodes were truncated, shape ``(n_steps, n_envs)``
        """
        rewards, truncated = self.buffer.tensors["rewards"].clone(), self.buffer.truncated
        if truncated is not None:
            goes_on = th.zeros_like(truncated.rows, dtype=th.bool)
            inputs = self.buffer.after(truncated.rows, truncated.observations, goes_on)
            values = policy.predict_values(inputs).flatten()
            self.buffer.add_to_rewards(rewards, self.gamma * (values - truncated.values))
        return rewards


def permutation(n: int, device: th.device) -> th.Tensor:
    """
    :param n: Number of samples
    :param device: Device of the samples
    :return: The numbers from 0 to ``n - 1`` in random order: on the CPU the one that SB3 draws from NumPy's generator, on
        other devices from their generators, so that nothing is copied to them
    """
    if device.type == "cpu":
        return th.from_numpy(np.random.permutation(n))
    return th.randperm(n, device=device)


def copy_into(target: th.Tensor, values: Any) -> None:
    """
    :param target: Row of a buffer
    :param values: Its new values, with or without the last dimension of size 1 that scalars have in buffers
    """
    target.copy_(th.as_tensor(values).reshape(target.shape), non_blocking=True)

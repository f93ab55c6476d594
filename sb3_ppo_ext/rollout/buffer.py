"""The rollout buffer of all engines: tensors on any device, which NumPy reads and writes where they lie on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.type_aliases import PyTorchObs, RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.type_aliases import Arrays, StateDict
from sb3_ppo_ext.memory.history import RolloutMemory, RolloutRows, permutation
from sb3_ppo_ext.rollout.gae import gae_of_tensors

ARRAYS = ("observations", "actions", "rewards", "returns", "episode_starts", "values", "log_probs", "advantages")
# SB3 does not flatten them, since minibatches do not have them.
NEVER_FLAT = ("rewards", "episode_starts")
# Methods of SB3's rollout buffers that an engine may do without
BUFFER_METHODS = ("reset", "add", "get", "_get_samples", "compute_returns_and_advantage", "swap_and_flatten", "to_torch")


class TruncatedEpisodes(NamedTuple):
    """
    Truncated episodes of a rollout.

    :param rows: Positions of their last steps in the flattened rollout, ``step * n_envs + environment``, shape ``(n,)``
    :param observations: Their terminal observations, shape ``(n, *obs_shape)``
    :param values: Values of these observations when they were collected, shape ``(n,)``
    """

    rows: th.Tensor
    observations: PyTorchObs
    values: th.Tensor


def _as_numpy(name: str) -> property:
    """Property of a buffer that reads a tensor as a NumPy array, and copies an array into the tensor."""

    is_estimated = name in ("values", "log_probs")

    def read(buffer: TensorRolloutBuffer) -> Any:
        if is_estimated:
            buffer.complete()
            buffer.is_read = True
        if not buffer.generator_ready and buffer.arrays:
            return buffer.arrays[name]
        return map_observations(lambda tensor: buffer.as_array(tensor, name), buffer.tensors[name])

    def write(buffer: TensorRolloutBuffer, values: object) -> None:
        buffer.complete()
        map_observations(buffer.fill, buffer.tensors[name], values)

    return property(read, write, doc=f"{name} as a NumPy array, see :class:`TensorRolloutBuffer`")


class TensorRolloutBuffer(RolloutBuffer):
    """
    A ``RolloutBuffer`` in tensors, for all observation spaces and all policies.

    ``tensors`` has what SB3's buffer has as arrays, of shape ``(n_steps, n_envs, ...)``, under the same names. The attributes
    of SB3's buffer are NumPy arrays: on the CPU they share the memory of the tensors, elsewhere they are copies that cannot be
    written to. As in SB3, they are flattened after the update.

    :param args: Positional arguments of ``RolloutBuffer``; ``device`` is that of the samples
    :param memory: What the rollout keeps for a history-based policy, ``None`` for other policies
    :param storage: Device of the tensors
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

    def __init__(self, *args: Any, memory: RolloutMemory | None = None, storage: th.device | str = "cpu", **kwargs: Any):
        self.memory, self.storage = memory, th.device(storage)
        self.tensors: dict[str, Arrays] = {}
        # The tensors as arrays, only on the CPU
        self.arrays: dict[str, object] = {}
        # What computes the values and log probabilities that are missing while a rollout is collected, and whether they have
        # been read in it: whoever has done so may have kept the arrays
        self.estimate: Callable[[], None] | None = None
        self.is_read = False
        super().__init__(*args, **kwargs)

    def __getstate__(self) -> StateDict:
        self.complete()
        return {**vars(self), "arrays": {}, "estimate": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._share()

    # Memory

    def reset(self) -> None:
        """Begin a new rollout. The memory is allocated once. What a history-based policy has seen last is kept."""
        if not self.tensors:
            self.allocate(self.storage)
        elif self.memory is not None:
            self.memory.keep_last(self.pos)
        self.generator_ready = False
        self.pos, self.full = 0, False
        self.estimate, self.is_read = None, False

    def complete(self) -> None:
        """Compute values and log probabilities of the steps so far, if an engine has put this off."""
        if self.estimate is not None:
            self.estimate()

    def allocate(self, storage: th.device) -> None:
        """
        Begin with empty tensors.

        :param storage: Device of the tensors
        """
        self.storage, self.pos, self.full, self.generator_ready = storage, 0, False, False
        n_before = 0 if self.memory is None else self.memory.n_before
        observations, starts = self.empty_observations(n_before), self._empty((), np.float32, n_before)
        self.tensors = {"observations": observations, "actions": self._empty((self.action_dim,), self.action_space.dtype)}
        self.tensors |= {name: self._empty((), np.float32) for name in ARRAYS[2:]} | {"episode_starts": starts}
        if self.memory is not None:
            self.memory.allocate(RolloutRows(self.buffer_size, self.n_envs, observations, starts, self.device))
        self._share()

    def _share(self) -> None:
        """Let columns that lie in the same memory do so, also in a copy, where pickle has separated them."""
        if self.memory is not None and self.tensors:
            rows, n_before = self.memory.rows, self.memory.n_before
            self.tensors["observations"] = map_observations(lambda part: part[n_before:], rows.observations)
            self.tensors["episode_starts"] = rows.starts[n_before:]
        self.arrays = {}
        if self.storage.type == "cpu":
            self.arrays = {name: map_observations(th.Tensor.numpy, part) for name, part in self.tensors.items()}

    def empty_observations(self, n_before: int = 0) -> th.Tensor | dict[str, th.Tensor]:
        """
        :param n_before: Number of steps before the rollout
        :return: Zeros for the observations of a rollout, shape ``(n_before + n_steps, n_envs, *obs_shape)``
        """
        space = self.observation_space
        if isinstance(self.obs_shape, dict):
            return {key: self._empty(shape, space[key].dtype, n_before) for key, shape in self.obs_shape.items()}
        return self._empty(self.obs_shape, space.dtype, n_before)

    def _empty(self, shape: tuple[int, ...], dtype: object, n_before: int = 0) -> th.Tensor:
        of_numpy = th.from_numpy(np.zeros(0, dtype)).dtype
        return th.zeros((n_before + self.buffer_size, self.n_envs, *shape), dtype=of_numpy, device=self.storage)

    def as_array(self, tensor: th.Tensor, name: str) -> np.ndarray:
        """
        :param tensor: Tensor of the buffer, shape ``(n_steps, n_envs, ...)``
        :param name: Name of the tensor
        :return: The same as an array, with the shape that SB3's buffer has at this time
        """
        array = tensor.detach().cpu().numpy()
        if self.storage.type != "cpu":
            array.flags.writeable = False
        return self.swap_and_flatten(array) if self.generator_ready and name not in NEVER_FLAT else array

    def fill(self, tensor: th.Tensor, values: np.ndarray) -> None:
        """
        :param tensor: Tensor of the buffer, shape ``(n_steps, n_envs, ...)``
        :param values: Its new values, an array of the same shape
        """
        tensor.copy_(th.as_tensor(values).reshape(tensor.shape))

    def to_torch(self, array: np.ndarray, copy: bool = True) -> th.Tensor:
        """
        :param array: NumPy array, or a tensor, which is returned as it is
        :param copy: Whether an array is copied
        :return: Tensor on the device
        """
        return array if isinstance(array, th.Tensor) else super().to_torch(array, copy)

    def on_device(self) -> TensorRolloutBuffer:
        """:return: This buffer with its tensors on the device of the samples; itself for a history-based policy"""
        if self.storage == self.device or self.memory is not None:
            return self
        moved = copy(self)
        moved.tensors = {
            name: map_observations(lambda tensor: tensor.to(self.device), part) for name, part in self.tensors.items()
        }
        moved.storage, moved.arrays = self.device, {}
        return moved

    # Filling

    def observe(self, observations: object, starts: object) -> Arrays:
        """
        Record the observations of the next step, before the environments overwrite them.

        :param observations: Tensors or arrays of shape ``(n_envs, *obs_shape)``
        :param starts: Whether each observation starts an episode, shape ``(n_envs,)``; ``None`` if that is recorded later
        :return: The recorded observations, on the device of the tensors
        """
        map_observations(copy_into, self._row("observations"), observations)
        if starts is not None:
            copy_into(self._row("episode_starts"), starts)
        if self.memory is not None:
            self.memory.observe(self.pos)
        return map_observations(lambda part: part[self.pos], self.tensors["observations"])

    def record(self, actions: object, values: th.Tensor, log_probs: th.Tensor) -> None:
        """
        Record the output of the policy for the observations of the next step.

        :param actions: Actions, or latents of a bounded distribution, shape ``(n_envs, *action_shape)``
        :param values: Values of the observations, shape ``(n_envs, 1)``
        :param log_probs: Log probabilities of the actions, shape ``(n_envs,)``
        """
        for name, part in (("actions", actions), ("values", values), ("log_probs", log_probs)):
            copy_into(self._row(name), part)

    def end_step(self, rewards: th.Tensor) -> None:
        """
        :param rewards: Rewards of the step, shape ``(n_envs,)``
        """
        copy_into(self._row("rewards"), rewards)
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def _row(self, name: str) -> Arrays:
        """Row of the next step, an array if the tensors lie on the CPU."""
        return map_observations(lambda part: part[self.pos], (self.arrays or self.tensors)[name])

    def add(
        self, obs: Arrays, action: Arrays, reward: Arrays, episode_start: Arrays, value: th.Tensor, log_prob: th.Tensor
    ) -> None:
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
        self.record(action, value, log_prob)
        self.end_step(reward)

    def after(self, rows: th.Tensor, observations: Arrays, starts: th.Tensor) -> Any:
        """
        :param rows: Positions of steps in the flattened rollout, ``step * n_envs + environment``, shape ``(n,)``
        :param observations: Observations that follow these steps, on the device, shape ``(n, *obs_shape)``
        :param starts: Whether each of them starts an episode, shape ``(n,)``
        :return: Inputs of the policy for these observations
        """
        return observations if self.memory is None else self.memory.after(rows, observations, starts)

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: np.ndarray | th.Tensor) -> None:
        """
        Estimate advantages (GAE) and returns: with SB3's operations on the CPU, elsewhere without waiting for the device.

        :param last_values: Values of the observations after the last step, shape ``(n_envs, 1)``
        :param dones: Whether the last step ended an episode, shape ``(n_envs,)``
        """
        if self.storage.type == "cpu":
            on_host = dones.cpu().numpy() if isinstance(dones, th.Tensor) else dones
            return super().compute_returns_and_advantage(last_values.detach(), on_host)
        tensors = self.tensors
        starts, values = tensors["episode_starts"], tensors["values"]
        dones, last = th.as_tensor(dones, device=self.storage), last_values.detach().flatten()
        advantages = gae_of_tensors(tensors["rewards"], values, starts, last, dones, self.gamma, self.gae_lambda)
        tensors["advantages"].copy_(advantages)
        tensors["returns"].copy_(advantages + values)

    # Samples

    def get(self, batch_size: int | None = None) -> Iterator[RolloutBufferSamples]:  # type: ignore[override]
        """
        :param batch_size: Number of samples in a minibatch, ``None`` for all
        :return: Minibatches of one epoch, in the order of SB3's buffer
        """
        assert self.full, "the rollout is not complete"
        self.generator_ready = True
        n = self.buffer_size * self.n_envs
        for indices in permutation(n, self.storage).split(batch_size or n):
            yield self._get_samples(indices)

    def _get_samples(self, batch_inds: object, env: VecNormalize | None = None) -> RolloutBufferSamples:
        return self.samples(th.as_tensor(batch_inds), 1)

    def samples(self, indices: th.Tensor, length: int) -> RolloutBufferSamples:
        """
        :param indices: Indices of samples in the flattened rollout, ``env * n_steps + step``; for a history-based policy, in
            blocks of successive steps of one environment, shape ``(n_blocks * length,)``
        :param length: Length of the blocks
        :return: Samples at these indices
        """
        rows = rows_of(indices.to(self.storage, non_blocking=True), self.buffer_size, self.n_envs)
        names = ("actions", "values", "log_probs", "advantages", "returns")
        actions, *numbers = (self._at(self.tensors[name], rows) for name in names)
        if self.memory is None:
            observations = map_observations(lambda tensor: self._at(tensor, rows), self.tensors["observations"])
        else:
            observations = self.memory.inputs(indices, length)
        if actions.dtype != th.float64 or self.memory is None or not self.memory.keeps_float64:
            actions = actions.float()
        return RolloutBufferSamples(observations, actions, *numbers)

    def _at(self, tensor: th.Tensor, rows: th.Tensor) -> th.Tensor:
        return tensor.flatten(0, 1)[rows].to(self.device)

    # What a history-based policy remembers

    def remembered(self) -> list[object] | None:
        """:return: Copy, in NumPy, of what the next rollout needs of this one; ``None`` for other policies"""
        return None if self.memory is None else self.memory.read(self.pos)

    def remember(self, remembered: list[object]) -> None:
        """
        :param remembered: What the next rollout needs of the last one, from :meth:`remembered`
        """
        assert self.memory is not None
        self.memory.write(remembered)


def columns_of(buffer: RolloutBuffer) -> dict[str, Arrays]:
    """
    :param buffer: Rollout buffer of any class, on the CPU, which is being filled
    :return: Its arrays, to write into
    """
    own: dict[str, Arrays] = getattr(buffer, "arrays", {})
    return own or {name: getattr(buffer, name) for name in ARRAYS}


def rows_of(indices: th.Tensor, n_steps: int, n_envs: int) -> th.Tensor:
    """
    :param indices: Indices of samples that are counted as ``env * n_steps + step``
    :param n_steps: Number of steps of the rollout
    :param n_envs: Number of environments
    :return: The same samples, counted as ``step * n_envs + env``
    """
    return indices % n_steps * n_envs + indices // n_steps


def knows_indices(buffer_class: object) -> bool:
    """
    :param buffer_class: Class of a rollout buffer
    :return: Whether minibatches can be drawn by the indices of their samples; a class that overrides ``get`` draws its own
    """
    known = (RolloutBuffer.get, DictRolloutBuffer.get, TensorRolloutBuffer.get)
    return getattr(buffer_class, "get", None) in known


def copy_into(target: Arrays, values: Arrays) -> None:
    """
    :param target: Row of a buffer, a tensor, or an array where the buffer lies on the CPU
    :param values: Its new values, with or without the last dimension of size 1 that scalars have in buffers
    """
    if isinstance(target, np.ndarray):
        on_host = values.detach().cpu().numpy() if isinstance(values, th.Tensor) else values
        target[...] = np.reshape(on_host, target.shape)
    else:
        target.copy_(th.as_tensor(values).reshape(target.shape), non_blocking=True)

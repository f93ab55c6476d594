"""Access of an update to a full rollout buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import PyTorchObs, RolloutBufferSamples

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.user_code import is_replaced
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.memory.history import permutation
from sb3_ppo_ext.rollout.bootstrap import joined, last_values, values_again
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer, TruncatedEpisodes, knows_indices
from sb3_ppo_ext.update.minibatches import Draw, PrioritizedSegments

# Number of samples that are evaluated at once without gradients, on the CPU and elsewhere
EVALUATION_BATCH, EVALUATION_BATCH_OF_DEVICE = 1024, 16384
# One number for each sample
NUMBERS = ("rewards", "episode_starts", "values", "log_probs", "advantages", "returns")


class Rollout:
    """
    The samples of a rollout, and the observations that followed it. Indices count the samples as ``env * n_steps + step``.

    :param buffer: Full rollout buffer
    :param last_observations: Observations after the last step, tensors or arrays of shape ``(n_envs, *obs_shape)``
    :param last_dones: Whether the last step ended an episode, shape ``(n_envs,)``
    :param truncations: Truncated episodes with terminal observations to be evaluated again, ``None`` if they are not needed
    :param gamma: Discount factor
    """

    def __init__(
        self,
        buffer: RolloutBuffer,
        last_observations: PyTorchObs | None = None,
        last_dones: np.ndarray | th.Tensor | None = None,
        truncations: Sequence[TruncatedEpisodes] | None = None,
        gamma: float = 0.99,
    ):
        self.buffer, self.last_observations, self.last_dones = buffer, last_observations, last_dones
        self.truncations, self.gamma = truncations or [], gamma
        self.memory = getattr(buffer, "memory", None)
        # Length of the blocks of successive steps in the samples that are drawn
        self.length = 1
        # Device where samples are drawn: that where they lie, if they need not be known to the host
        is_elsewhere = isinstance(buffer, TensorRolloutBuffer) and not (self.memory and self.memory.plans_on_host)
        self.device_of_draws = buffer.storage if is_elsewhere else th.device("cpu")  # type: ignore[attr-defined]
        # A buffer class that overrides `get` draws its own minibatches.
        self.is_indexable = knows_indices(type(buffer)) and not is_replaced(buffer, "get")
        if self.is_indexable:
            refuse_incomplete(buffer)
            # On the device of the policy, shape (n_steps, n_envs)
            self.columns = {name: self._column(name) for name in NUMBERS}
            flatten(buffer)

    def _column(self, name: str) -> th.Tensor:
        buffer = self.buffer
        if isinstance(buffer, TensorRolloutBuffer):
            column: th.Tensor = buffer.tensors[name]
            return column.to(buffer.device)
        array = getattr(buffer, name)
        of_samples = array if array.shape == (buffer.buffer_size, buffer.n_envs) else self.time_major(array)
        return th.as_tensor(of_samples, device=buffer.device)

    @property
    def n_samples(self) -> int:
        """Number of samples, ``n_steps * n_envs``."""
        return self.buffer.buffer_size * self.buffer.n_envs

    def copy_to_device(self) -> None:
        """Copy all samples to the device of the policy at once. Windows are not copied, since they overlap."""
        if isinstance(self.buffer, TensorRolloutBuffer):
            self.buffer = self.buffer.on_device()

    def samples(self, indices: th.Tensor) -> RolloutBufferSamples:
        """
        :param indices: Indices of samples, drawn by :meth:`draws`
        :return: Samples at these indices
        """
        return self._samples(indices, self.length)

    def _samples(self, indices: th.Tensor, length: int) -> RolloutBufferSamples:
        if self.memory is not None:
            samples: RolloutBufferSamples = self.buffer.samples(indices, length)  # type: ignore[attr-defined]
            return samples
        is_own = isinstance(self.buffer, TensorRolloutBuffer)
        return self.buffer._get_samples(indices if is_own else indices.numpy())  # type: ignore[arg-type]

    def order(self) -> th.Tensor:
        """:return: Indices of all samples in random order"""
        return permutation(self.n_samples, self.device_of_draws)

    def draws(self, step_size: int, batch_size: int, segments: PrioritizedSegments | None = None) -> Iterator[Draw]:
        """
        :param step_size: Number of samples in one step of the optimiser
        :param batch_size: Number of samples in each of its minibatches
        :param segments: Prioritised segments to draw from; ``None`` to draw each sample once
        :return: Indices and weights of the samples of each step in one epoch
        """
        if segments is not None:
            is_whole = segments.is_whole and batch_size % segments.length == 0
            self.length = segments.length if is_whole else 1
            return segments.epoch(step_size)
        if self.memory is not None:
            drawn, self.length = self.memory.draws(step_size, batch_size)
        else:
            drawn = iter(self.order().split(step_size))
        return ((indices, None) for indices in drawn)

    def continues(self, indices: th.Tensor) -> th.Tensor:
        """
        :param indices: Indices of samples
        :return: Whether the next step of the rollout is in the same episode, shape ``(batch_size,)``
        """
        n_steps = self.buffer.buffer_size
        environments, steps = indices // n_steps, indices % n_steps
        following = (steps + 1).clamp(max=n_steps - 1)
        starts = self.columns["episode_starts"].to(indices.device)
        return (following > steps) & (starts[following, environments] == 0)

    def next_observations(self, indices: th.Tensor) -> PyTorchObs:
        """
        :param indices: Indices of samples
        :return: Observations of the steps that follow, as the policy takes them, and those of the samples themselves where an
            episode or the rollout ends
        """
        return self._samples(indices + self.continues(indices), 1).observations

    def evaluate(self, function: Callable[[RolloutBufferSamples], th.Tensor | None]) -> th.Tensor | None:
        """
        Evaluate a function on the whole rollout, in batches.

        :param function: Function of samples, which returns a tensor with one row per sample, or ``None``
        :return: Concatenated results, with one row per sample; ``None`` if the function returns ``None``
        """
        length = 1 if self.memory is None else self.buffer.buffer_size
        device = self.device_of_draws
        size = EVALUATION_BATCH if device.type == "cpu" or self.memory is not None else EVALUATION_BATCH_OF_DEVICE
        parts = []
        for indices in th.arange(self.n_samples, device=device).split(max(size // length, 1) * length):
            part = function(self._samples(indices, length))
            if part is None:
                return None
            parts.append(part)
        return th.cat(parts)

    def time_major(self, flat: th.Tensor) -> th.Tensor:
        """
        :param flat: One number per sample, an array or tensor of shape ``(n_envs * n_steps,)``
        :return: The same numbers, shape ``(n_steps, n_envs)``
        """
        return flat.reshape(self.buffer.n_envs, self.buffer.buffer_size).T

    def last_values(self, policy: ActorCriticPolicy) -> th.Tensor:
        """
        :param policy: Policy with the critic that computes the values
        :return: Values of the observations after the last step, shape ``(n_envs,)``
        """
        return last_values(policy, self.buffer, self.last_observations, self.last_dones).flatten()

    def rewards(self, policy: ActorCriticPolicy) -> th.Tensor:
        """
        :param policy: Policy with the critic that evaluates the terminal observations of truncated episodes
        :return: Rewards, bootstrapped with these values where episodes were truncated, shape ``(n_steps, n_envs)``
        """
        rewards = self.columns["rewards"].clone()
        if self.truncations:
            episodes = joined(self.truncations)
            values = values_again(policy, self.buffer, episodes)
            rewards.view(-1)[episodes.rows] += self.gamma * (values - episodes.values)
        return rewards


def refuse_incomplete(buffer: RolloutBuffer) -> None:
    """
    :param buffer: Rollout buffer of an update
    :raises ValueError: if the rollout has fewer steps than the buffer, as after a callback has changed ``n_steps``
    """
    if not buffer.full:
        remedy = f"the rollout buffer is for {buffer.buffer_size} steps; change `n_steps` between two calls of `learn`"
        refuse("n_steps", buffer.pos, remedy)


def flatten(buffer: RolloutBuffer) -> None:
    """
    Merge the dimensions of steps and environments in the arrays of a buffer, as the first call of ``get`` does.

    :param buffer: Full rollout buffer, modified in place
    """
    if not buffer.generator_ready and not isinstance(buffer, TensorRolloutBuffer):
        for name in ("observations", "actions", "values", "log_probs", "advantages", "returns"):
            array = getattr(buffer, name)
            setattr(buffer, name, map_observations(buffer.swap_and_flatten, array))
    buffer.generator_ready = True

"""A full rollout buffer, as an update reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.memory.sequence_buffers import SequenceBufferMixin
from sb3_ppo_ext.update.bootstrap import Truncation, change_of_terminal_values, last_values
from sb3_ppo_ext.update.minibatches import Draw, PrioritizedSegments, shuffled, shuffled_segments

# Samples that are evaluated at once where no gradient is needed
EVALUATION_BATCH = 1024
# Steps that stay together in minibatches of a history-based policy
MIN_SEGMENT = 16


class Rollout:
    """
    The samples of a rollout, and what came after it.

    :param buffer: A full rollout buffer
    :param last_observations: The observations after its last step, as the environments returned them
    :param last_dones: Whether the last step ended an episode, shape ``(n_envs,)``
    :param truncations: The episodes that a time limit cut off, where the terminal observations are to be valued anew
    :param gamma: Discount factor
    """

    def __init__(
        self,
        buffer: RolloutBuffer,
        last_observations: Any = None,
        last_dones: Any = None,
        truncations: Sequence[Truncation] | None = None,
        gamma: float = 0.99,
    ):
        self.buffer, self.last_observations, self.last_dones = buffer, last_observations, last_dones
        self.truncations, self.gamma = truncations or [], gamma
        # A buffer class with a `get` of its own draws its minibatches itself.
        self.is_indexable = knows_indices(type(buffer))
        # What gathers the samples of some indices
        self.samples: Callable[[np.ndarray], RolloutBufferSamples] = buffer._get_samples
        if self.is_indexable:
            flatten(buffer)

    @property
    def n_samples(self) -> int:
        """Steps of all environments together."""
        return self.buffer.buffer_size * self.buffer.n_envs

    def copy_to_device(self) -> None:
        """Let the samples lie on the device of the policy, once and not minibatch by minibatch; sequences would overlap."""
        if self.is_indexable and not isinstance(self.buffer, SequenceBufferMixin):
            self.samples = SamplesOnDevice(self.buffer)

    def draws(self, step_size: int, segments: PrioritizedSegments | None = None) -> Iterator[Draw]:
        """
        :param step_size: Samples that make one step of the optimiser
        :param segments: From which to draw; ``None`` for each sample once
        :return: The indices of each step of one epoch, with their weights
        """
        if segments is not None:
            return segments.epoch(step_size)
        buffer = self.buffer
        if isinstance(buffer, SequenceBufferMixin):
            # Long enough that what is before them, and is computed anew for each of them, is no more than they are
            length = min(max(buffer.n_before, MIN_SEGMENT), buffer.buffer_size, step_size)
            return shuffled_segments(buffer.buffer_size, buffer.n_envs, length, step_size)
        return shuffled(self.n_samples, step_size)

    def evaluate(self, function: Callable[[RolloutBufferSamples], th.Tensor | None]) -> th.Tensor | None:
        """
        :param function: Of some samples
        :return: What it returns for the whole rollout; ``None`` if it returns that
        """
        indices = np.arange(self.n_samples)
        parts = []
        for start in range(0, len(indices), EVALUATION_BATCH):
            part = function(self.samples(indices[start : start + EVALUATION_BATCH]))
            if part is None:
                return None
            parts.append(part)
        return th.cat(parts)

    def time_major(self, flat: np.ndarray) -> np.ndarray:
        """
        :param flat: One number per sample, shape ``(n_envs * n_steps,)`` or with a last dimension of 1
        :return: Shape ``(n_steps, n_envs)``, as before :func:`flatten`
        """
        by_time: np.ndarray = flat.reshape(self.buffer.n_envs, self.buffer.buffer_size).T
        return by_time

    def last_values(self, policy: ActorCriticPolicy) -> np.ndarray:
        """
        :param policy: Whose critic is asked
        :return: Values of the observations after the last step, shape ``(n_envs,)``
        """
        values = last_values(policy, self.buffer, self.last_observations, self.last_dones)
        flat: np.ndarray = values.cpu().numpy().flatten()
        return flat

    def rewards(self, policy: ActorCriticPolicy) -> np.ndarray:
        """
        :param policy: Whose critic values the terminal observations of episodes that a time limit cut off
        :return: Rewards, with these values, shape ``(n_steps, n_envs)``
        """
        buffer = self.buffer
        change = change_of_terminal_values(policy, buffer, self.truncations, self.gamma)
        rewards: np.ndarray = buffer.rewards + change
        return rewards


class SamplesOnDevice:
    """
    The samples of a rollout, copied to the device of the policy once, where minibatches are then gathered.

    :param buffer: A full rollout buffer, flat
    """

    def __init__(self, buffer: RolloutBuffer):
        self.device = buffer.device
        self.samples = buffer._get_samples(np.arange(buffer.buffer_size * buffer.n_envs))

    def __call__(self, indices: np.ndarray) -> RolloutBufferSamples:
        """
        :param indices: Indices of samples in the flattened rollout
        :return: As ``_get_samples`` of the buffer
        """
        on_device = th.as_tensor(indices, device=self.device)
        parts: Any = (map_observations(lambda tensor: tensor[on_device], part) for part in self.samples)
        return type(self.samples)(*parts)


def knows_indices(buffer_class: object) -> bool:
    """
    :param buffer_class: Class of a rollout buffer
    :return: Whether its minibatches can be drawn by their indices; a class with a ``get`` of its own draws them itself
    """
    return getattr(buffer_class, "get", None) in (RolloutBuffer.get, DictRolloutBuffer.get)


def flatten(buffer: RolloutBuffer) -> None:
    """
    Join steps and environments to one dimension, as ``get`` does when it is first called.

    :param buffer: Changed in place, but for its rewards and episode starts, and observations that are read as sequences
    """
    if buffer.generator_ready:
        return
    names = ("actions", "values", "log_probs", "advantages", "returns")
    for name in names if isinstance(buffer, SequenceBufferMixin) else ("observations", *names):
        array = getattr(buffer, name)
        if isinstance(array, dict):
            flat: Any = {key: buffer.swap_and_flatten(part) for key, part in array.items()}
        else:
            flat = buffer.swap_and_flatten(array)
        setattr(buffer, name, flat)
    buffer.generator_ready = True

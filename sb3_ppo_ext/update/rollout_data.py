"""Access of an update to a full rollout buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.user_code import is_replaced
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.memory.history import HistoryBuffer
from sb3_ppo_ext.update.bootstrap import Truncation, change_of_terminal_values, last_values
from sb3_ppo_ext.update.minibatches import Draw, PrioritizedSegments, shuffled

# Methods of SB3's rollout buffers that an engine may do without
BUFFER_METHODS = ("reset", "add", "get", "_get_samples", "compute_returns_and_advantage", "swap_and_flatten", "to_torch")
# Number of samples that are evaluated at once without gradients
EVALUATION_BATCH = 1024


class Rollout:
    """
    The samples of a rollout, and the observations that followed it.

    :param buffer: Full rollout buffer
    :param last_observations: Observations after the last step, as the environments returned them
    :param last_dones: Whether the last step ended an episode, shape ``(n_envs,)``
    :param truncations: Truncated episodes with terminal observations to be evaluated again, ``None`` if they are not needed
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
        # A buffer class that overrides `get` draws its own minibatches.
        self.is_indexable = knows_indices(type(buffer)) and not is_replaced(buffer, "get")
        # Gathers the samples at the given indices
        self.samples: Callable[[np.ndarray], RolloutBufferSamples] = buffer._get_samples
        if self.is_indexable:
            refuse_incomplete(buffer)
            flatten(buffer)

    @property
    def n_samples(self) -> int:
        """Number of samples, ``n_steps * n_envs``."""
        return self.buffer.buffer_size * self.buffer.n_envs

    def copy_to_device(self) -> None:
        """Copy all samples to the device of the policy at once. Sequences are not copied, since they overlap."""
        if self.is_indexable and not isinstance(self.buffer, HistoryBuffer):
            self.samples = SamplesOnDevice(self.buffer)

    def draws(self, step_size: int, segments: PrioritizedSegments | None = None) -> Iterator[Draw]:
        """
        :param step_size: Number of samples in one step of the optimiser
        :param segments: Prioritised segments to draw from; ``None`` to draw each sample once
        :return: Indices and weights of the samples of each step in one epoch
        """
        if segments is not None:
            return segments.epoch(step_size)
        buffer = self.buffer
        if isinstance(buffer, HistoryBuffer):
            return ((indices, None) for indices in buffer.draws(step_size))
        return shuffled(self.n_samples, step_size)

    def continues(self, indices: np.ndarray) -> np.ndarray:
        """
        :param indices: Indices of samples in the flattened rollout, ``env * n_steps + step``
        :return: Whether the next step of the rollout is in the same episode, shape ``(batch_size,)``
        """
        environments, steps = np.divmod(indices, self.buffer.buffer_size)
        following = np.minimum(steps + 1, self.buffer.buffer_size - 1)
        same: np.ndarray = (following > steps) & (self.buffer.episode_starts[following, environments] == 0)
        return same

    def next_observations(self, indices: np.ndarray) -> Any:
        """
        :param indices: Indices of samples in the flattened rollout, ``env * n_steps + step``
        :return: Observations of the steps that follow, as the policy takes them, and those of the samples themselves where an
            episode or the rollout ends
        """
        return self.samples(indices + self.continues(indices)).observations

    def evaluate(self, function: Callable[[RolloutBufferSamples], th.Tensor | None]) -> th.Tensor | None:
        """
        Evaluate a function on the whole rollout, in batches.

        :param function: Function of samples, which returns a tensor with one row per sample, or ``None``
        :return: Concatenated results, with one row per sample; ``None`` if the function returns ``None``
        """
        indices = np.arange(self.n_samples)
        parts = []
        whole = self.buffer.n_evaluated if isinstance(self.buffer, HistoryBuffer) else 1
        size = max(EVALUATION_BATCH // whole, 1) * whole
        for start in range(0, len(indices), size):
            part = function(self.samples(indices[start : start + size]))
            if part is None:
                return None
            parts.append(part)
        return th.cat(parts)

    def time_major(self, flat: np.ndarray) -> np.ndarray:
        """
        :param flat: Array with one number per sample, shape ``(n_envs * n_steps,)`` or ``(n_envs * n_steps, 1)``
        :return: The same numbers in shape ``(n_steps, n_envs)``, as before :func:`flatten`
        """
        by_time: np.ndarray = flat.reshape(self.buffer.n_envs, self.buffer.buffer_size).T
        return by_time

    def last_values(self, policy: ActorCriticPolicy) -> np.ndarray:
        """
        :param policy: Policy with the critic that computes the values
        :return: Values of the observations after the last step, shape ``(n_envs,)``
        """
        values = last_values(policy, self.buffer, self.last_observations, self.last_dones)
        flat: np.ndarray = values.cpu().numpy().flatten()
        return flat

    def rewards(self, policy: ActorCriticPolicy) -> np.ndarray:
        """
        :param policy: Policy with the critic that evaluates the terminal observations of truncated episodes
        :return: Rewards, bootstrapped with these values where episodes were truncated, shape ``(n_steps, n_envs)``
        """
        buffer = self.buffer
        change = change_of_terminal_values(policy, buffer, self.truncations, self.gamma)
        rewards: np.ndarray = buffer.rewards + change
        return rewards


def refuse_incomplete(buffer: RolloutBuffer) -> None:
    """
    :param buffer: Rollout buffer of an update
    :raises ValueError: if the rollout has fewer steps than the buffer, as after a callback has changed ``n_steps``
    """
    if not buffer.full:
        remedy = f"the rollout buffer is for {buffer.buffer_size} steps; change `n_steps` between two calls of `learn`"
        refuse("n_steps", buffer.pos, remedy)


class SamplesOnDevice:
    """
    Copy of the samples of a rollout on the device of the policy, from which minibatches are gathered.

    :param buffer: Full rollout buffer, after :func:`flatten`
    """

    def __init__(self, buffer: RolloutBuffer):
        self.device = buffer.device
        self.samples = buffer._get_samples(np.arange(buffer.buffer_size * buffer.n_envs))

    def __call__(self, indices: np.ndarray) -> RolloutBufferSamples:
        """
        :param indices: Indices of samples in the flattened rollout
        :return: Samples at these indices, as ``_get_samples`` of the buffer returns them
        """
        on_device = th.as_tensor(indices, device=self.device)
        parts: Any = (map_observations(lambda tensor: tensor[on_device], part) for part in self.samples)
        return type(self.samples)(*parts)


def knows_indices(buffer_class: object) -> bool:
    """
    :param buffer_class: Class of a rollout buffer
    :return: Whether minibatches can be drawn by the indices of their samples; a class that overrides ``get`` draws its own
    """
    return getattr(buffer_class, "get", None) in (RolloutBuffer.get, DictRolloutBuffer.get)


def flatten(buffer: RolloutBuffer) -> None:
    """
    Merge the dimensions of steps and environments, as the first call of ``get`` does. Rewards, episode starts, and
    observations that are read as sequences keep their shape.

    :param buffer: Full rollout buffer, modified in place
    """
    if buffer.generator_ready:
        return
    names = buffer.flattened if isinstance(buffer, HistoryBuffer) else ("observations", *HistoryBuffer.flattened)
    for name in names:
        array = getattr(buffer, name)
        if isinstance(array, dict):
            flat: Any = {key: buffer.swap_and_flatten(part) for key, part in array.items()}
        else:
            flat = buffer.swap_and_flatten(array)
        setattr(buffer, name, flat)
    buffer.generator_ready = True

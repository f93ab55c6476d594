"""Rollouts for history-based policies on the device of the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.memory.context_watch import ContextWatch
from sb3_ppo_ext.memory.sequence_buffers import MAX_BYTES, Sequences, joined, segment_length
from sb3_ppo_ext.update import tensor_rollout
from sb3_ppo_ext.update.rollout_data import EVALUATION_BATCH
from sb3_ppo_ext.update.tensor_rollout import TensorRollout, TensorRolloutBuffer


class TensorSequenceBuffer(TensorRolloutBuffer):
    """
    A :class:`~sb3_ppo_ext.update.tensor_rollout.TensorRolloutBuffer` that also keeps the last ``context_length - 1`` steps
    before the rollout, and returns :class:`~sb3_ppo_ext.memory.sequence_buffers.Sequences` as observations.

    Step t of the rollout is in row ``context_length - 1 + t`` of the tensors with the earlier steps.

    :param args: Positional arguments of ``RolloutBuffer``
    :param context_length: Number of observations that the policy sees, including the current one
    :param n_action_features: Number of inputs that encode the last action, 0 if the policy does not see it
    :param keeps_rewards: Whether the policy sees the last reward
    :param kwargs: Keyword arguments of ``RolloutBuffer``
    """

    def __init__(
        self, *args: Any, context_length: int, n_action_features: int = 0, keeps_rewards: bool = False, **kwargs: Any
    ):
        self.n_before = context_length - 1
        self.n_action_features, self.keeps_rewards = n_action_features, keeps_rewards
        super().__init__(*args, **kwargs)
        self.context_watch = ContextWatch(context_length, self.n_envs)

    def reset(self) -> None:
        """Clear the rollout except for its last steps, which precede the next rollout."""
        if self.tensors:
            for rows, n in self._memory_rows():
                if rows is not None:
                    map_observations(partial(_move_rows, start=self.pos, n=n), rows)
        super().reset()

    def _allocate(self) -> None:
        super()._allocate()
        n_rows, n_envs, device = self.n_before + self.buffer_size, self.n_envs, self.device
        self.rows = map_observations(
            lambda part: th.zeros((n_rows, *part.shape[1:]), dtype=part.dtype, device=device), self.tensors["observations"]
        )
        # Views that the methods of the parent write to
        self.tensors["observations"] = map_observations(lambda rows: rows[self.n_before :], self.rows)
        self.starts = th.zeros((n_rows, n_envs), device=device)
        self.tensors["episode_starts"] = self.starts[self.n_before :]
        # Episode number of each step, -1 in rows that have not been filled yet
        self.episodes = th.full((n_rows, n_envs), -1, device=device)
        # Last action and reward before the observation in the same row; one more row for the first step of the next rollout
        self.last_actions: th.Tensor | None = None
        self.last_rewards: th.Tensor | None = None
        if self.n_action_features > 0:
            self.last_actions = th.zeros((n_rows + 1, n_envs, self.n_action_features), device=device)
        if self.keeps_rewards:
            self.last_rewards = th.zeros((n_rows + 1, n_envs), device=device)

    def _memory_rows(self) -> list[tuple[Any, int]]:
        """Tensors with the steps before the rollout, and how many of their rows precede it."""
        one_more = self.n_before + 1
        of_observations = [(self.rows, self.n_before), (self.starts, self.n_before), (self.episodes, self.n_before)]
        return [*of_observations, (self.last_actions, one_more), (self.last_rewards, one_more)]

    def memory(self) -> list[Any]:
        """:return: Copy of the last steps in NumPy, which precede the next rollout"""
        kept: list[Any] = []
        for rows, n in self._memory_rows():
            copy_last = partial(_on_host, start=self.pos, n=n)
            kept.append(None if rows is None else map_observations(copy_last, rows))
        return kept

    def set_memory(self, memory: list[Any]) -> None:
        """
        :param memory: Last steps before the next rollout, from :meth:`memory`
        """
        for (rows, n), kept in zip(self._memory_rows(), memory, strict=True):
            if rows is not None:
                map_observations(partial(_set_rows, n=n), rows, kept)

    def observe(self, observations: Any, starts: Any) -> Any:
        """
        Record the observations of the next step, before the environments overwrite them.

        :param observations: Tensors or arrays of shape ``(n_envs, *obs_shape)``
        :param starts: Whether each observation starts an episode, shape ``(n_envs,)``
        :return: The recorded observations, on the device
        """
        seen = super().observe(observations, starts)
        row = self.n_before + self.pos
        # Rows that have not been filled (-1) belong to another episode than this one, even if it does not begin at this step.
        before = self.episodes[row - 1].clamp(min=0)
        self.episodes[row] = before + (self.starts[row] > 0)
        return seen

    def keep_outcome(self, step: int, actions: th.Tensor | None, rewards: Any) -> None:
        """
        Store the actions and rewards of a step, which are the last ones at the next step.

        :param step: Index of the step in the rollout
        :param actions: Encoded actions, shape ``(n_envs, n_action_features)``; ``None`` if the policy does not see them
        :param rewards: Rewards of the environments, before truncated episodes are bootstrapped, shape ``(n_envs,)``
        """
        if self.last_actions is not None:
            assert actions is not None
            self.last_actions[self.n_before + step + 1].copy_(actions)
        if self.last_rewards is not None:
            self.last_rewards[self.n_before + step + 1].copy_(th.as_tensor(rewards))

    # Sequences for the policy

    def sequences_at(self, step: int) -> Sequences:
        """
        :param step: Index of the step in the rollout
        :return: Sequences of this step alone, one for each environment
        """
        row = self.n_before + step
        return self._sequences(lambda rows: rows[row].unsqueeze(1))

    def sequences_before(self, step: int) -> Iterator[Sequences]:
        """
        :param step: Index of the step in the rollout
        :return: Sequences of the ``context_length - 1`` steps before it, for a few environments at a time, so that not many
            images are encoded at once
        """
        n_bytes: list[int] = []
        map_observations(lambda rows: n_bytes.append(rows[0, 0].nbytes * self.n_before), self.rows)
        size = max(MAX_BYTES // max(sum(n_bytes), 1), 1)
        for first in range(0, self.n_envs, size):
            some = slice(first, first + size)
            yield self._sequences(lambda rows, some=some: rows[step : step + self.n_before, some].transpose(0, 1))

    def after(self, rows: th.Tensor, observations: Any, starts: th.Tensor) -> Any:
        """
        :param rows: Positions of steps in the flattened rollout, ``step * n_envs + environment``, shape ``(n,)``
        :param observations: Observations that follow these steps, shape ``(n, *obs_shape)``
        :param starts: Whether each of them starts an episode, shape ``(n,)``
        :return: Sequences that end with these observations
        """
        columns = (rows % self.n_envs).unsqueeze(1)
        steps = (rows // self.n_envs).unsqueeze(1) + 1
        earlier, at = steps + th.arange(self.n_before, device=self.device), steps + self.n_before
        before = self._sequences(lambda part: part[earlier, columns])
        starts = starts.bool().unsqueeze(1)
        now = Sequences(
            map_observations(
                lambda part, like: part.reshape(len(rows), 1, *like.shape[2:]), observations, before.observations
            ),
            self.episodes[at - 1, columns] + starts,
            starts,
            *(None if part is None else part[at, columns] for part in (self.last_actions, self.last_rewards)),
        )
        return joined(before, now)

    def in_blocks(self, indices: th.Tensor, length: int) -> RolloutBufferSamples:
        """
        :param indices: Indices of samples in the flattened rollout, ``env * n_steps + step``, in blocks of successive steps of
            one environment, shape ``(n_blocks * length,)``
        :param length: Length of the blocks
        :return: Samples at these indices, those of a block in one sequence
        """
        firsts = indices[::length].unsqueeze(1)
        columns = firsts // self.buffer_size
        rows = firsts % self.buffer_size + th.arange(self.n_before + length, device=self.device)
        return self._samples(indices, self._sequences(lambda part: part[rows, columns]))

    def _get_samples(self, batch_inds: Any, env: Any = None) -> RolloutBufferSamples:
        return self.in_blocks(th.as_tensor(batch_inds, device=self.device), 1)

    def _sequences(self, take: Any) -> Sequences:
        """Sequences of the rows that a function takes from a tensor."""
        outcomes = (None if part is None else take(part) for part in (self.last_actions, self.last_rewards))
        return Sequences(map_observations(take, self.rows), take(self.episodes), take(self.starts) > 0, *outcomes)


class TensorSequenceRollout(TensorRollout):
    """
    A rollout in a :class:`TensorSequenceBuffer`.

    :param buffer: Full rollout buffer
    :param args: Further arguments of ``TensorRollout``
    """

    buffer: TensorSequenceBuffer

    def __init__(self, buffer: TensorSequenceBuffer, *args: Any):
        super().__init__(buffer, *args)
        # Number of successive steps in a block of the samples that are drawn, and of samples in a minibatch if a step of the
        # optimiser consists of several
        self.length, self.batch_size = 1, 0
        self.samples = lambda indices: self.buffer.in_blocks(indices, self.length)

    def draws(self, step_size: int, segments: Any = None) -> Iterator[Any]:
        """
        :param step_size: Number of samples in one step of the optimiser
        :param segments: Prioritised segments to draw from; ``None`` to draw each sample once
        :return: Indices and weights of the samples of each step in one epoch
        """
        n_steps, batch_size = self.buffer.buffer_size, self.batch_size or step_size
        if segments is not None:
            self.length = segments.length if segments.is_even and batch_size % segments.length == 0 else 1
            return iter(segments.epoch(step_size))
        # Blocks of equal length, also in the last minibatch
        common = math.gcd(n_steps, batch_size)
        longest = segment_length(self.buffer.observation_space)
        self.length = next(length for length in range(min(longest, common), 0, -1) if common % length == 0)
        firsts = tensor_rollout.permutation(self.n_samples // self.length, self.buffer.device) * self.length
        blocks = firsts.unsqueeze(1) + th.arange(self.length, device=self.buffer.device)
        return ((indices, None) for indices in blocks.flatten().split(step_size))

    def evaluate(self, function: Any) -> th.Tensor | None:
        """
        Evaluate a function on the whole rollout, in batches.

        :param function: Function of samples, which returns a tensor with one row per sample, or ``None``
        :return: Concatenated results, with one row per sample; ``None`` if the function returns ``None``
        """
        n_steps, parts = self.buffer.buffer_size, []
        size = max(EVALUATION_BATCH // n_steps, 1) * n_steps
        for indices in th.arange(self.n_samples, device=self.buffer.device).split(size):
            part = function(self.buffer.in_blocks(indices, n_steps))
            if part is None:
                return None
            parts.append(part)
        return th.cat(parts)


def _move_rows(rows: th.Tensor, start: int, n: int) -> None:
    rows[:n] = rows[start : start + n].clone()


def _on_host(rows: th.Tensor, start: int, n: int) -> np.ndarray:
    return np.array(rows[start : start + n].cpu().numpy())


def _set_rows(rows: th.Tensor, kept: np.ndarray, n: int) -> None:
    rows[:n] = th.as_tensor(kept, device=rows.device)

"""Rollout buffers for history-based policies: successive samples share their history, it is not copied per sample."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.type_aliases import PyTorchObs, RolloutBufferSamples

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.memory.context_watch import ContextWatch
from sb3_ppo_ext.memory.history import HistoryBuffer

# Size of the observations that are copied at once to fill the caches of a policy, in bytes
MAX_BYTES = 2**23
# Number of consecutive steps that a history-based policy draws together. Successive steps are alike, so that long segments
# leave few independent samples in a minibatch. The steps that the policy sees before each segment are cheap, unless images.
SEGMENT, SEGMENT_OF_IMAGES = 8, 32


class Sequences(NamedTuple):
    """
    Input of a history-based policy: successive steps of several environments, including the ``context_length - 1`` steps
    before the first sample of each sequence.

    :param observations: Observations, shape ``(n_sequences, context_length - 1 + n, *obs_shape)``
    :param episodes: Episode number of each step, the same for two steps of one episode, shape
        ``(n_sequences, context_length - 1 + n)``
    :param starts: Whether each step begins an episode, so that it has no last action and reward, shape
        ``(n_sequences, context_length - 1 + n)``
    :param last_actions: Encoded action before each step, shape
        ``(n_sequences, context_length - 1 + n, n_action_features)``; ``None`` if the policy does not see it
    :param last_rewards: Reward of this action, shape ``(n_sequences, context_length - 1 + n)``; ``None`` if the policy does
        not see it
    :param samples: Indices of the samples among the last ``n`` steps of all sequences, flattened, shape ``(n_samples,)``;
        ``None`` if all of these steps are samples
    """

    observations: PyTorchObs
    episodes: th.Tensor
    starts: th.Tensor
    last_actions: th.Tensor | None = None
    last_rewards: th.Tensor | None = None
    samples: th.Tensor | None = None


class SequenceBufferMixin(HistoryBuffer):
    """
    A rollout buffer that also keeps the last ``context_length - 1`` steps before the rollout, and returns :class:`Sequences`
    as observations. Samples that are successive steps of one environment share a sequence.

    Step t of the rollout is in row ``context_length - 1 + t`` of the arrays with the earlier steps.

    :param args: Positional arguments of ``RolloutBuffer``
    :param context_length: Number of observations that the policy sees, including the current one
    :param n_action_features: Number of inputs that encode the last action, 0 if the policy does not see it
    :param keeps_rewards: Whether the policy sees the last reward
    :param kwargs: Keyword arguments of ``RolloutBuffer``
    """

    keeps_float32 = True

    def __init__(
        self, *args: Any, context_length: int, n_action_features: int = 0, keeps_rewards: bool = False, **kwargs: Any
    ):
        self.n_before = context_length - 1
        self.n_action_features, self.keeps_rewards = n_action_features, keeps_rewards
        self.rows: Any = None
        super().__init__(*args, **kwargs)
        self.context_watch = ContextWatch(context_length, self.n_envs)

    def reset(self) -> None:
        """Clear the rollout except for its last steps, which precede the next rollout."""
        if self.rows is None:
            self._allocate()
        else:
            self._keep_last_rows()
        super().reset()
        # Views that SB3's methods write to
        self.observations = map_observations(lambda rows: rows[self.n_before :], self.rows)
        self.episode_starts = self.starts[self.n_before :]

    def _allocate(self) -> None:
        n_rows, space = self.n_before + self.buffer_size, self.observation_space
        dtypes = {key: part.dtype for key, part in space.items()} if isinstance(space, spaces.Dict) else space.dtype
        self.rows = map_observations(
            lambda shape, dtype: np.zeros((n_rows, self.n_envs, *shape), dtype), self.obs_shape, dtypes
        )
        self.starts = np.zeros((n_rows, self.n_envs), np.float32)
        # Episode number of each step, -1 in rows that have not been filled yet
        self.episodes = np.full((n_rows, self.n_envs), -1)
        # Last action and reward before the observation in the same row; one more row for the first step of the next rollout
        self.last_actions, self.last_rewards = None, None
        if self.n_action_features > 0:
            self.last_actions = np.zeros((n_rows + 1, self.n_envs, self.n_action_features), np.float32)
        if self.keeps_rewards:
            self.last_rewards = np.zeros((n_rows + 1, self.n_envs), np.float32)

    def _keep_last_rows(self) -> None:
        self.set_memory(self.memory())

    def memory(self) -> list[Any]:
        """:return: Copy of the last steps, which precede the next rollout"""
        kept: list[Any] = []
        for rows, n in self._memory_rows():
            copy_last = partial(_copy_rows, start=self.pos, n=n)
            kept.append(None if rows is None else map_observations(copy_last, rows))
        return kept

    def set_memory(self, memory: list[Any]) -> None:
        """
        :param memory: Last steps before the next rollout, from :meth:`memory`
        """
        for (rows, n), kept in zip(self._memory_rows(), memory, strict=True):
            if rows is not None:
                map_observations(partial(_set_rows, n=n), rows, kept)

    def _memory_rows(self) -> list[tuple[Any, int]]:
        """Arrays with the steps before the rollout, and how many of their rows precede it."""
        one_more = self.n_before + 1
        of_observations = [(self.rows, self.n_before), (self.starts, self.n_before), (self.episodes, self.n_before)]
        return [*of_observations, (self.last_actions, one_more), (self.last_rewards, one_more)]

    def keep_observations(self, step: int, observations: Any, starts: np.ndarray) -> None:
        """
        Store the observations of a step as :meth:`add` does, but before the environments take the step.

        :param step: Index of the step in the rollout
        :param observations: Observations as the environments returned them, shape ``(n_envs, *obs_shape)``
        :param starts: Whether each observation begins an episode, shape ``(n_envs,)``
        """

        def keep(rows: np.ndarray, part: np.ndarray) -> None:
            rows[self.n_before + step] = np.reshape(part, rows.shape[1:])

        map_observations(keep, self.rows, observations)
        row = self.n_before + step
        self.starts[row] = starts
        # Rows that have not been filled (-1) belong to another episode than this one, even if it does not begin at this step.
        self.episodes[row] = np.maximum(self.episodes[row - 1], 0) + np.asarray(starts, bool)

    def add(self, obs: Any, action: np.ndarray, reward: np.ndarray, episode_start: np.ndarray, *args: Any) -> None:
        """Add a step, see ``RolloutBuffer``."""
        self.keep_observations(self.pos, obs, episode_start)
        super().add(obs, action, reward, episode_start, *args)

    def keep_outcome(self, step: int, actions: np.ndarray | None, rewards: np.ndarray) -> None:
        """
        Store the actions and rewards of a step, which are the last ones at the next step.

        :param step: Index of the step in the rollout
        :param actions: Encoded actions, shape ``(n_envs, n_action_features)``; ``None`` if the policy does not see them
        :param rewards: Rewards of the environments, before truncated episodes are bootstrapped, shape ``(n_envs,)``
        """
        if self.last_actions is not None:
            self.last_actions[self.n_before + step + 1] = actions
        if self.last_rewards is not None:
            self.last_rewards[self.n_before + step + 1] = rewards

    # Sequences for the policy

    def draws(self, step_size: int) -> Iterator[np.ndarray]:
        """
        :param step_size: Number of samples in one step of the optimiser
        :return: Indices of the samples of each step in one epoch
        """
        length = min(segment_length(self.observation_space), self.buffer_size, step_size)
        return shuffled_segments(self.buffer_size, self.n_envs, length, step_size)

    def sequences_of(self, indices: np.ndarray) -> Sequences:
        """
        :param indices: Indices of samples in the flattened rollout, ``env * buffer_size + step``, shape ``(n_samples,)``
        :return: Sequences with these samples, in this order
        """
        environments, steps = np.divmod(indices, self.buffer_size)
        begins = np.flatnonzero(np.r_[True, (np.diff(indices) != 1) | (steps[1:] == 0)])
        lengths = np.diff(np.r_[begins, len(indices)])
        longest = lengths.max()
        rows = steps[begins, None] + np.arange(self.n_before + longest)
        # Past its end, a shorter sequence is padded with arbitrary steps.
        rows = np.minimum(rows, self.n_before + self.buffer_size - 1)
        samples = None
        if lengths.min() < longest:
            samples = th.from_numpy(np.flatnonzero(np.arange(longest) < lengths[:, None])).to(self.device)
        return self._sequences((rows, environments[begins, None]), samples)

    def sequences_at(self, step: int) -> Sequences:
        """
        :param step: Index of the step in the rollout
        :return: Sequences of this step alone, one for each environment
        """
        return self._sequences((np.array([[self.n_before + step]]), np.arange(self.n_envs)[:, None]))

    def sequences_before(self, step: int) -> Iterator[Sequences]:
        """
        :param step: Index of the step in the rollout
        :return: Sequences of the ``context_length - 1`` steps before it, for a few environments at a time, so that not many
            images are copied at once
        """
        row: list[np.ndarray] = []
        map_observations(lambda rows: row.append(rows[0]), self.rows)
        n_bytes = sum(part.nbytes for part in row) * self.n_before // self.n_envs
        size = max(MAX_BYTES // max(n_bytes, 1), 1)
        for first in range(0, self.n_envs, size):
            environments = np.arange(first, min(first + size, self.n_envs))
            yield self._sequences((step + np.arange(self.n_before)[None], environments[:, None]))

    def sequences_after(
        self, steps: np.ndarray, environments: np.ndarray, observations: PyTorchObs, starts: np.ndarray
    ) -> Sequences:
        """
        :param steps: Indices of steps in the rollout, shape ``(n,)``
        :param environments: Index of the environment of each step, shape ``(n,)``
        :param observations: Observations that follow these steps, on the device, shape ``(n, *obs_shape)``
        :param starts: Whether each observation begins an episode, shape ``(n,)``
        :return: Sequences that end with these observations
        """
        columns = environments[:, None]
        before = self._sequences((steps[:, None] + 1 + np.arange(self.n_before), columns))
        rows, starts = steps[:, None] + 1 + self.n_before, starts[:, None]
        now = Sequences(
            map_observations(
                lambda part, rows: part.reshape(len(steps), 1, *rows.shape[2:]), observations, before.observations
            ),
            self.to_torch(self.episodes[rows - 1, columns] + starts),
            self.to_torch(starts),
            *self._outcomes((rows, columns)),
        )
        return joined(before, now)

    def _sequences(self, at: tuple[np.ndarray, np.ndarray], samples: th.Tensor | None = None) -> Sequences:
        """Sequences of some rows and environments, given as two arrays of indices that are broadcast."""
        return Sequences(
            map_observations(lambda rows: self.to_torch(rows[at], copy=False), self.rows),
            self.to_torch(self.episodes[at]),
            self.to_torch(self.starts[at] > 0),
            *self._outcomes(at),
            samples,
        )

    def _outcomes(self, at: tuple[np.ndarray, np.ndarray]) -> tuple[th.Tensor | None, th.Tensor | None]:
        actions, rewards = (
            None if rows is None else self.to_torch(rows[at]) for rows in (self.last_actions, self.last_rewards)
        )
        return actions, rewards

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> RolloutBufferSamples:
        return RolloutBufferSamples(
            self.sequences_of(batch_inds),  # type: ignore[arg-type]
            self.to_torch(self.actions[batch_inds].astype(np.float32, copy=False)),
            *(
                self.to_torch(array[batch_inds].flatten())
                for array in (self.values, self.log_probs, self.advantages, self.returns)
            ),
        )


def segment_length(observation_space: spaces.Space[Any]) -> int:
    """
    :param observation_space: Observation space of a history-based policy
    :return: Number of consecutive steps that are drawn together
    """
    parts = [*observation_space.values()] if isinstance(observation_space, spaces.Dict) else [observation_space]
    has_images = any(len(part.shape or ()) == 3 for part in parts)
    return SEGMENT_OF_IMAGES if has_images else SEGMENT


def shuffled_segments(n_steps: int, n_envs: int, length: int, batch_size: int) -> Iterator[np.ndarray]:
    """
    Draw the minibatches of one epoch as segments of consecutive steps, with every sample once.

    :param n_steps: Number of steps of the rollout in each environment
    :param n_envs: Number of environments
    :param length: Largest number of consecutive steps of an environment in a segment; a rollout is divided into as few
        segments as possible, of nearly equal lengths, since the advantage of a single sample cannot be normalised
    :param batch_size: Number of samples in a minibatch, which consists of as many whole segments as fit, at least one
    :return: Indices of the samples of each minibatch
    """
    of_rollout = np.array_split(np.arange(n_steps), -(-n_steps // length))
    ends = {segment[0]: segment[-1] + 1 for segment in of_rollout}
    starts = np.random.permutation(np.add.outer(np.arange(n_envs) * n_steps, list(ends)).flatten())
    n_minibatches = 1 if n_steps * n_envs <= batch_size else -(-len(starts) // max(batch_size // len(of_rollout[0]), 1))
    for drawn in np.array_split(starts, n_minibatches):
        yield np.concatenate([np.arange(first, first + ends[first % n_steps] - first % n_steps) for first in drawn])


class SequenceRolloutBuffer(SequenceBufferMixin, RolloutBuffer):
    """See :class:`SequenceBufferMixin`."""


class SequenceDictRolloutBuffer(SequenceBufferMixin, DictRolloutBuffer):  # type: ignore[misc]
    """See :class:`SequenceBufferMixin`."""


def _copy_rows(rows: np.ndarray, start: int, n: int) -> np.ndarray:
    return rows[start : start + n].copy()


def _set_rows(rows: np.ndarray, kept: np.ndarray, n: int) -> None:
    rows[:n] = kept


def joined(one: Sequences, other: Sequences) -> Sequences:
    """
    :param one: Sequences
    :param other: Sequences of the steps that follow
    :return: Sequences of all these steps
    """

    def join(*parts: Any) -> Any:
        return None if parts[0] is None else map_observations(lambda *tensors: th.cat(tensors, dim=1), *parts)

    return Sequences(*(join(*parts) for parts in zip(one, other, strict=True)))

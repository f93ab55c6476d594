"""Rollouts for policies with a memory: what came before a sample is read from where it lies, and never copied per sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.type_aliases import PyTorchObs, RolloutBufferSamples

from sb3_ppo_ext.common.observations import map_observations

# Of observations that are copied at once to compute what a policy remembers
MAX_BYTES = 2**23


class Sequences(NamedTuple):
    """
    What a policy with a memory reads: successive steps of several environments, the ``context_length - 1`` steps before the
    first sample of each included.

    :param observations: Shape ``(n_sequences, context_length - 1 + n, *obs_shape)``
    :param episodes: A number for each step, the same for two steps of one episode, shape
        ``(n_sequences, context_length - 1 + n)``
    :param starts: Which steps begin an episode, so that nothing was done before them, shape as ``episodes``
    :param last_actions: What the policy did before each step, encoded, shape
        ``(n_sequences, context_length - 1 + n, n_action_features)``, ``None`` if it does not see that
    :param last_rewards: What it got for that, shape ``(n_sequences, context_length - 1 + n)``, ``None`` likewise
    :param samples: Places among the ``n_sequences * n`` steps that are samples, ``None`` for all of them
    """

    observations: PyTorchObs
    episodes: th.Tensor
    starts: th.Tensor
    last_actions: th.Tensor | None = None
    last_rewards: th.Tensor | None = None
    samples: th.Tensor | None = None


class SequenceBufferMixin(RolloutBuffer):
    """
    A rollout buffer which keeps the last steps before the rollout, and whose samples are :class:`Sequences`. Those of its
    samples that are successive steps of one environment share a sequence.

    Step t of the rollout is in row ``context_length - 1 + t`` of what is kept.

    :param args: See ``RolloutBuffer``
    :param context_length: Steps that the policy sees, the present one included
    :param n_action_features: How many numbers it sees of what it did before
    :param keeps_rewards: Whether it sees what it got for that
    :param kwargs: See ``RolloutBuffer``
    """

    def __init__(
        self, *args: Any, context_length: int, n_action_features: int = 0, keeps_rewards: bool = False, **kwargs: Any
    ):
        self.n_before = context_length - 1
        self.n_action_features, self.keeps_rewards = n_action_features, keeps_rewards
        self.rows: Any = None
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        """Forget the rollout, but for its last steps, after which the next one begins."""
        if self.rows is None:
            self._allocate()
        else:
            self._keep_last_rows()
        super().reset()
        # Views, into which SB3's methods write
        self.observations = map_observations(lambda rows: rows[self.n_before :], self.rows)
        self.episode_starts = self.starts[self.n_before :]

    def _allocate(self) -> None:
        n_rows, space = self.n_before + self.buffer_size, self.observation_space
        dtypes = {key: part.dtype for key, part in space.items()} if isinstance(space, spaces.Dict) else space.dtype
        self.rows = map_observations(
            lambda shape, dtype: np.zeros((n_rows, self.n_envs, *shape), dtype), self.obs_shape, dtypes
        )
        self.starts = np.zeros((n_rows, self.n_envs), np.float32)
        # A number for each, the same for those of one episode, and -1 where nothing was yet
        self.episodes = np.full((n_rows, self.n_envs), -1)
        # Of what was before the observation of the same row; one more, for the first step of the next rollout
        self.last_actions, self.last_rewards = None, None
        if self.n_action_features > 0:
            self.last_actions = np.zeros((n_rows + 1, self.n_envs, self.n_action_features), np.float32)
        if self.keeps_rewards:
            self.last_rewards = np.zeros((n_rows + 1, self.n_envs), np.float32)

    def _keep_last_rows(self) -> None:
        def keep(rows: np.ndarray | None, n: int) -> None:
            if rows is not None:
                rows[:n] = rows[self.pos : self.pos + n]

        map_observations(lambda rows: keep(rows, self.n_before), self.rows)
        keep(self.starts, self.n_before)
        keep(self.episodes, self.n_before)
        keep(self.last_actions, self.n_before + 1)
        keep(self.last_rewards, self.n_before + 1)

    def keep_observations(self, step: int, observations: Any, starts: np.ndarray) -> None:
        """
        As :meth:`add` will, but before the environments go on.

        :param step: Of the rollout
        :param observations: As the environments returned them, shape ``(n_envs, *obs_shape)``
        :param starts: Whether they begin an episode, shape ``(n_envs,)``
        """

        def keep(rows: np.ndarray, part: np.ndarray) -> None:
            rows[self.n_before + step] = np.reshape(part, rows.shape[1:])

        map_observations(keep, self.rows, observations)
        row = self.n_before + step
        self.starts[row] = starts
        # What came before is not known at first: it is of another episode than this one even if that does not begin here.
        self.episodes[row] = np.maximum(self.episodes[row - 1], 0) + np.asarray(starts, bool)

    def add(self, obs: Any, action: np.ndarray, reward: np.ndarray, episode_start: np.ndarray, *args: Any) -> None:
        """See ``RolloutBuffer``."""
        self.keep_observations(self.pos, obs, episode_start)
        super().add(obs, action, reward, episode_start, *args)

    def keep_outcome(self, step: int, actions: np.ndarray | None, rewards: np.ndarray) -> None:
        """
        :param step: Of the rollout
        :param actions: What the policy did, encoded, shape ``(n_envs, n_action_features)``
        :param rewards: What it got for it, before anything is added to that, shape ``(n_envs,)``
        """
        if self.last_actions is not None:
            self.last_actions[self.n_before + step + 1] = actions
        if self.last_rewards is not None:
            self.last_rewards[self.n_before + step + 1] = rewards

    # What the policy reads

    def sequences_of(self, places: np.ndarray) -> Sequences:
        """
        :param places: Of samples in the flattened rollout, ``env * buffer_size + step``
        :return: What the policy reads for them, in this order
        """
        environments, steps = np.divmod(places, self.buffer_size)
        begins = np.flatnonzero(np.r_[True, (np.diff(places) != 1) | (steps[1:] == 0)])
        lengths = np.diff(np.r_[begins, len(places)])
        longest = lengths.max()
        rows = steps[begins, None] + np.arange(self.n_before + longest)
        # Past the end of a shorter one comes anything
        rows = np.minimum(rows, self.n_before + self.buffer_size - 1)
        samples = None
        if lengths.min() < longest:
            samples = th.from_numpy(np.flatnonzero(np.arange(longest) < lengths[:, None])).to(self.device)
        return self._sequences((rows, environments[begins, None]), samples)

    def sequences_at(self, step: int) -> Sequences:
        """
        :param step: Of the rollout
        :return: This step alone, of all environments
        """
        return self._sequences((np.array([[self.n_before + step]]), np.arange(self.n_envs)[:, None]))

    def sequences_before(self, step: int) -> Iterator[Sequences]:
        """
        :param step: Of the rollout
        :return: The ``context_length - 1`` steps before it, of some environments after the others, so that not many images are
            copied at once
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
        :param steps: Of the rollout, shape ``(n,)``
        :param environments: Shape ``(n,)``
        :param observations: Which follow these steps, on the device, shape ``(n, *obs_shape)``
        :param starts: Whether they begin an episode, shape ``(n,)``
        :return: What the policy reads when it sees them
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
        """Of some rows and environments, as indices that are broadcast."""
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


class SequenceRolloutBuffer(SequenceBufferMixin, RolloutBuffer):
    """See :class:`SequenceBufferMixin`."""


class SequenceDictRolloutBuffer(SequenceBufferMixin, DictRolloutBuffer):  # type: ignore[misc]
    """See :class:`SequenceBufferMixin`."""


def joined(one: Sequences, other: Sequences) -> Sequences:
    """
    :param one: Some steps
    :param other: Those that follow
    :return: All of them
    """

    def join(*parts: Any) -> Any:
        return None if parts[0] is None else map_observations(lambda *tensors: th.cat(tensors, dim=1), *parts)

    return Sequences(*(join(*parts) for parts in zip(one, other, strict=True)))

"""Memory of a transformer policy: the steps before the rollout, so that successive samples share their history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.weight_watch import WeightWatch
from sb3_ppo_ext.memory.context_watch import ContextWatch
from sb3_ppo_ext.memory.history import Output, RolloutMemory, RolloutRows, Stepper, permutation
from sb3_ppo_ext.memory.transformer import Cache

# Size of the observations that are copied at once to fill the caches of a policy, in bytes
MAX_BYTES = 2**23
# Number of consecutive steps that a history-based policy draws together. Successive steps are alike, so that long segments
# leave few independent samples in a minibatch. The steps that the policy sees before each segment are cheap, unless images.
SEGMENT, SEGMENT_OF_IMAGES = 8, 32


class Sequences(NamedTuple):
    """
    Input of a history-based policy: successive steps of several environments, including the ``context_length - 1`` steps
    before the first sample of each sequence. The last ``n`` steps of all sequences are the samples.

    :param observations: Observations, shape ``(n_sequences, context_length - 1 + n, *obs_shape)``
    :param episodes: Episode number of each step, the same for two steps of one episode, shape
        ``(n_sequences, context_length - 1 + n)``
    :param starts: Whether each step begins an episode, so that it has no last action and reward, shape
        ``(n_sequences, context_length - 1 + n)``
    :param last_actions: Encoded action before each step, shape
        ``(n_sequences, context_length - 1 + n, n_action_features)``; ``None`` if the policy does not see it
    :param last_rewards: Reward of this action, shape ``(n_sequences, context_length - 1 + n)``; ``None`` if the policy does
        not see it
    """

    observations: PyTorchObs
    episodes: th.Tensor
    starts: th.Tensor
    last_actions: th.Tensor | None = None
    last_rewards: th.Tensor | None = None


class WindowMemory(RolloutMemory):
    """
    Keeps the last ``context_length - 1`` steps before the rollout, and makes :class:`Sequences`. Samples that are successive
    steps of one environment share a sequence.

    Step t of the rollout is in row ``context_length - 1 + t`` of the tensors with the earlier steps.

    :param context_length: Number of observations that the policy sees, including the current one
    :param n_action_features: Number of inputs that encode the last action, 0 if the policy does not see it
    :param keeps_rewards: Whether the policy sees the last reward
    """

    def __init__(self, context_length: int, n_action_features: int = 0, keeps_rewards: bool = False):
        self.context_length, self.n_before = context_length, context_length - 1
        self.n_action_features, self.keeps_rewards = n_action_features, keeps_rewards
        self.context_watch: ContextWatch | None = None

    def allocate(self, rows: RolloutRows) -> None:
        super().allocate(rows)
        n_rows, n_envs, device = self.n_before + rows.n_steps, rows.n_envs, rows.storage
        if self.context_watch is None:
            self.context_watch = ContextWatch(self.context_length, n_envs)
        # Episode number of each step, -1 in rows that have not been filled yet
        self.episodes = th.full((n_rows, n_envs), -1, device=device)
        # Last action and reward before the observation in the same row; one more row for the first step of the next rollout
        self.last_actions: th.Tensor | None = None
        self.last_rewards: th.Tensor | None = None
        if self.n_action_features > 0:
            self.last_actions = th.zeros((n_rows + 1, n_envs, self.n_action_features), device=device)
        if self.keeps_rewards:
            self.last_rewards = th.zeros((n_rows + 1, n_envs), device=device)

    def kept(self) -> list[tuple[PyTorchObs | None, int]]:
        """:return: Tensors with the steps before the rollout, and how many of their rows precede it"""
        one_more = self.n_before + 1
        of_observations = [(part, self.n_before) for part in (self.rows.observations, self.rows.starts, self.episodes)]
        return [*of_observations, (self.last_actions, one_more), (self.last_rewards, one_more)]

    def continue_from(self, before: RolloutMemory) -> None:
        if isinstance(before, WindowMemory):
            self.context_watch = before.context_watch

    # While a rollout is collected

    def stepper(self, is_watched: bool) -> Stepper:
        return CachedSteps(self, is_watched)

    def observe(self, step: int) -> None:
        row = self.n_before + step
        # Rows that have not been filled (-1) belong to another episode than this one, even if it does not begin at this step.
        self.episodes[row] = self.episodes[row - 1].clamp(min=0) + (self.rows.starts[row] > 0)

    def note_outcome(self, policy: Any, step: int, actions: Arrays, rewards: Arrays) -> None:
        """Store the actions and rewards of a step, which are the last ones at the next step."""
        if self.last_actions is not None:
            encode = policy.encode_action_tensors if isinstance(actions, th.Tensor) else policy.encode_actions
            self.last_actions[self.n_before + step + 1].copy_(th.as_tensor(encode(actions)))
        if self.last_rewards is not None:
            self.last_rewards[self.n_before + step + 1].copy_(th.as_tensor(rewards))

    def note_episodes(self, starts: np.ndarray, dones: np.ndarray, num_timesteps: int) -> None:
        """Warn once if episodes are longer than the context."""
        assert self.context_watch is not None
        self.context_watch.note(starts, dones, num_timesteps)

    # Sequences for the policy

    def draws(self, step_size: int, batch_size: int) -> tuple[Iterator[th.Tensor], int]:
        """Draw blocks of equal length, as many whole ones in a step as fit."""
        n_steps, device = self.rows.n_steps, self.rows.storage
        longest = min(segment_length(self.rows.observations), n_steps, batch_size)
        length = next(n for n in range(longest, 0, -1) if n_steps % n == 0)
        n_blocks = n_steps * self.rows.n_envs // length
        # Nearly equal numbers of blocks, since the advantage of a single sample cannot be normalised
        n_draws = -(-n_blocks // max(step_size // length, 1))
        blocks = permutation(n_blocks, device).unsqueeze(1) * length + th.arange(length, device=device)
        return (part.flatten() for part in blocks.tensor_split(n_draws)), length

    def inputs(self, indices: th.Tensor, length: int) -> Sequences:
        """:return: Sequences with these samples, those of a block in one sequence"""
        n_steps, device = self.rows.n_steps, self.rows.storage
        firsts = indices.to(device, non_blocking=True)[::length].unsqueeze(1)
        columns = firsts // n_steps
        rows = firsts % n_steps + th.arange(self.n_before + length, device=device)
        return self._sequences(lambda part: part[rows, columns])

    def sequences_at(self, step: int) -> Sequences:
        """
        :param step: Index of the step in the rollout
        :return: Sequences of only this step, one for each environment
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
        map_observations(lambda rows: n_bytes.append(rows[0, 0].nbytes * self.n_before), self.rows.observations)
        size = max(MAX_BYTES // max(sum(n_bytes), 1), 1)
        for first in range(0, self.rows.n_envs, size):
            some = slice(first, first + size)
            yield self._sequences(lambda rows, some=some: rows[step : step + self.n_before, some].transpose(0, 1))

    def after(self, rows: th.Tensor, observations: Arrays, starts: th.Tensor) -> Sequences:
        """:return: Sequences that end with these observations"""
        device, storage, n_envs = self.rows.device, self.rows.storage, self.rows.n_envs
        rows, starts = rows.to(storage), starts.to(device).bool().unsqueeze(1)
        columns, steps = (rows % n_envs).unsqueeze(1), (rows // n_envs).unsqueeze(1) + 1
        earlier, at = steps + th.arange(self.n_before, device=storage), steps + self.n_before
        before = self._sequences(lambda part: part[earlier, columns])
        now = Sequences(
            map_observations(
                lambda part, like: part.reshape(len(rows), 1, *like.shape[2:]), observations, before.observations
            ),
            self.episodes[at - 1, columns].to(device) + starts,
            starts,
            *(None if part is None else part[at, columns].to(device) for part in (self.last_actions, self.last_rewards)),
        )
        return joined(before, now)

    def _sequences(self, take: Any) -> Sequences:
        """Sequences of the rows that a function takes from a tensor."""
        rows, device = self.rows, self.rows.device
        outcomes = (None if part is None else take(part).to(device) for part in (self.last_actions, self.last_rewards))
        observations = map_observations(lambda part: take(part).to(device), rows.observations)
        return Sequences(observations, take(self.episodes).to(device), (take(rows.starts) > 0).to(device), *outcomes)


class CachedSteps(Stepper):
    """
    Evaluates a transformer policy step by step. Each step is computed once. If parameters change during the rollout, the steps
    that the policy can still see are computed again.

    :param memory: Memory with the sequences
    :param is_watched: Whether user code may change parameters in ways that torch does not track
    """

    def __init__(self, memory: WindowMemory, is_watched: bool):
        self.memory = memory
        self.weights = WeightWatch(by_value=is_watched)
        self.caches: list[Cache] = []

    def __call__(self, policy: Any, observations: object, starts: object, step: int) -> Output:
        if self.weights.have_changed(policy):
            self.caches = self._filled_caches(policy, step)
        output: Output = policy.act(self.memory.sequences_at(step), self.caches)
        return output

    def _filled_caches(self, policy: Any, step: int) -> list[Cache]:
        """Caches of the transformers, filled with the steps before this one."""
        memory, transformers = self.memory, policy.transformers()
        capacity = memory.n_before + memory.rows.n_steps - step
        caches = [Cache(transformer, memory.rows.n_envs, capacity) for _, transformer in transformers]
        if memory.n_before == 0:
            return caches
        inputs: list[list[th.Tensor]] = [[] for _ in transformers]
        episodes = []
        for sequences in memory.sequences_before(step):
            episodes.append(sequences.episodes)
            for parts, (extractor, _) in zip(inputs, transformers, strict=True):
                parts.append(policy.inputs(sequences, extractor))
        for parts, (_, transformer), cache in zip(inputs, transformers, caches, strict=True):
            transformer(th.cat(parts), th.cat(episodes), cache)
        return caches


def segment_length(observations: object) -> int:
    """
    :param observations: Observations of a rollout, shape ``(n_steps, n_envs, *obs_shape)``
    :return: Largest number of consecutive steps that are drawn together
    """
    has_images: list[bool] = []
    map_observations(lambda part: has_images.append(part.ndim == 5), observations)
    return SEGMENT_OF_IMAGES if any(has_images) else SEGMENT


def joined(one: Sequences, other: Sequences) -> Sequences:
    """
    :param one: Sequences
    :param other: Sequences of the steps that follow
    :return: Sequences of all these steps
    """

    def join(*parts: Arrays) -> Arrays:
        return None if parts[0] is None else map_observations(lambda *tensors: th.cat(tensors, dim=1), *parts)

    return Sequences(*(join(*parts) for parts in zip(one, other, strict=True)))

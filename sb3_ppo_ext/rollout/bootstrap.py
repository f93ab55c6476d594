"""Bootstrapping: values of the observations after the last step of a rollout and at the end of truncated episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.common.observations import map_observations, stack
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.policies.normalized_observations import inputs_of
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer, TruncatedEpisodes


def last_values(policy: ActorCriticPolicy, buffer: RolloutBuffer, observations: Arrays, starts: Arrays) -> th.Tensor:
    """
    :param policy: Policy with the critic that computes the values
    :param buffer: Buffer with the rollout
    :param observations: Observations after the last step, arrays or tensors
    :param starts: Whether each of these observations starts an episode, shape ``(n_envs,)``
    :return: Values of the observations, shape ``(n_envs, 1)``
    """
    rows = (buffer.buffer_size - 1) * buffer.n_envs + np.arange(buffer.n_envs)
    tensors = map_observations(lambda part: th.as_tensor(part, device=policy.device), observations)
    return policy.predict_values(_after(buffer, rows, tensors, starts))


def terminal_values(
    policy: ActorCriticPolicy,
    buffer: RolloutBuffer,
    rows: Sequence[int],
    observations: Sequence[np.ndarray | dict[str, np.ndarray]],
    batched: bool,
) -> TruncatedEpisodes:
    """
    :param policy: Policy with the critic that computes the values
    :param buffer: Buffer with the rollout
    :param rows: Positions of the last steps of the episodes in the flattened rollout, ``step * n_envs + environment``
    :param observations: Terminal observations of these episodes, as the environments returned them
    :param batched: Whether to evaluate all observations in one call. A batch changes the last bit of most values (it
        multiplies matrices, not vectors)
    :return: The episodes with the values of their terminal observations
    """
    n, tensors, values = len(rows), [], []
    for part in [slice(n)] if batched else [slice(i, i + 1) for i in range(n)]:
        tensors.append(inputs_of(policy, stack(observations[part]))[0])
        going_on = np.zeros(len(rows[part]), bool)
        with th.no_grad():
            values.append(policy.predict_values(_after(buffer, np.array(rows[part]), tensors[-1], going_on)))
    joined = map_observations(lambda *parts: th.cat(parts), *tensors)
    return TruncatedEpisodes(th.tensor(rows).to(policy.device), joined, th.cat(values).flatten())


def values_again(policy: ActorCriticPolicy, buffer: RolloutBuffer, episodes: TruncatedEpisodes) -> th.Tensor:
    """
    :param policy: Policy with the current critic
    :param buffer: Buffer with the rollout
    :param episodes: Truncated episodes of the rollout
    :return: Values of their terminal observations, shape ``(n,)``
    """
    going_on = th.zeros_like(episodes.rows, dtype=th.bool)
    return policy.predict_values(_after(buffer, episodes.rows, episodes.observations, going_on)).flatten()


def in_one_batch(
    policy: ActorCriticPolicy, buffer: TensorRolloutBuffer, episodes: TruncatedEpisodes, rewards: th.Tensor, gamma: float
) -> TruncatedEpisodes:
    """
    Evaluate terminal observations in one batch whose values have been added to the rewards step by step, since user code may
    read them: the last bit of the values is then the same as without user code.

    :param policy: Policy that has not changed in the rollout
    :param buffer: Buffer with the rollout. Rewards that user code has changed stay
    :param episodes: Truncated episodes with the values that have been added
    :param rewards: Their last rewards without these values, shape ``(n,)``
    :param gamma: Discount factor
    :return: The episodes with the values of the batch
    """
    with th.no_grad():
        values = values_again(policy, buffer, episodes)
    all_rewards = buffer.tensors["rewards"].view(-1)
    found = all_rewards[episodes.rows]
    is_untouched = found == rewards + gamma * episodes.values
    all_rewards[episodes.rows] = th.where(is_untouched, rewards + gamma * values, found)
    return episodes._replace(values=values)


def joined(episodes: Sequence[TruncatedEpisodes]) -> TruncatedEpisodes:
    """
    :param episodes: Truncated episodes, at least one part
    :return: All of them as one
    """
    rows, observations, values = zip(*episodes, strict=True)
    return TruncatedEpisodes(th.cat(rows), map_observations(lambda *parts: th.cat(parts), *observations), th.cat(values))


def _after(buffer: RolloutBuffer, rows: Arrays, observations: Arrays, starts: Arrays) -> Any:
    """Inputs of the policy for observations that follow the given steps."""
    if not isinstance(buffer, TensorRolloutBuffer) or buffer.memory is None:
        return observations
    device = buffer.device
    return buffer.after(th.as_tensor(rows).to(device), observations, th.as_tensor(starts).to(device))

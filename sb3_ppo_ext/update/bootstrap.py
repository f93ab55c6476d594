"""Bootstrapping: values of the observations after the last step of a rollout and at the end of truncated episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from sb3_ppo_ext.common.observations import stack
from sb3_ppo_ext.memory.history import HistoryBuffer
from sb3_ppo_ext.policies.normalized_observations import inputs_of


class Truncation(NamedTuple):
    """
    A truncated episode.

    :param step: Step of the rollout at which the episode was truncated
    :param environment: Index of the environment
    :param observation: Terminal observation of the episode, as the environment returned it
    :param value: Value of the terminal observation when it was collected
    """

    step: int
    environment: int
    observation: Any
    value: float


def last_values(policy: ActorCriticPolicy, buffer: RolloutBuffer, observations: Any, starts: np.ndarray) -> th.Tensor:
    """
    :param policy: Policy with the critic that computes the values
    :param buffer: Buffer with the rollout
    :param observations: Observations after the last step, as the environments returned them
    :param starts: Whether each of these observations starts an episode, shape ``(n_envs,)``
    :return: Values of the observations, shape ``(n_envs, 1)``
    """
    n_envs = buffer.n_envs
    steps = np.full(n_envs, buffer.buffer_size - 1)
    tensors = obs_as_tensor(observations, policy.device)
    return policy.predict_values(_after(buffer, tensors, steps, np.arange(n_envs), starts))


def terminal_values(
    policy: ActorCriticPolicy,
    buffer: RolloutBuffer,
    steps: Sequence[int],
    environments: Sequence[int],
    observations: Sequence[Any],
    batched: bool,
) -> th.Tensor:
    """
    :param policy: Policy with the critic that computes the values
    :param buffer: Buffer with the rollout
    :param steps: Steps of the rollout at which episodes were truncated, length n
    :param environments: Indices of the environments of these episodes, length n
    :param observations: Terminal observations of these episodes, as the environments returned them, length n
    :param batched: Whether to evaluate all observations in one call. A batch changes the last bit of most values (it
        multiplies matrices, not vectors)
    :return: Values of the terminal observations, shape ``(n, 1)``, on the CPU
    """
    n, values = len(observations), []
    for part in [slice(n)] if batched else [slice(i, i + 1) for i in range(n)]:
        tensors = inputs_of(policy, stack(observations[part]))[0]
        going_on = np.zeros(len(steps[part]), bool)
        with th.no_grad():
            values.append(policy.predict_values(_after(buffer, tensors, steps[part], environments[part], going_on)))
    return th.cat(values).cpu()


def change_of_terminal_values(
    policy: ActorCriticPolicy, buffer: RolloutBuffer, truncations: Sequence[Truncation], gamma: float
) -> np.ndarray:
    """
    :param policy: Policy with the current critic
    :param buffer: Buffer with the rollout
    :param truncations: Truncated episodes of the rollout
    :param gamma: Discount factor
    :return: Change of the bootstrapped rewards if the current critic evaluates the terminal observations, shape
        ``(n_steps, n_envs)``
    """
    change = np.zeros_like(buffer.rewards)
    if truncations:
        steps, environments, observations, old_values = zip(*truncations, strict=True)
        values = terminal_values(policy, buffer, steps, environments, observations, batched=True).numpy().flatten()
        change[list(steps), list(environments)] = gamma * (values - np.array(old_values))
    return change


def _after(buffer: RolloutBuffer, observations: Any, steps: Any, environments: Any, starts: Any) -> Any:
    """Inputs of the policy for observations that follow the given steps of the given environments."""
    if not isinstance(buffer, HistoryBuffer):
        return observations
    return buffer.sequences_after(np.array(steps), np.array(environments), observations, np.array(starts, bool))

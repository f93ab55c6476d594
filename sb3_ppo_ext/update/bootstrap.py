"""Values of observations that are not in the rollout buffer: those after its last step, and those that end episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from sb3_ppo_ext.common.observations import stack
from sb3_ppo_ext.memory.sequence_buffers import SequenceBufferMixin


class Truncation(NamedTuple):
    """
    An episode that a time limit cut off.

    :param step: Step of the rollout at which it ended
    :param environment: Index of the environment
    :param observation: Its last observation, as the environment returned it
    :param value: Value of this observation when it was collected
    """

    step: int
    environment: int
    observation: Any
    value: float


def last_values(policy: ActorCriticPolicy, buffer: RolloutBuffer, observations: Any, starts: np.ndarray) -> th.Tensor:
    """
    :param policy: Whose critic is asked
    :param buffer: With the rollout
    :param observations: Those after the last step, as the environments returned them
    :param starts: Which of them begin an episode, shape ``(n_envs,)``
    :return: Their values, shape ``(n_envs, 1)``
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
    :param policy: Whose critic is asked
    :param buffer: With the rollout
    :param steps: Steps of the rollout at which episodes were cut off
    :param environments: Indices of their environments
    :param observations: Their last observations, as the environments returned them
    :param batched: Whether to evaluate all of them in one call. A batch changes the last bit of most values (it multiplies
        matrices, not vectors)
    :return: The values, shape ``(len(observations), 1)``, on the CPU
    """
    n, values = len(observations), []
    for part in [slice(n)] if batched else [slice(i, i + 1) for i in range(n)]:
        tensors = policy.obs_to_tensor(stack(observations[part]))[0]
        going_on = np.zeros(len(steps[part]), bool)
        with th.no_grad():
            values.append(policy.predict_values(_after(buffer, tensors, steps[part], environments[part], going_on)))
    return th.cat(values).cpu()


def change_of_terminal_values(
    policy: ActorCriticPolicy, buffer: RolloutBuffer, truncations: Sequence[Truncation], gamma: float
) -> np.ndarray:
    """
    :param policy: With the current critic
    :param buffer: With the rollout
    :param truncations: The episodes that a time limit cut off in it
    :param gamma: Discount factor
    :return: What the rewards of the rollout would change by if the current critic had valued the last observations of these
        episodes, shape ``(n_steps, n_envs)``
    """
    change = np.zeros_like(buffer.rewards)
    if truncations:
        steps, environments, observations, old_values = zip(*truncations, strict=True)
        values = terminal_values(policy, buffer, steps, environments, observations, batched=True).numpy().flatten()
        change[list(steps), list(environments)] = gamma * (values - np.array(old_values))
    return change


def _after(buffer: RolloutBuffer, observations: Any, steps: Any, environments: Any, starts: Any) -> Any:
    """What the policy reads of observations that came after some steps of some environments."""
    if not isinstance(buffer, SequenceBufferMixin):
        return observations
    return buffer.sequences_after(np.array(steps), np.array(environments), observations, np.array(starts, bool))

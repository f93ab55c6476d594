"""What acts while a rollout is collected, and what it records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.memory.sequences import SequenceBufferMixin
from sb3_ppo_ext.memory.transformer import Cache
from sb3_ppo_ext.rollout.weights import WeightWatch
from sb3_ppo_ext.update.bootstrap import Truncation, last_values, terminal_values


@dataclass(frozen=True)
class RolloutConfig:
    """
    The options of one rollout.

    :param n_steps: Steps to collect in each environment
    :param gamma: Discount factor
    :param action_space: Of one environment
    :param device: Of the policy
    :param num_timesteps: Steps of the training when the rollout begins, for messages
    :param is_watched: Whether code of users may read or change anything at each step: values and log probabilities are then
        computed step by step, with the parameters as they are at the time
    :param truncations: Where episodes that a time limit cut off are noted, ``None`` if nobody will ask for them
    """

    n_steps: int
    gamma: float
    action_space: spaces.Space
    device: th.device
    num_timesteps: int = 0
    is_watched: bool = True
    truncations: list[Truncation] | None = None


class Action(NamedTuple):
    """
    What the policy does at a step.

    :param obs_tensor: The observations on the device, ``None`` if nobody can see them
    :param samples: What the buffer keeps of the actions, shape ``(n_envs, *action_shape)``
    :param values: Shape ``(n_envs, 1)``, ``None`` if they are computed later
    :param log_probs: Shape ``(n_envs,)``, ``None`` if they are computed later
    """

    obs_tensor: Any
    samples: np.ndarray
    values: th.Tensor | None
    log_probs: th.Tensor | None


class Transition(NamedTuple):
    """
    What came of an action.

    :param step: Step of the rollout
    :param observations: Those that the policy acted on, as the environments returned them
    :param starts: Whether they begin an episode, shape ``(n_envs,)``
    :param action: What the policy did
    :param env_actions: What the environments got, shape ``(n_envs, *action_shape)``
    :param rewards: Shape ``(n_envs,)``
    :param truncated: Index and last observation of each environment whose episode was cut off by a time limit
    """

    step: int
    observations: Any
    starts: np.ndarray
    action: Action
    env_actions: np.ndarray
    rewards: np.ndarray
    truncated: Sequence[tuple[int, Any]] = ()


class Actor(Protocol):
    """Acts, and fills the rollout buffer. The policy is given at each step, for a callback may replace it."""

    def act(self, policy: ActorCriticPolicy, observations: Any, starts: np.ndarray, step: int) -> Action:
        """
        :param policy: As it is now
        :param observations: As the environments returned them, shape ``(n_envs, *obs_shape)``
        :param starts: Whether they begin an episode, shape ``(n_envs,)``
        :param step: Step of the rollout
        :return: What it does
        """

    def record(self, policy: ActorCriticPolicy, transition: Transition) -> None:
        """
        :param policy: As it is now
        :param transition: What came of the last action
        """

    def finish(self, policy: ActorCriticPolicy, observations: Any, dones: np.ndarray) -> th.Tensor:
        """
        Estimate advantages and returns.

        :param policy: As it is now
        :param observations: Those after the last step
        :param dones: Whether the last step ended an episode, shape ``(n_envs,)``
        :return: Their values, shape ``(n_envs, 1)``
        """


class PolicyActor(Actor):
    """
    One call of the policy at each step, as SB3 does it.

    :param buffer: To be filled
    :param config: Options of the rollout
    """

    def __init__(self, buffer: RolloutBuffer, config: RolloutConfig):
        self.buffer, self.config = buffer, config

    def act(self, policy: ActorCriticPolicy, observations: Any, starts: np.ndarray, step: int) -> Action:
        with th.no_grad():
            obs_tensor = obs_as_tensor(observations, self.config.device)
            actions, values, log_probs = self._evaluate(policy, obs_tensor, starts, step)
        return Action(obs_tensor, actions.cpu().numpy(), values, log_probs)

    def _evaluate(
        self, policy: ActorCriticPolicy, obs_tensor: Any, starts: np.ndarray, step: int
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        return policy(obs_tensor)

    def record(self, policy: ActorCriticPolicy, transition: Transition) -> None:
        self._bootstrap(policy, transition)
        _, samples, values, log_probs = transition.action
        assert values is not None
        assert log_probs is not None
        self.buffer.add(transition.observations, samples, transition.rewards, transition.starts, values, log_probs)

    def _bootstrap(self, policy: ActorCriticPolicy, transition: Transition) -> None:
        """
        Add the discounted value of the terminal observation to the reward of each episode that was cut off by a time
        limit, for it would have gone on (`issue #633 <https://github.com/DLR-RM/stable-baselines3/issues/633>`_).
        """
        if not transition.truncated:
            return
        environments, observations = zip(*transition.truncated, strict=True)
        # The CPU takes them one by one as SB3 does, to the bit. Elsewhere one call for all saves a wait for the device per
        # environment.
        steps, batched = [transition.step] * len(environments), self.config.device.type != "cpu"
        values = terminal_values(policy, self.buffer, steps, environments, observations, batched)
        for index, value in zip(environments, values, strict=True):
            transition.rewards[index] += self.config.gamma * value
        note_truncations(self.config, steps, environments, observations, values.flatten().tolist())

    def finish(self, policy: ActorCriticPolicy, observations: Any, dones: np.ndarray) -> th.Tensor:
        with th.no_grad():
            values = last_values(policy, self.buffer, observations, dones)
        self.buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        return values


class HistoryActor(PolicyActor):
    """
    Evaluates a history-based policy step by step. Each step is computed once, unless the parameters change in the middle of
    the rollout: then the steps that the policy can still see are computed again.

    :param buffer: To be filled
    :param config: Options of the rollout
    """

    buffer: SequenceBufferMixin

    def __init__(self, buffer: RolloutBuffer, config: RolloutConfig):
        super().__init__(buffer, config)
        self.weights = WeightWatch(by_value=config.is_watched)
        self.caches: list[Cache] = []

    def _evaluate(self, policy: Any, obs_tensor: Any, starts: np.ndarray, step: int) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        if self.weights.have_changed(policy):
            self.caches = self._filled_caches(policy, step)
        self.buffer.keep_observations(step, map_observations(lambda part: part.cpu().numpy(), obs_tensor), starts)
        return policy.act(self.buffer.sequences_at(step), self.caches)

    def _filled_caches(self, policy: Any, step: int) -> list[Cache]:
        """What the transformers have computed of the steps before this one."""
        buffer, transformers = self.buffer, policy.transformers()
        capacity = buffer.n_before + buffer.buffer_size - step
        caches = [Cache(transformer, buffer.n_envs, capacity) for _, transformer in transformers]
        if buffer.n_before == 0:
            return caches
        inputs: list[list[th.Tensor]] = [[] for _ in transformers]
        episodes = []
        for sequences in buffer.sequences_before(step):
            episodes.append(sequences.episodes)
            for parts, (extractor, _) in zip(inputs, transformers, strict=True):
                parts.append(policy.inputs(sequences, extractor))
        for parts, (_, transformer), cache in zip(inputs, transformers, caches, strict=True):
            transformer(th.cat(parts), th.cat(episodes), cache)
        return caches

    def record(self, policy: Any, transition: Transition) -> None:
        encoded = policy.encode_actions(transition.env_actions) if policy.use_last_action else None
        # Before the rewards are bootstrapped
        self.buffer.keep_outcome(transition.step, encoded, transition.rewards)
        super().record(policy, transition)


def note_truncations(
    config: RolloutConfig,
    steps: Sequence[int],
    environments: Sequence[int],
    observations: Sequence[Any],
    values: Sequence[float],
) -> None:
    """
    :param config: With the list to add to, if there is one
    :param steps: Steps of the rollout at which episodes were cut off
    :param environments: Indices of their environments
    :param observations: Their last observations
    :param values: The values of these
    """
    if config.truncations is not None:
        config.truncations.extend(map(Truncation, steps, environments, observations, values))

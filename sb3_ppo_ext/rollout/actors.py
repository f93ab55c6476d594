"""Actors, which choose actions and record transitions while a rollout is collected."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.weight_watch import WeightWatch
from sb3_ppo_ext.envs.parallel.share_rollout import ShareActor, ShareRollout
from sb3_ppo_ext.memory.policies import TransformerPolicyMixin
from sb3_ppo_ext.memory.recurrence import RecurrentStates
from sb3_ppo_ext.memory.recurrent_buffers import RecurrentBufferMixin
from sb3_ppo_ext.memory.sequence_buffers import SequenceBufferMixin
from sb3_ppo_ext.memory.transformer import Cache
from sb3_ppo_ext.update.bootstrap import Truncation, last_values, terminal_values


@dataclass(frozen=True)
class RolloutConfig:
    """
    Options of one rollout.

    :param n_steps: Number of steps to collect in each environment
    :param action_space: Space of the samples of the policy for a single environment
    :param device: Device of the policy
    :param num_timesteps: Number of timesteps trained before the rollout, for messages
    :param is_watched: Whether user code may read or change anything at each step: values and log probabilities are then
        computed at each step, with the current parameters
    :param truncations: List that truncated episodes are added to, ``None`` if they are not needed
    """

    n_steps: int
    action_space: spaces.Space
    device: th.device
    num_timesteps: int = 0
    is_watched: bool = True
    truncations: list[Truncation] | None = None


class Action(NamedTuple):
    """
    The output of the policy at a step.

    :param obs_tensor: Observations on the device of the policy, ``None`` if no user code can read them
    :param samples: Actions, or latents of a bounded distribution, as stored in the buffer, shape ``(n_envs, *action_shape)``
    :param values: Values of the observations, shape ``(n_envs, 1)``, ``None`` if they are computed later
    :param log_probs: Log probabilities of the samples, shape ``(n_envs,)``, ``None`` if they are computed later
    """

    obs_tensor: Any
    samples: np.ndarray
    values: th.Tensor | None
    log_probs: th.Tensor | None


class Transition(NamedTuple):
    """
    A step of the environments.

    :param step: Step of the rollout
    :param observations: Observations before the step, as the environments returned them, shape ``(n_envs, *obs_shape)``
    :param starts: Whether each observation starts an episode, shape ``(n_envs,)``
    :param action: Output of the policy for these observations
    :param env_actions: Actions within the bounds, shape ``(n_envs, *action_shape)``; vectors for a ``Dict`` or ``Tuple``
    :param rewards: Rewards of the step, shape ``(n_envs,)``
    :param gamma: Discount factor
    :param truncated: Index of the environment and terminal observation of each truncated episode
    """

    step: int
    observations: Any
    starts: np.ndarray
    action: Action
    env_actions: np.ndarray
    rewards: np.ndarray
    gamma: float
    truncated: Sequence[tuple[int, Any]] = ()


class Actor(Protocol):
    """Chooses actions and fills the rollout buffer. The policy is passed at each step, since a callback may replace it."""

    def act(self, policy: ActorCriticPolicy, observations: Any, starts: np.ndarray, step: int) -> Action:
        """
        Choose the actions of a step.

        :param policy: Current policy
        :param observations: Observations as the environments returned them, shape ``(n_envs, *obs_shape)``
        :param starts: Whether each observation starts an episode, shape ``(n_envs,)``
        :param step: Step of the rollout
        :return: Output of the policy
        """

    def record(self, policy: ActorCriticPolicy, transition: Transition) -> None:
        """
        Record a step in the buffer.

        :param policy: Current policy
        :param transition: Step of the environments after the last :meth:`act`
        """

    def finish(self, policy: ActorCriticPolicy, observations: Any, dones: np.ndarray) -> th.Tensor:
        """
        Estimate advantages and returns at the end of the rollout.

        :param policy: Current policy
        :param observations: Observations after the last step, shape ``(n_envs, *obs_shape)``
        :param dones: Whether the last step ended an episode, shape ``(n_envs,)``
        :return: Values of these observations, shape ``(n_envs, 1)``
        """

    def further_locals(self) -> dict[str, Any]:
        """:return: Further variables that callbacks find in their ``locals`` after :meth:`act`, by name"""
        return {}


class DivisibleActor(Actor):
    """An actor that can also act for a whole rollout in several processes."""

    @abstractmethod
    def for_share(self) -> Callable[[slice], ShareActor] | None:
        """
        :return: Function that makes an actor for some of the environments, which does what :meth:`act` would do for them in
            this rollout, bit for bit; ``None`` if that is not possible
        """

    @abstractmethod
    def record_all(
        self, rollout: ShareRollout, starts: np.ndarray, truncated: Sequence[tuple[int, int, Any]], gamma: float
    ) -> None:
        """
        Record all steps at once, in which the actors of :meth:`for_share` have acted.

        :param rollout: Rollout of all environments
        :param starts: Whether each of the first observations starts an episode, shape ``(n_envs,)``
        :param truncated: Step, index of the environment and terminal observation of each truncated episode
        :param gamma: Discount factor
        """


class PolicyActor(Actor):
    """
    Calls the policy at each step, as SB3 does.

    :param buffer: Buffer to fill
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
        if isinstance(self.config.action_space, spaces.Discrete):
            samples = samples.reshape(-1, 1)
        self.buffer.add(transition.observations, samples, transition.rewards, transition.starts, values, log_probs)

    def _bootstrap(self, policy: ActorCriticPolicy, transition: Transition) -> None:
        """
        Add the discounted value of the terminal observation to the last reward of each truncated episode
        (`issue #633 <https://github.com/DLR-RM/stable-baselines3/issues/633>`_).
        """
        if not transition.truncated:
            return
        environments, observations = zip(*transition.truncated, strict=True)
        # On the CPU, observations are evaluated one at a time, so that results are equal to SB3's bit for bit. On other
        # devices, they are evaluated in one call, which saves a synchronisation for each environment.
        steps, batched = [transition.step] * len(environments), self.config.device.type != "cpu"
        values = terminal_values(policy, self.buffer, steps, environments, observations, batched)
        for index, value in zip(environments, values, strict=True):
            transition.rewards[index] += transition.gamma * value
        note_truncations(self.config, steps, environments, observations, values.flatten().tolist())

    def finish(self, policy: ActorCriticPolicy, observations: Any, dones: np.ndarray) -> th.Tensor:
        with th.no_grad():
            values = last_values(policy, self.buffer, observations, dones)
        self.buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        return values


class CachedPolicy:
    """
    Evaluates a history-based policy step by step. Each step is computed once. If parameters change during the rollout, the
    steps that the policy can still see are computed again.

    :param buffer: Buffer that returns sequences
    :param is_watched: Whether user code may change parameters in ways that torch does not track
    """

    def __init__(self, buffer: Any, is_watched: bool):
        self.buffer = buffer
        self.weights = WeightWatch(by_value=is_watched)
        self.caches: list[Cache] = []

    def __call__(self, policy: Any, step: int) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        :param policy: Current policy
        :param step: Step of the rollout, whose observations are in the buffer
        :return: Actions, values and log probabilities, as ``forward`` of SB3's policies returns them
        """
        assert isinstance(policy, TransformerPolicyMixin)
        if self.weights.have_changed(policy):
            self.caches = self._filled_caches(policy, step)
        return policy.act(self.buffer.sequences_at(step), self.caches)

    def _filled_caches(self, policy: TransformerPolicyMixin, step: int) -> list[Cache]:
        """Caches of the transformers, filled with the steps before this one."""
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


class HistoryActor(PolicyActor):
    """
    Evaluates a history-based policy step by step, see :class:`CachedPolicy`.

    :param buffer: Buffer to fill
    :param config: Options of the rollout
    """

    buffer: SequenceBufferMixin

    def __init__(self, buffer: RolloutBuffer, config: RolloutConfig):
        super().__init__(buffer, config)
        self.cached = CachedPolicy(buffer, config.is_watched)

    def _evaluate(
        self, policy: ActorCriticPolicy, obs_tensor: Any, starts: np.ndarray, step: int
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        self.buffer.keep_observations(step, map_observations(lambda part: part.cpu().numpy(), obs_tensor), starts)
        return self.cached(policy, step)

    def record(self, policy: ActorCriticPolicy, transition: Transition) -> None:
        assert isinstance(policy, TransformerPolicyMixin)
        encoded = policy.encode_actions(transition.env_actions) if policy.use_last_action else None
        # Called before rewards are bootstrapped
        self.buffer.keep_outcome(transition.step, encoded, transition.rewards)
        super().record(policy, transition)

    def finish(self, policy: ActorCriticPolicy, observations: Any, dones: np.ndarray) -> th.Tensor:
        self.buffer.context_watch.note(self.buffer.episode_starts, dones, self.config.num_timesteps)
        return super().finish(policy, observations, dones)


class RecurrentActor(PolicyActor):
    """
    Passes the states of a recurrent policy from step to step, and keeps them in the buffer.

    :param buffer: Buffer to fill, with the states before the first step
    :param config: Options of the rollout
    """

    buffer: RecurrentBufferMixin

    def __init__(self, buffer: RolloutBuffer, config: RolloutConfig):
        super().__init__(buffer, config)
        self.states: RecurrentStates = self.buffer.states_before(0)
        self.starts: th.Tensor | None = None

    def _evaluate(
        self, policy: ActorCriticPolicy, obs_tensor: Any, starts: np.ndarray, step: int
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        recurrent: Any = policy
        self.starts = th.tensor(starts, dtype=th.float32, device=self.config.device)
        actions, values, log_probs, self.states = recurrent(obs_tensor, self.states, self.starts)
        self.buffer.keep_states(step + 1, self.states)
        return actions, values, log_probs

    def further_locals(self) -> dict[str, Any]:
        """:return: States after the step and starts of episodes, with the names of RecurrentPPO"""
        return {"lstm_states": self.states, "episode_starts": self.starts}


def make_actor(buffer: RolloutBuffer, config: RolloutConfig) -> Actor:
    """
    :param buffer: Buffer to fill
    :param config: Options of the rollout
    :return: Actor that calls the policy of this buffer at each step
    """
    if isinstance(buffer, RecurrentBufferMixin):
        return RecurrentActor(buffer, config)
    return HistoryActor(buffer, config) if isinstance(buffer, SequenceBufferMixin) else PolicyActor(buffer, config)


def note_truncations(
    config: RolloutConfig,
    steps: Sequence[int],
    environments: Sequence[int],
    observations: Sequence[Any],
    values: Sequence[float],
) -> None:
    """
    Add truncated episodes to the list of the configuration, if there is one.

    :param config: Options of the rollout, with the list
    :param steps: Steps of the rollout at which episodes were truncated, length n
    :param environments: Indices of the environments of these episodes, length n
    :param observations: Terminal observations of these episodes, length n
    :param values: Values of the terminal observations, length n
    """
    if config.truncations is not None:
        config.truncations.extend(map(Truncation, steps, environments, observations, values))

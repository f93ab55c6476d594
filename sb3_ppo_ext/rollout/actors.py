"""Actors, which choose actions and record transitions while a rollout is collected."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.weight_watch import WeightWatch
from sb3_ppo_ext.distributions.colored_noise import sampling_with
from sb3_ppo_ext.envs.parallel.share_rollout import ShareActor, ShareRollout
from sb3_ppo_ext.memory.history import Stepper
from sb3_ppo_ext.rollout.bootstrap import in_one_batch, joined, last_values, terminal_values
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer, TruncatedEpisodes
from sb3_ppo_ext.rollout.lazy_locals import copied_later


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
    :param sde_sample_freq: Number of steps after which gSDE draws new noise, at most 0 for never
    :param noise: Noise of the Gaussian at each step, shape ``(n_steps, n_envs, n)``; ``None`` if it is drawn at each step
    """

    n_steps: int
    action_space: spaces.Space
    device: th.device
    num_timesteps: int = 0
    is_watched: bool = True
    truncations: list[TruncatedEpisodes] | None = None
    sde_sample_freq: int = -1
    noise: th.Tensor | None = None


class Action(NamedTuple):
    """
    The output of the policy at a step.

    Tensors that nobody but user code may read can be a :class:`~sb3_ppo_ext.rollout.lazy_locals.Later`.

    :param obs_tensor: Observations on the device of the policy, ``None`` if no user code can read them
    :param samples: Actions, or latents of a bounded distribution, as stored in the buffer, shape ``(n_envs, *action_shape)``
    :param values: Values of the observations, shape ``(n_envs, 1)``, ``None`` if they are computed later
    :param log_probs: Log probabilities of the samples, shape ``(n_envs,)``, ``None`` if they are computed later
    """

    obs_tensor: object
    samples: np.ndarray
    values: Arrays
    log_probs: Arrays


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
    observations: Arrays
    starts: np.ndarray
    action: Action
    env_actions: np.ndarray
    rewards: np.ndarray
    gamma: float
    truncated: Sequence[tuple[int, object]] = ()


class Actor(Protocol):
    """Chooses actions and fills the rollout buffer. With ``backend="eager"``, a policy that is replaced acts at once."""

    # Whether `act` itself refuses outputs of the policy that are not finite
    checks_outputs: ClassVar[bool] = False
    # Function from samples to actions within the bounds; `None` for that of the current policy
    within_bounds: Callable[[np.ndarray], np.ndarray] | None = None

    def act(self, policy: ActorCriticPolicy, observations: object, starts: np.ndarray, step: int) -> Action:
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

    def finish(self, policy: ActorCriticPolicy, observations: object, dones: np.ndarray) -> th.Tensor:
        """
        Estimate advantages and returns at the end of the rollout.

        :param policy: Current policy
        :param observations: Observations after the last step, shape ``(n_envs, *obs_shape)``
        :param dones: Whether the last step ended an episode, shape ``(n_envs,)``
        :return: Values of these observations, shape ``(n_envs, 1)``
        """

    def further_locals(self) -> dict[str, object]:
        """:return: Further variables that callbacks find in their ``locals`` after :meth:`act`, by name"""
        return {}


class DivisibleActor(Actor):
    """An actor that can also act for a whole rollout in several processes."""

    @abstractmethod
    def for_share(self, largest: int) -> Callable[[slice], ShareActor] | None:
        """
        Draw all that is random in the rollout.

        :param largest: Bytes that this may take, beyond what the actor has already
        :return: Function that makes an actor for some of the environments, which does what :meth:`act` would do for them in
            this rollout, bit for bit; ``None`` if that is not possible
        """

    @abstractmethod
    def record_all(
        self, rollout: ShareRollout, starts: np.ndarray, truncated: Sequence[tuple[int, int, object]], gamma: float
    ) -> None:
        """
        Record all steps at once, in which the actors of :meth:`for_share` have acted.

        :param rollout: Rollout of all environments
        :param starts: Whether each of the first observations starts an episode, shape ``(n_envs,)``
        :param truncated: Step, index of the environment and terminal observation of each truncated episode
        :param gamma: Discount factor
        """


# From observations on the device to actions, values and log probabilities, as `forward` of SB3's policies
Act: TypeAlias = Callable[[Arrays], tuple[th.Tensor, th.Tensor, th.Tensor]]


class PolicyActor(Actor):
    """
    Calls the policy at each step and adds the step to the buffer, as SB3 does.

    :param buffer: Buffer to fill
    :param config: Options of the rollout
    :param act: What computes ``forward`` of the policy, ``None`` for the current policy itself
    """

    def __init__(self, buffer: RolloutBuffer, config: RolloutConfig, act: Act | None = None):
        # A compiled function draws its own noise.
        self.buffer, self.config, self.compute = buffer, config, act if config.noise is None else None
        self.memory = buffer.memory if isinstance(buffer, TensorRolloutBuffer) else None
        self.stepper: Stepper | None = None if self.memory is None else self.memory.stepper(config.is_watched)

    def act(self, policy: ActorCriticPolicy, observations: Arrays, starts: np.ndarray, step: int) -> Action:
        with th.no_grad():
            obs_tensor = obs_as_tensor(observations, self.config.device)
            if self.stepper is not None:
                self._buffer.observe(observations, starts)
            actions, values, log_probs = self._evaluate(policy, obs_tensor, starts, step)
        return Action(obs_tensor, actions.cpu().numpy(), values, log_probs)

    @property
    def _buffer(self) -> TensorRolloutBuffer:
        assert isinstance(self.buffer, TensorRolloutBuffer)
        return self.buffer

    def _evaluate(
        self, policy: ActorCriticPolicy, obs_tensor: object, starts: object, step: int
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        noise = None if self.config.noise is None else self.config.noise[step]
        with sampling_with(policy, noise):
            if self.stepper is not None:
                return self.stepper(policy, obs_tensor, starts, step)
            return policy(obs_tensor) if self.compute is None else self.compute(obs_tensor)

    def record(self, policy: ActorCriticPolicy, transition: Transition) -> None:
        if self.memory is not None:
            self.memory.note_outcome(policy, transition.step, transition.env_actions, transition.rewards)
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
        rows = [transition.step * self.buffer.n_envs + index for index in environments]
        episodes = terminal_values(policy, self.buffer, rows, observations, batched=self.config.device.type != "cpu")
        for index, value in zip(environments, episodes.values.cpu().unsqueeze(1), strict=True):
            transition.rewards[index] += transition.gamma * value
        note_truncations(self.config, episodes)

    def finish(self, policy: ActorCriticPolicy, observations: object, dones: np.ndarray) -> th.Tensor:
        if self.memory is not None:
            self.memory.note_episodes(self.buffer.episode_starts, dones, self.config.num_timesteps)
        with th.no_grad():
            values = last_values(policy, self.buffer, observations, dones)
        self.buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        return values

    def further_locals(self) -> dict[str, object]:
        return {} if self.stepper is None else self.stepper.further_locals()


class DeviceActor(PolicyActor):
    """
    Calls the policy at each step of a rollout on a device. Observations are copied to the device, and actions from it;
    everything else stays where it is. Rewards and ends of episodes are copied at the end of the rollout.

    :param buffer: Buffer to fill
    :param config: Options of the rollout
    :param act: What computes ``forward`` of the policy, ``None`` for the current policy itself
    """

    def __init__(self, buffer: RolloutBuffer, config: RolloutConfig, act: Act | None = None):
        super().__init__(buffer, config, act)
        self.rewards = np.zeros((buffer.buffer_size, buffer.n_envs), np.float32)
        self.starts = np.zeros_like(self.rewards)
        self.gamma = buffer.gamma
        # Rows and terminal observations of truncated episodes that have not been evaluated yet, and those that have
        self.truncated: list[tuple[int, object]] = []
        self.evaluated: list[TruncatedEpisodes] = []
        self.weights = WeightWatch(by_value=True)
        self.staging: object = None
        # Observations of the last step, already in the buffer
        self.observations: object = None

    def act(self, policy: ActorCriticPolicy, observations: Arrays, starts: np.ndarray, step: int) -> Action:
        if step == 0 and self.config.is_watched:
            self.weights.have_changed(policy)
        with th.no_grad():
            # Without a memory, the starts of episodes are copied at the end of the rollout.
            known = None if self.stepper is None else th.as_tensor(np.asarray(starts, np.float32))
            obs_tensor = self._buffer.observe(self._staged(observations), known)
            self.observations = observations
            if known is not None:
                known = self._buffer.tensors["episode_starts"][step]
            samples, values, log_probs = self._evaluate(policy, obs_tensor, known, step)
        self._buffer.record(samples, values, log_probs)
        return Action(copied_later(obs_tensor), samples.cpu().numpy(), values, log_probs)

    def _staged(self, observations: object) -> Arrays:
        """Observations on a GPU, by way of page-locked memory, from which it copies them while the host continues."""
        if self.config.device.type != "cuda":
            return observations
        if self.staging is None:
            # Arrays keep their strides, as those of transposed images, which the GPU then brings into order.
            self.staging = map_observations(lambda part: th.from_numpy(np.array(part)).pin_memory(), observations)
        # The copy of the step before has ended, since the host has waited for its actions.
        map_observations(lambda pinned, part: np.copyto(pinned.numpy(), part), self.staging, observations)
        return map_observations(lambda pinned: pinned.to(self.config.device, non_blocking=True), self.staging)

    def record(self, policy: ActorCriticPolicy, transition: Transition) -> None:
        buffer, step = self._buffer, transition.step
        self.gamma = transition.gamma
        if transition.observations is not self.observations:
            starts = None if self.memory is None else np.asarray(transition.starts, np.float32)
            buffer.observe(transition.observations, starts)
        self.rewards[step], self.starts[step] = transition.rewards, transition.starts
        if self.memory is not None:
            self.memory.note_outcome(policy, step, transition.env_actions, self.rewards[step])
        if self.config.is_watched:
            # User code may have written into its arrays, and may read all of them at the next step.
            _, samples, values, log_probs = transition.action
            assert values is not None
            assert log_probs is not None
            buffer.record(th.from_numpy(samples), values, log_probs)
            buffer.tensors["rewards"][step].copy_(th.from_numpy(self.rewards[step]))
            buffer.tensors["episode_starts"][step].copy_(th.from_numpy(self.starts[step]))
        self.truncated += [(step * buffer.n_envs + index, observation) for index, observation in transition.truncated]
        if self.config.is_watched:
            # It may also change the parameters before the end of the rollout.
            self._bootstrap_all(policy)
        buffer.pos, buffer.full = step + 1, step + 1 == buffer.buffer_size

    def _bootstrap_all(self, policy: ActorCriticPolicy) -> None:
        if not self.truncated:
            return
        rows, observations = zip(*self.truncated, strict=True)
        self.truncated = []
        episodes = terminal_values(policy, self.buffer, rows, observations, batched=True)
        self._buffer.tensors["rewards"].view(-1)[episodes.rows] += self.gamma * episodes.values
        self.evaluated.append(episodes)

    def _note_truncations(self, policy: ActorCriticPolicy, rewards: th.Tensor) -> None:
        if not self.evaluated:
            return
        episodes = joined(self.evaluated)
        if self.config.is_watched and not self.weights.have_changed(policy):
            episodes = in_one_batch(policy, self._buffer, episodes, rewards.reshape(-1)[episodes.rows], self.gamma)
        note_truncations(self.config, episodes)

    def finish(self, policy: ActorCriticPolicy, observations: object, dones: np.ndarray) -> th.Tensor:
        buffer, device = self._buffer, self.config.device
        last = np.asarray(dones, np.float32)[np.newaxis]
        from_host = th.from_numpy(np.stack([self.rewards, self.starts, np.broadcast_to(last, self.starts.shape)])).to(device)
        if not self.config.is_watched:  # User code may have written into the buffer, which has them already.
            buffer.tensors["rewards"].copy_(from_host[0])
            buffer.tensors["episode_starts"].copy_(from_host[1])
        self._bootstrap_all(policy)
        self._note_truncations(policy, from_host[0])
        with th.no_grad():
            values = last_values(policy, buffer, observations, from_host[2, 0])
        if self.memory is not None:
            self.memory.note_episodes(self.starts, dones, self.config.num_timesteps)
        buffer.compute_returns_and_advantage(last_values=values, dones=from_host[2, 0])
        return values


def make_actor(buffer: RolloutBuffer, config: RolloutConfig, act: Act | None = None) -> Actor:
    """
    :param buffer: Buffer to fill
    :param config: Options of the rollout
    :param act: What computes ``forward`` of the policy on a device, ``None`` for the current policy itself
    :return: Actor that calls the policy at each step
    """
    if isinstance(buffer, TensorRolloutBuffer) and buffer.storage.type != "cpu":
        return DeviceActor(buffer, config, act)
    return PolicyActor(buffer, config)


def note_truncations(config: RolloutConfig, episodes: TruncatedEpisodes) -> None:
    """
    Add truncated episodes to the list of the configuration, if there is one.

    :param config: Options of the rollout, with the list
    :param episodes: Truncated episodes
    """
    if config.truncations is not None:
        config.truncations.append(episodes)

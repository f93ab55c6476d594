"""
The actor of the native engine. At each step only the action is computed. Values and log probabilities are computed for all
steps at once at the end, unless user code may read them at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from sb3_ppo_ext.common.guards import check_outputs, is_finite, refuse_policy
from sb3_ppo_ext.common.observations import map_observations, stack
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.native.layers import Forward
from sb3_ppo_ext.engines.native.policy import NativePolicy, blocks, mask
from sb3_ppo_ext.engines.native.share_actor import NativeShareActor
from sb3_ppo_ext.envs.parallel.share_rollout import ShareActor, ShareRollout
from sb3_ppo_ext.policies.actor_critic import actions_for_env
from sb3_ppo_ext.policies.normalized_observations import inputs_of
from sb3_ppo_ext.rollout.actors import Action, DivisibleActor, RolloutConfig, Transition, note_truncations
from sb3_ppo_ext.rollout.buffer import TruncatedEpisodes, columns_of


class NativeActor(DivisibleActor):
    """
    An actor that computes with the extension module. Random numbers are drawn for all steps at once.

    :param native: Policy on the extension module
    :param buffer: Buffer to fill
    :param config: Options of the rollout
    """

    checks_outputs = True

    def __init__(self, native: NativePolicy, buffer: RolloutBuffer, config: RolloutConfig):
        self.native, self.buffer, self.config, self.is_watched = native, buffer, config, config.is_watched
        self.gamma = 0.0
        # Arrays that are written to at each step
        self.rows = columns_of(buffer)
        # The observations in them, if these are what the networks read
        self.inputs = None if config.is_watched else native.inputs_in(self.rows["observations"])
        native.pack()
        native.has_changed()
        # Random numbers of all steps
        self.noise = native.distribution.noise(config.n_steps, buffer.n_envs, native.actor.n_outputs)
        self._scale_noise(0)
        space = config.action_space
        # Discrete samples have their shape already.
        self.sample_shape = None if isinstance(space, spaces.Discrete) else (buffer.n_envs, *(space.shape or ()))
        # Observations of the last step, already in the buffer
        self.observations: Arrays = None
        # Number of steps with values and log probabilities in the buffer
        self.n_estimated = 0
        # Step, environment and terminal observation of truncated episodes that have not been bootstrapped yet
        self.truncated: list[tuple[int, int, object]] = []

    def _scale_noise(self, step: int) -> None:
        distribution = self.native.distribution
        if not distribution.has_spread():
            refuse_policy(self.native.policy, step, self._num_timesteps(step))
        self.scaled_noise = distribution.scaled(self.noise)
        # Whether samples are finite where outputs are
        self.samples_are_finite = isinstance(self.scaled_noise, np.ndarray) and is_finite(self.scaled_noise)

    def _num_timesteps(self, step: int) -> int:
        return self.config.num_timesteps + step * self.buffer.n_envs

    # Computed at each step

    def act(self, policy: ActorCriticPolicy, observations: Arrays, starts: np.ndarray, step: int) -> Action:
        native = self.native
        if self.is_watched:
            # User code may have changed parameters in place, in ways that torch does not track.
            native.pack()
            self.rows = columns_of(self.buffer)
        _write_observations(self.rows["observations"], step, observations)
        self.observations = observations
        features = native.features(observations) if self.inputs is None else self.inputs[step]
        if not self.is_watched and native.has_changed():
            # Earlier steps are evaluated with the parameters of the policy that made them.
            self._estimate(step)
            native.pack()
            self._scale_noise(step)
        outputs = mask(native.actor(features), native.invalid(observations))
        check_outputs(policy, outputs, step, self._num_timesteps(step))
        noise = native.distribution.scaled(self.noise[step]) if self.is_watched else self.scaled_noise[step]
        samples = native.distribution.sample(outputs, noise)
        if self.is_watched or not self.samples_are_finite:
            check_outputs(policy, samples, step, self._num_timesteps(step))
        if self.sample_shape is not None and samples.shape != self.sample_shape:
            samples = samples.reshape(self.sample_shape)
        if not self.is_watched:
            return Action(None, samples, None, None)
        log_probs = native.distribution.log_prob(outputs, samples.reshape(len(features), -1))
        values = th.from_numpy(native.critic(features))
        return Action(obs_as_tensor(observations, self.config.device), samples, values, th.from_numpy(log_probs))

    def record(self, policy: ActorCriticPolicy, transition: Transition) -> None:
        buffer, rows, step, action = self.buffer, self.rows, transition.step, transition.action
        if transition.observations is not self.observations:
            _write_observations(rows["observations"], step, transition.observations)
        rows["actions"][step] = action.samples.reshape(buffer.n_envs, -1)
        rows["rewards"][step] = transition.rewards
        rows["episode_starts"][step] = transition.starts
        if action.values is not None and action.log_probs is not None:
            rows["values"][step] = action.values.numpy().ravel()
            rows["log_probs"][step] = action.log_probs.numpy()
            self.n_estimated = step + 1
        if transition.truncated:
            self.gamma = transition.gamma
            self.truncated += [(step, *truncated) for truncated in transition.truncated]
            if self.is_watched:
                self.native.pack()
                self._bootstrap()
        buffer.pos = step + 1

    # Acting in several processes

    def for_share(self, largest: int) -> Callable[[slice], ShareActor] | None:
        native = self.native
        sampler, for_env = native.distribution.sampler(), actions_for_env(native.policy)
        if self.is_watched or sampler is None or for_env is None:
            return None
        if (drawn := self._noise_of_rollout(largest)) is None:
            return None
        noise, n_held = drawn
        # The features of the actor alone, of which it reads all
        network = Forward(native.actor.values, None, native.actor.n_outputs, native.actor.n_latents)
        # A process has a part of the environments.
        shape = None if self.sample_shape is None else (-1, *self.sample_shape[1:])
        acting = NativeShareActor(native.inputs[0], network, native.mask_key, noise, n_held, sampler, shape, for_env)
        return lambda envs: replace(acting, noise=noise[:, envs])

    def _noise_of_rollout(self, largest: int) -> tuple[Arrays, int] | None:
        """Noise of all steps, and the number of steps in which each element of it is used; ``None`` if it is too large."""
        if not self.native.distribution.needs_latents:
            return self.scaled_noise, 1
        n_steps, freq, current = self.config.n_steps, self.config.sde_sample_freq, self.scaled_noise[0]
        if freq <= 0:
            return current[np.newaxis], n_steps
        if current.nbytes * -(-n_steps // freq) > largest:
            return None
        drawn = []
        for _ in range(0, n_steps, freq):
            self.native.policy.reset_noise(self.buffer.n_envs)
            drawn.append(self.scaled_noise[0])
        return np.stack(drawn), freq

    def record_all(
        self, rollout: ShareRollout, starts: np.ndarray, truncated: Sequence[tuple[int, int, object]], gamma: float
    ) -> None:
        buffer, rows = self.buffer, columns_of(self.buffer)
        map_observations(_fill, rows["observations"], rollout.observations)
        buffer.actions[:] = rollout.samples.reshape(buffer.actions.shape)
        buffer.rewards[:] = rollout.rewards
        buffer.episode_starts[0], buffer.episode_starts[1:] = starts, rollout.dones[:-1]
        self.gamma, self.truncated = gamma, list(truncated)
        buffer.pos = self.config.n_steps

    def finish(self, policy: ActorCriticPolicy, observations: Arrays, dones: np.ndarray) -> th.Tensor:
        self.buffer.full = self.buffer.pos == self.buffer.buffer_size
        if self.is_watched:
            self.native.pack()
        self._estimate(self.config.n_steps)
        return self._estimate_advantages(observations, np.asarray(dones))

    # Computed for many steps at once

    def _estimate(self, end: int) -> None:
        """Compute missing values and log probabilities of the steps before ``end``, and bootstrap truncated episodes."""
        native, buffer, steps = self.native, self.buffer, slice(self.n_estimated, end)
        self.n_estimated = end
        if steps.start == end:
            return
        shape = buffer.rewards[steps].shape
        observations = _joined(buffer.observations, steps)
        features, invalid = native.features(observations), native.invalid(observations)
        actions = buffer.actions[steps].reshape(len(features), -1).astype(np.float32, copy=False)
        values, log_probs = np.empty((2, len(features)), np.float32)
        for rows in blocks(0, len(features)):
            outputs, values[rows] = native.evaluate(features[rows])
            mask(outputs, None if invalid is None else invalid[rows])
            log_probs[rows] = native.distribution.log_prob(outputs, actions[rows])
        buffer.values[steps], buffer.log_probs[steps] = values.reshape(shape), log_probs.reshape(shape)
        self._bootstrap()

    def _bootstrap(self) -> None:
        if not self.truncated:
            return
        steps, environments, each = zip(*self.truncated, strict=True)
        observations = stack(each)
        values = self.native.critic(self.native.features(observations)).ravel()
        np.add.at(self.buffer.rewards, (list(steps), list(environments)), np.float32(self.gamma) * values)
        self.truncated.clear()
        if self.config.truncations is not None:
            rows = th.tensor(steps) * self.buffer.n_envs + th.tensor(environments)
            tensors = inputs_of(self.native.policy, observations)[0]
            note_truncations(self.config, TruncatedEpisodes(rows, tensors, th.from_numpy(values)))

    def _estimate_advantages(self, observations: object, dones: np.ndarray) -> th.Tensor:
        """Compute advantages and returns, and return the values of the last observations, shape ``(n_envs, 1)``."""
        buffer = self.buffer
        values = self.native.critic(self.native.features(observations))
        arrays = (buffer.rewards, buffer.values, buffer.episode_starts, values.ravel(), dones)
        # User code may have left arrays of another type.
        rewards, *others = (np.ascontiguousarray(array, np.float32) for array in arrays)
        advantages = np.empty_like(rewards)
        extension.module.gae(rewards, *others, buffer.gamma, buffer.gae_lambda, advantages)
        buffer.advantages = advantages
        buffer.returns = buffer.advantages + buffer.values
        return th.from_numpy(values)


def _write_observations(rows: Arrays, step: int, observations: Arrays) -> None:
    # Called before the environment steps, since it may write the next observations into the same array.
    if isinstance(observations, dict):
        for key, array in observations.items():
            rows[key][step] = array.reshape(rows[key][step].shape)
    elif observations.shape == rows.shape[1:]:
        rows[step] = observations
    else:
        rows[step] = observations.reshape(rows.shape[1:])


def _fill(rows: np.ndarray, observations: np.ndarray) -> None:
    # Those after the last step may be there as well.
    rows[:] = observations[: len(rows)].reshape(rows.shape)


def _joined(observations: Arrays, steps: slice) -> Arrays:
    """Observations of some steps, with the dimensions of steps and environments merged."""
    if isinstance(observations, dict):
        return {key: _joined(array, steps) for key, array in observations.items()}
    return observations[steps].reshape(-1, *observations.shape[2:])

"""
The actor of the native engine. At each step only the action is computed. Values and log probabilities are computed for many
steps at once: all of them at the end, or where user code may change what they are computed from, a few steps later, and before
it reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

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
from sb3_ppo_ext.engines.native.policy import BLOCK, NativePolicy, mask
from sb3_ppo_ext.engines.native.samplers import sampler_of
from sb3_ppo_ext.engines.native.share_actor import NativeShareActor
from sb3_ppo_ext.envs.parallel.share_rollout import ShareActor, ShareRollout
from sb3_ppo_ext.policies.actor_critic import actions_for_env
from sb3_ppo_ext.policies.normalized_observations import inputs_of
from sb3_ppo_ext.rollout.actors import Action, DivisibleActor, RolloutConfig, Transition, note_truncations
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer, TruncatedEpisodes, columns_of
from sb3_ppo_ext.rollout.lazy_locals import Later


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
        # From outputs and noise to samples
        self.sample = sampler_of(native.distribution) or native.distribution.sample
        # User code may change parameters in place, in ways that torch does not track.
        self.has_changed = native.watch().has_changed if config.is_watched else native.has_changed
        self.has_changed()
        # Random numbers of all steps
        self.noise = native.distribution.noise(config.n_steps, buffer.n_envs, native.actor.n_outputs)
        if config.noise is not None:
            self.noise = native.distribution.with_normal(self.noise, config.noise.numpy())
        self._scale_noise(0)
        space = config.action_space
        if isinstance(space, spaces.Box) and (for_env := actions_for_env(native.policy)) is not None:
            self.within_bounds = for_env.within_bounds
        # Discrete samples have their shape already.
        self.sample_shape = None if isinstance(space, spaces.Discrete) else (buffer.n_envs, *(space.shape or ()))
        # Observations of the last step, already in the buffer
        self.observations: Arrays = None
        # Number of steps with values and log probabilities in the buffer
        self.n_estimated = 0
        # Features, outputs of the actor and samples of the steps after these, if user code may write into the buffer
        self.unestimated: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        if config.is_watched and isinstance(buffer, TensorRolloutBuffer):
            buffer.estimate = self._estimate_seen
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
            self.rows = columns_of(self.buffer)
        _write_observations(self.rows["observations"], step, observations)
        self.observations = observations
        features = native.features(observations) if self.inputs is None else self.inputs[step]
        self._follow_changes(step)
        outputs = native.actor(features)
        if native.mask_key is not None:
            mask(outputs, native.invalid(observations))
        if not native.actor.are_finite:
            check_outputs(policy, outputs, step, self._num_timesteps(step))
        samples = self.sample(outputs, self.scaled_noise[step])
        if not self.samples_are_finite:
            check_outputs(policy, samples, step, self._num_timesteps(step))
        if self.sample_shape is not None and samples.shape != self.sample_shape:
            samples = samples.reshape(self.sample_shape)
        if not self.is_watched:
            return Action(None, samples, None, None)
        self.unestimated.append((features.copy(), outputs, samples.reshape(len(features), -1).astype(np.float32)))
        values, log_probs = (Later(partial(self._estimated, name, step)) for name in ("values", "log_probs"))
        return Action(Later(partial(obs_as_tensor, observations, self.config.device)), samples, values, log_probs)

    def _follow_changes(self, step: int) -> None:
        if self.has_changed():
            # Earlier steps are evaluated with the parameters of the policy that made them.
            self._estimate(step)
            self.native.pack()
            self._scale_noise(step)

    def record(self, policy: ActorCriticPolicy, transition: Transition) -> None:
        buffer, rows, step, action = self.buffer, self.rows, transition.step, transition.action
        if transition.observations is not self.observations:
            _write_observations(rows["observations"], step, transition.observations)
        rows["actions"][step] = action.samples.reshape(buffer.n_envs, -1)
        rows["rewards"][step] = transition.rewards
        rows["episode_starts"][step] = transition.starts
        if self.is_watched:
            self._record_estimates(step, values=action.values, log_probs=action.log_probs)
        if transition.truncated:
            self.gamma = transition.gamma
            self.truncated += [(step, *truncated) for truncated in transition.truncated]
            if self.is_watched:
                self._follow_changes(step + 1)
                self._bootstrap()
        buffer.pos = step + 1

    # Acting in several processes

    def for_share(self, largest: int) -> Callable[[slice], ShareActor] | None:
        native = self.native
        sampler, for_env = sampler_of(native.distribution), actions_for_env(native.policy)
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
        self._follow_changes(self.config.n_steps)
        self._estimate(self.config.n_steps)
        return self._estimate_advantages(observations, np.asarray(dones))

    # Computed for many steps at once

    def _estimate(self, end: int) -> None:
        """Compute missing values and log probabilities of the steps before ``end``, and bootstrap truncated episodes."""
        steps, shape = slice(self.n_estimated, end), (-1, self.buffer.n_envs)
        if steps.start == end:
            return
        self.n_estimated = end
        values, log_probs = self._estimates_kept() if self.unestimated else self._estimates_stored(steps)
        columns = columns_of(self.buffer)
        columns["values"][steps], columns["log_probs"][steps] = values.reshape(shape), log_probs.reshape(shape)
        self._bootstrap()

    def _estimates_kept(self) -> tuple[np.ndarray, np.ndarray]:
        """Values and log probabilities of the steps that have not been estimated."""
        features, outputs, samples = map(_one_batch, zip(*self.unestimated, strict=True))
        self.unestimated.clear()
        return self.native.critic(features), self.native.distribution.log_prob(outputs, samples)

    def _estimates_stored(self, steps: slice) -> tuple[np.ndarray, np.ndarray]:
        """The same of steps in the buffer."""
        actions = self.buffer.actions[steps]
        actions = actions.reshape(-1, *actions.shape[2:])
        return self.native.values_and_log_probs(_joined(self.buffer.observations, steps), actions)

    def has_estimated(self, buffer: RolloutBuffer) -> bool:
        """
        :param buffer: Buffer of an update
        :return: Whether it has the values and log probabilities of the current policy, before the first step of the update
        """
        return buffer is self.buffer and buffer.full and not self.is_watched and not self.native.has_changed()

    # What user code sees

    def _estimated(self, name: str, step: int) -> th.Tensor:
        """Copy of the values, shape ``(n_envs, 1)``, or log probabilities, shape ``(n_envs,)``, of a step."""
        self._estimate(max(step + 1, self.n_estimated))
        shape = (-1, 1) if name == "values" else (-1,)
        return th.from_numpy(np.array(columns_of(self.buffer)[name][step], np.float32).reshape(shape))

    def _estimate_seen(self) -> None:
        """Let the buffer have the estimates of all steps so far."""
        self._estimate(self.n_estimated + len(self.unestimated))

    def _record_estimates(self, step: int, **shown: Later) -> None:
        buffer = self.buffer
        is_read = not isinstance(buffer, TensorRolloutBuffer) or buffer.is_read
        if is_read or len(self.unestimated) * buffer.n_envs >= BLOCK:
            self._estimate(step + 1)
        for name in (name for name, later in shown.items() if later.made):
            # User code may have written into them.
            columns_of(buffer)[name][step] = shown[name].get().numpy().ravel()

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


def _one_batch(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _fill(rows: np.ndarray, observations: np.ndarray) -> None:
    # Those after the last step may be there as well.
    rows[:] = observations[: len(rows)].reshape(rows.shape)


def _joined(observations: Arrays, steps: slice) -> Arrays:
    """Observations of some steps, with the dimensions of steps and environments merged."""
    if isinstance(observations, dict):
        return {key: _joined(array, steps) for key, array in observations.items()}
    return observations[steps].reshape(-1, *observations.shape[2:])

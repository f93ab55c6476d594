"""Collection of rollouts from environments whose steps are tensors: SB3's loop, without waiting for the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_ppo_ext.common.action_masks import choices_of
from sb3_ppo_ext.common.bounds import bounds_on_device
from sb3_ppo_ext.common.guards import NO_ACTION, check_finite, refuse_policy, reset_after_errors
from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace, structured
from sb3_ppo_ext.common.observations import dtype_of, map_observations, observations_at
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.weight_watch import WeightWatch
from sb3_ppo_ext.distributions.colored_noise import sampling_with
from sb3_ppo_ext.envs.action_masks import leave_choices, refuse_empty
from sb3_ppo_ext.envs.tensors.env_log import SUCCESS, EnvLog
from sb3_ppo_ext.envs.tensors.tensor_vec_env import TensorStep, TensorVecEnv
from sb3_ppo_ext.envs.tensors.tensor_vec_transpose_image import steps_in_tensors
from sb3_ppo_ext.policies.actor_critic import unscaled, unscales_as_known
from sb3_ppo_ext.rollout.bootstrap import in_one_batch, last_values, values_again
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer, TruncatedEpisodes, copy_into
from sb3_ppo_ext.rollout.collector import RolloutCollector
from sb3_ppo_ext.rollout.lazy_locals import Later, LaterArrays, LazyLocals, copied_later, keep_lazily
from sb3_ppo_ext.rollout.user_code import is_user_class, runs_user_code


class TensorsAfter(NamedTuple):
    """
    The end of a rollout.

    :param arrays: Observations after the last step, as arrays
    :param observations: The same as tensors
    :param starts: Whether each of them starts an episode
    """

    arrays: VecEnvObs
    observations: PyTorchObs
    starts: th.Tensor


class TensorRolloutCollector(RolloutCollector):
    """
    An on-policy algorithm that collects rollouts from a :class:`~sb3_ppo_ext.TensorVecEnv` into a
    :class:`~sb3_ppo_ext.rollout.buffer.TensorRolloutBuffer` without leaving the device, and from all other
    environments as its parent does.
    """

    # `_last_obs` and `_last_episode_starts` after the last rollout, as tensors
    _tensors_after: TensorsAfter | None = None

    def _collect(self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int) -> bool:
        is_known = type(self)._update_info_buffer is RolloutCollector._update_info_buffer and unscales_as_known(self.policy)
        takes_tensors = isinstance(rollout_buffer, TensorRolloutBuffer) and self._collects_tensors()
        if not steps_in_tensors(env) or not takes_tensors or not is_known:
            self._tensors_after = None
            return self._collect_in_numpy(env, callback, rollout_buffer, n_rollout_steps)
        assert isinstance(rollout_buffer, TensorRolloutBuffer)
        in_tensors: Any = env  # such an environment, or a wrapper that has its methods
        with reset_after_errors(self):
            return TensorCollection(self, in_tensors, callback, rollout_buffer, n_rollout_steps).run()

    def _collect_in_numpy(self, env: VecEnv, callback: BaseCallback, buffer: RolloutBuffer, n_steps: int) -> bool:
        base = env.unwrapped
        if not isinstance(base, TensorVecEnv):
            return super()._collect(env, callback, buffer, n_steps)
        base.env_log.clear()  # of steps that are not of this rollout
        go_on = super()._collect(env, callback, buffer, n_steps)
        base.env_log.record(self.logger)
        return go_on

    def _collects_tensors(self) -> bool:
        """Whether rollouts from tensor environments stay on their device, instead of being those of SB3 in NumPy."""
        return True

    def _make_act(self) -> Any:
        """Function from observations to actions, values and log probabilities."""
        return self.policy

    def _last_tensors(self) -> tuple[Arrays, th.Tensor]:
        """Observations after the last step, and whether they start an episode, as tensors."""
        if self._tensors_after is not None and self._tensors_after.arrays is self._last_obs:
            return self._tensors_after.observations, self._tensors_after.starts
        starts = th.as_tensor(self._last_episode_starts, device=self.device)
        last_observations: Arrays = self._last_obs
        return obs_as_tensor(last_observations, self.device), starts

    def _last_inputs(self) -> tuple[Arrays, th.Tensor]:
        """The same, with the observations as the critic reads them."""
        observations, starts = self._last_tensors()
        if self._tensors_after is not None:
            return self._normalized(observations), starts
        # Arrays, to which masks may be added
        return obs_as_tensor(self._seen_by_critic(self._last_obs, self.n_envs), self.device), starts


class ShownStep:
    """
    What callbacks can read of a step, in NumPy.

    :param samples: Actions, or latents of a bounded distribution
    :param env_actions: Actions within the bounds, as vectors for a ``Dict`` or ``Tuple``
    :param result: Step of the environments
    :param env: Environments
    :param seen: Observations before the step
    """

    def __init__(self, samples: th.Tensor, env_actions: th.Tensor, result: TensorStep, env: TensorVecEnv, seen: PyTorchObs):
        self.result = result
        self.samples, self.env_actions = LaterArrays(samples), LaterArrays(env_actions)
        self.dones = LaterArrays(result.terminated | result.truncated)
        self.new_obs, self.rewards = LaterArrays(result.observations), LaterArrays(result.rewards)
        self.infos = Later(lambda: env.infos(result, seen))


class TensorCollection:
    """
    The collection of one rollout.

    :param model: Model that collects it
    :param env: Environments
    :param callback: Callback of the training
    :param buffer: Buffer to fill
    :param n_steps: Number of steps to collect in each environment
    """

    def __init__(self, model: Any, env: TensorVecEnv, callback: BaseCallback, buffer: TensorRolloutBuffer, n_steps: int):
        self.model, self.env, self.callback, self.buffer, self.n_steps = model, env, callback, buffer, n_steps
        self.is_watched = is_user_class(type(model)) or runs_user_code(callback)
        space = self.space = model._sample_space
        # Bounds of the actions, `None` if there are none
        self.bounds = bounds_on_device(space.low, space.high, env.device) if isinstance(space, spaces.Box) else None
        self.memory = buffer.memory
        self.mask_key: str | None = model.action_mask_key
        self.choices = choices_of(space) if self.mask_key is not None else []
        # Ends of episodes, ends by truncation, returns, lengths and successes at each step
        shape = (n_steps, env.num_envs)
        self.episodes = th.zeros((5, *shape), device=env.device)
        self.has_successes = False
        self.final_observations: object = None
        # Values of terminal observations, if parameters may change before the end of the rollout, and rewards without them
        self.final_values = th.zeros(shape, device=env.device) if self.is_watched else None
        self.rewards = th.zeros(shape, device=env.device) if self.is_watched else None
        self.weights = WeightWatch(by_value=True)
        self.log = EnvLog()
        # Steps whose infos a callback has read, and may have changed
        self.counted: list[int] = []

    def run(self) -> bool:
        """
        :return: False if a callback has ended the training
        """
        model, env, buffer = self.model, self.env, self.buffer
        keep_lazily(self.callback)
        model.policy.set_training_mode(False)
        buffer.reset()
        # It begins with the states before the first step, where `reset` puts those after the last rollout.
        self.stepper = None if self.memory is None else self.memory.stepper(self.is_watched)
        if model._truncations is not None:
            model._truncations.clear()
        if model.use_sde:
            model.policy.reset_noise(env.num_envs)
        self.callback.on_rollout_start()
        observations, starts = model._last_tensors()
        self.first_starts, model._tensors_after = np.array(model._last_episode_starts, bool), None

        # What a callback puts in the place of the policy acts from the next rollout on.
        policy, noise = model.policy, model._draw_noise(env.num_envs, self.n_steps)
        act = model._make_act() if noise is None else policy  # A compiled function draws its own noise.
        if self.is_watched:
            self.weights.have_changed(policy)
        for step in range(self.n_steps):
            if model.use_sde and model.sde_sample_freq > 0 and step % model.sde_sample_freq == 0:
                policy.reset_noise(env.num_envs)
            seen = buffer.observe(model._normalized(observations), starts)
            # A copy, since the environment may overwrite them
            before = seen if model.normalizer is None else map_observations(th.clone, observations)
            with th.no_grad(), sampling_with(policy, None if noise is None else noise[step]):
                samples, values, log_probs = act(seen) if self.stepper is None else self.stepper(policy, seen, starts, step)
                env_actions = self._for_env(samples)
            for call in model._before_step:
                call()
            # A copy of its own, which the environment may write into
            result = env.step_tensors(self._structured(env_actions.clone()))
            model._update_normalizer(result.observations, result.rewards, result.terminated | result.truncated)
            model.num_timesteps += env.num_envs * model.ranks.size
            shown = ShownStep(samples, env_actions, result, env, before)
            variables = self._locals(step, seen, values, log_probs, shown)
            self.callback.update_locals(variables)
            if not self.callback.on_step():
                self._stop(before, starts)
                return False
            observations, starts = self._record(step, shown, values, log_probs)

        self._finish(observations, starts)
        self.callback.update_locals(variables)
        self.callback.on_rollout_end()
        return True

    def _record(self, step: int, shown: ShownStep, values: th.Tensor, log_probs: th.Tensor) -> tuple[Arrays, th.Tensor]:
        """Record a step with what callbacks have written into its arrays, and return the next observations and starts."""
        model, buffer, dones = self.model, self.buffer, shown.dones.tensors()
        if shown.infos.made:
            self.counted.append(step)
            model._update_info_buffer(shown.infos.get(), dones.cpu().numpy())
        rewards, final = model._normalized_rewards(shown.rewards.tensors()), shown.result.final_observations
        final = None if final is None else model._normalized(final)
        result = shown.result._replace(observations=shown.new_obs.tensors(), rewards=rewards, final_observations=final)
        buffer.record(shown.samples.tensors(), values, log_probs)
        if self.memory is not None:
            self.memory.note_outcome(model.policy, step, shown.env_actions.tensors(), result.rewards)
        buffer.end_step(result.rewards)
        self._keep_ends(step, result, dones)
        return result.observations, dones

    def _stop(self, seen: PyTorchObs, starts: th.Tensor) -> None:
        """Leave the model as SB3's loop does when a callback ends the training: before the step that it has seen."""
        ended, _, returns, lengths, successes = self.episodes.cpu().numpy()
        self._add_episodes(ended, returns, lengths, successes)
        self._keep_last(seen, starts, starts.cpu().numpy())

    def _for_env(self, samples: th.Tensor) -> th.Tensor:
        """Actions within the bounds of the action space."""
        if self.bounds is None:
            return samples.to(dtype_of(self.space))
        low, high = self.bounds
        if self.model.policy.squash_output:
            return unscaled(self.model.policy, samples, low, high)
        return th.clamp(samples, low, high)

    def _structured(self, actions: th.Tensor) -> Arrays:
        return self.space.batched(actions) if isinstance(self.space, FlatActionSpace) else actions

    # For callbacks

    def _locals(self, step: int, seen: PyTorchObs, values: th.Tensor, log_probs: th.Tensor, shown: ShownStep) -> LazyLocals:
        """The local variables of SB3's loop."""
        return LazyLocals(
            self=self.model,
            env=self.env,
            callback=self.callback,
            rollout_buffer=self.buffer,
            n_rollout_steps=self.n_steps,
            n_steps=step,
            obs_tensor=copied_later(seen),
            samples=shown.samples,
            actions=shown.env_actions if self.model._samples_latents else shown.samples,
            values=values,
            log_probs=log_probs,
            clipped_actions=shown.env_actions,
            env_actions=Later(lambda: structured(self.space, shown.env_actions.get())),
            new_obs=shown.new_obs,
            rewards=shown.rewards,
            dones=shown.dones,
            infos=shown.infos,
            **({} if self.stepper is None else self.stepper.further_locals()),
        )

    # Ends of episodes

    def _keep_ends(self, step: int, result: TensorStep, dones: th.Tensor) -> None:
        parts = [dones, result.truncated & ~result.terminated, result.episode_returns, result.episode_lengths]
        if SUCCESS in result.log:
            parts.append(result.log[SUCCESS])
            self.has_successes = True
        for row, part in zip(self.episodes[:, step], parts, strict=False):
            row.copy_(part)
        self.log.add(result.log, dones)
        final = result.final_observations
        if final is not None:
            if self.final_observations is None:
                self.final_observations = self.buffer.empty_observations()
            map_observations(lambda rows, part: copy_into(rows[step], part), self.final_observations, final)
        if self.final_values is not None and self.rewards is not None:
            self.rewards[step] = self.buffer.tensors["rewards"][step]
            with th.no_grad():
                seen = observations_at(self._terminal_observations(), step)
                rows = step * self.env.num_envs + th.arange(self.env.num_envs, device=dones.device)
                values = values_again(self.model.policy, self.buffer, TruncatedEpisodes(rows, seen, self.final_values[step]))
            self.final_values[step] = values
            cut_off = result.truncated & ~result.terminated
            self.buffer.tensors["rewards"][step] += self.model.gamma * th.where(cut_off, values, 0.0)

    def _terminal_observations(self) -> Arrays:
        """Terminal observations, or those before them, valid where an episode has ended, shape ``(n_steps, n_envs, ...)``."""
        return self.buffer.tensors["observations"] if self.final_observations is None else self.final_observations

    # After the last step

    def _finish(self, observations: PyTorchObs, dones: th.Tensor) -> None:
        model, buffer = self.model, self.buffer
        numbers, is_finite, log = self._on_host(observations)
        if not is_finite:
            self._refuse(observations)
        ended, cut_off, returns, lengths, successes = numbers
        self._add_episodes(ended, returns, lengths, successes)
        self.log.record(model.logger, log)
        rows = np.flatnonzero(cut_off)
        if len(rows):
            self._bootstrap(rows)
        with th.no_grad():
            values = last_values(model.policy, buffer, model._normalized(observations), dones)
            buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        if self.memory is not None:
            starts = np.concatenate([self.first_starts[np.newaxis], ended[:-1] > 0])
            self.memory.note_episodes(starts, ended[-1] > 0, model.num_timesteps - ended.size)
        self._keep_last(observations, dones, ended[-1])

    def _keep_last(self, observations: object, starts: th.Tensor, starts_on_host: np.ndarray) -> None:
        """Keep the last observations, as tensors and, as in SB3, as arrays, which can be saved."""
        model = self.model
        # Copied, since the environment may overwrite them
        kept = map_observations(lambda part: part.clone(), observations)
        model._last_obs = map_observations(lambda part: part.cpu().numpy(), kept)
        model._last_episode_starts = starts_on_host.astype(bool)
        model._tensors_after = TensorsAfter(model._last_obs, kept, starts.clone())

    def _on_host(self, observations: object) -> tuple[np.ndarray, bool, np.ndarray]:
        """Ends of episodes, whether all numbers of the rollout are finite, and numbers of the log, in one transfer."""
        actions = self.buffer.tensors["actions"]
        tensors = [self.buffer.tensors["rewards"]]
        for part in (self.buffer.tensors["observations"], observations):
            map_observations(tensors.append, part)
        valid = [th.isfinite(tensor).all() for tensor in tensors if tensor.is_floating_point()]
        valid.append(_are_actions(actions).all())
        if self.mask_key is not None:
            valid.append(leave_choices(self._masks(), self.choices))
        numbers = th.stack([th.stack(valid).all().float(), *self.log.numbers()])
        packed = th.cat([self.episodes.flatten(), numbers]).cpu().numpy()
        n = self.episodes.numel()
        return packed[:n].reshape(self.episodes.shape), bool(packed[n]), packed[n + 1 :]

    def _masks(self) -> th.Tensor:
        """Masks of the actions, shape ``(n_steps, n_envs, n_choices)``."""
        return self.buffer.tensors["observations"][self.mask_key].flatten(2)

    def _add_episodes(self, ended: np.ndarray, returns: np.ndarray, lengths: np.ndarray, successes: np.ndarray) -> None:
        ended = ended.copy()
        ended[self.counted] = 0
        found = np.nonzero(ended)
        shared = self.model._shared_rollout
        if shared is not None:
            shared.note_arrays(found, returns, lengths, successes if self.has_successes else None, self.env.seconds())
        buffer = self.model.ep_info_buffer
        for r, n in list(zip(returns[found].tolist(), lengths[found].tolist(), strict=True))[-buffer.maxlen :]:
            buffer.append({"r": r, "l": int(n), "t": self.env.seconds()})
        if self.has_successes:
            self.model.ep_success_buffer.extend(successes[found].astype(bool).tolist())

    def _bootstrap(self, rows: np.ndarray) -> None:
        if self.final_observations is None:
            self.env.warn_without_final_observations()
        on_device = th.from_numpy(rows).to(self.env.device)
        terminal = map_observations(lambda part: part.flatten(0, 1)[on_device], self._terminal_observations())
        policy, gamma = self.model.policy, self.model.gamma
        if self.final_values is not None and self.rewards is not None:
            # They have been added at each step, since user code may read the rewards.
            episodes = TruncatedEpisodes(on_device, terminal, self.final_values.flatten()[on_device])
            if not self.weights.have_changed(policy):
                episodes = in_one_batch(policy, self.buffer, episodes, self.rewards.flatten()[on_device], gamma)
        else:
            with th.no_grad():
                values = values_again(policy, self.buffer, TruncatedEpisodes(on_device, terminal, on_device))
            self.buffer.tensors["rewards"].view(-1)[on_device] += gamma * values
            episodes = TruncatedEpisodes(on_device, terminal, values)
        if self.model._truncations is not None:
            self.model._truncations.append(episodes)

    def _refuse(self, last_observations: object) -> None:
        """
        Name the first number that is not finite.

        :raises ValueError: always
        """
        model, before = self.model, self.model.num_timesteps
        for step in range(self.n_steps + 1):
            model.num_timesteps = before - (self.n_steps - step + 1) * self.env.num_envs * model.ranks.size
            row = step - 1  # of the step that returned the observations
            if step > 0:
                self._check(model, "reward", self.buffer.tensors["rewards"][row], row)
            seen = self.buffer.tensors["observations"]
            observations = last_observations if step == self.n_steps else observations_at(seen, step)
            self._check(model, "observation", observations, max(row, 0))
            if step < self.n_steps and self.mask_key is not None and not leave_choices(self._masks()[step], self.choices):
                refuse_empty(self._masks()[step].cpu().numpy(), self.choices, step, model.num_timesteps)
            if step < self.n_steps and not _are_actions(self.buffer.tensors["actions"][step]).all():
                refuse_policy(model.policy, step, model.num_timesteps)
        raise AssertionError("all numbers are finite")

    def _check(self, model: Any, what: str, data: Any, step: int) -> None:
        check_finite(model, what, map_observations(lambda part: part.cpu().numpy(), data), step)


def _are_actions(actions: th.Tensor) -> th.Tensor:
    """Whether actions are finite, and discrete ones are not those of a policy with NaN."""
    return th.isfinite(actions) if actions.is_floating_point() else actions != NO_ACTION

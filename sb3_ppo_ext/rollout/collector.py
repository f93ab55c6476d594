"""Collection of rollouts from NumPy environments: SB3's loop, with checks of the data that come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_ppo_ext.common.action_masks import add_mask, choices_of
from sb3_ppo_ext.common.bounds import clipped
from sb3_ppo_ext.common.guards import check_finite, check_outputs, reset_after_errors, restored_if_refused
from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace, structured
from sb3_ppo_ext.common.type_aliases import Arrays, Info
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributed.ranks import SINGLE, Ranks
from sb3_ppo_ext.distributions.colored_noise import N_TERMS, colored, gaussian_part
from sb3_ppo_ext.envs.action_masks import ActionMasks, reader
from sb3_ppo_ext.envs.normalizer import Normalizer
from sb3_ppo_ext.memory.states import StateMemory
from sb3_ppo_ext.rollout.actors import Actor, PolicyActor, RolloutConfig, Transition
from sb3_ppo_ext.rollout.advice import NO_STATISTICS, advice_on, has_monitor, say_once
from sb3_ppo_ext.rollout.buffer import TruncatedEpisodes
from sb3_ppo_ext.rollout.lazy_locals import Later, LazyLocals
from sb3_ppo_ext.rollout.overlap import overlapped_collection
from sb3_ppo_ext.rollout.own_copies import OwnCopies, TerminalWatch, kept_of
from sb3_ppo_ext.rollout.shared_rollout import SharedRollout
from sb3_ppo_ext.rollout.step_checks import StepChecks
from sb3_ppo_ext.rollout.user_code import environments_of, is_empty, is_user_class, runs_user_code


class RolloutCollector(OnPolicyAlgorithm):
    """
    An on-policy algorithm that collects rollouts as SB3's PPO does, bit for bit. Engines differ in the
    :class:`~sb3_ppo_ext.rollout.actors.Actor` that chooses actions and records transitions.
    """

    # Truncated episodes of the last rollout; None if they are not needed
    _truncations: list[TruncatedEpisodes] | None = None
    # Ranks of a distributed training
    ranks: Ranks = SINGLE
    _shared_rollout: SharedRollout | None = None
    _terminal_watch: TerminalWatch | None = None
    #: Running statistics with which observations and rewards are normalised, ``None`` if they are not. What environments,
    #: callbacks and ``predict`` see is not normalised, what the policy and the rollout buffer get is
    normalizer: Normalizer | None = None
    # What has been warned of
    _said: frozenset[str] = frozenset()
    # Called right before each step of the environments, by each `TrainingCheckpoint`
    _before_step: Sequence[Callable[[], None]] = ()
    # Whether the policy samples latents of a bounded action distribution instead of actions
    _samples_latents = False
    # Whether invalid actions are masked, and the key of the masks in the observations, `None` if a method returns them
    action_masking: bool
    action_mask_key: str | None
    # Exponent of the power of the action noise, and the last white numbers that it is made from
    noise_color: float = 0.0
    _white_noise: np.ndarray | None = None

    @property
    def _sample_space(self) -> spaces.Space:
        """Space of the samples of the policy: that of the actions, or of the vectors for a ``Dict`` or ``Tuple``."""
        of_policy = self.policy.action_space
        return of_policy if isinstance(of_policy, FlatActionSpace) else self.action_space

    @property
    def _last_lstm_states(self) -> Arrays:
        """
        States of a recurrent policy after the last step, under the name of RecurrentPPO, which may be assigned or changed in
        place; ``None`` for other policies.
        """
        memory = getattr(self.rollout_buffer, "memory", None)
        return memory.show_states(self.rollout_buffer.pos) if isinstance(memory, StateMemory) else None

    @_last_lstm_states.setter
    def _last_lstm_states(self, states: Arrays) -> None:
        memory = getattr(self.rollout_buffer, "memory", None)
        if isinstance(memory, StateMemory):
            memory.set_states(self.rollout_buffer.pos, states)

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """
        Collect experiences using the current policy and fill a ``RolloutBuffer``.

        :param env: The training environment
        :param callback: Callback that will be called at each step
            (and at the beginning and end of the rollout)
        :param rollout_buffer: Buffer to fill with rollouts
        :param n_rollout_steps: Number of experiences to collect per environment
        :return: True if function returned with at least `n_rollout_steps`
            collected, False if callback terminated rollout prematurely.
        :raises ValueError: if the environment returns NaN, infinity, or data of another type or shape than a vectorised
            environment does, or if an action is not finite
        :raises WorkerError: if a process of the environment dies, raises an error or does not answer in time. As with the
            errors above, the model and the statistics of ``VecNormalize`` are then restored to their state before the rollout;
            the next call of ``learn`` resets the environment
        """
        start = time.perf_counter()
        with restored_if_refused(self, environments_of(callback)):
            if self.normalizer is not None:
                self.normalizer.begin_rollout()
            self._shared_rollout = SharedRollout(self) if self.ranks.are_several else None
            go_on = self._collect(env, callback, rollout_buffer, n_rollout_steps)
            if self._shared_rollout is not None:
                go_on = self._shared_rollout.finish(go_on, n_rollout_steps)
        self.logger.record("time/rollout_seconds", time.perf_counter() - start)
        return go_on

    def _collect(self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int) -> bool:
        # Callbacks read the local variables of this function, so that they have the same names as in SB3.
        assert self._last_obs is not None, "No previous observation was provided"
        self.policy.set_training_mode(False)

        n_steps = 0
        rollout_buffer.reset()
        if self._truncations is not None:
            self._truncations.clear()
        if self.use_sde:
            self.policy.reset_noise(env.num_envs)

        callback.on_rollout_start()
        actor = self._make_actor(rollout_buffer, self._rollout_config(callback, n_rollout_steps))
        if (overlapped := overlapped_collection(self, env, callback, actor, n_rollout_steps)) is not None:
            with reset_after_errors(self):
                return overlapped.run()
        copies, space = OwnCopies(env), self._sample_space
        within_bounds = actor.within_bounds or self._within_bounds
        checks = StepChecks(self, are_arrays=copies.are_of_sb3)
        are_read = not is_empty(callback)  # these variables
        self._last_obs, self._last_episode_starts = copies.of(self._last_obs), copies.of(self._last_episode_starts)
        masks = self._masks_of(env) if self.action_masking else None

        while n_steps < n_rollout_steps:
            if self.use_sde and self.sde_sample_freq > 0 and n_steps % self.sde_sample_freq == 0:
                self.policy.reset_noise(env.num_envs)

            last_obs = self._last_obs
            seen: Arrays = self._normalized(last_obs)
            seen = seen if masks is None else masks.seen(seen, n_steps, self.num_timesteps)
            action = actor.act(self.policy, seen, self._last_episode_starts, n_steps)
            obs_tensor, samples, values, log_probs = action
            self._check_samples(actor, samples, n_steps)
            clipped_actions = within_bounds(samples)
            actions = clipped_actions if self._samples_latents else samples
            env_actions = structured(space, clipped_actions.copy())  # its own, which it may write into

            for call in self._before_step:
                call()
            new_obs, rewards, dones, infos = copies.of_step(checks.checked(env.step(env_actions), n_steps))
            self._update_normalizer(new_obs, rewards, dones)

            self.num_timesteps += env.num_envs * self.ranks.size

            if are_read:
                further = actor.further_locals() if masks is None else _with_masks(actor, masks, obs_tensor)
                callback.update_locals(_readable({**locals(), **further} if further else locals()))
            if not callback.on_step():
                return False

            self._update_info_buffer(infos, dones)
            n_steps += 1

            if self._last_obs is not last_obs:  # which a callback has replaced
                seen = self._normalized(self._last_obs)
                seen = seen if masks is None else masks.with_last(seen)
            truncated = self._ends(env, last_obs, new_obs, dones, infos, n_steps - 1) if np.count_nonzero(dones) else ()
            starts: Arrays = self._last_episode_starts
            kept = self._normalized_rewards(rewards)
            actor.record(
                self.policy,
                Transition(n_steps - 1, seen, starts, action, clipped_actions, kept, self.gamma, truncated),
            )
            self._last_obs = new_obs
            self._last_episode_starts = dones

        values = actor.finish(self.policy, self._seen_by_critic(self._last_obs, env.num_envs), dones)
        # As SB3 leaves them
        actions = actions.reshape(-1, 1) if isinstance(self.action_space, spaces.Discrete) else actions

        callback.update_locals(_readable({**locals(), **actor.further_locals()}))
        callback.on_rollout_end()

        return True

    def _masks_of(self, env: VecEnv) -> ActionMasks:
        key = self.action_mask_key
        return ActionMasks(self.action_space, key, env.num_envs, reader(env) if key is None else list)

    def _make_actor(self, rollout_buffer: RolloutBuffer, config: RolloutConfig) -> Actor:
        return PolicyActor(rollout_buffer, config)

    def _rollout_config(self, callback: BaseCallback, n_rollout_steps: int) -> RolloutConfig:
        return RolloutConfig(
            n_rollout_steps,
            self._sample_space,
            self.device,
            self.num_timesteps,
            is_watched=self._is_watched(callback),
            truncations=self._truncations,
            sde_sample_freq=self.sde_sample_freq,
            noise=self._draw_noise(self.n_envs, n_rollout_steps),
        )

    def _check_noise(self) -> None:
        distribution = getattr(self.policy, "action_dist", None)
        if self.noise_color != 0 and gaussian_part(distribution) is None:
            refuse(
                "noise_color", self.noise_color, f"{type(distribution).__name__} draws no Gaussian noise in each step; give 0"
            )

    def _draw_noise(self, n_envs: int, n_steps: int) -> th.Tensor | None:
        """
        :param n_envs: Number of environments
        :param n_steps: Number of steps of a rollout
        :return: Correlated noise of its steps, shape ``(n_steps, n_envs, n)``, which goes on where that of the rollout before
            has ended; ``None`` if noise is white
        """
        if self.noise_color == 0:
            return None
        shape, before = (n_envs, len(self.policy.log_std)), self._white_noise
        if before is None or before.shape[1:] != shape:
            before = th.randn(N_TERMS - 1, *shape, device=self.device).cpu().numpy()
        new = th.randn(n_steps, *shape, device=self.device)
        white = th.cat([th.from_numpy(before).to(new), new])
        self._white_noise = white[n_steps:].cpu().numpy()
        return colored(white, self.noise_color)

    def _is_watched(self, callback: BaseCallback) -> bool:
        """Whether code of a user runs at each step."""
        return is_user_class(type(self)) or runs_user_code(callback)

    def _check_samples(self, actor: Actor, samples: np.ndarray, step: int) -> None:
        if not actor.checks_outputs:
            check_outputs(self.policy, samples, step, self.num_timesteps)

    def _within_bounds(self, actions: np.ndarray) -> np.ndarray:
        """
        :param actions: Actions or latents that the policy sampled, shape ``(n_envs, *action_shape)``
        :return: Actions within the bounds of the action space, of the same shape
        """
        space = self._sample_space
        if not isinstance(space, spaces.Box):
            return actions
        if self.policy.squash_output:
            return self.policy.unscale_action(actions)
        # Samples of a Gaussian are unbounded.
        return clipped(actions, space.low, space.high)

    def _actions_for_env(self, actions: np.ndarray) -> Arrays:
        """
        :param actions: Actions within the bounds, shape ``(n_envs, *action_shape)``
        :return: Actions as the environments take them: for a ``Dict`` or ``Tuple`` action space a list
        """
        return structured(self._sample_space, actions)

    def _ends(
        self, env: VecEnv, before: VecEnvObs, after: VecEnvObs, dones: np.ndarray, infos: list[Info], step: int
    ) -> list[tuple[int, Arrays]]:
        """Truncated episodes of a step in which some have ended, as :meth:`_truncated_episodes` returns them."""
        if self._terminal_watch is None or self._terminal_watch.env_id != id(env):
            self._terminal_watch = TerminalWatch(env)
        self._terminal_watch.note(before, after, dones, infos)
        return list(self._truncated_episodes(dones, infos, step))

    def _truncated_episodes(self, dones: np.ndarray, infos: list[Info], step: int) -> Iterator[tuple[int, Arrays]]:
        """Index of the environment and copy of the terminal observation of each truncated episode."""
        for index in dones.nonzero()[0].tolist():
            observation = infos[index].get("terminal_observation")
            if observation is not None and infos[index].get("TimeLimit.truncated", False):
                observation = StepChecks(self, step).checked_terminal(observation)
                check_finite(self, "terminal observation", observation, step, env_index=index)
                # Copied, since an environment may write its next observation into the same array.
                yield index, self._seen_by_critic(deepcopy(observation))

    def _seen_by_critic(self, observations: object, *n: int) -> Arrays:
        """
        Observations in the form that the critic reads. Values do not depend on masks: all actions are valid.

        :param observations: Observations of the environments
        :param n: Number of observations, none for a single one without a first dimension
        """
        observations = self._normalized(observations)
        if not self.action_masking or self.action_mask_key is not None:
            return observations
        return add_mask(observations, np.ones((*n, sum(choices_of(self.action_space))), bool))

    def _normalized(self, observations: Arrays) -> Arrays:
        """Observations of the environments, in arrays or tensors, as the policy reads them."""
        return observations if self.normalizer is None else self.normalizer.observations(observations)

    def _normalized_rewards(self, rewards: object) -> Arrays:
        """Rewards of the environments as the rollout buffer stores them: a copy, if they are normalised."""
        return rewards if self.normalizer is None else self.normalizer.rewards(rewards)

    def _update_normalizer(self, observations: object, rewards: object, dones: object) -> None:
        """Let the statistics take part in a step of the environments."""
        if self.normalizer is not None:
            self.normalizer.step(observations, rewards, dones, self.gamma)

    def _update_info_buffer(self, infos: list[Info], dones: np.ndarray | None = None) -> None:
        try:
            # Most infos say nothing that is kept.
            filled = [i for i, info in enumerate(infos) if "episode" in info or "is_success" in info or type(info) is not dict]
            if filled:
                kept = [kept_of(infos[index]) for index in filled]
                super()._update_info_buffer(kept, None if dones is None else dones[filled])
            if self._shared_rollout is not None and dones is not None:
                self._shared_rollout.note(infos, dones)
        except (AttributeError, TypeError):
            StepChecks(self, self.rollout_buffer.pos).check_infos(infos)
            raise
        if not self.ep_info_buffer and dones is not None and NO_STATISTICS not in self._said and np.count_nonzero(dones):
            self._warn_without_statistics()

    def _warn_without_statistics(self) -> None:
        if self.env is not None and has_monitor(self.env):
            self._said |= {NO_STATISTICS}  # An episode of the monitor may be longer, such as a game with several lives.
        say_once(self, NO_STATISTICS)

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        with restored_if_refused(self):
            starts = self._last_episode_starts
            results = super()._setup_learn(*args, **kwargs)
            # SB3 has just reset the environment.
            StepChecks(self).check_observations(self._last_obs)
            check_finite(self, "observation", self._last_obs, 0)
            if self.normalizer is not None and self._last_episode_starts is not starts:
                self.normalizer.reset(self._last_obs)
        for message in advice_on(self):
            say_once(self, message)
        return results


def _readable(variables: dict[str, object]) -> dict[str, object]:
    """Variables for callbacks, of which those that the actor computes later are computed when they are read."""
    return LazyLocals(variables) if isinstance(variables["log_probs"], Later) else variables


def _with_masks(actor: Actor, masks: ActionMasks, obs_tensor: Arrays) -> dict[str, object]:
    """Further variables for callbacks, those of masks among them."""
    return actor.further_locals() | masks.further_locals(obs_tensor.get() if isinstance(obs_tensor, Later) else obs_tensor)

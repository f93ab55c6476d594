"""
Collection of whole rollouts at once, where nobody can see the difference: by processes that do not wait for each other, or by
one compiled function of JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EventCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.common.action_masks import add_mask
from sb3_ppo_ext.common.guards import check_finite, is_finite, refuse_policy
from sb3_ppo_ext.common.observations import map_observations, observations_at
from sb3_ppo_ext.common.type_aliases import Arrays, Info
from sb3_ppo_ext.envs.parallel.share_rollout import MaskSource, ShareRollout
from sb3_ppo_ext.envs.parallel.vec_env import ParallelVecEnv
from sb3_ppo_ext.envs.tensors.jax_vec_env import JaxVecEnv
from sb3_ppo_ext.rollout.actors import Actor, DivisibleActor
from sb3_ppo_ext.rollout.normalized_shares import normalized_rollout, normalizing
from sb3_ppo_ext.rollout.user_code import is_empty

# Callbacks that never end training, do not use its environments, and read nothing of a step but what `_locals` gives them
PATIENT = {
    "stable_baselines3.common.callbacks.CallbackList",
    "stable_baselines3.common.callbacks.CheckpointCallback",
    "stable_baselines3.common.callbacks.EvalCallback",
    "stable_baselines3.common.callbacks.EveryNTimesteps",
    "stable_baselines3.common.callbacks.ProgressBarCallback",
    "rl_zoo3.callbacks.SaveVecNormalizeCallback",
    "sb3_ppo_ext.TrainingCheckpoint",
    "sb3_ppo_ext.zoo.atomic_saving.AtomicEvalCallback",
    "sb3_ppo_ext.zoo.progress_file.ProgressFile",
}
# Bytes of the observations of a rollout above which the memory for copies of them, and the time for messages, matter
LARGEST = 1 << 28
# What a rollout calls of the environments
STEPS = ("step", "step_async", "step_wait", "step_tensors", "step_to_numpy", "pending_actions", "_step", "_infos")


def overlapped_collection(
    model: Any, env: VecEnv, callback: BaseCallback, actor: Actor, n_steps: int
) -> OverlappedCollection | None:
    """
    :param model: Model that collects a rollout
    :param env: Environments, with their wrappers
    :param callback: Callback of the training
    :param actor: Actor of the rollout
    :param n_steps: Number of steps to collect in each environment
    :return: Collection of the rollout, if nothing but the actor decides what the environments do in it, and nothing sees them
        in between; otherwise ``None``. Wrappers such as ``VecNormalize`` need all environments at each step, and so do
        statistics of the model that change at each step
    """
    if model.normalizer is not None and not model.normalizer.is_frozen:
        return None
    if not isinstance(actor, DivisibleActor) or not _collects_rollouts(env, model) or not _is_patient(callback, env):
        return None
    if n_steps * sum(part.nbytes for part in _parts(model._last_obs)) > LARGEST or _draws_in_between(callback, model):
        return None
    generator = th.get_rng_state()
    make_actor = actor.for_share(LARGEST)
    if make_actor is None:
        return None
    if model.normalizer is not None:
        make_actor = normalizing(make_actor, model.normalizer)
    if isinstance(env, ParallelVecEnv):
        collect: Any = partial(env.collect, make_actor, model._last_obs, n_steps)
    else:
        collect = env.collector(make_actor(slice(0, env.num_envs)), model._last_obs, n_steps)
    if collect is None:
        th.set_rng_state(generator)  # The steps will draw the same numbers.
        return None
    return OverlappedCollection(model, env, callback, actor, collect, n_steps)


def _collects_rollouts(env: VecEnv, model: Any) -> TypeGuard[ParallelVecEnv | JaxVecEnv]:
    if isinstance(env, ParallelVecEnv):
        return env.overlap and _steps_as(ParallelVecEnv, env)
    # A method that returns masks is none of JAX.
    has_masks = model.action_masking and model.action_mask_key is None
    return isinstance(env, JaxVecEnv) and env.device.type == "cpu" and not has_masks and _steps_as(JaxVecEnv, env)


def _steps_as(known: type, env: VecEnv) -> bool:
    return all(getattr(type(env), name, None) is getattr(known, name, None) and name not in vars(env) for name in STEPS)


def _parts(observations: Arrays) -> list[np.ndarray]:
    return list(observations.values()) if isinstance(observations, dict) else [observations]


def _draws_in_between(callback: BaseCallback | None, model: Any) -> bool:
    """Whether evaluations draw random numbers between the steps at which gSDE does, which the order of both decides on."""
    if callback is None or not model.use_sde or model.sde_sample_freq <= 0:
        return False
    is_random = isinstance(callback, EvalCallback) and not callback.deterministic
    return is_random or any(_draws_in_between(part, model) for part in _parts_of(callback))


def _is_patient(callback: BaseCallback | None, env: VecEnv) -> bool:
    if callback is None or is_empty(callback):
        return True
    if f"{type(callback).__module__}.{type(callback).__qualname__}" not in PATIENT:
        return False
    if isinstance(callback, EvalCallback) and callback.eval_env.unwrapped is env:
        return False
    return all(_is_patient(part, env) for part in _parts_of(callback))


def _parts_of(callback: BaseCallback) -> list[BaseCallback | None]:
    """Callbacks that a callback calls."""
    parts: list[BaseCallback | None] = list(callback.callbacks) if isinstance(callback, CallbackList) else []
    if isinstance(callback, EventCallback):
        parts.append(callback.callback)
    if isinstance(callback, EvalCallback):
        parts.append(callback.callback_on_new_best)
    return parts


class OverlappedCollection:
    """
    The collection of a rollout by :meth:`ParallelVecEnv.collect` or :meth:`JaxVecEnv.collector`. Callbacks are called
    afterwards, for one step after the other, with the model as it would be after the step.

    :param model: Model that collects it
    :param env: Environments
    :param callback: Callback of the training
    :param actor: Actor of the rollout
    :param collect: Function that collects the rollout, given where masks come from
    :param n_steps: Number of steps to collect in each environment
    """

    def __init__(
        self,
        model: Any,
        env: ParallelVecEnv | JaxVecEnv,
        callback: BaseCallback,
        actor: DivisibleActor,
        collect: Callable[[MaskSource | None], ShareRollout],
        n_steps: int,
    ):
        self.model, self.env, self.callback, self.actor, self.collect = model, env, callback, actor, collect
        self.n_steps = n_steps

    def run(self) -> bool:
        """
        :return: False if a callback has ended the training
        """
        model = self.model
        starts = np.array(model._last_episode_starts, bool)
        rollout = self.collect(self._mask_source())
        env_actions: Arrays = model._within_bounds(rollout.samples) if rollout.n_steps else ()
        is_right = is_finite(rollout.observations) and is_finite(rollout.rewards)
        truncated: list[tuple[int, int, Arrays]] = []
        for step in range(rollout.n_steps):
            new_obs = observations_at(rollout.observations, step + 1)
            if not is_right:
                check_finite(model, "observation", new_obs, step)
                check_finite(model, "reward", rollout.rewards[step], step)
            model._update_normalizer(new_obs, rollout.rewards[step], rollout.dones[step])
            infos = self._end_step(rollout, step, env_actions[step])
            if infos is None:
                model._last_obs = None
                return False
            if step in rollout.infos:
                model._update_info_buffer(infos, rollout.dones[step])
                truncated += [(step, *each) for each in model._truncated_episodes(rollout.dones[step], infos, step)]
            model._last_obs, model._last_episode_starts = new_obs, rollout.dones[step]
        if rollout.n_steps < self.n_steps:
            refuse_policy(model.policy, rollout.n_steps, model.num_timesteps)

        # Copied, so that nothing keeps the whole rollout
        model._last_obs = map_observations(np.copy, model._last_obs)
        model._last_episode_starts = model._last_episode_starts.copy()
        self.env.actions = model._actions_for_env(env_actions[-1].copy())
        self.actor.record_all(self._as_read(rollout), starts, truncated, model.gamma)
        last = model._seen_by_critic(model._last_obs, self.env.num_envs)
        values = self.actor.finish(model.policy, last, model._last_episode_starts)
        self.callback.update_locals({"values": values, "n_steps": self.n_steps})
        self.callback.on_rollout_end()
        return True

    def _mask_source(self) -> MaskSource | None:
        model = self.model
        if not model.action_masking:
            return None
        n_per_step = self.env.num_envs * model.ranks.size
        return MaskSource(model.action_space, model.action_mask_key, model.num_timesteps, n_per_step)

    def _as_read(self, rollout: ShareRollout) -> ShareRollout:
        """The rollout as the policy has read it."""
        kept = rollout if self.model.normalizer is None else normalized_rollout(rollout, self.model.normalizer)
        if rollout.masks is None or self.model.action_mask_key is not None:
            return kept
        return replace(kept, observations=add_mask(kept.observations, rollout.masks))

    def _end_step(self, rollout: ShareRollout, step: int, env_actions: np.ndarray) -> list[Info] | None:
        """Let the callbacks see a step, and return its infos; ``None`` if one of them ends the training."""
        infos: list[Info] = [dict(rollout.plain_info) for _ in range(self.env.num_envs)]
        for index, info in rollout.infos.get(step, {}).items():
            infos[index] = info
        self.model.num_timesteps += self.env.num_envs * self.model.ranks.size
        self.callback.update_locals(self._locals(rollout, step, env_actions, infos))
        return infos if self.callback.on_step() else None

    def _locals(self, rollout: ShareRollout, step: int, env_actions: np.ndarray, infos: Any) -> dict[str, Any]:
        return {
            "self": self.model,
            "env": self.env,
            "callback": self.callback,
            "rollout_buffer": self.model.rollout_buffer,
            "n_rollout_steps": self.n_steps,
            "n_steps": step,
            "samples": rollout.samples[step],
            "actions": env_actions if self.model._samples_latents else rollout.samples[step],
            "clipped_actions": env_actions,
            "new_obs": observations_at(rollout.observations, step + 1),
            "rewards": rollout.rewards[step],
            "dones": rollout.dones[step],
            "infos": infos,
            **({} if rollout.masks is None else {"action_masks": rollout.masks[step]}),
        }

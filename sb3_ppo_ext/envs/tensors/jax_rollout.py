"""Whole rollouts of environments in JAX as one compiled function: a scan over the policy and the step of all copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_ppo_ext.common.guards import is_finite
from sb3_ppo_ext.common.observations import dtype_of, map_observations
from sb3_ppo_ext.common.type_aliases import Arrays, Info, JaxTree
from sb3_ppo_ext.envs.action_masks import ActionMasks
from sb3_ppo_ext.envs.parallel.share_rollout import MaskSource, ShareRollout
from sb3_ppo_ext.envs.tensors.jax_functions import import_jax
from sb3_ppo_ext.envs.tensors.tensor_vec_env import TensorStep, TensorVecEnv


class ScannedSteps(NamedTuple):
    """
    The steps of a rollout, each field of shape ``(n_steps, n_envs, ...)``, named as in
    :class:`~sb3_ppo_ext.envs.tensors.tensor_vec_env.TensorStep`.

    :param samples: Samples of the policy
    :param is_right: Whether the outputs of the policy and the samples are finite, shape ``(n_steps,)``
    """

    samples: JaxTree
    is_right: JaxTree
    observations: JaxTree
    rewards: JaxTree
    terminated: JaxTree
    truncated: JaxTree
    final_observations: JaxTree
    log: JaxTree
    episode_returns: JaxTree
    episode_lengths: JaxTree


def make_rollout(
    step_all: Callable[..., JaxTree], act: Callable[..., JaxTree], n_held: int, env: Any
) -> Callable[..., JaxTree]:
    """
    :param step_all: Step of all copies
    :param act: Function of a :class:`JaxActor`
    :param n_held: Number of steps in which each element of the noise is used
    :param env: Environment with the spaces
    :return: Function of the parameters, the noise, the numbers of the steps, and the state, last observations, returns and
        lengths of the running episodes; returns the last three of the next rollout but the observations, and the
        :class:`ScannedSteps`. It is not compiled
    """
    jax = import_jax()
    jnp = jax.numpy

    def in_dtype_of(space: Any, part: JaxTree) -> JaxTree:
        return part.astype(jax.dtypes.canonicalize_dtype(th.zeros(0, dtype=dtype_of(space)).numpy().dtype))

    def in_space(space: Any, part: JaxTree) -> JaxTree:
        made = in_dtype_of(space, part)
        if part.shape != (env.num_envs, *(space.shape or ())) or (part.dtype.kind == "f" and made.dtype.kind != "f"):
            raise TypeError(f"{part} is not of {space}")
        return made

    def seen(observations: JaxTree) -> JaxTree:
        space: Any = env.observation_space
        if not isinstance(space, spaces.Dict):
            return in_space(space, observations)
        return {key: in_space(part, observations[key]) for key, part in space.items()}

    def rollout(parameters: JaxTree, noise: JaxTree, steps: JaxTree, *before: JaxTree) -> JaxTree:
        def step(carried: JaxTree, number: JaxTree) -> JaxTree:
            state, observations, returns, lengths = carried
            samples, actions, is_right = act(parameters, noise[number // n_held], observations)
            state, (new, rewards, terminated, truncated, last, log) = step_all(state, in_dtype_of(env.action_space, actions))
            new, returns, lengths, ended = seen(new), returns + rewards, lengths + 1, terminated | truncated
            if any(part.shape != ended.shape for part in log.values()):
                raise TypeError(f"{log} are not numbers")
            ends = (rewards, terminated, truncated, seen(last), log, returns, lengths)
            return (state, new, jnp.where(ended, 0, returns), jnp.where(ended, 0, lengths)), (samples, is_right, new, *ends)

        (state, _, returns, lengths), made = jax.lax.scan(step, before, steps)
        return (state, returns, lengths), ScannedSteps(*made)

    return rollout


def on_host(env: TensorVecEnv, before: Arrays, steps: ScannedSteps) -> ShareRollout:
    """
    :param env: Environment that was stepped
    :param before: Observations before the first step
    :param steps: Its steps
    :return: The same in arrays, up to the first observation, reward or output of the policy that is not finite
    """

    def with_first(first: np.ndarray, others: JaxTree) -> np.ndarray:
        return np.concatenate([first[np.newaxis], np.asarray(others)], dtype=first.dtype)

    observations, rewards = map_observations(with_first, before, steps.observations), np.asarray(steps.rewards)
    samples, dones = np.asarray(steps.samples), np.asarray(steps.terminated) | np.asarray(steps.truncated)
    env.env_log.add(map_observations(th.from_dlpack, steps.log), th.from_numpy(dones))
    if samples.dtype.kind == "i":
        samples = samples.astype(np.int64)
    rollout = ShareRollout(
        observations, samples, rewards, dones, _infos(env, dones, steps), [{}] * env.num_envs, plain_info={}
    )
    return rollout.first(_n_right(rollout, np.asarray(steps.is_right)))


def _n_right(rollout: ShareRollout, is_right: np.ndarray) -> int:
    """Number of steps up to the first data that are not finite, or before the policy's first outputs that are not."""
    n = len(is_right) if is_right.all() else int(is_right.argmin())
    parts = rollout.observations.values() if isinstance(rollout.observations, dict) else [rollout.observations]
    after = [rollout.rewards, *(part[1:] for part in parts)]
    if all(map(is_finite, after)):
        return n
    return next((step + 1 for step in range(n) if not all(is_finite(part[step]) for part in after)), n)


def _infos(env: TensorVecEnv, dones: np.ndarray, steps: ScannedSteps) -> dict[int, dict[int, Info]]:
    """Infos of the ends of episodes, by step and environment."""
    n_envs = dones.shape[1]
    ended = np.flatnonzero(dones)
    infos: dict[int, Info] = {index: {} for index in ended.tolist()}
    if infos:
        flat = [_flat(getattr(steps, name)) for name in TensorStep._fields[:6]]
        returns, lengths, terminated = (np.asarray(part).reshape(-1)[ended] for part in (*steps[-2:], steps.terminated))
        env.fill_infos(infos, ended, TensorStep(*flat), ~terminated, returns, lengths, None)
    found: dict[int, dict[int, Info]] = {}
    for index, info in infos.items():
        found.setdefault(index // n_envs, {})[index % n_envs] = info
    return found


def _flat(arrays: JaxTree) -> Arrays:
    """Tensors with the dimensions of steps and copies merged."""
    return map_observations(lambda array: th.from_dlpack(array).flatten(0, 1), arrays)


def masked(rollout: ShareRollout, source: MaskSource) -> ShareRollout:
    """
    :param rollout: Rollout with the masks of the actions in the observations
    :param source: Their key
    :return: The rollout with its masks
    :raises EnvironmentDataError: if a mask leaves no choice
    """
    masks = ActionMasks(source.action_space, source.key, rollout.dones.shape[1], list)
    found = []
    for step in range(rollout.n_steps):
        observations = map_observations(lambda part: part[step], rollout.observations)  # noqa: B023  # called at once
        masks.seen(observations, step, source.num_timesteps + step * source.n_per_step)
        found.append(masks.masks)
    return replace(rollout, masks=np.array(found))

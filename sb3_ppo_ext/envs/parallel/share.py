"""The environments that one process steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices
from stable_baselines3.common.vec_env.util import dict_to_obs

from sb3_ppo_ext.common.action_masks import METHOD
from sb3_ppo_ext.common.guards import is_finite
from sb3_ppo_ext.common.observations import observations_at
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.envs.action_masks import ActionMasks
from sb3_ppo_ext.envs.fast_dummy_vec_env import FastDummyVecEnv, detached
from sb3_ppo_ext.envs.parallel.share_rollout import MaskSource, ShareActor, ShareRollout
from sb3_ppo_ext.envs.parallel.shared_arrays import SharedArrays, numbers_of
from sb3_ppo_ext.envs.parallel.step_infos import StepInfos


class EnvironmentShare(FastDummyVecEnv):
    """
    Some of the environments of a :class:`~sb3_ppo_ext.ParallelVecEnv`. It writes what they return into memory that processes
    share, and its methods are called in all processes alike.

    :param env_fns: Functions that create the environments
    :param first: Index of the first of them among all environments
    :raises ValueError: if they return the same environment twice, or the observation space is not supported
    """

    def __init__(self, env_fns: list[Callable[[], gym.Env]], first: int):
        self._first = first
        try:
            super().__init__(env_fns)
        except Exception:
            if getattr(self, "envs", None):
                numbers_of(self.envs[0].observation_space)
            raise

    def attach(self, arrays: SharedArrays) -> None:
        """
        :param arrays: Arrays to write into. A checkpoint that is restored replaces them by others
        """
        if arrays.own_rewards is self.buf_rews:
            return
        envs = slice(self._first, self._first + self.num_envs)
        self.buf_obs = OrderedDict((key, array[envs]) for key, array in arrays.observations.items())
        self.keys = list(self.buf_obs)
        self._buffers = [(key, buffer, buffer.shape[1:]) for key, buffer in self.buf_obs.items()]
        self.buf_rews, self.buf_dones = arrays.rewards[envs], arrays.dones[envs]
        arrays.own_rewards = self.buf_rews

    def step_infos(self, actions: np.ndarray | list[object]) -> StepInfos | None:
        """
        Step all environments.

        :param actions: Action for each environment
        :return: What there is to say but numbers; ``None`` if there is nothing
        """
        infos = self.step_envs(actions)
        # Whoever was truncated has a terminal observation as well.
        unusual = {index: info for index, info in enumerate(infos) if len(info) > 1}
        if not unusual:
            return None
        return unusual, {index: self.reset_infos[index] for index in unusual if self.buf_dones[index]}

    def collect(self, actor: ShareActor, observations: Arrays, n_steps: int, source: MaskSource | None = None) -> ShareRollout:
        """
        Step all environments for a whole rollout, or to the first observation, reward or output of the policy that is not
        finite.

        :param actor: Actor for these environments
        :param observations: Their last observations
        :param n_steps: Number of steps
        :param source: Where masks of invalid actions come from, ``None`` for no masks
        :return: What they returned
        :raises EnvironmentDataError: if a mask cannot be used, or an observation or a reward has another shape or type
        """
        rows = {key: np.empty((n_steps + 1, *buffer.shape), buffer.dtype) for key, buffer in self.buf_obs.items()}
        seen = dict_to_obs(self.observation_space, rows)
        masks = (
            None if source is None else ActionMasks(source.action_space, source.key, self.num_envs, self._masks, self._first)
        )
        masked: list[np.ndarray] = []
        rewards, dones = (np.empty((n_steps, *array.shape), array.dtype) for array in (self.buf_rews, self.buf_dones))
        samples: list[np.ndarray] = []
        told: dict[int, dict[int, dict[str, object]]] = {}
        for key in rows:
            rows[key][0] = observations if key is None else observations[key]
        is_last = False
        while len(samples) < n_steps and not is_last:
            step = len(samples)
            given = observations_at(seen, step)
            if masks is not None and source is not None:
                given = masks.seen(given, step, source.num_timesteps + step * source.n_per_step)
            chosen = actor.act(given, step)
            if chosen is None or not self.goes_on():
                break
            if masks is not None:
                masked.append(masks.masks)
            samples.append(chosen[0])
            infos = self.step_envs(chosen[1])
            for key, buffer in self.buf_obs.items():
                rows[key][step + 1] = buffer
            rewards[step], dones[step] = self.buf_rews, self.buf_dones
            is_last = step + 1 == n_steps or not all(map(is_finite, (*self.buf_obs.values(), self.buf_rews)))
            of_step = {i: detached(info) for i, info in enumerate(infos) if is_last or dones[step, i] or "episode" in info}
            if of_step:
                told[step] = of_step
        n = len(samples)
        arrays = (np.array(samples), rewards[:n], dones[:n])
        of_steps = observations_at(seen, slice(n + 1))
        return ShareRollout(of_steps, *arrays, told, list(self.reset_infos), np.array(masked) if source else None)

    def _masks(self) -> list[object]:
        return self.call(lambda env: env.get_wrapper_attr(METHOD)(), [()] * self.num_envs)

    def goes_on(self) -> bool:
        """
        Called before each step of a rollout.

        :return: Whether somebody still waits for it
        """
        return True

    def reset_envs(self, seeds: Sequence[int | None], options: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """
        Reset all environments.

        :param seeds: Seed for each environment
        :param options: Options for each environment, which are not passed on if they are empty
        :return: Info of each environment
        """
        for index, env in enumerate(self.envs):
            self._active = index
            given = {"options": options[index]} if options[index] else {}
            observation, self.reset_infos[index] = env.reset(seed=seeds[index], **given)
            self._save_obs(index, observation)
        return self.reset_infos

    def render_envs(self, indices: Sequence[int]) -> list[Any]:
        """
        :param indices: Environments
        :return: What ``render`` of each returns
        """
        return [self.envs[index].render() for index in indices]

    def has_attr_each(self, name: str, indices: Sequence[int]) -> list[bool]:
        """
        :param name: Name of an attribute
        :param indices: Environments
        :return: Whether each of them, or one of its wrappers, has it. The attribute itself may not be picklable
        """
        return [self.envs[index].has_wrapper_attr(name) for index in indices]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """As SB3, but by name: a class of the script has travelled by value, and is another object in a forked process."""
        name = (wrapper_class.__module__, wrapper_class.__qualname__)
        return [any(name in _names_of(each) for each in _wrappers_of(env)) for env in self._get_target_envs(indices)]

    def call(self, function: Callable[..., object], args: Sequence[tuple[object, ...]]) -> list[object]:
        """
        :param function: Function that gets an environment and the arguments
        :param args: Arguments for each environment
        :return: What it returns for each environment
        """
        results = []
        for index, env in enumerate(self.envs):
            self._active = index
            results.append(function(env, *args[index]))
        return results

    @property
    def active(self) -> int:
        """Index of the environment that was called last, among all environments."""
        return self._first + self._active


def _wrappers_of(env: gym.Env) -> Iterator[gym.Wrapper]:
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env


def _names_of(wrapper: gym.Wrapper) -> set[tuple[str, str]]:
    return {(each.__module__, each.__qualname__) for each in type(wrapper).__mro__}

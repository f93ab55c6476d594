"""
The memory between a rollout and its environments. What an environment is given is its own; what it gives is copied where it is
kept, since the next step may write into it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecCheckNan,
    VecEnv,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    VecVideoRecorder,
)
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_ppo_ext.common.observations import map_observations, observations_at
from sb3_ppo_ext.common.type_aliases import Arrays, Info
from sb3_ppo_ext.envs.checked_subproc_vec_env import CheckedSubprocVecEnv
from sb3_ppo_ext.envs.fast_dummy_vec_env import FastDummyVecEnv
from sb3_ppo_ext.envs.parallel.vec_env import ParallelVecEnv
from sb3_ppo_ext.envs.rnd_reward import RNDReward
from sb3_ppo_ext.envs.vector_env_adapter import VectorEnvAdapter

# Vectorised environments that return new arrays at each step, and wrappers around them that write into none of an earlier step
ENVIRONMENTS = frozenset((DummyVecEnv, SubprocVecEnv, FastDummyVecEnv, CheckedSubprocVecEnv, ParallelVecEnv, VectorEnvAdapter))
WRAPPERS = frozenset(
    (VecCheckNan, VecExtractDictObs, VecFrameStack, VecMonitor, VecNormalize, VecTransposeImage, VecVideoRecorder, RNDReward)
)
# What a script may have replaced in one of them
STEPS = frozenset(("step", "step_wait", "reset"))
# What is kept of the infos
KEPT = frozenset(("episode", "is_success"))
# Number of episodes without a terminal observation of their own after which there is a warning
SUSPICIOUS = 3


def gives_new_arrays(env: VecEnv) -> bool:
    """
    :param env: Vectorised environments, with their wrappers
    :return: Whether what they return is known to be left alone by the next step
    """
    known: Any = env
    while type(known) in WRAPPERS and _has_own_steps(known):
        known = known.venv
    return type(known) in ENVIRONMENTS and _has_own_steps(known)


def _has_own_steps(env: VecEnv) -> bool:
    """Whether the methods are those of its class. Not by ``vars``, which slows all attributes of an object (Python 3.11)."""
    return all(getattr(getattr(env, name), "__func__", None) is getattr(type(env), name) for name in STEPS)


class OwnCopies:
    """
    Copies what the environments of a rollout return, where they might write into it later. Arrays keep their order in memory.

    :param env: Vectorised environments, with their wrappers
    """

    def __init__(self, env: VecEnv):
        self.are_new = gives_new_arrays(env)
        # Whether they come as they are from one of SB3's that fills arrays of the right types and shapes
        self.are_of_sb3 = self.are_new and type(env) in (DummyVecEnv, FastDummyVecEnv)

    def of(self, observations: Arrays) -> Arrays:
        """
        :param observations: Observations of all environments, or whether they start an episode
        :return: The same, to be kept
        """
        return observations if self.are_new else map_observations(np.array, observations)

    def of_step(self, result: tuple[Arrays, Arrays, Arrays, Any]) -> tuple[Arrays, Arrays, Arrays, Any]:
        """
        :param result: Observations, rewards, dones and infos
        :return: The same, to be kept but for the infos
        """
        if self.are_of_sb3:
            return result
        observations, rewards, dones, infos = result
        # Rewards are copied: the values of truncated episodes are added to them, and `VecNormalize` keeps them.
        return self.of(observations), np.array(rewards), self.of(dones), infos


def kept_of(info: Mapping[str, object]) -> Info:
    """
    :param info: Info of a step
    :return: Copy of what a model keeps of it
    """
    return {key: _copy_of(value) for key in KEPT if (value := info.get(key)) is not None}


def _copy_of(value: object) -> object:
    # What a `Monitor` says of an episode, which `deepcopy` takes long for
    if type(value) is dict and all(type(part) in (int, float) for part in value.values()):
        return value.copy()
    return deepcopy(value)


class TerminalWatch:
    """
    Warns once if terminal observations seem to have been overwritten before they were copied. SB3's ``DummyVecEnv`` and
    ``SubprocVecEnv`` reset an environment first, so that one with a single array for its observations returns the first
    observation of the next episode as the last one of the old, and one with a single info that it clears returns none.

    :param env: Vectorised environments
    """

    def __init__(self, env: VecEnv):
        # Not the environments themselves, which would be copied and pickled with the model
        self.env_id, self.is_of_sb3 = id(env), type(env.unwrapped) in (DummyVecEnv, SubprocVecEnv)
        # Number of episodes whose terminal observation was lost, if it was in all of them
        self.is_active, self.n_lost = True, 0

    def note(self, before: VecEnvObs, after: VecEnvObs, dones: np.ndarray, infos: Sequence[Info]) -> None:
        """
        :param before: Observations before a step, shape ``(n_envs, *obs_shape)``
        :param after: Observations after it, the first ones of new episodes
        :param dones: Whether episodes have ended
        :param infos: Infos of the step
        """
        for index in dones.nonzero()[0].tolist() if self.is_active else ():
            is_lost = self._is_lost(before, after, index, infos[index])
            if is_lost is not None:
                self.is_active, self.n_lost = self.is_active and is_lost, self.n_lost + 1
        if self.is_active and self.n_lost >= SUSPICIOUS:
            self.is_active = False
            warnings.warn(
                f"The terminal observations of {self.n_lost} episodes, of as many, were missing or equal to the first ones of "
                "the next episodes: the environment seems to write all observations into one array, or all infos into one "
                "dictionary, and SB3's DummyVecEnv and SubprocVecEnv reset it before they copy the last ones. Truncated "
                "episodes are then valued wrongly. Make it with `make_vec_env(..., vec_env_cls=FastDummyVecEnv)` or "
                "`ParallelVecEnv` of sb3_ppo_ext, or let its `step` return copies.",
                stacklevel=2,
            )

    def _is_lost(self, before: VecEnvObs, after: VecEnvObs, index: int, info: Info) -> bool | None:
        """Whether the terminal observation is lost, ``None`` if that cannot be told."""
        terminal = info.get("terminal_observation")
        if terminal is None:
            return True if self.is_of_sb3 else None
        if not info.get("TimeLimit.truncated", False) or not _can_be_written(terminal):
            return None
        # Where observations do not change, or cannot be written into, equal ones say nothing.
        first = observations_at(after, index)
        return None if _equal(observations_at(before, index), first) else _equal(terminal, first)


def _can_be_written(observation: VecEnvObs) -> bool:
    parts = observation.values() if isinstance(observation, Mapping) else [observation]
    return any(isinstance(part, np.ndarray) and part.ndim for part in parts)


def _equal(one: Arrays, other: Arrays) -> bool:
    if isinstance(other, Mapping):
        return isinstance(one, Mapping) and all(key in one and np.array_equal(one[key], other[key]) for key in other)
    return np.array_equal(one, other)

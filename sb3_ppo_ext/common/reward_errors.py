"""Rewards that are no numbers, which SB3 and NumPy refuse with an error that names neither them nor a remedy."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, MutableMapping, Sequence
from numbers import Real
from types import FrameType
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_ppo_ext.common.validation import described

NOTHING = "Nothing was learned from this rollout."
#: Packages whose variable `reward` is that of an environment
PACKAGES = ("gymnasium", "sb3_ppo_ext", "stable_baselines3")


def describe_bad_reward(error: Exception, where: str | None = None) -> str | None:
    """
    :param error: Error that was raised in the step of an environment
    :param where: Name of the environment in the description; ``None`` for what the traceback says
    :return: What is wrong with the reward, and what helps; ``None`` if the error has another reason
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    frame, given = frames[-1], frames[-1].f_locals
    where = _place(frames) if where is None else where
    if frame.f_globals.get("__name__", "").split(".")[0] in PACKAGES and "reward" in given:
        reward = given["reward"]
        if isinstance(reward, Real | np.bool_) or (isinstance(reward, np.ndarray) and reward.ndim == 0):
            return None
        shown = f"{described(reward)} ({type(reward).__name__}): {_remedy(reward)}"
        return f"The reward of {where} must be a number, not {shown}. {NOTHING}"
    if frame.f_code is DummyVecEnv.step_wait.__code__ and "unpack" not in str(error) and _only_reward_is_left(given):
        # It writes the reward into an array, without a name for it.
        return f"The reward of {where} must be a number ({error}). {NOTHING}"
    return None


def _place(frames: Sequence[FrameType]) -> str:
    """Environment of the step of a ``DummyVecEnv`` among the frames"""
    indices = [frame.f_locals.get("env_idx") for frame in frames if frame.f_code is DummyVecEnv.step_wait.__code__]
    return "an environment" if not indices or indices[-1] is None else f"environment {indices[-1]}"


def _only_reward_is_left(given: Mapping[str, Any]) -> bool:
    """Whether what `DummyVecEnv` has got besides the reward, in this step or the one before, is what it should be."""
    env, index = given["self"], given["env_idx"]
    ends = [given[name] for name in ("terminated", "truncated") if name in given]
    return isinstance(env.buf_infos[index], MutableMapping) and all(np.size(end) == 1 for end in ends)


def _remedy(reward: object) -> str:
    if not isinstance(reward, np.ndarray | list | tuple) or np.size(reward) == 0:
        return "return one from `step`, 0.0 where there is none"
    around = "around the environment, inside of all other wrappers"
    if np.size(reward) == 1:
        return f"`gymnasium.wrappers.TransformReward(env, lambda reward: np.asarray(reward).item())` {around} makes it one"
    return (
        "rewards for several objectives have to be weighted, with `mo_gymnasium.wrappers.LinearReward(env, weight)` or with "
        f"`gymnasium.wrappers.TransformReward(env, lambda reward: float(np.dot(reward, weight)))` {around}"
    )

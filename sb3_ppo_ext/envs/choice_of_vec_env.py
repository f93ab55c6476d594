"""Whether several processes step environments faster than one: measured with one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import gymnasium as gym
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.common.cores import available_cores
from sb3_ppo_ext.envs.fast_dummy_vec_env import FastDummyVecEnv
from sb3_ppo_ext.envs.parallel.vec_env import ParallelVecEnv

# Seconds that processes lose per step of all environments, for messages and for the policy, which each of them computes. By
# `scripts/benchmark_choice.py` on two free cores, trainings in which more is saved are 1.1 to 1.4 times as fast. Below that,
# processes gain at times and lose at others.
COST = 2e-5
# Limits of the measurement
LONGEST, MOST_STEPS = 0.1, 200


class VecEnvChoice(NamedTuple):
    """
    A class of vectorised environments, and why it was taken.

    :param cls: Class
    :param reason: A line that says why
    """

    cls: type[VecEnv]
    reason: str


def choose_vec_env(make: Callable[[], gym.Env], n_envs: int) -> VecEnvChoice:
    """
    Results do not depend on the choice.

    :param make: Function that makes an environment, with its wrappers
    :param n_envs: Number of environments
    :return: ``ParallelVecEnv`` if the steps that it takes at the same time last longer than what that costs, otherwise
        ``FastDummyVecEnv``
    """
    n_processes = min(available_cores(), n_envs)
    if n_processes == 1:
        return VecEnvChoice(FastDummyVecEnv, "FastDummyVecEnv: there is one core, or one environment")
    seconds = seconds_per_step(make)
    saved = seconds * (n_envs - -(-n_envs // n_processes))
    what = f"a step of one environment takes {seconds * 1e6:.0f} µs, and {n_processes} processes save {saved * 1e6:.0f} µs"
    if saved > COST:
        return VecEnvChoice(ParallelVecEnv, f"ParallelVecEnv: {what} for each step of {n_envs}")
    return VecEnvChoice(FastDummyVecEnv, f"FastDummyVecEnv: {what} for each step of {n_envs}, less than they cost")


def seconds_per_step(make: Callable[[], gym.Env]) -> float:
    """
    :param make: Function that makes an environment, with its wrappers
    :return: Seconds that a step with a random action takes, resets included
    """
    env = make()
    try:
        env.reset(seed=0)
        env.action_space.seed(0)
        n_steps, start = 0, time.perf_counter()
        while n_steps < MOST_STEPS and time.perf_counter() - start < LONGEST:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
            n_steps += 1
        return (time.perf_counter() - start) / max(n_steps, 1)
    finally:
        env.close()

"""
When several processes train faster than one: the measurement behind the rule of `sb3_ppo_ext/envs/choice_of_vec_env.py`.

For each task and number of environments, whole training runs in `FastDummyVecEnv` and in `ParallelVecEnv` take turns, with
normalisation and statistics per rollout, so that environments need not wait for each other. The table has the time of a step,
what the processes save, the median ratio of the speeds, and what the rule takes.

Run it: python scripts/benchmark_choice.py (about 3 minutes on two quiet cores; `--rounds`, `--steps`)
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext import FastDummyVecEnv, ParallelVecEnv, make
from sb3_ppo_ext.common.cores import available_cores
from sb3_ppo_ext.envs.choice_of_vec_env import COST, choose_vec_env, seconds_per_step

TASKS = ("CartPole-v1", "Pendulum-v1", "HalfCheetah-v5")
N_ENVS = (2, 8)
# The same for all tasks, whatever their presets
SETTINGS: dict[str, Any] = dict(
    batch_size=128, n_epochs=10, use_sde=False, normalize=True, normalize_freq="rollout", device="cpu"
)


def speed(task: str, n_envs: int, cls: type[VecEnv], n_steps: int) -> float:
    """
    :param task: Id of an environment
    :param n_envs: Number of environments
    :param cls: Class of the vectorised environments
    :param n_steps: Number of steps to time
    :return: Steps per second of a training, after its first rollout
    """
    model, env = make(task, n_envs=n_envs, vec_env_cls=cls, n_steps=2048 // n_envs, seed=0, **SETTINGS)
    try:
        model.learn(2048)
        start = time.perf_counter()
        model.learn(n_steps, reset_num_timesteps=False)
        return n_steps / (time.perf_counter() - start)
    finally:
        env.close()


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16384)
    args = parser.parse_args()
    th.set_num_threads(1)
    warnings.simplefilter("ignore")
    cores = available_cores()
    print(f"{cores} cores, load {os.getloadavg()[0]:.1f}; the rule: more than {COST * 1e6:.0f} µs saved\n")
    print("| task, environments | step, µs | saved, µs | ParallelVecEnv / FastDummyVecEnv | the rule takes |")
    print("| --- | --- | --- | --- | --- |")
    for task in TASKS:
        for n_envs in N_ENVS:
            classes = (FastDummyVecEnv, ParallelVecEnv)
            turns = [[speed(task, n_envs, cls, args.steps) for cls in classes] for _ in range(args.rounds)]
            found = np.array([together / one for one, together in turns])
            seconds = min(seconds_per_step(partial(gym.make, task)) for _ in range(3))
            saved = seconds * (n_envs - -(-n_envs // min(cores, n_envs)))
            taken = choose_vec_env(partial(gym.make, task), n_envs).cls.__name__
            ratio = f"{np.median(found):.2f} ({found.min():.2f} to {found.max():.2f})"
            print(f"| {task}, {n_envs} | {seconds * 1e6:.0f} | {saved * 1e6:.0f} | {ratio} | {taken} |", flush=True)


if __name__ == "__main__":
    main()

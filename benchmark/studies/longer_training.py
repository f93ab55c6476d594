"""
The presets of the robots with one and three million steps, beside RN-D (https://arxiv.org/abs/2601.23075) in its own
configuration: a categorical distribution over 41 values of each joint, an actor of residual blocks and a small critic.

RN-D has 16 environments with 1024 steps, ten epochs of minibatches of 256 samples, and a rate that decays from 3e-4 to 0. Its
statistics of observations and rewards are shared by the environments here, and each environment's own there. The score is the
mean return of 20 episodes of the last deterministic policy, in environments with seeds of their own. Seeds begin at 610.

Run it: python benchmark/studies/longer_training.py (hours for each run), and with `--timesteps 3000000`
It writes benchmark/studies/longer_training.csv.gz after each run; runs that are in the table are not repeated. `--report` runs
nothing.
"""

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from common import Job, Row, mean_and_std, parser_of, print_table, read_csv, select, write_csv
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from torch import nn

from sb3_ppo_ext import PPOExt, make
from sb3_ppo_ext.policies import MlpPolicy

TASKS = ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "Swimmer-v5")
ARMS = ("preset", "RN-D")
FIRST_SEED, N_EPISODES = 610, 20
N_BINS = 41


class Bins(gym.ActionWrapper):
    """Each dimension of an action is one of 41 values, evenly spaced between its bounds."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        assert isinstance(env.action_space, spaces.Box)
        self._values = np.linspace(env.action_space.low, env.action_space.high, N_BINS)
        self.action_space = spaces.MultiDiscrete([N_BINS] * env.action_space.shape[0])

    def action(self, action: np.ndarray) -> np.ndarray:
        return self._values[action, np.arange(len(action))]


class ResidualActorSmallCritic(MlpPolicy):
    """An actor of two residual blocks of 256 units, and a critic of two tanh layers of 64."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, net_type="simba", net_arch=dict(pi=[256, 256], vf=[]), **kwargs)

    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        critic = nn.Sequential(nn.Linear(self.features_dim, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mlp_extractor.value_net, self.mlp_extractor.latent_dim_vf = critic.to(self.device), 64


# The loss of CleanRL, from which RN-D is made, halves the squared error once more: vf_coef is a quarter
RN_D: dict[str, Any] = dict(
    n_steps=1024,
    batch_size=256,
    n_epochs=10,
    learning_rate="lin_3e-4",
    clip_range_vf=0.2,
    vf_clip_mode="max",
    vf_coef=0.25,
    normalize_obs=True,
    normalize_reward=True,
)


def make_model(task: str, arm: str, seed: int) -> PPOExt:
    if arm == "preset":
        return make(task, seed=seed, device="cpu")[0]
    env = make_vec_env(task, 16, seed=seed, wrapper_class=Bins)
    return PPOExt(ResidualActorSmallCritic, env, seed=seed, device="cpu", **RN_D)


def run(job: Job) -> Row:
    model, start = make_model(**job.settings, seed=job.seed), time.process_time()
    model.learn(job.timesteps)
    seconds = time.process_time() - start
    wrapper = Bins if job.settings["arm"] == "RN-D" else None
    test = make_vec_env(job.settings["task"], 10, seed=10_000 + job.seed, wrapper_class=wrapper)
    score = float(np.mean(evaluate_policy(model, test, N_EPISODES, return_episode_rewards=True)[0]))
    return {**job.settings, "seed": job.seed, "timesteps": job.timesteps, "return": score, "cpu_seconds": seconds}


def jobs_of(arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Job]:
    """Runs that are not in the table, the first seed of all of them first."""
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    for seed, task, arm in itertools.product(seeds, arguments.tasks, arguments.arms):
        settings = {"task": task, "arm": arm}
        if not select(rows, **settings, seed=seed, timesteps=arguments.timesteps):
            yield Job(settings, seed, arguments.timesteps)


def report(rows: list[Row]) -> None:
    for timesteps in sorted({row["timesteps"] for row in rows}):
        lines = []
        for task in TASKS:
            kinds = [select(rows, task=task, arm=arm, timesteps=timesteps) for arm in ARMS]
            lines.append([task, *(cell(kind) for kind in kinds)])
        print_table(f"Return after {timesteps:,} steps, mean ± std over seeds (number)", ["", *ARMS], lines)


def cell(runs: list[Row]) -> str:
    return f"{mean_and_std(np.array([row['return'] for row in runs]))} ({len(runs)})" if runs else "-"


def main() -> None:
    parser = parser_of(__doc__, timesteps=1_000_000, seeds=1, tasks=TASKS, arms=ARMS)
    parser.add_argument("--report", action="store_true", help="print the tables of the runs that there are")
    arguments = parser.parse_args()
    path = arguments.out / "longer_training.csv.gz"
    rows = read_csv(path)
    jobs = [] if arguments.report else list(jobs_of(arguments, rows))
    with multiprocessing.get_context("spawn").Pool(arguments.processes, partial(th.set_num_threads, 1)) as pool:
        for n_done, done in enumerate(pool.imap_unordered(run, jobs), start=1):
            rows = sorted([*rows, done], key=lambda row: (row["timesteps"], TASKS.index(row["task"]), row["arm"], row["seed"]))
            write_csv(path, rows)
            print(f"{n_done} of {len(jobs)} runs: {done}", flush=True)
    report(rows)


if __name__ == "__main__":
    main()

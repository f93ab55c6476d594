"""
Which policy remembers what POPGym's easy tasks hide, after 100 thousand steps: PPO on eight stacked frames, the transformer
with the entry `memory`, MinGRU and LRU of two layers and an LSTM with the entry `recurrent`, and RecurrentPPO of sb3-contrib
with its defaults. Nothing was chosen on these tasks.

Observations are those of POPGym's own experiments: they contain the previous action and whether an episode begins. All arms
have eight environments, and the frames have the options of the entry `memory`. RecurrentPPO is computed by PPOExt, which is
equal but for rounding, in less time.

Returns of POPGym lie between -1 and 1, and of cart-poles and pendulums between 0 and 1. The table has the mean over the
episodes of the last 20 thousand steps of a run, and its highest mean over those of 10 thousand steps ("best"), as POPGym
reports them. What it published, for a GRU with 256 units and the PPO of RLlib, is after 15 million steps, 150 times as many.

Run it: python benchmark/studies/popgym_easy.py (hours for each seed on one core; it needs popgym)
It writes benchmark/studies/popgym_easy.csv.gz after each run, all arms and tasks with the first seed first; runs that are in
the table are not repeated. `--report` runs nothing.
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
import popgym.envs
import torch as th
from common import Job, Row, mean_and_std, parser_of, print_table, read_csv, select, write_csv
from popgym.wrappers import Antialias, PreviousAction
from robustness import HELD, N_FRAMES
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from sb3_ppo_ext import PPOExt, make

# Each with what POPGym published for its GRU, as far as a secondary source quotes it: the mean over three runs of the best
# return, table 3 of https://arxiv.org/abs/2303.01859
TASKS: dict[str, float | None] = {
    "RepeatPrevious": 1.0,
    "RepeatFirst": 1.0,
    "CountRecall": 0.177,
    "HigherLower": 0.529,
    "Autoencode": -0.283,
    "NoisyPositionOnlyCartPole": 0.995,
    "PositionOnlyCartPole": 1.0,
    "PositionOnlyPendulum": None,
    "NoisyPositionOnlyPendulum": None,
    "Battleship": None,
    "Concentration": None,
    "MineSweeper": None,
    "MultiarmedBandit": 0.619,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "MinGRU": dict(rnn="mingru", n_lstm_layers=2),
    "LRU": dict(rnn="lru", n_lstm_layers=2),
    "LSTM": {},
}
ARMS = ("frames", "transformer", *RECURRENT, "RecurrentPPO")
# With the networks of the entry
SIZES: dict[str, Any] = dict(lstm_hidden_size=64, net_arch=dict(pi=[64], vf=[64]))
N_ENVS, TIMESTEPS = 8, 100_000
# Numbers of steps of a period of a training run, and of its end
PERIOD, END = 10_000, 20_000


def make_env(task: str) -> gym.Env:
    """A task as a vector, with the wrappers of POPGym's own experiments."""
    env = Antialias(PreviousAction(getattr(popgym.envs, f"{task}Easy")()))
    return gym.wrappers.DtypeObservation(gym.wrappers.FlattenObservation(env), np.float32)


def make_model(task: str, arm: str, seed: int) -> PPOExt:
    source = partial(make_env, task)
    if arm == "transformer":
        return make(source, N_ENVS, seed, device="cpu", policy="MlpTransformerPolicy")[0]
    if arm in RECURRENT:
        policy_kwargs = {**SIZES, **RECURRENT[arm]}
        return make(source, N_ENVS, seed, device="cpu", policy="MlpLstmPolicy", policy_kwargs=policy_kwargs)[0]
    env = make_vec_env(source, N_ENVS, seed=seed)
    if arm == "frames":
        env = VecFrameStack(env, N_FRAMES)
        return PPOExt("MlpPolicy", env, n_steps=128, batch_size=256, seed=seed, device="cpu", **HELD)
    return PPOExt("MlpLstmPolicy", env, n_steps=128, batch_size=128, seed=seed, device="cpu")


def measured(env: VecEnv, timesteps: int) -> Row:
    """Mean returns of the episodes that have ended, by when they have."""
    episodes = zip(env.env_method("get_episode_lengths"), env.env_method("get_episode_rewards"), strict=True)
    ends, returns = np.hstack([(N_ENVS * np.cumsum(lengths), rewards) for lengths, rewards in episodes])
    periods = np.ceil(ends / PERIOD).clip(max=max(timesteps // PERIOD, 1))  # without a short one at the end
    best = max(returns[periods == period].mean() for period in np.unique(periods))
    return {"return": float(returns[ends > ends.max() - END].mean()), "best": float(best)}


def run(job: Job) -> Row:
    model, start = make_model(**job.settings, seed=job.seed), time.process_time()
    model.learn(job.timesteps)
    assert model.env is not None
    returns, seconds = measured(model.env, job.timesteps), time.process_time() - start
    return {**job.settings, "seed": job.seed, "timesteps": job.timesteps, **returns, "cpu_seconds": seconds}


def jobs_of(arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Job]:
    """Runs that are not in the table, the first seed of all of them first."""
    for seed, task, arm in itertools.product(range(arguments.seeds), arguments.tasks, arguments.arms):
        settings = {"task": task, "arm": arm}
        if not select(rows, **settings, seed=seed):
            yield Job(settings, seed, arguments.timesteps)


def report(rows: list[Row], arguments: argparse.Namespace) -> None:
    for column, title in (("return", "at the end"), ("best", "best")):
        lines = []
        for task in arguments.tasks:
            kinds = [select(rows, task=task, arm=arm) for arm in arguments.arms]
            published = TASKS[task] if column == "best" else None
            lines.append([task, *(cell(kind, column) for kind in kinds), "" if published is None else f"{published:.2f}"])
        means = [mean_over_tasks(select(rows, arm=arm), column) for arm in arguments.arms]
        print_table(
            f"Return, {title}, mean ± std over seeds", ["", *arguments.arms, "published GRU"], [*lines, ["mean", *means, ""]]
        )
    seconds = [f"{np.mean([row['cpu_seconds'] for row in select(rows, arm=arm)]):.0f}" for arm in arguments.arms]
    print_table("CPU time of a run", ["", *arguments.arms], [["seconds", *seconds]])


def cell(runs: list[Row], column: str) -> str:
    return mean_and_std(np.array([row[column] for row in runs])) if runs else "-"


def mean_over_tasks(runs: list[Row], column: str) -> str:
    """Mean of the means of the tasks, if there are runs of each."""
    tasks = {row["task"] for row in runs}
    means = [np.mean([row[column] for row in select(runs, task=task)]) for task in tasks]
    return f"{np.mean(means):.2f}" if len(tasks) == len(TASKS) else "-"


def main() -> None:
    parser = parser_of(__doc__, timesteps=TIMESTEPS, seeds=5, tasks=tuple(TASKS), arms=ARMS)
    parser.add_argument("--report", action="store_true", help="print the tables of the runs that there are")
    arguments = parser.parse_args()
    path = arguments.out / "popgym_easy.csv.gz"
    rows = read_csv(path)
    jobs = [] if arguments.report else list(jobs_of(arguments, rows))
    with multiprocessing.get_context("spawn").Pool(arguments.processes, partial(th.set_num_threads, 1)) as pool:
        for n_done, done in enumerate(pool.imap_unordered(run, jobs), start=1):
            rows = sorted([*rows, done], key=lambda row: (list(TASKS).index(row["task"]), row["arm"], row["seed"]))
            write_csv(path, rows)
            print(f"{n_done} of {len(jobs)} runs: {done}", flush=True)
    report(rows, arguments)


if __name__ == "__main__":
    main()

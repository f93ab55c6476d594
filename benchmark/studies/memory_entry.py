"""
Whether the entry `memory` of hyperparameters/ppo_ext.yml should normalise rewards, or observations too: on the eight tasks of
robustness.py, whose returns are at most 1, and on three tasks of Gymnasium with large rewards and without ids, so that `make`
takes this entry. Where velocities are not hidden, the policy also has to cope with a memory that it does not need.

The score is the mean return, as the environment gives it, of the episodes in the last 20 thousand of 100 thousand steps.
Seeds begin at 400 and chose nothing.

Run it: python benchmark/studies/memory_entry.py (about a minute a run; what is done is not repeated)
It writes benchmark/studies/memory_entry.csv.gz after each run.
"""

import multiprocessing
import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from common import Job, Row, parser_of, print_table, read_csv, select, write_csv
from robustness import TASKS as SMALL_RETURNS
from robustness import Returns

from sb3_ppo_ext import make

TASKS = {**SMALL_RETURNS, **{name: partial(gym.make, name) for name in ("CartPole-v1", "Acrobot-v1", "Pendulum-v1")}}
ARMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rewards": {"normalize_reward": True},
    "rewards and observations": {"normalize_reward": True, "normalize_obs": True},
}
TIMESTEPS, FIRST_SEED = 100_000, 400


def run(job: Job) -> Row:
    model, env = make(
        TASKS[job.settings["task"]], policy="MlpTransformerPolicy", seed=job.seed, device="cpu", **ARMS[job.settings["arm"]]
    )
    callback, start = Returns(job.timesteps), time.process_time()
    model.learn(job.timesteps, callback=callback)
    env.close()
    score = float(np.mean([row["return"] for row in callback.rows()[-2:]]))
    return {**job.settings, "seed": job.seed, "score": score, "cpu_seconds": time.process_time() - start}


def main() -> None:
    parser = parser_of(__doc__, timesteps=TIMESTEPS, seeds=3, tasks=tuple(TASKS), arms=tuple(ARMS))
    arguments = parser.parse_args()
    path = arguments.out / "memory_entry.csv.gz"
    rows = read_csv(path)
    jobs = [
        Job({"task": task, "arm": arm}, FIRST_SEED + seed, arguments.timesteps)
        for seed in range(arguments.seeds)
        for task in arguments.tasks
        for arm in arguments.arms
        if not select(rows, task=task, arm=arm, seed=FIRST_SEED + seed)
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.processes, partial(th.set_num_threads, 1)) as pool:
        for done in pool.imap_unordered(run, jobs):
            rows = sorted([*rows, done], key=lambda row: (list(TASKS).index(row["task"]), row["arm"], row["seed"]))
            write_csv(path, rows)
            print(done, flush=True)
    lines = [[task, *(cell(select(rows, task=task, arm=arm)) for arm in arguments.arms)] for task in arguments.tasks]
    print_table("return, mean ± std over seeds", ["task", *arguments.arms], lines)


def cell(runs: list[Row]) -> str:
    scores = [row["score"] for row in runs]
    return f"{np.mean(scores):.3g} ± {np.std(scores):.2g} ({len(scores)})" if scores else "-"


if __name__ == "__main__":
    main()

"""
Whether `default` learns as much with any number of environments, and with statistics that wait for the end of a rollout.

Tasks are made without their ids, so that `make` takes its entry for unknown tasks: with 2, 8, 12, 16 and 64 environments at
equal steps, and with both values of `normalize_freq`. With 64, rollouts are so short that `make` staggers the first episodes;
"64 together" is without. A score is the mean return of 20 deterministic episodes at the
end. Seeds are those that chose nothing.

Run it: python benchmark/studies/environments.py (about 70 minutes on one core; what is done is not repeated)
It writes benchmark/studies/environments.csv.gz and benchmark/studies/environments.svg.
"""

import multiprocessing
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from common import (
    Job,
    Row,
    grid_of_axes,
    legend_below,
    mean_and_std,
    parse_arguments,
    print_table,
    read_csv,
    save_plot,
    write_csv,
)
from matplotlib.figure import Figure
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_ppo_ext import make, presets

TASKS = {
    "Pendulum-v1": 100_000,
    "LunarLanderContinuous-v3": 100_000,
    "Reacher-v5": 100_000,
    "HalfCheetah-v5": 100_000,
    "LunarLander-v3": 100_000,
    "Walker2d-v5": 100_000,
}
# Those of which the number of environments changes; the statistics are compared on all.
COUNTED = list(TASKS)[:5]
COUNTS = (2, 8, 12, 16, 64)
FIRST_SEED = 700
N_EPISODES = 20
DISCRETE = {"LunarLander-v3"}


TOGETHER = "64 together"
ARMS: dict[str, dict[str, Any]] = {
    TOGETHER: {"n_envs": 64, "staggered_start": False},
    **{freq: {"normalize_freq": freq} for freq in ("step", "rollout")},
    **{str(count): {"n_envs": count} for count in COUNTS},
}


def entry_of(task: str) -> dict[str, Any]:
    """:return: The entry that `make` takes for a task without an id"""
    return presets()["default-discrete" if task in DISCRETE else "default"]


def needs_run(task: str, arm: str) -> bool:
    """:return: Whether the arm is not the same as another one, and concerns the task"""
    if arm == TOGETHER:
        return task in COUNTED
    return not arm.isdecimal() or (task in COUNTED and int(arm) != entry_of(task)["n_envs"])


def run(job: Job) -> Row:
    task, arm = job.settings["task"], job.settings["arm"]
    model, envs = make(lambda: gym.make(task), seed=job.seed, device="cpu", **ARMS[arm])
    model.learn(job.timesteps)
    envs.close()
    evaluated = make_vec_env(task, 4, seed=job.seed + 100_000)
    returns, _ = evaluate_policy(model, evaluated, N_EPISODES, return_episode_rewards=True)
    evaluated.close()
    return {**job.settings, "seed": job.seed, "score": float(np.mean(returns))}


def run_missing(jobs: Sequence[Job], path: Path, n_processes: int) -> list[Row]:
    """Run what has no row yet, and write the row of each run as soon as it is done."""
    rows = read_csv(path)
    done = {(row["task"], str(row["arm"]), row["seed"]) for row in rows}
    todo = [job for job in jobs if (job.settings["task"], job.settings["arm"], job.seed) not in done]
    with multiprocessing.get_context("spawn").Pool(n_processes, partial(th.set_num_threads, 1)) as pool:
        for row in pool.imap(run, todo):
            rows.append(row)
            write_csv(path, rows)
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return read_csv(path)


def scores(rows: Sequence[Row], task: str, arm: str) -> np.ndarray:
    """Scores of an arm by seed. With the number of environments of the entry, they are those with its statistics."""
    if arm == str(entry_of(task)["n_envs"]):
        arm = entry_of(task).get("normalize_freq", "step")
    found = [row for row in rows if row["task"] == task and str(row["arm"]) == arm]
    return np.array([row["score"] for row in sorted(found, key=lambda row: row["seed"])])


def counted_tasks(rows: Sequence[Row]) -> list[str]:
    """:return: The tasks that have runs with every number of environments"""
    return [task for task in COUNTED if all(len(scores(rows, task, str(count))) for count in COUNTS)]


def difference(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Difference of two means with a 95 % bootstrap interval; bold if it excludes 0"""
    rng = np.random.default_rng(0)
    draws = [rng.choice(values, (5000, len(values))).mean(axis=1) for values in (ours, theirs)]
    low, high = np.percentile(draws[0] - draws[1], [2.5, 97.5])
    text = f"{ours.mean() - theirs.mean():+.3g} ({low:+.3g} to {high:+.3g})"
    return f"**{text}**" if low > 0 or high < 0 else text


def report(rows: list[Row]) -> None:
    counted = counted_tasks(rows)
    header = ["task", *(f"{count} environments" for count in COUNTS)]
    lines = [[task, *(mean_and_std(scores(rows, task, str(count)), 1) for count in COUNTS)] for task in counted]
    print_table("return, mean ± std over seeds", header, lines)
    lines = [
        [task, *(difference(scores(rows, task, str(n)), scores(rows, task, "2")) for n in COUNTS[1:])] for task in counted
    ]
    print_table("difference from 2 environments (95 % interval)", ["task", *map(str, COUNTS[1:])], lines)
    lines = []
    for task in counted:
        together, staggered = scores(rows, task, TOGETHER), scores(rows, task, "64")
        if len(together):
            values = mean_and_std(together, 1), mean_and_std(staggered, 1), difference(staggered, together)
            lines.append([task, *values])
    print_table("64 environments", ["task", "together", "staggered", "difference (95 % interval)"], lines)
    lines = []
    for task in TASKS:
        step, rollout = (scores(rows, task, freq) for freq in ("step", "rollout"))
        if len(step) and len(rollout):
            lines.append([task, mean_and_std(step, 1), mean_and_std(rollout, 1), difference(rollout, step)])
    print_table("statistics", ["task", "per step", "per rollout", "difference (95 % interval)"], lines)


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(len(counted_tasks(rows)))
    for ax, task in zip(axes, counted_tasks(rows), strict=True):
        values = [scores(rows, task, str(count)) for count in COUNTS]
        [line] = ax.plot(COUNTS, [each.mean() for each in values], "o-", label="default, 100 000 steps")
        low, high = ([bound(each) for each in values] for bound in (np.min, np.max))
        ax.fill_between(COUNTS, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        ax.set(title=task, xlabel="environments", ylabel="return", xscale="log")
        ax.set_xticks(COUNTS, map(str, COUNTS))
        ax.minorticks_off()
    legend_below(figure, axes[0])
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=None, seeds=10, tasks=list(TASKS), arms=list(ARMS))
    limit = arguments.timesteps
    jobs = [
        Job({"task": task, "arm": arm}, FIRST_SEED + number, min(TASKS[task], limit or TASKS[task]))
        for number in range(arguments.seeds)
        for task in arguments.tasks
        for arm in arguments.arms
        if needs_run(task, arm)
    ]
    rows = run_missing(jobs, arguments.out / "environments.csv.gz", arguments.processes)
    report(rows)
    if counted_tasks(rows):
        save_plot(plot(rows), arguments.out / "environments.svg")


if __name__ == "__main__":
    main()

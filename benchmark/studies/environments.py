"""
Whether `default` learns as much with any number of environments, and with statistics that wait for the end of a rollout.

Tasks are made without their ids, so that `make` takes its entry for unknown tasks: with 2, 8, 12, 16 and 64 environments at
equal steps, and with the other `normalize_freq`. A score is the mean return of 20 episodes of the deterministic policy at the
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
    select,
    write_csv,
)
from matplotlib.figure import Figure
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_ppo_ext import make

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
OTHER = {"step": "rollout", "rollout": "step"}


def arms_of(task: str) -> dict[str, dict[str, Any]]:
    """:return: Arguments of `make` by the name of the arm"""
    counts = {str(count): {"n_envs": count} for count in COUNTS} if task in COUNTED else {}
    return {"as it is": {}, "other normalize_freq": {}, **counts}


def run(job: Job) -> Row:
    task, arm = job.settings["task"], job.settings["arm"]
    model, envs = make(lambda: gym.make(task), seed=job.seed, device="cpu", **arms_of(task)[arm])
    if arm == "other normalize_freq":
        envs.close()
        model, envs = make(lambda: gym.make(task), seed=job.seed, device="cpu", normalize_freq=OTHER[model.normalize_freq])
    model.learn(job.timesteps)
    envs.close()
    evaluated = make_vec_env(task, 4, seed=job.seed + 100_000)
    score, _ = evaluate_policy(model, evaluated, N_EPISODES)
    evaluated.close()
    return {**job.settings, "seed": job.seed, "n_envs": model.n_envs, "freq": model.normalize_freq, "score": float(score)}


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
    """Scores of an arm by seed. `8`, the number of the entry, is the arm without changes."""
    own = select(rows, task=task, arm="as it is")
    found = [row for row in rows if row["task"] == task and str(row["arm"]) == arm]
    return np.array([row["score"] for row in sorted(found or own, key=lambda row: row["seed"])])


def difference(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Difference of two means with a 95 % bootstrap interval; bold if it excludes 0"""
    rng = np.random.default_rng(0)
    draws = [rng.choice(values, (5000, len(values))).mean(axis=1) for values in (ours, theirs)]
    low, high = np.percentile(draws[0] - draws[1], [2.5, 97.5])
    text = f"{ours.mean() - theirs.mean():+.3g} ({low:+.3g} to {high:+.3g})"
    return f"**{text}**" if low > 0 or high < 0 else text


def report(rows: list[Row]) -> None:
    counted = [task for task in COUNTED if len(scores(rows, task, "2"))]
    header = ["task", *(f"{count} environments" for count in COUNTS)]
    lines = [[task, *(mean_and_std(scores(rows, task, str(count)), 1) for count in COUNTS)] for task in counted]
    print_table("return, mean ± std over seeds", header, lines)
    lines = [
        [task, *(difference(scores(rows, task, str(n)), scores(rows, task, "2")) for n in COUNTS[1:])] for task in counted
    ]
    print_table("difference from 2 environments (95 % interval)", ["task", *map(str, COUNTS[1:])], lines)
    lines = []
    for task in TASKS:
        freqs = {row["freq"]: row["arm"] for row in rows if row["task"] == task and not str(row["arm"]).isdecimal()}
        if len(freqs) == 2:
            values = {freq: scores(rows, task, arm) for freq, arm in freqs.items()}
            cells = [mean_and_std(values[freq], 1) for freq in OTHER]
            lines.append([task, *cells, difference(values["rollout"], values["step"])])
    print_table("statistics per step and per rollout", ["task", *OTHER, "difference (95 % interval)"], lines)


def plot(rows: list[Row]) -> Figure:
    figure, axes = grid_of_axes(len(COUNTED))
    for ax, task in zip(axes, COUNTED, strict=True):
        values = [scores(rows, task, str(count)) for count in COUNTS]
        [line] = ax.plot(COUNTS, [each.mean() for each in values], "o-", label="`default`, 100 000 steps")
        low, high = ([bound(each) for each in values] for bound in (np.min, np.max))
        ax.fill_between(COUNTS, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        ax.set(title=task, xlabel="environments", ylabel="return", xscale="log")
        ax.set_xticks(COUNTS, map(str, COUNTS))
        ax.minorticks_off()
    legend_below(figure, axes[0])
    return figure


def main() -> None:
    arguments = parse_arguments(__doc__, timesteps=None, seeds=10, tasks=list(TASKS))
    limit = arguments.timesteps
    # The number of the entry is not run twice.
    jobs = [
        Job({"task": task, "arm": arm}, FIRST_SEED + number, min(TASKS[task], limit or TASKS[task]))
        for number in range(arguments.seeds)
        for task in arguments.tasks
        for arm in arms_of(task)
        if arm != "8"
    ]
    rows = run_missing(jobs, arguments.out / "environments.csv.gz", arguments.processes)
    report(rows)
    save_plot(plot(rows), arguments.out / "environments.svg")


if __name__ == "__main__":
    main()

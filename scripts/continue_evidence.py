"""
Continue the runs in the background of the benchmark where they were interrupted: a missing run of `default` or a baseline on a
held-out task, and one of a baseline of the robots, in turns, until none is missing.

Run it: nice -n 19 python scripts/continue_evidence.py (days; it can be stopped at any time)
It needs the packages of benchmark/held-out.txt.
"""

import argparse
import os
from itertools import cycle, product
from pathlib import Path

import benchmark_returns
import torch as th
from default_split import HELD_OUT
from returns_suites import BASELINES, BASELINES_BY_SB3, ROBOTS, SUITES, Job

# Seeds of the held-out tasks
HELD_OUT_SEEDS = range(500, 510)
# Seeds of the baselines of the robots, and how many of them each arm has. TRPO takes several times as long as others.
# What SB3 computes shows that its scores are those of the same hyperparameters computed by PPOExt.
FIRST_SEED = 610
N_SEEDS = {**dict.fromkeys(BASELINES, 10), "TRPO": 5, **dict.fromkeys(BASELINES_BY_SB3, 1)}
# The first ones learn within a million steps, and their baselines are the strongest.
TASKS = ("Hopper-v5", "Walker2d-v5", "HalfCheetah-v5", "Swimmer-v5", "Ant-v5", "Humanoid-v5")


def held_out() -> list[Job]:
    """:return: Runs of the held-out tasks, seed by seed"""
    arms = [arm for arm in SUITES["held_out"][1] if arm not in BASELINES_BY_SB3]
    return [Job("held_out", task, arm, seed) for seed, task, arm in product(HELD_OUT_SEEDS, HELD_OUT, arms)]


def baselines() -> list[Job]:
    """:return: Runs of the baselines of the robots, seed by seed, and last those that SB3 computes"""
    assert set(TASKS) == set(ROBOTS)
    return [
        Job("robots", task, arm, FIRST_SEED + number)
        for arms in (BASELINES, BASELINES_BY_SB3)
        for number in range(max(N_SEEDS.values()))
        for task in TASKS
        for arm in arms
        if number < N_SEEDS[arm]
    ]


def run_next(jobs: list[Job], folder: Path) -> int:
    """
    :param jobs: All jobs of a suite
    :param folder: Folder of the results
    :return: Number of runs: one, or none if none is missing
    """
    path = folder / f"{jobs[0].suite}.csv"
    runs = benchmark_returns.read(path)
    missing = [job for job in jobs if not benchmark_returns.is_done(job, runs)]
    return benchmark_returns.run_jobs(missing[:1], path, 1) if missing else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmark"), help="folder of the results (default: %(default)s)")
    arguments = parser.parse_args()
    benchmark_returns.exit_on_sigterm()
    benchmark_returns.refuse_without_extension()
    th.set_num_threads(1)
    print(f"process {os.getpid()}, results in {arguments.out.resolve()}", flush=True)
    suites = [held_out(), baselines()]
    last = [1, 1]
    for turn in cycle((0, 1)):
        last[turn] = run_next(suites[turn], arguments.out)
        if not any(last):
            return


if __name__ == "__main__":
    main()

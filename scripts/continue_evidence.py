"""
Continue the runs in the background of the benchmark where they were interrupted: as many runs of `search_default.py` as it
has tasks and a missing run of a baseline of `benchmark_returns.py` in turns, one at a time, until none is missing.

Run it: nice -n 19 python scripts/continue_evidence.py (days; it can be stopped at any time)
"""

import argparse
import os
from itertools import cycle
from pathlib import Path

import benchmark_returns
import search_default
import torch as th
from default_split import DEVELOPMENT
from returns_suites import BASELINES, BASELINES_BY_SB3, ROBOTS, Job

# Seeds of the baselines of the robots, and how many of them each arm has. TRPO takes several times as long as others.
# What SB3 computes shows that its scores are those of the same hyperparameters computed by PPOExt.
FIRST_SEED = 610
N_SEEDS = {**dict.fromkeys(BASELINES, 10), "TRPO": 5, **dict.fromkeys(BASELINES_BY_SB3, 1)}
# The first ones learn within a million steps, and their baselines are the strongest.
TASKS = ("Hopper-v5", "Walker2d-v5", "HalfCheetah-v5", "Swimmer-v5", "Ant-v5", "Humanoid-v5")


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


def continue_search(folder: Path) -> int:
    """
    :param folder: Folder of the results
    :return: Number of runs: as many as there are tasks at most
    """
    return search_default.run_some(search_default.Search(), folder / search_default.FILE, len(DEVELOPMENT))


def continue_baselines(folder: Path) -> int:
    """
    :param folder: Folder of the results
    :return: Number of runs: one, or none if none is missing
    """
    path = folder / "robots.csv"
    runs = benchmark_returns.read(path)
    todo = [job for job in baselines() if not benchmark_returns.is_done(job, runs)]
    return benchmark_returns.run_jobs(todo[:1], path, 1) if todo else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmark"), help="folder of the results (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="turns of the search that come before any baseline")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    benchmark_returns.exit_on_sigterm()
    benchmark_returns.refuse_without_extension()
    th.set_num_threads(1)
    print(f"process {os.getpid()}, results in {arguments.out.resolve()}", flush=True)
    for _ in range(arguments.first):
        continue_search(arguments.out)
    last = [1, 1]
    for turn in cycle((0, 1)):
        last[turn] = continue_baselines(arguments.out) if turn else continue_search(arguments.out)
        if not any(last):
            return


if __name__ == "__main__":
    main()

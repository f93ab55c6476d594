"""
A search for the entry `default`, on the tasks in `default_split.py`, in two phases.

First, a screening: each run is on one task, and has a random level of every lever in `search_space.py`. A lever is judged by
the mean over all runs that have a level of it, not at one point (https://arxiv.org/abs/2412.07165). Then, a race: candidates,
SB3's defaults with and without ``VecNormalize``, and the `default` before the search run on all tasks, with a further seed in
each round. The better half of the candidates goes on, for each kind of actions.

Run it: python scripts/search_default.py (hours; it needs RL Zoo, MuJoCo, Box2D and MinAtar)
It writes benchmark/search.csv.xz after each run and continues where it was interrupted. `--report` writes benchmark/search.md
of the existing runs.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch as th
from benchmark_returns import make_experiment, refuse_without_extension
from default_split import DEVELOPMENT
from search_report import racers, report
from search_space import CANDIDATES, SearchJob, kind_of, race_jobs, sampled_jobs
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, sync_envs_normalization

# A score is the mean of 20 episodes: as in `benchmark_returns.py`, half of them before the last tenth of the training.
N_EPISODES = 10
BEFORE_LAST = 0.9
OUT = Path("benchmark")
FILE = "search.csv.xz"
N_SAMPLED, N_ROUNDS = 155, 10
COLUMNS = ["configuration", "task", "seed", "digest", "engine", "timesteps", "score", "cpu_seconds", "levels"]


class Evaluations(BaseCallback):
    """
    Evaluate the deterministic policy before the first rollout that begins in the last tenth of the training, and when asked.

    :param envs: Environments to evaluate in
    :param timesteps: Number of steps of the training
    """

    def __init__(self, envs: VecEnv, timesteps: int) -> None:
        super().__init__()
        self.envs = envs
        self.start = BEFORE_LAST * timesteps
        self.returns: list[float] = []
        self.seconds = 0.0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if not self.returns and self.num_timesteps >= self.start:
            self.evaluate(N_EPISODES)

    def evaluate(self, n_episodes: int) -> None:
        before = time.process_time()
        sync_envs_normalization(self.training_env, self.envs)
        returns, _ = evaluate_policy(self.model, self.envs, n_episodes, return_episode_rewards=True)
        self.returns += list(np.ravel(returns))
        self.seconds += time.process_time() - before


def run(job: SearchJob) -> dict[str, Any]:
    """
    Train in this process. The result depends on the job only, not on the runs before.

    :param job: The run
    :return: Its row. The score is NaN if the training ended with numbers that are not finite.
    """
    with tempfile.TemporaryDirectory() as folder:
        experiment, model = make_experiment("ppo_ext", job.task, job.entry(), Path(folder), job.seed)
        evaluations = Evaluations(experiment.create_envs(N_EPISODES, eval_env=True, no_log=True), job.timesteps)
        evaluations.envs.seed(job.seed + 100_000)
        engine, _ = model._choose_backend()
        start = time.process_time()
        try:
            model.learn(job.timesteps, callback=evaluations)
            seconds = time.process_time() - start - evaluations.seconds
            evaluations.evaluate(2 * N_EPISODES - len(evaluations.returns))
            score = float(np.mean(evaluations.returns))
        except ValueError as error:
            if "finite" not in str(error):
                raise
            score, seconds = np.nan, time.process_time() - start
        for envs in (model.env, evaluations.envs):
            envs.close()
    names = {"configuration": job.configuration, "task": job.task, "seed": job.seed, "digest": job.digest(), "engine": engine}
    levels = {"levels": json.dumps(job.levels())} if job.levels() else {}
    return {**names, "timesteps": job.timesteps, "score": score, "cpu_seconds": round(seconds, 2), **levels}


def read(path: Path) -> pd.DataFrame:
    text = {"configuration": str, "digest": str}
    rows = pd.read_csv(path, dtype=text) if path.exists() else pd.DataFrame()
    return rows.reindex(columns=COLUMNS)


def write(path: Path, rows: pd.DataFrame) -> None:
    """Write the rows in a fixed order. The file is replaced as a whole, so that it is never half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"part-{path.name}")
    rows.sort_values(["configuration", "task", "seed"]).to_csv(part, index=False, float_format="%.6g")
    part.replace(path)


def key(row: Any) -> tuple[str, str, int, str]:
    """
    :param row: A job, or a row of a run
    :return: What is the same for both. A row of a sampled run holds its levels, and stays valid when others are sampled later.
    """
    digest = row.digest() if isinstance(row, SearchJob) else row.digest
    return row.configuration, row.task, int(row.seed), "" if row.configuration.isdecimal() else digest


@dataclass(frozen=True)
class Search:
    """
    All runs of the search, in the order in which they are computed.

    :param n_sampled: Number of sampled runs, which come first
    :param n_rounds: Number of rounds of the race, which follow
    :param tasks: Names of the tasks
    :param limit: Largest number of steps of a run
    :param candidates: Names of candidates that run instead of all this, each on the tasks of its kind of actions
    """

    n_sampled: int = N_SAMPLED
    n_rounds: int = N_ROUNDS
    tasks: tuple[str, ...] = tuple(DEVELOPMENT)
    limit: int | None = None
    candidates: tuple[str, ...] = ()

    def jobs(self, rows: pd.DataFrame) -> Iterator[SearchJob]:
        """
        :param rows: Rows of the runs that are done: they decide who is left in a round of the race
        :return: The runs
        """
        tasks = list(self.tasks)
        if self.candidates:
            named = {task: [name for name in self.candidates if name in CANDIDATES[kind_of(task)]] for task in tasks}
            for number in range(self.n_rounds):
                yield from race_jobs(number, named, self.limit, references=())
            return
        yield from sampled_jobs(self.n_sampled, tasks, self.limit)
        for number in range(self.n_rounds):
            yield from race_jobs(number, racers(rows, number, tasks), self.limit)

    def next_job(self, rows: pd.DataFrame) -> SearchJob | None:
        """:return: The first run that has no row yet, ``None`` if there is none"""
        done = {key(row) for row in rows.itertuples()}
        return next((job for job in self.jobs(rows) if key(job) not in done), None)


def run_some(search: Search, path: Path, n_runs: int | None = None) -> int:
    """
    Run what is not done yet, and write the row of each run as soon as it is done.

    :param search: All runs
    :param path: File of the rows
    :param n_runs: Number of runs at most; ``None`` for all
    :return: Number of runs
    """
    n_done = 0
    while n_done != n_runs and (job := search.next_job(read(path))) is not None:
        row = run(job)
        old = read(path)
        same = (old["configuration"] == job.configuration) & (old["task"] == job.task) & (old["seed"] == job.seed)
        new = pd.DataFrame([row])
        write(path, new if old[~same].empty else pd.concat([old[~same], new], ignore_index=True))
        text = f"{row['score']:.1f} in {row['cpu_seconds']:.0f} s of CPU time, {row['engine']}"
        print(f"{job.configuration}, {job.task}, seed {job.seed}: {text}", flush=True)
        n_done += 1
    return n_done


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampled", type=int, default=N_SAMPLED, help="number of sampled runs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=N_ROUNDS, help="number of rounds of the race (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=DEVELOPMENT, default=list(DEVELOPMENT), help="(default: all)")
    names = sorted({name for candidates in CANDIDATES.values() for name in candidates})
    parser.add_argument("--candidates", nargs="+", choices=names, default=[], help="that run instead of sampled runs and race")
    parser.add_argument("--timesteps", type=int, help="of each run at most (default: no limit)")
    parser.add_argument("--runs", type=int, help="number of runs at most (default: all that are missing)")
    parser.add_argument("--out", type=Path, default=OUT, help="output folder (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="write the tables of the existing runs only")
    arguments = parser.parse_args()
    if arguments.timesteps and arguments.out == parser.get_default("out"):
        parser.error("--timesteps: short runs would stand among those in benchmark/; name another folder with --out")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    path = arguments.out / FILE
    if not arguments.report:
        refuse_without_extension()
        th.set_num_threads(1)
        search = Search(
            arguments.sampled, arguments.rounds, tuple(arguments.tasks), arguments.timesteps, tuple(arguments.candidates)
        )
        run_some(search, path, arguments.runs)
    rows = read(path)
    if rows.empty:
        sys.exit(f"{path} has no runs yet")
    report(rows, arguments.out)


if __name__ == "__main__":
    main()

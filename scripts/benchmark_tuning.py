"""
What tuning finds in 100 trials of Pendulum at 20 thousand steps, beside the entry that RL Zoo tuned for PPO.

The trials are those of the stock command, `rl_zoo3 train -optimize`. The best one is then trained anew with each seed, with
`--trial-id`, and so is the Zoo's entry; scores and statistics are those of `benchmark_returns.py`.

Run it: python scripts/benchmark_tuning.py (half an hour of one core; it needs RL Zoo)
It writes benchmark/tuning-trials.csv, tuning.csv, tuning.md and tuning.png. The study is kept in logs/, where it goes on if it
was interrupted.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import optuna
import pandas as pd
from benchmark_returns import ENVIRONMENT, SUITES, Arm, Job, add_versions, exit_on_sigterm, read, rows_of, run_jobs
from optuna.storages.journal import JournalFileBackend
from returns_report import report

TASK, STUDY = "Pendulum-v1", "pendulum"
SUITE, THEIRS, OURS = "tuning", "ppo", "best trial"


def tune(storage: Path, n_trials: int, timesteps: int, processes: int) -> optuna.Study:
    """
    The stock command, in so many processes.

    :raises RuntimeError: if one of them fails
    """
    storage.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "rl_zoo3.train", "--algo", "ppo_ext", "--env", TASK, "-n", str(timesteps), "-optimize"]
    words += ["--max-total-trials", str(n_trials), "--n-evaluations", "5", "--eval-episodes", "20", "--n-eval-envs", "10"]
    words += ["--sampler", "tpe", "--pruner", "median", "--num-threads", "1", "--device", "cpu", "--verbose", "0"]
    words += ["--storage", str(storage), "--study-name", STUDY, "-f", str(storage.parent)]
    workers = [subprocess.Popen(words, env=ENVIRONMENT) for _ in range(processes)]
    try:
        statuses = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(statuses):
        raise RuntimeError(f"{' '.join(words)} failed: see above")
    return load(storage)


def load(storage: Path) -> optuna.Study:
    journal = optuna.storages.JournalStorage(JournalFileBackend(str(storage)))
    return optuna.load_study(study_name=STUDY, storage=journal)


def add_suite(study: optuna.Study, storage: Path) -> None:
    """The Zoo's entry, and ours with what the best trial sampled."""
    trial = ("--storage", str(storage), "--study-name", STUDY, "--trial-id", str(study.best_trial.number))
    SUITES[SUITE] = ((TASK,), {THEIRS: Arm("ppo", "ppo"), OURS: Arm("ppo_ext", "ppo_ext", words=trial)})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--timesteps", type=int, default=20_000, help="of each trial and each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="at a time (default: %(default)s)")
    parser.add_argument("--storage", type=Path, default=Path("logs/benchmark_tuning.log"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("benchmark"), help="folder (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.timesteps != parser.get_default("timesteps"):
        for name in ("storage", "out"):
            if getattr(arguments, name) == parser.get_default(name):
                parser.error(f"--timesteps: other trials and runs are not to be mixed with these; name another --{name}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    exit_on_sigterm()
    study = tune(arguments.storage, arguments.trials, arguments.timesteps, arguments.processes)
    add_suite(study, arguments.storage)
    arguments.out.mkdir(parents=True, exist_ok=True)
    columns = ("number", "value", "params", "state")
    study.trials_dataframe(columns).to_csv(arguments.out / "tuning-trials.csv", index=False, float_format="%.5g")
    path = arguments.out / f"{SUITE}.csv"
    arms = [THEIRS, OURS]
    jobs = [Job(SUITE, TASK, arm, seed, arguments.timesteps) for seed in range(arguments.seeds) for arm in arms]
    if run_jobs(jobs, path, arguments.processes):
        add_versions(arguments.out, SUITE)
    # Of an older study's best trial there may be more.
    report(SUITE, pd.concat(rows_of(job, read(path)) for job in jobs), arms, arguments.out)


if __name__ == "__main__":
    main()

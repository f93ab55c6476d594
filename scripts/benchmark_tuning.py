"""
What tuning finds in 100 trials on Pendulum with 20 thousand steps, compared with the entry that RL Zoo tuned for PPO.

The trials are those of the Zoo's own command, `rl_zoo3 train -optimize`. The best trial is then trained again with each seed,
with `--trial-id`, and so is the Zoo's entry. Scores and statistics are those of `benchmark_returns.py`.

Run it: python scripts/benchmark_tuning.py (half an hour on one core; it needs RL Zoo)
It writes benchmark/tuning-trials.csv, tuning.csv, tuning.md and tuning.svg. The study is stored in logs/, so that it continues
if it was interrupted.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import optuna
import pandas as pd
from benchmark_returns import ENVIRONMENT, add_versions, exit_on_sigterm, read, rows_of, run_jobs
from optuna.storages.journal import JournalFileBackend
from returns_report import report
from returns_suites import CONTROL, SUITES, Arm, Job

TASK, STUDY = "Pendulum-v1", "pendulum"
SUITE, THEIRS, OURS = "tuning", "ppo", "best trial"


def tune(storage: Path, n_trials: int, timesteps: int, processes: int) -> optuna.Study:
    """
    Run the Zoo's command in several processes.

    :param storage: File of the study
    :param n_trials: Number of trials of all processes together
    :param timesteps: Number of timesteps of each trial
    :param processes: Number of processes
    :return: The study
    :raises RuntimeError: if one of the processes fails
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
    """Add a suite with two arms: the Zoo's entry, and the hyperparameters of the best trial."""
    trial = ("--storage", str(storage), "--study-name", STUDY, "--trial-id", str(study.best_trial.number))
    SUITES[SUITE] = ({TASK: CONTROL[TASK]}, {THEIRS: Arm("ppo", "ppo"), OURS: Arm("ppo_ext", "ppo_ext", words=trial)})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="number of trials (default: %(default)s)")
    parser.add_argument("--timesteps", type=int, default=20_000, help="of each trial and each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=10, help="number of runs of each kind (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="number of simultaneous processes (default: %(default)s)")
    parser.add_argument("--storage", type=Path, default=Path("logs/benchmark_tuning.log"), help="study (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmark"), help="output folder (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.timesteps != parser.get_default("timesteps"):
        for name in ("storage", "out"):
            if getattr(arguments, name) == parser.get_default(name):
                parser.error(f"--timesteps: trials and runs of different lengths must not be mixed; name another --{name}")
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
    # The file may contain more runs, of the best trial of an older study.
    report(SUITE, pd.concat(rows_of(job, read(path)) for job in jobs), arms, arguments.out)


if __name__ == "__main__":
    main()

"""
The returns of `ppo_ext` against RL Zoo's `ppo` at equal numbers of steps: presets, the default preset, and history-based
policies.

Each run is the Zoo's own command, `rl_zoo3 train ... -conf FILE`, in a process with one thread; the file contains only the
entry of the task. The deterministic policy is evaluated 10 times in a training run; a score is the mean of the last two
evaluations, 20 episodes. The scores are aggregated with rliable (https://arxiv.org/abs/2108.13264).

Run it: python scripts/benchmark_returns.py (hours; it needs RL Zoo, MuJoCo and Box2D)
It writes benchmark/*.csv after each run and continues where it was interrupted; runs whose hyperparameters have changed are
repeated. `--report` writes tables and plots of the existing runs, and `--times` measures the CPU time per step for
benchmark/times.json.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pandas as pd
import torch as th
import yaml
from baselines_report import baseline_parts, baselines_of
from returns_report import N_LAST, report, report_ablation, select
from returns_suites import ABLATIONS, PACKAGES, REMOVED, RUN_ONCE, SUITES, Job, of_package, pair, timed_baselines
from rl_zoo3.exp_manager import ExperimentManager

from sb3_ppo_ext.engines.native import extension

N_EVALUATIONS, N_EPISODES = 10, 10
_PATH = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _PATH}
RUNNING: set[subprocess.Popen] = set()


def command(job: Job, folder: Path) -> list[str]:
    """The command of a run. Its entry is written to a file in the folder."""
    conf = folder / "entry.yml"
    conf.write_text(yaml.safe_dump({job.task: job.fitted_entry()}))
    arm = SUITES[job.suite][1][job.arm]
    words = [sys.executable, "-m", "rl_zoo3.train", "--algo", arm.algo, "--env", job.task, *arm.words, "-conf", str(conf)]
    words += ["--seed", str(job.seed), "-f", str(folder), "--verbose", "0", "--num-threads", "1"]
    words += ["--device", "cpu", "--eval-freq", str(job.timesteps // N_EVALUATIONS), "--eval-episodes", str(N_EPISODES)]
    package = of_package(job.task, PACKAGES)
    words += [] if package is None else ["--gym-packages", package]
    return [*words, "--n-eval-envs", str(N_EPISODES)]


def train(job: Job) -> pd.DataFrame:
    """
    :param job: The run
    :return: A row for each evaluation
    :raises RuntimeError: if the command fails or ends too early, with its output
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words, output, start = command(job, folder), folder / "output.txt", time.perf_counter()
        with output.open("w") as file:
            # Ctrl-C must reach only this process: the Zoo would end the training early and still succeed.
            process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT, start_new_session=True)
            RUNNING.add(process)
            # Not `process.wait`: this also gives the CPU time, which the machine's other work does not change.
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            RUNNING.discard(process)
        evaluations = list(folder.glob(f"*/{job.task.replace('/', '-')}_1/evaluations.npz"))
        if process.returncode != 0 or not evaluations:
            raise RuntimeError(f"{' '.join(words)}\n{output.read_text()}")
        with np.load(evaluations[0]) as data:
            timesteps, returns = data["timesteps"], data["results"].mean(axis=1)
        if len(timesteps) < N_EVALUATIONS:
            raise RuntimeError(f"{' '.join(words)} ended at step {timesteps[-1]}")
    columns = {"task": job.task, "arm": job.arm, "seed": job.seed, "digest": job.digest(), "engine": engine_of(job)}
    times = {"seconds": time.perf_counter() - start, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    return pd.DataFrame({**columns, "timesteps": timesteps, "return": returns, **times})


def engine_of(job: Job) -> str:
    """:return: What computes a run: the engine that our algorithm chooses, or the package of another algorithm"""
    algo = SUITES[job.suite][1][job.arm].algo
    if algo != "ppo_ext":
        return "sb3" if algo == "ppo" else "sb3_contrib"
    with tempfile.TemporaryDirectory() as folder:
        backend, _ = make_model(job, Path(folder))._choose_backend()
    return backend


def refuse_without_extension() -> None:
    """
    Runs of another engine end elsewhere, and are not what users get.

    :raises SystemExit: if the C module of the native engine was not built
    """
    if extension.module is None:
        sys.exit("The C module of PPOExt is not built here, so that another engine would compute its runs: pip install -e .")


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"digest": str}) if path.exists() else pd.DataFrame()


def write(path: Path, runs: pd.DataFrame) -> None:
    """Write the rows in a fixed order. The file is replaced as a whole, so that it is never half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    runs.sort_values(["task", "arm", "seed", "timesteps"]).to_csv(part, index=False, float_format="%.5g")
    part.replace(path)


def rows_of(job: Job, runs: pd.DataFrame) -> pd.DataFrame:
    return select(runs, task=job.task, arm=job.arm, seed=job.seed, digest=job.digest())


def is_done(job: Job, runs: pd.DataFrame) -> bool:
    return not rows_of(job, runs).empty


def without(job: Job, runs: pd.DataFrame) -> pd.DataFrame:
    """The rows without those of the same run with older hyperparameters."""
    old = select(runs, task=job.task, arm=job.arm, seed=job.seed)
    return runs.drop(old.index)


def run_jobs(jobs: list[Job], path: Path, n_processes: int) -> int:
    """
    Run the jobs that are not done yet, and write the rows of each as soon as it is done.

    :param jobs: All jobs of a suite
    :param path: File of the evaluations
    :param n_processes: Number of simultaneous runs
    :return: Number of jobs that were run
    """
    lock = Lock()
    jobs = [job for job in jobs if not is_done(job, read(path))]
    print(f"{path}: {len(jobs)} runs to do", flush=True)

    def run(job: Job) -> None:
        rows = train(job)
        with lock:
            write(path, pd.concat([without(job, read(path)), rows], ignore_index=True))
            score = rows["return"].tail(N_LAST).mean()
            seconds = rows["cpu_seconds"].iloc[0]
            print(f"{job.task}, {job.arm}, seed {job.seed}: {score:.1f} in {seconds:.0f} s of CPU time", flush=True)

    with ThreadPoolExecutor(n_processes) as pool:
        try:
            for done in as_completed([pool.submit(run, job) for job in jobs]):
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                process.kill()
            raise
    return len(jobs)


def current(runs: pd.DataFrame, suite: str) -> pd.DataFrame:
    """The rows whose hyperparameters are still those of the task."""
    if runs.empty:
        return runs
    tasks, arms = SUITES[suite]
    digests = {(task, arm): Job(suite, task, arm, 0).digest() for task in tasks for arm in arms}
    return runs[[digests.get((row.task, row.arm)) == row.digest for row in runs.itertuples()]]


# Times


def measure_times(suite: str, tasks: Sequence[str], n_rounds: int = 5) -> dict[str, dict[str, float]]:
    """
    :param suite: Name of the suite
    :param tasks: Names of the tasks
    :param n_rounds: Number of rounds
    :return: CPU time of a step of each baseline, as a multiple of ours, by task and baseline: the median over the rounds, in
        each of which all arms train in turns for at least one update, without evaluations
    """
    ours, baselines = pair(suite)[1], timed_baselines(suite)
    ratios = {}
    for task in tasks:
        with tempfile.TemporaryDirectory() as folder:
            models = [make_model(Job(suite, task, arm, 0), Path(folder), algo) for arm, algo in baselines.items()]
            models.append(make_model(Job(suite, task, ours, 0), Path(folder)))
            rounds = [[cpu_time_per_step(model) for model in models] for _ in range(n_rounds + 1)]
        times = np.array(rounds[1:])
        medians = np.median(times[:, :-1] / times[:, -1:], axis=0)
        ratios[task] = {arm: round(float(ratio), 2) for arm, ratio in zip(baselines, medians, strict=True)}
        for arm, ratio in ratios[task].items():
            print(f"{suite}, {task}: {ratio} times less CPU time per step than {arm}", flush=True)
    return ratios


def make_model(job: Job, folder: Path, algo: str | None = None) -> Any:
    """Make the model as the Zoo's command does, with the algorithm of the arm or another one."""
    return make_experiment(algo or SUITES[job.suite][1][job.arm].algo, job.task, job.fitted_entry(), folder)[1]


def make_experiment(algo: str, task: str, entry: dict[str, Any], folder: Path, seed: int = 0) -> tuple[ExperimentManager, Any]:
    """
    :param algo: Name of the algorithm in the Zoo
    :param task: Name of the task
    :param entry: Its hyperparameters
    :param folder: Folder of the files that the Zoo writes
    :param seed: Seed
    :return: What the Zoo's command makes, and its model
    """
    package = of_package(task, PACKAGES)
    if package is not None:
        importlib.import_module(package)
    conf = folder / "entry.yml"
    conf.write_text(yaml.safe_dump({task: entry}))
    experiment = ExperimentManager(
        argparse.Namespace(), algo, task, str(folder), eval_freq=-1, config=str(conf), device="cpu", seed=seed, verbose=0
    )
    with contextlib.redirect_stdout(io.StringIO()):
        made = experiment.setup_experiment()
    assert made is not None
    return experiment, made[0]


def cpu_time_per_step(model: Any, n_steps: int = 2048) -> float:
    """CPU seconds per step of whole rollouts and their updates, over at least ``n_steps`` steps."""
    before, start = model.num_timesteps, time.process_time()
    model.learn(max(n_steps, model.n_steps * model.n_envs), reset_num_timesteps=False)
    return (time.process_time() - start) / (model.num_timesteps - before)


# The command line


def versions() -> dict[str, str]:
    names = ("sb3_ppo_ext", "stable_baselines3", "sb3_contrib", "rl_zoo3", "gymnasium", "torch", "numpy", "mujoco")
    return {"python": platform.python_version(), **{name: version(name) for name in names}, "machine": _processor()}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", choices=SUITES, help="which ones to run (default: all but held_out)")
    tasks = sorted({task for budgets, _ in SUITES.values() for task in budgets})
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks, help="which ones to run (default: all)")
    arms = sorted({arm for _, arms in SUITES.values() for arm in arms})
    parser.add_argument("--arms", nargs="+", choices=arms, help="which ones to run (default: all of the suite)")
    parser.add_argument("--seeds", type=int, default=5, help="number of runs of each kind (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it (default: %(default)s)")
    parser.add_argument("--timesteps", type=int, help="of each run at most (default: no limit)")
    parser.add_argument("--processes", type=int, default=2, help="number of simultaneous runs (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmark"), help="output folder (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="write tables and plots of the existing runs only")
    parser.add_argument("--times", action="store_true", help="measure the CPU time per step instead, both arms in turns")
    arguments = parser.parse_args()
    arguments.suites = arguments.suites or [suite for suite in SUITES if suite not in RUN_ONCE]
    if arguments.timesteps and arguments.out == parser.get_default("out"):
        parser.error("--timesteps: short runs would replace those in benchmark/; name another folder with --out")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    exit_on_sigterm()
    if not arguments.report:
        refuse_without_extension()
    jobs = {suite: jobs_of(suite, arguments) for suite in arguments.suites}
    for suite in arguments.suites:
        path = arguments.out / f"{suite}.csv"
        if arguments.times and suite in ABLATIONS:
            continue  # all of its arms use our algorithm
        if arguments.times:
            add_times(arguments.out, suite, list(dict.fromkeys(job.task for job in jobs[suite])))
        elif not arguments.report and run_jobs(jobs[suite], path, arguments.processes):
            add_versions(arguments.out, suite)
        # Limited runs, as in tests, have other hyperparameters than their task.
        runs = read(path) if arguments.timesteps else current(read(path), suite)
        if runs.empty:
            continue
        if suite in ABLATIONS:
            report_ablation(suite, runs, list(SUITES[suite][1]), arguments.out)
        else:
            report_all(suite, runs, arguments.out)


def report_all(suite: str, runs: pd.DataFrame, folder: Path) -> None:
    """Write the tables and plots of a suite, with those of all baselines first if there are several."""
    ours = pair(suite)[1]
    baselines = baselines_of(runs, list(SUITES[suite][1]), ours)
    tasks = [task for task in SUITES[suite][0] if task in set(select(runs, arm=ours)["task"])]
    ratios = read_json(folder / "baseline_times.json").get(suite, {})
    first = baseline_parts(runs, tasks, ours, baselines, ratios) if len(baselines) > 1 else []
    report(suite, runs, pair(suite), folder, first)


def jobs_of(suite: str, arguments: argparse.Namespace) -> list[Job]:
    """
    The jobs of a suite, seed by seed, so that an interrupted benchmark has some runs of every task.

    :param suite: Name of the suite
    :param arguments: Arguments of the command line
    :return: The jobs
    :raises ValueError: if a task has no hyperparameters
    """
    budgets, arms = SUITES[suite]
    tasks = [task for task in budgets if task in arguments.tasks]
    wanted = [arm for arm in arms if arm in (arguments.arms or arms) and arm not in REMOVED]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    jobs = [Job(suite, task, arm, seed, arguments.timesteps) for seed in seeds for task in tasks for arm in wanted]
    for job in jobs:
        job.entry()
    return jobs


def exit_on_sigterm() -> None:
    """Exit on SIGTERM. Otherwise the runs would continue without this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def add_versions(folder: Path, suite: str) -> None:
    path = folder / "versions.json"
    path.write_text(json.dumps({**read_json(path), suite: versions()}, indent=1) + "\n")


def add_times(folder: Path, suite: str, tasks: Sequence[str]) -> None:
    """Measure the times, and write the ratios to the first baseline to `times.json`, and all to `baseline_times.json`."""
    th.set_num_threads(1)
    measured = measure_times(suite, tasks)
    first = {task: ratios[pair(suite)[0]] for task, ratios in measured.items()}
    add_json(folder / "times.json", suite, first)
    add_json(folder / "baseline_times.json", suite, measured)


def add_json(path: Path, suite: str, values: dict[str, Any]) -> None:
    """Add values to those of a suite, by task."""
    listed = read_json(path)
    listed[suite] = {**listed.get(suite, {}), **values}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(listed, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()

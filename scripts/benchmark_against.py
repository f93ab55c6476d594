"""
Whether the working tree trains slower than a revision: ``benchmark_speed.py --against REVISION``.

The revision is checked out and built in a temporary folder. It and the working tree train in turns, each in a process of its
own, in random order; the median of the ratios of their processor times, with its interval, says which configuration is slower.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
REVISION, TREE = "revision", "working tree"

# Seconds of processor time that one of the two takes for a turn of a configuration
Turn = Callable[[dict[str, Any]], float]


def compare(cases: Mapping[str, dict[str, Any]], turns: Mapping[str, Turn], rounds: int) -> Iterator[tuple[str, dict]]:
    """
    :param cases: Configurations by name, as :func:`train` takes them
    :param turns: What makes a turn of the revision, and of the working tree
    :param rounds: Number of turns of each
    :return: Name of each configuration, and times of both, of which those at the same position belong together
    """
    rng = np.random.default_rng()
    for name, case in cases.items():
        times: dict[str, list[float]] = {REVISION: [], TREE: []}
        for number in range(rounds + 1):
            for which in rng.permutation([REVISION, TREE]):
                taken = turns[which](case)
                if number:  # The first turn makes the model.
                    times[which].append(taken)
        yield name, times


def is_slower(result: dict[str, Any]) -> bool:
    """
    :param result: Ratio of the speed of the working tree to that of the revision, with its interval
    :return: Whether the working tree is slower beyond the interval
    """
    return result["high"] < 1


def check_out(revision: str, folder: Path) -> None:
    """
    :param revision: Revision of the repository
    :param folder: Empty folder, into which its files are written
    """
    files = subprocess.run(["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=files, check=True)


def build(folder: Path) -> None:
    """
    :param folder: Checkout whose extension modules are built in place
    """
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "PYTHONPATH": ""}, stdout=subprocess.DEVNULL)


@contextmanager
def trainer_in(checkout: Path) -> Iterator[Turn]:
    """
    :param checkout: Checkout of the repository
    :return: What makes a turn with its package, in a process of its own
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=checkout, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def turn(case: dict[str, Any]) -> float:
            print(json.dumps(case), file=stdin, flush=True)
            answer = stdout.readline()
            if not answer:
                raise RuntimeError(f"the process with the package in {checkout} has ended, see above")
            return float(answer)

        yield turn
        stdin.close()


@contextmanager
def trainers_against(revision: str) -> Iterator[dict[str, Turn]]:
    """
    :param revision: Revision of the repository
    :return: What makes a turn of the revision, and of the working tree, whose modules have to be built
    """
    with tempfile.TemporaryDirectory() as folder:
        check_out(revision, Path(folder))
        build(Path(folder))
        with trainer_in(Path(folder)) as of_revision, trainer_in(ROOT) as of_tree:
            yield {REVISION: of_revision, TREE: of_tree}


def train(case: dict[str, Any], models: dict[str, Any]) -> float:
    """
    :param case: Environment, number of its copies, timesteps of a turn, policy, and options
    :param models: Models made so far, by their case
    :return: Seconds of processor time of a turn
    """
    import torch as th
    from stable_baselines3.common.env_util import make_vec_env

    from sb3_ppo_ext import PPOExt

    th.set_num_threads(1)
    key = json.dumps(case)
    if key not in models:
        env = make_vec_env(case["env"], case["n_envs"], seed=0)
        models[key] = PPOExt(case["policy"], env, seed=0, device="cpu", **case["options"])
    start = time.process_time()
    models[key].learn(case["steps"], reset_num_timesteps=False)
    return time.process_time() - start


def serve() -> None:
    """Answer each configuration on the standard input with the time of a turn."""
    answers, sys.stdout = sys.stdout, sys.stderr  # Libraries print as well.
    models: dict[str, Any] = {}
    for line in sys.stdin:
        print(train(json.loads(line), models), file=answers, flush=True)


if __name__ == "__main__":
    serve()

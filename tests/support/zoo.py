"""Run the commands of RL Zoo, and find the files that they write."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import yaml
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import ALGOS, get_latest_run_id

from sb3_ppo_ext import PPOExt

BIN = Path(sys.executable).parent
RL_ZOO3 = [str(BIN / "rl_zoo3")]
MODULE = [sys.executable, "-m"]
# With this seed the first trials are small.
QUICK = ["--eval-freq", "-1", "--seed", "15", "--num-threads", "1", "--device", "cpu"]


def run(*command, cwd, fails=False, **environment):
    """Output of a command, which must fail if and only if `fails`."""
    environment = {"SDL_VIDEODRIVER": "dummy", **os.environ, **environment}
    completed = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=cwd, env=environment)
    assert (completed.returncode != 0) == fails, completed.stdout + completed.stderr
    return completed.stdout + completed.stderr


def train(*arguments, cwd, algo="ppo_ext", command=(*RL_ZOO3, "train"), **kwargs):
    """Output of a training from the command line."""
    return run(*command, "--algo", algo, *QUICK, *arguments, cwd=cwd, **kwargs)


def saved(folder, env_id, algo="ppo_ext", run_id=None):
    """Path of the final model of a run, by default of the latest run."""
    run_id = run_id or get_latest_run_id(str(folder / "logs" / algo), env_id)
    return folder / "logs" / algo / f"{env_id}_{run_id}" / f"{env_id}.zip"


def config(folder, env_id, algo="ppo_ext"):
    """The hyperparameters that a run has saved."""
    text = (saved(folder, env_id, algo).parent / env_id / "config.yml").read_text()
    return dict(yaml.load(text, Loader=yaml.UnsafeLoader))


def look_instead_of_learning(monkeypatch, look):
    """Let a function look at each model that the Zoo makes, in the place of its training; trials are pruned."""

    class Spy(PPOExt):
        def learn(self, *args, **kwargs):
            look(self)
            raise ValueError("pruned")

    monkeypatch.setitem(ALGOS, "ppo_ext", Spy)


def manager(algo="ppo_ext", env_id="MountainCarContinuous-v0", folder=".", **kwargs):
    """The ``ExperimentManager`` behind the Zoo's commands, with as few evaluations as possible."""
    defaults = dict(device="cpu", seed=15, n_evaluations=1, n_eval_episodes=1)
    return ExperimentManager(Namespace(), algo, env_id, str(folder), **{**defaults, **kwargs})

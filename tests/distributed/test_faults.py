"""
Ranks that die: torchrun starts all again, and the training ends as one that was not interrupted.

``KILLS=10`` sets how many of them each test ends.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sb3_ppo_ext import PPOExt

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.xdist_group("ranks")]
SCRIPT = Path(__file__).parents[1] / "support" / "rank_training.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "50"]
KILLS, SEED = int(os.environ.get("KILLS", 3)), int(os.environ.get("KILL_SEED", 0))


def start(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = (folder / "output.txt").open("w")
    return subprocess.Popen([*TORCHRUN, *command], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)


def ranks_of(process):
    """Processes of the ranks, which are children of torchrun's agent."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in found]


def kill_ranks(process, checkpoints, n_kills):
    """Kill a rank at random moments after the newest checkpoint."""
    generator = random.Random(SEED)
    for _ in range(n_kills):
        newest = set(checkpoints.glob("*.zip"))
        while process.poll() is None and set(checkpoints.glob("*.zip")) == newest:
            time.sleep(0.02)
        time.sleep(generator.uniform(0, 1))
        ranks = ranks_of(process)
        if process.poll() is not None or not ranks:
            return
        os.kill(generator.choice(ranks), signal.SIGKILL)


def trained(command, folder, n_kills=0, checkpoints="checkpoints"):
    folder.mkdir()
    process = start(command, folder)
    kill_ranks(process, folder / checkpoints, n_kills)
    assert process.wait(600) == 0, (folder / "output.txt").read_text()[-5000:]
    return folder


def test_a_script(tmp_path):
    """A script that calls ``resume`` ends with the same model, statistics and episodes on all ranks, to the bit."""
    whole = trained([SCRIPT, ".", "40000"], tmp_path / "whole")
    killed = trained([SCRIPT, ".", "40000"], tmp_path / "killed", KILLS)
    assert len(list(killed.glob("resumed_*"))) >= 2
    for rank in range(2):
        expected, found = (json.loads((folder / f"{rank}.json").read_text()) for folder in (whole, killed))
        assert expected == found
    assert not list(Path("/dev/shm").glob("sb3_ppo_ext_*"))


def test_the_zoo(tmp_path):
    """The Zoo's ``train`` goes on in the same folder, and ends with the same model, logs and evaluations."""
    arguments = ["-m", "rl_zoo3.train", "--algo", "ppo_ext", "--env", "Pendulum-v1", "--seed", "15", "--device", "cpu"]
    arguments += ["-n", "30000", "--save-freq", "1024", "--eval-freq", "4096", "--eval-episodes", "1", "--verbose", "0"]
    arguments += ["-params", "n_envs:4", "n_steps:64", "batch_size:64", "normalize:True"]
    run = "logs/ppo_ext/Pendulum-v1_1"
    whole = trained(arguments, tmp_path / "whole")
    killed = trained(arguments, tmp_path / "killed", KILLS, f"{run}/checkpoints")
    assert [path.name for path in (killed / "logs/ppo_ext").iterdir()] == ["Pendulum-v1_1"]
    models = [PPOExt.load(folder / run / "Pendulum-v1.zip", device="cpu") for folder in (whole, killed)]
    for one, other in zip(*(model.policy.state_dict().values() for model in models), strict=True):
        np.testing.assert_array_equal(other.numpy(), one.numpy())
    logs = [pd.read_csv(folder / run / "progress.csv") for folder in (whole, killed)]
    timeless = sorted(name for name in logs[0] if not any(word in name for word in ("seconds", "fps", "elapsed")))
    np.testing.assert_array_equal(logs[1][timeless].to_numpy(), logs[0][timeless].to_numpy())
    evaluations = [np.load(folder / run / "evaluations.npz")["results"] for folder in (whole, killed)]
    np.testing.assert_array_equal(*evaluations)

"""
Trainings from the command line that are ended at random moments. ``KILLS=50`` sets how many of them each test ends.

The moments are drawn from ``KILL_SEED`` and fall on different instructions in each run.
"""

import os
import random
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from support.processes import listen_to_ctrl_c
from support.zoo import MODULE, run

from sb3_ppo_ext import PPOExt

pytestmark = [pytest.mark.slow, pytest.mark.integration]

ENV, FOLDER = "Pendulum-v1", "logs/ppo_ext/Pendulum-v1_1"
# A file is written every few milliseconds, so that many kills fall into the middle of one.
ARGUMENTS = ["--algo", "ppo_ext", "--env", ENV, "--seed", "15", "--device", "cpu", "--num-threads", "1", "--verbose", "0"]
ARGUMENTS += ["--save-freq", "256", "--eval-freq", "512", "--eval-episodes", "1"]
PARAMS = ["-params", "n_envs:2", "n_steps:64", "batch_size:64", "n_epochs:2", "normalize:dict(epsilon=1e-8)"]
KILLS, SEED = int(os.environ.get("KILLS", 5)), int(os.environ.get("KILL_SEED", 0))


def start(folder, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*MODULE, "sb3_ppo_ext.zoo", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=listen_to_ctrl_c,
    )


def end(process, folder, generator, number, longest=2.0):
    """Send a signal to a training, up to some seconds after its first checkpoint."""
    deadline = time.monotonic() + 120
    while not list(folder.glob(f"{FOLDER}/checkpoints/*.zip")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(generator.uniform(0, longest))
    process.send_signal(number)
    process.wait(60)


def assert_whole(folder):
    """Every file with a final name can be read, and none is missing in between."""
    run_folder = folder / FOLDER
    for path in [*run_folder.glob("*.zip"), *run_folder.glob("checkpoints/*.zip")]:
        model = PPOExt.load(path, device="cpu")
        assert np.isfinite(model.predict(np.zeros(3, np.float32))[0]).all()
    for path in run_folder.rglob("*.pkl"):
        VecNormalize.load(str(path), make_vec_env(ENV))
    for path in run_folder.rglob("*.npz"):
        assert len(np.load(path)["results"])
    steps = sorted(int(re.search(r"_(\d+)_steps", path.name)[1]) for path in run_folder.glob("rl_model_*_steps.zip"))
    assert steps == list(range(256, 256 * len(steps) + 1, 256))
    PPOExt.resume(run_folder / "checkpoints", make_vec_env(ENV, 2)).env.close()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_every_file_is_whole(name, tmp_path):
    """Whenever a training is ended, each file under its final name is whole, and no checkpoint is lost."""
    generator = random.Random(f"{name} {SEED}")
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = start(folder, "train", *ARGUMENTS, "-n", "1000000", *PARAMS)
        end(process, folder, generator, getattr(signal, name))
        assert_whole(folder)


def results(folder):
    model = PPOExt.load(folder / FOLDER / f"{ENV}.zip", device="cpu")
    rows = (folder / FOLDER / "0.monitor.csv").read_text().splitlines()[2:]
    return [tensor.numpy() for tensor in model.policy.state_dict().values()], [row.split(",")[:2] for row in rows]


def test_resumed_after_kills(tmp_path):
    """A training that is killed again and again and resumed each time ends as one that was not."""
    generator = random.Random(SEED)
    total = ["-n", str(2560 * (KILLS + 1))]
    for name in ("plain", "killed"):
        (tmp_path / name).mkdir()
    run(*MODULE, "sb3_ppo_ext.zoo", "train", *ARGUMENTS, *total, *PARAMS, cwd=tmp_path / "plain")
    process = start(tmp_path / "killed", "train", *ARGUMENTS, *total, *PARAMS)
    for _ in range(KILLS):
        end(process, tmp_path / "killed", generator, signal.SIGKILL, longest=1.5)
        process = start(tmp_path / "killed", "resume", FOLDER)
        # Resuming takes a while before the training goes on.
        time.sleep(generator.uniform(0, 8))
    assert process.wait(600) == 0
    parameters, episodes = results(tmp_path / "killed")
    expected_parameters, expected_episodes = results(tmp_path / "plain")
    assert all(np.array_equal(*pair) for pair in zip(parameters, expected_parameters, strict=True))
    assert episodes == expected_episodes

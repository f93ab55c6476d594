"""``python -m sb3_ppo_ext.zoo resume FOLDER``, and checkpoints as ``--trained-agent``."""

import contextvars
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import yaml
from support.zoo import saved

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.envs import choice_of_vec_env
from sb3_ppo_ext.zoo.__main__ import main
from sb3_ppo_ext.zoo.resuming import words_of

pytestmark = pytest.mark.integration

ENV = "Pendulum-v1"
SMALL = ["--env", ENV, "-n", "768", "--save-freq", "150", "-tb", "tb", "--eval-freq", "200", "--eval-episodes", "1"]
PARAMS = ["-params", "n_envs:2", "n_steps:64", "batch_size:32", "n_epochs:2", "normalize:True"]


@pytest.fixture
def zoo_here(tmp_path, monkeypatch, short_episodes):
    """The command ``python -m sb3_ppo_ext.zoo`` in this process, and in the folder of the test."""
    short_episodes(ENV)

    def command(*arguments, cwd=tmp_path):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["zoo", *map(str, arguments)])
        contextvars.copy_context().run(main)

    return command


@pytest.fixture
def run(zoo_here, tmp_path):
    """Folder of a run that is complete, with what it leaves behind: the reference for resumed ones."""
    zoo_here("train", "--algo", "ppo_ext", "--seed", "15", "--device", "cpu", *SMALL, *PARAMS)
    return saved(tmp_path, ENV).parent


def interrupted(folder):
    """Bring the folder of a run into a state as after an interruption: its end is missing."""
    (folder / f"{ENV}.zip").unlink()
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.stem.split("_")[1]))
    newest.unlink()


def results(folder):
    """Parameters, log without times, evaluations and episodes of a run."""
    model = PPOExt.load(folder / f"{ENV}.zip", device="cpu")
    log = pd.read_csv(folder / "progress.csv")
    timeless = sorted(name for name in log if not any(word in name for word in ("seconds", "fps", "elapsed")))
    monitor = pd.read_csv(folder / "1.monitor.csv", skiprows=1)[["r", "l"]]
    evaluations = np.load(folder / "evaluations.npz")["results"]
    return [
        *(p.numpy() for p in model.policy.state_dict().values()),
        log[timeless].to_numpy(),
        monitor.to_numpy(),
        evaluations,
    ]


def assert_equal(one, other):
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def test_resume(run, zoo_here, tmp_path):
    """A run goes on in its own folder to the same end, wherever the command is started, and keeps its own files."""
    before = results(run)
    config, arguments = ((run / ENV / name).read_text() for name in ("config.yml", "args.yml"))
    interrupted(run)
    (tmp_path / "elsewhere").mkdir()
    zoo_here("resume", run, cwd=tmp_path / "elsewhere")
    assert_equal(before, results(run))
    assert (config, arguments) == tuple((run / ENV / name).read_text() for name in ("config.yml", "args.yml"))
    assert sorted(path.name for path in run.parent.iterdir()) == [f"{ENV}_1"]
    assert sorted(path.name for path in (tmp_path / "tb" / ENV).iterdir()) == ["PPOExt_1"]
    assert not (run / ENV / "vecnormalize.pkl").exists()


def test_resume_with_a_vec_normalize(zoo_here, tmp_path):
    """So does a run with a second file, for its statistics."""
    arguments = ["--algo", "ppo_ext", "--seed", "15", "--device", "cpu", *SMALL, *PARAMS[:-1]]
    zoo_here("train", *arguments, "normalize:dict(epsilon=1e-8)")
    run = saved(tmp_path, ENV).parent
    before = results(run)
    assert (run / ENV / "vecnormalize.pkl").exists()
    interrupted(run)
    zoo_here("resume", run)
    assert_equal(before, results(run))


def test_trained_agent(run, zoo_here):
    """With a checkpoint as ``--trained-agent``, a new run goes on to the same end, with the log from the beginning."""
    interrupted(run)
    before = run / "checkpoints" / "training_512_steps.zip"
    shutil.copy(before, "checkpoint.zip")
    zoo_here("train", "--algo", "ppo_ext", "--seed", "15", "--device", "cpu", *SMALL, *PARAMS, "-i", "checkpoint.zip")
    zoo_here("resume", run)
    assert_equal(results(run), results(run.with_name(f"{ENV}_2")))


def test_resume_of_a_continued_training(run, zoo_here):
    """Statistics that came with the agent of ``--trained-agent`` are there again when the training is resumed."""
    arguments = ["--algo", "ppo_ext", "--seed", "15", "--device", "cpu", *SMALL, *PARAMS[:-1]]
    zoo_here("train", *arguments, "-i", run / f"{ENV}.zip")
    continued = run.with_name(f"{ENV}_2")
    before = results(continued)
    assert PPOExt.load(continued / f"{ENV}.zip").normalizer.obs_rms.count > PPOExt.load(run / f"{ENV}.zip").num_timesteps
    interrupted(continued)
    zoo_here("resume", continued)
    assert_equal(before, results(continued))


def test_hyperparameters_are_those_of_the_run(run, zoo_here):
    """A run that is resumed reads the hyperparameters that it has saved, not those of today."""
    interrupted(run)
    path = run / ENV / "config.yml"
    config = yaml.load(path.read_text(), Loader=yaml.UnsafeLoader)
    config["n_epochs"] = 5
    path.write_text(yaml.dump(config))
    zoo_here("resume", run)
    assert PPOExt.load(run / f"{ENV}.zip").n_epochs == 5


@pytest.mark.slow
def test_monitor_files_of_other_processes(zoo_here, tmp_path, monkeypatch):
    """Environments in other processes keep the episodes before the checkpoint, too."""
    monkeypatch.setattr(choice_of_vec_env, "COST", 0.0)
    arguments = ["--env", "CartPole-v1", "-n", "256", "--save-freq", "64", "--eval-freq", "-1", "--vec-env", "subproc"]
    zoo_here("train", "--algo", "ppo_ext", "--seed", "1", "--device", "cpu", *arguments, *PARAMS[:-1])
    folder = saved(tmp_path, "CartPole-v1").parent
    before = (folder / "0.monitor.csv").read_text()
    zoo_here("resume", folder)
    assert (folder / "0.monitor.csv").read_text().startswith(before)


def test_checkpoints_only_with_save_freq(train_here, tmp_path, zoo_here):
    """Without ``--save-freq`` the Zoo writes no checkpoints; the message says what to do."""
    train_here("--env", "CartPole-v1", "-n", "64", "-params", "n_envs:1", "n_steps:32")
    folder = saved(tmp_path, "CartPole-v1").parent
    with pytest.raises(ValueError, match="--save-freq"):
        zoo_here("resume", folder)


def test_other_folders_are_refused(tmp_path, zoo_here, train_here):
    """Folders that are not that of a training of ``ppo_ext`` are refused, with an example."""
    with pytest.raises(ValueError, match="folder of one run"):
        zoo_here("resume", tmp_path)
    train_here("--env", "CartPole-v1", "-n", "64", "-params", "n_envs:1", "n_steps:32", algo="ppo")
    with pytest.raises(ValueError, match="only training runs of `ppo_ext`"):
        zoo_here("resume", saved(tmp_path, "CartPole-v1", algo="ppo").parent)


def test_arguments_are_repeated():
    """What was given to ``train`` is given again, dictionaries and negative numbers as well."""
    arguments = {"env": ENV, "eval_freq": -1, "progress": True, "track": False, "env_kwargs": {"g": 9.8, "mode": "a"}}
    words = [word for name, value in arguments.items() for word in words_of(name, value)]
    assert words == [f"--env={ENV}", "--eval-freq=-1", "--progress", "--env-kwargs", "g:9.8", "mode:'a'"]

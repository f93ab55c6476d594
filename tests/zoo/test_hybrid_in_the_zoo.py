"""RL Zoo's commands with an environment of hybrid actions."""

import numpy as np
import pytest
import yaml
from support import hybrid
from support.hybrid import Passing
from support.zoo import saved

from sb3_ppo_ext import PPOExt

ENTRY = dict(n_timesteps=256, policy="MlpPolicy", n_envs=2, n_steps=64, normalize=True, action_dist="beta")
ARGUMENTS = ["--env", "Passing-v0", "--gym-packages", hybrid.__name__, "-conf", "mine.yml"]


@pytest.fixture(autouse=True)
def _entry(tmp_path):
    (tmp_path / "mine.yml").write_text(yaml.dump({"Passing-v0": ENTRY}))


@pytest.mark.integration
def test_train_enjoy_and_continue(tmp_path, train_here, enjoy_here):
    """`train` evaluates and saves an agent, `enjoy` plays it, and `-i` goes on with it."""
    train_here(*ARGUMENTS, "--eval-freq", "128", "--eval-episodes", "1")
    agent = saved(tmp_path, "Passing-v0")
    assert (agent.parent / "best_model.zip").exists()
    model = PPOExt.load(agent, device="cpu")
    assert model.action_dist == "beta"
    assert Passing.action_space.contains(model.predict(np.zeros(6, np.float32))[0])
    assert "Mean reward" in enjoy_here("Passing-v0", 30)
    train_here(*ARGUMENTS, "-i", agent)
    assert PPOExt.load(saved(tmp_path, "Passing-v0"), device="cpu")._n_updates > model._n_updates


@pytest.mark.integration
def test_tune(train_here, tmp_path):
    """A trial of a study trains, with the action distribution of the entry."""
    study = [
        "-optimize",
        "-n",
        "200",
        "--no-optim-plots",
        "--n-trials",
        "1",
        "--storage",
        "study.log",
        "--study-name",
        "study",
    ]
    train_here(*ARGUMENTS, *study, "--n-startup-trials", "1", "--n-evaluations", "1", "--eval-episodes", "1")
    assert (tmp_path / "study.log").exists()

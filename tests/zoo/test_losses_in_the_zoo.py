"""RL Zoo's commands with auxiliary losses and intrinsic rewards."""

import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from stable_baselines3.common.vec_env import VecNormalize
from support.zoo import config, manager, saved

from sb3_ppo_ext import PPOExt, RNDReward
from sb3_ppo_ext.zoo.registration import register

LOSSES = {
    "mirror": {"coef": 0.5, "obs": [0, [1, -1], [2, -1]], "action": [[0, -1]]},
    "caps_temporal": 0.1,
    "caps_spatial": {"coef": 0.05, "std": 0.01},
}
ENTRY = dict(n_envs=2, n_steps=32, batch_size=32, n_epochs=2, n_timesteps=128, policy="MlpPolicy", normalize=True)


@pytest.fixture
def entry(tmp_path):
    """A file of hyperparameters with auxiliary losses and intrinsic rewards."""
    wrapper = [{"sb3_ppo_ext.RNDReward": {"coef": 0.5, "n_steps": 16}}]
    text = yaml.safe_dump({"Pendulum-v1": ENTRY | {"auxiliary_losses": LOSSES, "vec_env_wrapper": wrapper}})
    (tmp_path / "conf.yml").write_text(text)
    return ["--env", "Pendulum-v1", "-conf", str(tmp_path / "conf.yml")]


@pytest.mark.integration
def test_yaml(entry, tmp_path, train_here, enjoy_here):
    """A training with evaluations, `enjoy`, a training that goes on, and tuning have the losses of the entry."""
    train_here(*entry, "--eval-freq", "64", "--eval-episodes", "1")
    model = PPOExt.load(saved(tmp_path, "Pendulum-v1"))
    assert model.auxiliary_losses == LOSSES == config(tmp_path, "Pendulum-v1")["auxiliary_losses"]
    printed = enjoy_here("Pendulum-v1", 400)
    [first] = [float(line.split(": ")[1]) for line in printed.splitlines() if line.startswith("Episode Reward")][:1]
    assert -2000 < first < 0
    train_here(*entry, "-i", saved(tmp_path, "Pendulum-v1"))
    arguments = ["--storage", "study.log", "--study-name", "s", "-optimize", "--n-trials", "1", "--n-startup-trials", "1"]
    train_here(*entry, *arguments, "--n-evaluations", "1", "--eval-episodes", "1", "-n", "64", "--no-optim-plots")
    journal = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    assert optuna.load_study(storage=journal, study_name="s").trials[0].state is optuna.trial.TrialState.COMPLETE


def test_params(tmp_path, train_here):
    """Losses are given on the command line as Python's dictionary."""
    train_here("--env", "Pendulum-v1", "-n", "64", "-params", "n_envs:2", "n_steps:32", f"auxiliary_losses:{LOSSES!r}")
    assert PPOExt.load(saved(tmp_path, "Pendulum-v1")).auxiliary_losses == LOSSES


def test_bad_losses(tmp_path, train_here):
    """A bad loss is refused with its message, and nothing is written."""
    with pytest.raises(ValueError, match="`auxiliary_losses` has no option `caps`"):
        train_here("--env", "Pendulum-v1", "-n", "64", "-params", "auxiliary_losses:{'caps': 1}")
    assert not (tmp_path / "logs").exists()


def wrappers(env):
    while isinstance(env, VecNormalize):
        env = env.venv
    return env


def test_environments_for_evaluation(entry, tmp_path):
    """The Zoo's environments for evaluation, and those of `enjoy`, have the rewards of the task."""
    from rl_zoo3.utils import create_test_env

    register()
    experiment = manager(env_id="Pendulum-v1", folder=tmp_path, config=entry[-1])
    experiment.setup_experiment()
    for is_eval in (False, True):
        env = wrappers(experiment.create_envs(1, eval_env=is_eval, no_log=True))
        assert isinstance(env, RNDReward)
        assert env.training is not is_eval
    hyperparams = {"vec_env_wrapper": [{"sb3_ppo_ext.RNDReward": {"coef": 0.5}}], "normalize": False}
    env = create_test_env("Pendulum-v1", hyperparams=hyperparams, should_render=False)
    assert not env.training

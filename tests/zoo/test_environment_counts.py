"""`-params n_envs:N` keeps the samples per update of an entry, as `make` does."""

import warnings

import optuna
import pytest
import yaml
from optuna.samplers import RandomSampler
from support.zoo import config, manager, saved

from sb3_ppo_ext import PPOExt, make
from sb3_ppo_ext.zoo import environment_counts
from sb3_ppo_ext.zoo.environment_counts import with_environments

ENTRY = dict(policy="MlpPolicy", n_timesteps=1000, n_envs=4, n_steps=256, batch_size=64)


@pytest.fixture(autouse=True)
def twelve_cores(monkeypatch):
    monkeypatch.setattr(environment_counts, "available_cores", lambda: 12)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {}),
        (dict(n_steps=8), {}),
        (dict(n_envs=4), dict(n_envs=4)),
        (dict(n_envs=1), dict(n_envs=1, n_steps=1024)),
        (dict(n_envs=16), dict(n_envs=16, n_steps=64)),
        (dict(n_envs=10), dict(n_envs=10, n_steps=96)),  # 15 whole minibatches
        (dict(n_envs="auto"), dict(n_envs=12, n_steps=80)),
        (dict(n_envs=16, n_steps=5), dict(n_envs=16)),
        (dict(n_envs=64), dict(n_envs=64, n_steps=16, staggered_start=True)),
        (dict(n_envs=64, staggered_start=False), dict(n_envs=64, n_steps=16, staggered_start=False)),
        (dict(n_envs=64, n_steps=16), dict(n_envs=64)),
    ],
)
def test_samples_per_update(given, found):
    """The steps of a rollout are those that make as many samples, or nearly as many, unless they are given."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert with_environments(ENTRY, given) == found
    assert with_environments({"n_envs": 2}, {"n_envs": 8})["n_steps"] == 512  # of the 2048 that are the default


@pytest.mark.parametrize(("n_envs", "n_steps", "samples"), [(128, 16, 2048), (100, 16, 1600)])
def test_samples_that_cannot_be_kept(n_envs, n_steps, samples):
    """Where that is not possible, a warning has both numbers."""
    with pytest.warns(UserWarning, match=f"the preset has 1024 samples per update, and this one {samples}"):
        assert with_environments(ENTRY, dict(n_envs=n_envs))["n_steps"] == n_steps


def test_rollout_of_one_minibatch():
    """It stays one where the samples cannot be kept, unless its size is given."""
    entry = {**ENTRY, "n_envs": 8, "n_steps": 32, "batch_size": 256}
    assert with_environments(entry, dict(n_envs=12)) == dict(n_envs=12, n_steps=21, batch_size=252, staggered_start=True)
    assert with_environments(entry, dict(n_envs=12, batch_size=63))["batch_size"] == 63
    assert "batch_size" not in with_environments(entry, dict(n_envs=16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, env = make("CartPole-v1", n_envs=12)
    env.close()
    assert (model.n_steps, model.batch_size) == (21, 252)


def test_batch_size_that_is_given(tmp_path):
    """The number of steps is one with which its minibatches are whole, in `make` and in the Zoo."""
    given = dict(n_envs=12, batch_size=160)
    experiment = manager(env_id="FrozenLake-v1", folder=tmp_path, hyperparams=dict(given), eval_freq=-1)
    _, stored = experiment.setup_experiment()
    model, env = make("FrozenLake-v1", **given)
    env.close()
    assert model.n_steps == stored["n_steps"] == 160


def test_entries_for_all_cores():
    """An entry can say `auto`; its steps are then those of each environment."""
    entry = {**ENTRY, "n_envs": "auto"}
    assert with_environments(entry, {}) == with_environments(entry, dict(n_steps=8)) == dict(n_envs=12)
    assert with_environments(entry, dict(n_envs=2)) == dict(n_envs=2)


def test_trials():
    """The steps of a trial are for its number of environments, not for that of the entry."""
    assert with_environments(ENTRY, {}, of_trial=8) == dict(n_envs=8)
    assert with_environments(ENTRY, dict(n_envs=2), of_trial=8) == dict(n_envs=2, n_steps=1024)


@pytest.mark.parametrize("n_envs", [0, -1, 1.5, "all", True, None, [2]])
def test_bad_numbers(n_envs, tmp_path):
    """Other values are refused by name, wherever they are from, and nothing is written."""
    with pytest.raises(ValueError, match="`n_envs="):
        manager(env_id="CartPole-v1", folder=tmp_path, hyperparams=dict(n_envs=n_envs)).setup_experiment()
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump({"CartPole-v1": {**ENTRY, "n_envs": n_envs}}))
    with pytest.raises(ValueError, match="`n_envs="):
        manager(env_id="CartPole-v1", folder=tmp_path, config=str(path)).setup_experiment()
    assert [each.name for each in tmp_path.iterdir()] == ["mine.yml"]


def test_as_make(tmp_path):
    """The Zoo and `make` have the same number of steps, and the run saves it."""
    experiment = manager(env_id="Pendulum-v1", folder=tmp_path, hyperparams=dict(n_envs=8), eval_freq=-1)
    model, stored = experiment.setup_experiment()
    made, _ = make("Pendulum-v1", n_envs=8, device="cpu")
    assert (model.n_envs, model.n_steps) == (made.n_envs, made.n_steps) == (stored["n_envs"], stored["n_steps"]) == (8, 512)


def test_command_line(tmp_path, train_here):
    """On the command line, `auto` needs no quotes, and what it stood for is saved."""
    (tmp_path / "mine.yml").write_text(yaml.safe_dump({"CartPole-v1": {**ENTRY, "n_steps": 96}}))
    train_here("--env", "CartPole-v1", "-n", "64", "-conf", "mine.yml", "-params", "n_envs:auto")
    stored = config(tmp_path, "CartPole-v1")
    assert (stored["n_envs"], stored["n_steps"]) == (12, 32)
    assert PPOExt.load(saved(tmp_path, "CartPole-v1")).n_envs == 12


@pytest.mark.integration
def test_staggered_study(tmp_path):
    """A training with a trial begins its environments as the trial did, unless the user says otherwise."""
    storage = f"sqlite:///{tmp_path}/study.db"
    tuning = dict(optimize_hyperparameters=True, n_timesteps=600, storage=storage, study_name="s")
    experiment = manager("ppo_ext", "CartPole-v1", tmp_path, hyperparams=dict(n_envs=64), **tuning)
    experiment.setup_experiment()
    study = optuna.create_study(direction="maximize", sampler=RandomSampler(0), storage=storage, study_name="s")
    study.optimize(experiment.objective, n_trials=1)
    again = dict(env_id="CartPole-v1", folder=tmp_path, storage=storage, study_name="s", trial_id=0)
    for given, is_staggered in (({}, True), (dict(n_envs=64), True), (dict(staggered_start=False), False)):
        _, stored = manager(**again, hyperparams=given).read_hyperparameters()
        assert stored.get("staggered_start", False) == is_staggered


@pytest.mark.integration
def test_studies(tmp_path):
    """In a study, rollouts are sampled for the number of environments, and a training with the trial has as many samples."""
    storage = f"sqlite:///{tmp_path}/study.db"
    experiment = manager(
        *("ppo_ext", "CartPole-v1", tmp_path),
        **dict(hyperparams=dict(n_envs=3), optimize_hyperparameters=True, n_timesteps=600, storage=storage, study_name="s"),
    )
    experiment.setup_experiment()
    study = optuna.create_study(direction="maximize", sampler=RandomSampler(0), storage=storage, study_name="s")
    study.optimize(experiment.objective, n_trials=1)
    trial = study.trials[0]
    assert trial.params["n_envs"] == 3
    again = dict(env_id="CartPole-v1", folder=tmp_path, storage=storage, study_name="s", trial_id=0)
    _, stored = manager(**again).read_hyperparameters()
    assert (stored["n_envs"], stored["n_steps"]) == (3, trial.user_attrs["n_steps"])
    assert "staggered_start" not in stored
    _, stored = manager(**again, hyperparams=dict(n_envs=1)).read_hyperparameters()
    assert (stored["n_envs"], stored["n_steps"]) == (1, 3 * trial.user_attrs["n_steps"])

"""The best trial of a study as an entry of a YAML file: it is printed, saved, and trained with."""

import functools
import sys
from pathlib import Path

import optuna
import pytest
import torch as th
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from rl_zoo3.hyperparams_opt import HYPERPARAMS_SAMPLER
from support.parity import assert_equal
from support.zoo import look_instead_of_learning, manager, saved
from torch import nn

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.common.schedules import value_of
from sb3_ppo_ext.zoo.best_trial import NotCodeError, as_code, best_entry

pytestmark = pytest.mark.integration

ZOO_FILE = Path(sys.modules["rl_zoo3"].__file__).parent / "hyperparams" / "ppo.yml"
ENV_ID = "MountainCarContinuous-v0"  # The Zoo's entry has `policy_kwargs`, `normalize` and gSDE.
STUDY = ["--storage", "study.log", "--study-name", "study"]
SHORT = ["--n-startup-trials", "9", "--n-evaluations", "1", "--eval-episodes", "1", "--no-optim-plots"]


@pytest.fixture(autouse=True)
def _short_episodes(short_episodes):
    short_episodes(ENV_ID)


def optimize(command, *arguments, n_trials=2, env_id=ENV_ID):
    command("-optimize", "--env", env_id, "-n", 200, *STUDY, *SHORT, "--max-total-trials", n_trials, *arguments)


def best_trial():
    return optuna.load_study(study_name="study", storage=JournalStorage(JournalFileBackend("study.log"))).best_trial


def test_it_is_trained_with(tmp_path, train_here, capsys):
    """A training with the entry equals one with `--trial-id`, in all parameters; `-params` of the study are part of it."""
    zoo_file = ["-conf", ZOO_FILE]
    given = [
        "-params",
        "vf_coef:0.7",
        "policy_kwargs:dict(log_std_init=-3.29, ortho_init=False, optimizer_class=th.optim.AdamW)",
    ]
    optimize(train_here, *zoo_file, *given)
    printed = capsys.readouterr().out
    path = tmp_path / "logs" / "ppo_ext" / f"{ENV_ID}_1" / "best.yml"
    text, trial = path.read_text(), best_trial()
    assert text in printed
    assert f"# Trial {trial.number} of the study study: mean return {trial.value:.6g} after 200 steps\n" in text
    [(env_id, entry)] = yaml.safe_load(text).items()
    assert env_id == ENV_ID
    assert (entry["n_timesteps"], entry["vf_coef"], entry["normalize"]) == (200, 0.7, True)
    assert "ortho_init=False" in entry["policy_kwargs"]
    train_here("--env", ENV_ID, "--conf-file", path)
    with_entry = PPOExt.load(saved(tmp_path, ENV_ID))
    # With `--trial-id`, `policy_kwargs` of the command line would precede those of the trial.
    again = ["-params", "vf_coef:0.7", "policy_kwargs:dict(ortho_init=False, optimizer_class=th.optim.AdamW)"]
    train_here("--env", ENV_ID, "-n", 200, *zoo_file, *STUDY, "--trial-id", trial.number, *again)
    with_trial = PPOExt.load(saved(tmp_path, ENV_ID))
    assert saved(tmp_path, ENV_ID).parent.name == f"{ENV_ID}_3"
    assert_equal(with_trial.policy.state_dict(), with_entry.policy.state_dict(), "policy")
    assert_equal(with_trial.policy.optimizer.state_dict(), with_entry.policy.optimizer.state_dict(), "optimizer")
    for name in ("n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "ent_coef", "vf_coef", "use_sde", "action_dist"):
        assert getattr(with_entry, name) == getattr(with_trial, name), name
    assert type(with_entry.policy.optimizer) is th.optim.AdamW


@pytest.mark.parametrize("n_envs", [1, 3])
def test_entry_equals_the_hyperparameters_of_the_trial(n_envs, tmp_path, monkeypatch):
    """What the entry says is what the trial was trained with, read by the Zoo as any entry."""
    made = []
    arguments = dict(env_id="Pendulum-v1", folder=tmp_path, eval_freq=-1, verbose=0)
    experiment = manager(
        **arguments, optimize_hyperparameters=True, n_timesteps=1000, hyperparams=dict(n_envs=n_envs), env_kwargs={"g": 9.0}
    )
    experiment.setup_experiment()
    with monkeypatch.context() as patch:
        look_instead_of_learning(patch, made.append)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(3))
        study.optimize(experiment.objective, n_trials=12)
    for of_trial, trial in zip(made, study.trials, strict=True):
        path = tmp_path / f"{trial.number}.yml"
        path.write_text(yaml.safe_dump({"Pendulum-v1": best_entry(experiment, trial.params, experiment.n_timesteps)}))
        model, _ = manager(**arguments, config=str(path)).setup_experiment()
        assert model.env.get_attr("g") == [9.0] * n_envs
        for name in model._set_up.keys() - {"seed"}:  # Trials have none.
            value, theirs = model._set_up[name], of_trial._set_up[name]
            if callable(value) and not isinstance(value, type):
                value, theirs = ([value_of(schedule, p) for p in (1.0, 0.5, 0.1)] for schedule in (value, theirs))
            assert value == theirs, name
        assert str(model.policy) == str(of_trial.policy)
        assert model.policy.state_dict().keys() == of_trial.policy.state_dict().keys()


def test_a_study_that_is_complete(tmp_path, train_here):
    """A worker that has no trial left to do writes the entry of the best trial as well."""
    optimize(train_here)
    optimize(train_here)
    first, second = ((tmp_path / "logs" / "ppo_ext" / f"{ENV_ID}_{run}" / "best.yml").read_text() for run in (1, 2))
    assert first == second
    assert len(optuna.load_study(study_name="study", storage=JournalStorage(JournalFileBackend("study.log"))).trials) == 2


def test_in_a_database(tmp_path, train_here):
    """So does a study in a database, and one that is kept in memory."""
    database = ["--storage", f"sqlite:///{tmp_path}/study.db"]
    optimize(train_here, *database, n_trials=1)
    train_here("-optimize", "--env", ENV_ID, "-n", 200, *SHORT, "--n-trials", 1)
    for run in (1, 2):
        assert (tmp_path / "logs" / "ppo_ext" / f"{ENV_ID}_{run}" / "best.yml").exists()


def test_values_without_a_form_in_yaml(tmp_path, train_here, capsys):
    """An object in `policy_kwargs` cannot be written: the message names it, and `--trial-id` as the way to train."""
    given = "policy_kwargs:dict(features_extractor_class=__import__('stable_baselines3').common.torch_layers.FlattenExtractor)"
    optimize(train_here, "-params", given, n_trials=1)
    printed = capsys.readouterr().out
    assert "best.yml is not written, because <class 'stable_baselines3.common.torch_layers.FlattenExtractor'>" in printed
    assert "--trial-id 0" in printed
    train_here("-optimize", "--env", ENV_ID, "-n", 200, *SHORT, "--n-trials", 1, "-params", given)
    assert "has no form in YAML: tune with a `--storage`" in capsys.readouterr().out  # This study is gone.
    assert not list(tmp_path.rglob("best.yml"))


def test_a_sampler_of_the_users_own(tmp_path, train_here, monkeypatch, capsys):
    """What our converter does not know is no matter of YAML."""
    monkeypatch.setitem(HYPERPARAMS_SAMPLER, "ppo_ext", lambda trial, *_: {"n_steps": trial.suggest_int("n_steps", 64, 64)})
    optimize(train_here, n_trials=1)
    assert "best.yml is not written, because the trial lacks 'net_arch', which the converter" in capsys.readouterr().out
    assert not list(tmp_path.rglob("best.yml"))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        1e-5,
        float("inf"),
        'it\'s "so"',
        [64, 64],
        (1, "a"),
        (),
        {"pi": [64], "vf": []},
        {"not a name": 1},
        nn.ReLU,
        {"optimizer_class": th.optim.AdamW, "betas": (0.9, 0.95)},
    ],
    ids=str,
)
def test_as_code(value):
    """The code evaluates to the value."""
    assert eval(as_code(value), {"nn": nn, "th": th}) == value


@pytest.mark.parametrize(
    "value",
    [PPOExt, [nn.ReLU()], functools.partial(nn.ELU), {"a": object()}],
    ids=["class", "module", "partial", "object"],
)
def test_no_code(value):
    """Objects and other classes have no code."""
    with pytest.raises(NotCodeError):
        as_code(value)


def test_steps_of_the_trial(tmp_path, train_here):
    """The entry has the numbers of steps and environments of its trial, also where the last command had others."""
    optimize(train_here, "-params", "n_envs:3", n_trials=1)
    optimize(train_here, "-n", 100, n_trials=1)
    texts = [path.read_text() for path in sorted(tmp_path.rglob("best.yml"))]
    trials = optuna.load_study(study_name="study", storage=JournalStorage(JournalFileBackend("study.log"))).trials
    steps = {trial.number: trial.user_attrs["n_timesteps"] for trial in trials}
    for text in texts:
        number = int(text.split()[2])
        assert f"after {steps[number]} steps" in text
        entry = yaml.safe_load(text)[ENV_ID]
        assert (entry["n_timesteps"], entry["n_envs"]) == (steps[number], 3)

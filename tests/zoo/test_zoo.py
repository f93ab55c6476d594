"""RL Zoo's own commands, unchanged, with `--algo ppo_ext`."""

import contextlib
import copy
import os
import pickle
import re
import shutil
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import optuna
import pytest
import torch as th
import yaml
from gymnasium import spaces
from rl_zoo3 import ALGOS
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
from rl_zoo3.utils import SimpleLinearSchedule, get_hf_trained_models
from stable_baselines3 import PPO
from support.parity import assert_equal
from support.toys import VECTOR, Samples
from support.zoo import MODULE, config, look_instead_of_learning, manager, run, saved, train

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.zoo import register
from sb3_ppo_ext.zoo.__main__ import main
from sb3_ppo_ext.zoo.tuning import NETWORKS
from sb3_ppo_ext.zoo.yaml_entries import HYPERPARAMS, TrialHyperparams, default_for, find_hyperparams

pytestmark = pytest.mark.integration

# The command line


ZOO_FILE = Path(sys.modules["rl_zoo3"].__file__).parent / "hyperparams" / "ppo.yml"
SMALL = ["-params", "n_steps:128", "n_epochs:2"]


@pytest.mark.parametrize(
    ("env_id", "arguments"),
    [
        pytest.param("CartPole-v1", ["-n", "768"], marks=pytest.mark.slow),  # in our YAML, as a command
        pytest.param("Pendulum-v1", ["-n", "8192", "-conf", str(ZOO_FILE), *SMALL], marks=pytest.mark.slow),  # with gSDE
        ("HalfCheetah-v4", ["-n", "200", *SMALL]),  # in the Zoo's: normalised, with policy_kwargs
        pytest.param("BipedalWalkerHardcore-v3", ["-n", "2048", *SMALL], marks=pytest.mark.slow),
    ],
)
def test_same_numbers_as_ppo(env_id, arguments, tmp_path, train_here):
    """
    With the same seed, `ppo` and the reference backend of `ppo_ext` save the same parameters and the same hyperparameters.
    """
    command = partial(train, cwd=tmp_path) if env_id == "CartPole-v1" else train_here
    for algo in ("ppo", "ppo_ext"):
        reference = [] if algo == "ppo" else [*([] if "-params" in arguments else ["-params"]), "backend:'eager'"]
        command("--env", env_id, *arguments, *reference, algo=algo)
    theirs, ours = PPO.load(saved(tmp_path, env_id, "ppo")), PPOExt.load(saved(tmp_path, env_id))
    assert type(ours) is PPOExt
    assert ours._n_updates > 0
    assert_equal(theirs.policy.state_dict(), ours.policy.state_dict(), "policy")
    assert_equal(theirs.policy.optimizer.state_dict(), ours.policy.optimizer.state_dict(), "optimizer")
    expected = config(tmp_path, env_id, "ppo") | {"backend": "eager"}
    if expected.pop("normalize", False):  # by the model itself
        expected |= {"normalize_obs": True, "normalize_reward": True}
    assert expected == config(tmp_path, env_id)


@pytest.mark.xdist_group("trained")
def test_train_writes_what_the_zoo_writes(trained):
    """A run leaves model, best model, checkpoints, evaluations, monitor, TensorBoard and configuration."""
    folder = saved(trained, "CartPole-v1").parent
    for name in ("best_model.zip", "evaluations.npz", "rl_model_300_steps.zip", "0.monitor.csv", "CartPole-v1/config.yml"):
        assert (folder / name).exists(), sorted(path.name for path in folder.iterdir())
    assert list((trained / "tb" / "CartPole-v1").glob("PPOExt_1/events*"))


@pytest.mark.xdist_group("trained")
def test_enjoy(trained, enjoy_here, monkeypatch):
    """`enjoy` loads the agent and plays it."""
    monkeypatch.chdir(trained)
    assert "Mean reward" in enjoy_here("CartPole-v1", 200)


@pytest.mark.slow
@pytest.mark.xdist_group("trained")
def test_record_video(trained):
    """`record_video` writes a video of the best model."""
    arguments = ["--algo", "ppo_ext", "--env", "CartPole-v1", "-f", "logs", "-n", "20", "-o", "videos", "--load-best"]
    run(*MODULE, "rl_zoo3.record_video", *arguments, cwd=trained)
    assert list((trained / "videos").glob("*.mp4"))


@pytest.mark.xdist_group("trained")
def test_continue_training(trained, tmp_path, train_here):
    """`-i` goes on with the parameters of a saved agent."""
    agent = saved(trained, "CartPole-v1")
    train_here("--env", "CartPole-v1", "-n", "256", "-i", agent, "-params", "learning_rate:0.0")
    before, after = PPOExt.load(agent), PPOExt.load(saved(tmp_path, "CartPole-v1"))
    assert_equal(before.policy.state_dict(), after.policy.state_dict(), "policy")
    assert after._n_updates > before._n_updates


@pytest.mark.slow
def test_our_own_command(tmp_path):
    """`python -m sb3_ppo_ext.zoo` needs no hook."""
    arguments = ["--env", "CartPole-v1", "-n", "300"]
    refused = train(*arguments, cwd=tmp_path, fails=True, SB3_PPO_EXT_AUTOREGISTER="0")
    assert "invalid choice: 'ppo_ext'" in refused
    command = (*MODULE, "sb3_ppo_ext.zoo", "train")
    train(*arguments, cwd=tmp_path, command=command, SB3_PPO_EXT_AUTOREGISTER="0")
    assert saved(tmp_path, "CartPole-v1").exists()
    # ... and gets along with it.
    train(*arguments, cwd=tmp_path, command=command)
    first, second = (PPOExt.load(saved(tmp_path, "CartPole-v1", run_id=i)).policy.state_dict() for i in (1, 2))
    assert_equal(first, second, "policy")


def test_help_of_our_own_command(monkeypatch, capsys):
    """It lists the scripts, names one that it does not have, and leaves the rest to the script."""

    def printed(*words):
        monkeypatch.setattr(sys, "argv", ["zoo", *words])
        with contextlib.suppress(SystemExit):
            main()
        return "".join(capsys.readouterr())

    assert "invalid choice: 'trian'" in printed("trian")
    assert "record_video" in printed("--help")
    assert "--eval-freq" in printed("train", "--help")


def test_conf_file_wins(tmp_path, train_here):
    """A file that the user names is the only one that counts."""
    entry = dict(n_timesteps=64, policy="MlpPolicy", n_steps=16, batch_size=16, learning_rate="lin_0.002")
    (tmp_path / "mine.yml").write_text(yaml.dump({"CartPole-v1": entry}))
    train_here("--env", "CartPole-v1", "-conf", "mine.yml")
    assert config(tmp_path, "CartPole-v1") == entry
    assert PPOExt.load(saved(tmp_path, "CartPole-v1")).n_steps == 16


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("n_step:5", "PPOExt has no option `n_step`: did you mean `n_steps`"),
        ("gamma:1.5", "`gamma=1.5` is not valid"),
        ("learning_rate:'cos_3e-4'", "`learning_rate='cos_3e-4'` is not valid"),
        ("clip_range:'lin_x'", "`clip_range='lin_x'` is not valid"),
    ],
)
def test_bad_hyperparameter(parameter, message, tmp_path, train_here):
    """It is refused before a folder is made."""
    with pytest.raises(ValueError, match=re.escape(message)):
        train_here("--env", "CartPole-v1", "-params", parameter)
    assert list(tmp_path.iterdir()) == []


# Tuning


def optimize(command, *arguments, env_id="MountainCarContinuous-v0"):
    """Run few short trials on an environment whose entry, here the Zoo's, has policy_kwargs."""
    arguments = ("-optimize", "--env", env_id, "-conf", ZOO_FILE, "-n", "200", "--no-optim-plots", *arguments)
    return command("--n-startup-trials", "1", "--n-evaluations", "2", "--eval-episodes", "1", *arguments)


def trials(storage, name="study"):
    return optuna.load_study(storage=storage, study_name=name).trials


@pytest.mark.parametrize(
    ("sampler", "pruner", "more"),
    [
        ("tpe", "median", ["--n-trials", "2"]),
        pytest.param("random", "halving", ["--n-trials", "2", "--n-jobs", "2"], marks=pytest.mark.slow),
        pytest.param("random", "none", ["--max-total-trials", "2", "--optimization-log-path", "t"], marks=pytest.mark.slow),
    ],
)
def test_tuning(sampler, pruner, more, tmp_path, train_here, short_episodes):
    """Studies with each sampler and pruner complete, with several jobs as well, in an SQLite database."""
    storage = f"sqlite:///{tmp_path}/study.db"
    study = ["--storage", storage, "--study-name", "study"]
    short_episodes("MountainCarContinuous-v0")
    optimize(train_here, "--sampler", sampler, "--pruner", pruner, *study, *more)
    states = [trial.state for trial in trials(storage)]
    assert len(states) == int(more[1])
    assert set(states) <= {optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED}
    assert optuna.trial.TrialState.COMPLETE in states


def test_trial_of_a_journal(tmp_path, train_here, short_episodes):
    """`--trial-id` trains with a trial's values, those of the first one, and the entry's `policy_kwargs` stay."""
    short_episodes("MountainCarContinuous-v0")
    study = ["--storage", "studies/study.log", "--study-name", "study"]
    optimize(train_here, *study, "--n-trials", "1")
    journal = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / study[1])))
    for trial in trials(journal):
        chosen = ["-conf", ZOO_FILE, *study, "--trial-id", trial.number]
        train_here("--env", "MountainCarContinuous-v0", "-n", "10", *chosen)
        model = PPOExt.load(saved(tmp_path, "MountainCarContinuous-v0"))
        assert model.n_steps == 2 ** trial.params["n_steps_pow"]
        assert model.learning_rate(1.0) == trial.params["learning_rate"]
        width = NETWORKS[trial.params["net_type"]][trial.params["net_arch"]]
        assert model.policy.net_arch == dict(pi=width, vf=width)
        assert model.action_dist == trial.params["action_dist"].replace("gsde", "gaussian")
        assert model.policy.ortho_init is False
        # The saved configuration can be read by `enjoy`, and holds the merged ones.
        stored = config(tmp_path, "MountainCarContinuous-v0")
        assert stored["policy_kwargs"]["ortho_init"] is False
        assert stored["policy_kwargs"]["net_arch"] == dict(pi=width, vf=width)


# What the commands call, in this process


def test_registered():
    """
    `ppo_ext` is registered under its name and under the one that the Hub look-up makes of the class; doing it again changes
    nothing.
    """
    assert ALGOS["ppo_ext"] is ALGOS["ppoext"] is PPOExt
    assert PPOExt.__name__.lower() in ALGOS
    before = dict(ALGOS), dict(HYPERPARAMS_SAMPLER), dict(HYPERPARAMS_CONVERTER), vars(ExperimentManager).copy()
    register()
    assert before == (ALGOS, HYPERPARAMS_SAMPLER, HYPERPARAMS_CONVERTER, vars(ExperimentManager))


def test_hub_look_up(monkeypatch):
    """The Zoo finds an agent of ours on the Hub, and knows its algorithm."""

    card_data = {"model-index": [{"name": "PPOExt", "results": [{"dataset": {"name": "CartPole-v1"}}]}]}
    model = SimpleNamespace(id="someone/ppo_ext-CartPole-v1", card_data=card_data)
    monkeypatch.setattr("rl_zoo3.utils.HfApi.list_models", lambda self, **_: [model])
    [(algo, env_id)] = get_hf_trained_models().values()
    assert ALGOS[algo] is PPOExt
    assert env_id == "CartPole-v1"


@pytest.mark.slow
def test_ars_goes_on_working(tmp_path):
    """ARS, which sends its ExperimentManager to other processes, goes on working."""
    train("--env", "CartPole-v1", "-n", "100", "-params", "n_envs:2", algo="ars", cwd=tmp_path)
    assert saved(tmp_path, "CartPole-v1", "ars").exists()


@pytest.mark.parametrize("algo", ["ppo", "ppo_ext"])
def test_experiments_can_be_copied_and_sent(algo):
    """The class is the Zoo's, and its objects can be copied and pickled."""
    experiment = manager(algo)
    for copied in (copy.copy(experiment), copy.deepcopy(experiment), pickle.loads(pickle.dumps(experiment))):
        assert type(copied) is ExperimentManager
        assert copied.algo == algo


def test_subclasses_of_a_user(tmp_path):
    """A user's subclasses of ExperimentManager keep their signature and their methods."""

    class Mine(ExperimentManager):
        def __init__(self, *, env_id, algo):
            super().__init__(Namespace(), algo, env_id, str(tmp_path), device="cpu", eval_freq=-1)

        def read_hyperparameters(self):
            hyperparams, saved_hyperparams = super().read_hyperparameters()
            return {**hyperparams, "gamma": 0.5}, saved_hyperparams

    for algo in ("ppo", "ppo_ext"):
        model, saved_hyperparams = Mine(env_id="CartPole-v1", algo=algo).setup_experiment()
        assert model.gamma == 0.5
        assert saved_hyperparams["gamma"] == 0.98


def test_a_subclass_of_ppo_ext_in_the_zoo(tmp_path, monkeypatch):
    """A subclass that is registered over ours may have options of its own."""

    class Mine(PPOExt):
        def __init__(self, *args, extra=1, **kwargs):
            super().__init__(*args, **kwargs)
            self.extra = extra

    monkeypatch.setitem(ALGOS, "ppo_ext", Mine)
    register()
    model, _ = manager(folder=tmp_path, eval_freq=-1, hyperparams={"extra": 2}).setup_experiment()
    assert model.extra == 2


@pytest.mark.slow
def test_source_checkout_of_the_zoo(tmp_path):
    """The Zoo's YAML files are found in a source checkout, where they lie beside the package."""
    package = Path(sys.modules["rl_zoo3"].__file__).parent
    shutil.copytree(package, tmp_path / "rl_zoo3", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "rl_zoo3" / "hyperparams").rename(tmp_path / "hyperparams")
    arguments = ["--env", "HalfCheetah-v4", "-n", "256"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    train(*arguments, cwd=tmp_path, command=(*MODULE, "rl_zoo3.train"), PYTHONPATH=path)
    assert config(tmp_path, "HalfCheetah-v4")["n_steps"] == 512


def test_trial_and_command_line(tmp_path):
    """`-params` wins over the trial, in `policy_kwargs` keyword by keyword."""
    storage = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(storage=storage, study_name="study")
    trial = study.ask()
    sampled = HYPERPARAMS_SAMPLER["ppo_ext"](trial, 1, 1, {})
    study.tell(trial, 0.0)
    custom = {"gamma": 0.5, "policy_kwargs": "dict(net_arch=[8])", "vf_coef": 0.9}
    experiment = manager(storage=storage, study_name="study", trial_id=0, hyperparams=custom)
    hyperparams, saved_hyperparams = experiment.read_hyperparameters()
    assert hyperparams["policy_kwargs"] == {**sampled["policy_kwargs"], "net_arch": [8]}
    assert (hyperparams["gamma"], hyperparams["vf_coef"]) == (0.5, 0.9)
    assert hyperparams["learning_rate"] == sampled["learning_rate"]
    assert dict(saved_hyperparams) == hyperparams


@pytest.mark.parametrize(
    ("storage", "study_name", "trial_id", "message"),
    [
        ("sqlite:///study.db", "study", 7, "`--trial-id 7`: the study study has no such trial"),
        ("sqlite:///study.db", "study", -1, "`--trial-id -1`: trials are numbered from 0"),
        ("sqlite:///study.db", "studi", 0, "`--study-name studi`: no such study in that storage, which has study"),
        ("sqlite:///study.db", None, 0, "`--trial-id 0`: of which study"),
        (None, "study", 0, "`--trial-id 0`: of which study"),
        ("studi.log", "study", 0, "`--storage studi.log`: there is no such file"),
        ("sqlite:///study.db?timeout=60", "study", 7, "`--trial-id 7`: the study study has no such trial"),
        ("sqlite:///studi.db?timeout=60", "study", 0, "`--storage sqlite:///studi.db.timeout=60`: there is no such file"),
    ],
)
def test_no_such_trial(storage, study_name, trial_id, message, tmp_path, monkeypatch):
    """A trial that cannot be found is refused with the reason, and nothing is created."""
    monkeypatch.chdir(tmp_path)
    optuna.create_study(storage="sqlite:///study.db", study_name="study")
    experiment = manager(storage=storage, study_name=study_name, trial_id=trial_id)
    with pytest.raises(ValueError, match=message):
        experiment.setup_experiment()
    assert [path.name for path in tmp_path.iterdir()] == ["study.db"]


@pytest.mark.parametrize(
    ("env_id", "entry_point", "expected"),
    [
        ("Pendulum-v1", "", (HYPERPARAMS, "Pendulum-v1")),
        ("BipedalWalkerHardcore-v3", "", (ZOO_FILE, "BipedalWalkerHardcore-v3")),
        ("Nothing-v0", "", (HYPERPARAMS, "default")),
        ("ALE/Pong-v5", "ale_py.env:AtariEnv", (ZOO_FILE, "atari")),
        ("MinAtar/Breakout-v1", "minatar.gym:BaseEnv", (HYPERPARAMS, "minatar")),
        ("gymnax/Breakout-MinAtar", "sb3_ppo_ext.envs.tensors.gymnax_ids:GymnaxEnv", (HYPERPARAMS, "minatar")),
        ("Hopper-v4", "gymnasium.envs.mujoco.hopper_v4:HopperEnv", (ZOO_FILE, "Hopper-v4")),
        ("Hopper-v5", "gymnasium.envs.mujoco.hopper_v5:HopperEnv", (HYPERPARAMS, "Hopper-v5")),
        ("Ant-v4", "gymnasium.envs.mujoco.ant_v4:AntEnv", (ZOO_FILE, "Ant-v4")),
        ("HumanoidStandup-v5", "gymnasium.envs.mujoco.humanoidstandup_v5:HumanoidStandupEnv", (HYPERPARAMS, "default")),
        ("CartPoleNoVel-v1", "", (HYPERPARAMS, "CartPoleNoVel-v1")),
    ],
)
def test_find_hyperparams(env_id, entry_point, expected):
    """Our entry goes before the Zoo's, the Zoo's before our default."""
    assert find_hyperparams(env_id, entry_point, ZOO_FILE) == expected


@pytest.mark.parametrize(
    ("env_id", "key"),
    [("CartPoleNoVel-v1", "CartPoleNoVel-v1"), ("CartPole-v1", "memory"), ("Acrobot-v1", "memory"), ("Nothing-v0", "memory")],
)
def test_find_hyperparams_of_history_based_policies(env_id, key):
    """Entries of other policies are not taken for history-based ones."""
    assert find_hyperparams(env_id, "", ZOO_FILE, "MlpTransformerPolicy") == (HYPERPARAMS, key)


@pytest.mark.parametrize(
    ("env_id", "entry_point", "expected"),
    [
        ("CartPoleNoVel-v1", "", (ZOO_FILE.with_name("ppo_lstm.yml"), "CartPoleNoVel-v1")),
        ("ALE/Pong-v5", "ale_py.env:AtariEnv", (ZOO_FILE.with_name("ppo_lstm.yml"), "atari")),
        ("Nothing-v0", "", (HYPERPARAMS, "recurrent")),
        ("default", "", (HYPERPARAMS, "recurrent")),
    ],
)
def test_find_hyperparams_of_recurrent_policies(env_id, entry_point, expected):
    """A recurrent policy takes the Zoo's entry for its RecurrentPPO, or else ours."""
    assert find_hyperparams(env_id, entry_point, ZOO_FILE, "MlpLstmPolicy") == expected


# One part of these observations is a vector.
MIXED = spaces.Dict(image=spaces.Box(0, 255, (36, 36, 3), np.uint8), word=spaces.Discrete(3), vector=VECTOR)
gym.register("Mixed-v0", Samples, max_episode_steps=20, kwargs=dict(observation_space=MIXED))


@pytest.mark.parametrize(
    ("space", "key"),
    [
        (spaces.MultiDiscrete([2, 3]), "default-discrete"),
        (spaces.MultiBinary(2), "default-discrete"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (1,))]), "default"),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Dict(c=spaces.Box(-1, 1, (1,)))), "default"),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.MultiBinary(2)), "default-discrete"),
    ],
)
def test_default_for_actions(space, key):
    """A `Box` anywhere in the action space makes it continuous."""
    assert default_for(space) == key


@pytest.mark.parametrize(
    ("env_id", "policy", "norm_obs", "gamma"),
    [
        pytest.param("HumanoidStandup-v5", "MlpPolicy", True, 0.995, marks=pytest.mark.integration),
        ("Taxi-v4", "MlpPolicy", False, 0.975),
        ("Mixed-v0", "MultiInputPolicy", ["vector"], 0.95),
    ],
)
def test_default_entry(env_id, policy, norm_obs, gamma, tmp_path):
    """The default entry is for any environment, and normalises those observations that can be."""
    arguments = dict(env_id=env_id, folder=tmp_path, eval_freq=-1, n_timesteps=64)
    experiment = manager(**arguments, hyperparams=dict(policy=policy, n_steps=8, n_envs=2))
    model, _ = experiment.setup_experiment()
    assert model.get_vec_normalize_env() is None
    assert (model.normalize_obs, model.normalize_reward) == (norm_obs, True)
    is_box = isinstance(model.action_space, spaces.Box)
    assert (model.ent_coef, model.gamma) == (0.0 if is_box else 0.01, gamma)
    assert (type(model.policy.mlp_extractor.policy_net[1]).__name__, model.n_epochs) == ("LayerNorm", 10)
    model.learn(32)


def test_users_say_what_is_normalized(tmp_path):
    """`normalize` of the command line replaces that of the entry."""
    experiment = manager(
        env_id="Acrobot-v1", folder=tmp_path, hyperparams=dict(normalize="dict(norm_obs=False, clip_reward=5.0)")
    )
    model, _ = experiment.setup_experiment()
    assert (model.normalize_obs, model.clip_reward) == (False, 5.0)


# Entries that are not for a single environment
GENERAL_ENTRIES = {"memory", "recurrent", "default", "default-discrete", "minatar", "minigrid", "shared", "simulator"}


def test_tasks_without_velocities():
    """Each task without velocities that the Zoo registers has an entry with a history-based policy."""
    entries = yaml.safe_load(HYPERPARAMS.read_text())
    masked = [env_id for env_id in gym.registry if "NoVel" in env_id]
    assert len(masked) == 6
    assert {entries[env_id]["policy"] for env_id in masked} == {"MlpTransformerPolicy"}


@pytest.mark.integration  # importing MuJoCo's windows starts a process
def test_every_entry_is_legal(tmp_path):
    """Each entry of our YAML builds a model."""
    for env_id in yaml.safe_load(HYPERPARAMS.read_text()).keys() - GENERAL_ENTRIES:
        model, _ = manager(env_id=env_id, folder=tmp_path, eval_freq=-1, hyperparams=dict(n_envs=1)).setup_experiment()
        assert type(model) is PPOExt


def test_history_based_policy(tmp_path, train_here, enjoy_here, capsys):
    """A history-based policy is trained with hyperparameters for it, and watched."""
    policy = "policy:'MlpTransformerPolicy'"
    train_here("--env", "Acrobot-v1", "-n", "256", "-params", policy, "n_steps:32", "n_epochs:1")
    printed = capsys.readouterr().out
    assert "No hyperparameters for Acrobot-v1, using those of memory" in printed
    model = PPOExt.load(saved(tmp_path, "Acrobot-v1"))
    assert (model.policy.context_length, model.n_envs, model.batch_size) == (32, 8, 256)
    assert "Mean reward" in enjoy_here("Acrobot-v1", 600)


def test_recurrent_policy(tmp_path, train_here, enjoy_here, capsys):
    """A recurrent policy is trained with the Zoo's hyperparameters for RecurrentPPO, and watched."""
    train_here("--env", "CartPoleNoVel-v1", "-n", "512", "-params", "policy:'MlpLstmPolicy'", "n_epochs:1")
    assert "No hyperparameters" not in capsys.readouterr().out
    model = PPOExt.load(saved(tmp_path, "CartPoleNoVel-v1"))
    assert (model.policy.lstm_hidden_size, model.n_envs, model.n_steps, model.gae_lambda) == (64, 8, 32, 0.8)
    assert "Mean reward" in enjoy_here("CartPoleNoVel-v1", 600)


def test_different_keys(tmp_path, train_here, enjoy_here):
    """The keys of actor and critic are given on the command line; the agent is watched with all observations."""
    keys = "policy_kwargs:dict(actor_keys=['vector'], critic_keys=['vector', 'word'])"
    train_here("--env", "Mixed-v0", "-n", "64", "-params", "policy:'MultiInputPolicy'", keys, "n_steps:8", "n_envs:2")
    model = PPOExt.load(saved(tmp_path, "Mixed-v0"))
    assert (model.policy.actor_keys, model.policy.critic_keys) == (["vector"], ["vector", "word"])
    assert "Mean reward" in enjoy_here("Mixed-v0", 60)


def test_defaults_of_recurrent_ppo(tmp_path):
    """Where an entry of RecurrentPPO relies on the defaults of that algorithm, PPOExt has the same, unless they are given."""
    given = dict(policy="MlpLstmPolicy")
    for hyperparams, batch_size in ((given, 128), (dict(given, batch_size=256), 256)):
        experiment = manager(env_id="PendulumNoVel-v1", folder=tmp_path, eval_freq=-1, hyperparams=hyperparams)
        model, saved_hyperparams = experiment.setup_experiment()
        assert (model.n_steps, model.batch_size, saved_hyperparams["batch_size"]) == (1024, batch_size, batch_size)


def test_recurrent_policy_without_an_entry(tmp_path, train_here):
    """The entry `recurrent` builds a model."""
    train_here("--env", "Acrobot-v1", "-n", "256", "-params", "policy:'MlpLstmPolicy'", "n_steps:32", "n_epochs:1", "n_envs:2")
    train_here("--env", "CartPole-v1", "-n", "128", "-params", "policy:'MlpLstmPolicy'", "n_steps:32", "n_epochs:1")
    assert PPOExt.load(saved(tmp_path, "CartPole-v1")).policy.lstm_hidden_size == 64


def test_trials_of_history_based_policies(tmp_path, monkeypatch):
    """Trials build networks of the sampled size."""
    made = []
    look_instead_of_learning(monkeypatch, made.append)
    experiment = manager(env_id="CartPoleNoVel-v1", folder=tmp_path, eval_freq=-1, optimize_hyperparameters=True)
    experiment.setup_experiment()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    trial = study.ask()
    with pytest.raises(optuna.TrialPruned):
        experiment.objective(trial)
    (policy,) = (model.policy for model in made)
    assert policy.context_length == 2 ** trial.params["context_length_pow"]
    assert policy.memory_kwargs["d_model"] == trial.params["d_model"]


def test_sampled_policy_kwargs_are_merged():
    """Sampled values win, those of the YAML survive, the original is not changed."""
    hyperparams = TrialHyperparams(gamma=0.9, policy_kwargs=dict(log_std_init=-2, net_arch=[8]))
    trial = hyperparams.copy()
    trial.update(dict(gamma=0.99, policy_kwargs=dict(net_arch=[64])))
    assert trial == dict(gamma=0.99, policy_kwargs=dict(log_std_init=-2, net_arch=[64]))
    assert hyperparams == dict(gamma=0.9, policy_kwargs=dict(log_std_init=-2, net_arch=[8]))


def test_different_keys_in_trials():
    """Where the entry has keys of actor or critic, they decide whether features extractors are shared, and not the trial."""
    keys = dict(actor_keys=["vector"])
    trial = TrialHyperparams(policy_kwargs=keys)
    trial.update(dict(policy_kwargs=dict(net_arch=[64], share_features_extractor=True)))
    assert trial == dict(policy_kwargs=dict(keys, net_arch=[64]))


def test_policy_kwargs_of_the_yaml_reach_the_trials(tmp_path, monkeypatch):
    """What a trial builds has the entry's `ortho_init` and the sampled networks."""
    seen = []
    look_instead_of_learning(monkeypatch, lambda model: seen.append(model.policy_kwargs))
    arguments = dict(folder=tmp_path, config=str(ZOO_FILE))
    experiment = manager(**arguments, optimize_hyperparameters=True, n_timesteps=100, n_trials=1)
    assert experiment.setup_experiment() is None
    study = optuna.create_study(direction="maximize")
    study.optimize(experiment.objective, n_trials=2)
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.PRUNED] * 2
    for policy_kwargs in seen:
        assert policy_kwargs["ortho_init"] is False
        assert policy_kwargs.keys() >= {"net_arch", "activation_fn"}


def test_nan_prunes_the_trial_and_not_the_study(tmp_path, monkeypatch):
    """An environment that returns NaN ends a trial, and the next one runs."""
    experiment = manager(folder=tmp_path, optimize_hyperparameters=True, n_timesteps=100, eval_freq=-1)
    experiment.setup_experiment()
    create_envs, made = experiment.create_envs, []

    def sick_at_first(n_envs, eval_env=False, no_log=False):
        env = create_envs(n_envs, eval_env, no_log)
        made.append(env)
        if len(made) == 1:
            step = env.step
            env.step = lambda actions: (step(actions)[0] * np.nan, *step(actions)[1:])
        return env

    monkeypatch.setattr(experiment, "create_envs", sick_at_first)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=15))
    study.optimize(experiment.objective, n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"]


def test_schedules_of_the_zoo_can_be_saved():
    """The Zoo's own schedule classes are taken as they are."""
    model = PPOExt(
        "MlpPolicy", "CartPole-v1", learning_rate=SimpleLinearSchedule("1e-3"), clip_range=SimpleLinearSchedule(0.2)
    )
    assert model.lr_schedule(0.5) == 5e-4


@pytest.mark.xdist_group("trained")
def test_enjoy_loads_with_custom_objects(trained):
    """The custom objects of the Zoo's `enjoy` are taken."""
    custom_objects = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0}
    model = PPOExt.load(saved(trained, "CartPole-v1"), custom_objects=custom_objects, seed=0)
    assert model.lr_schedule(1.0) == model.clip_range(1.0) == 0.0
    assert all(th.isfinite(parameter).all() for parameter in model.policy.parameters())


def test_statistics_are_saved(tmp_path, train_here):
    """The statistics lie in the zip, and count the observations of the training."""
    train_here("--env", "MountainCarContinuous-v0", "-n", "100")
    assert PPOExt.load(saved(tmp_path, "MountainCarContinuous-v0")).normalizer.obs_rms.count > 100

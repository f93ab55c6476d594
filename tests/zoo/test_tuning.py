"""What is sampled, and that studies survive: several workers, and one that is killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import optuna
import pytest
import yaml
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
from sqlalchemy.exc import OperationalError
from support.zoo import QUICK, RL_ZOO3, look_instead_of_learning, manager, run

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.zoo import study_storage as storage
from sb3_ppo_ext.zoo import tuning
from sb3_ppo_ext.zoo.experiment import hyperparameters_optimization
from sb3_ppo_ext.zoo.yaml_entries import HYPERPARAMS

pytestmark = pytest.mark.integration

POSTGRES = Path(__file__).parents[2] / "scripts" / "postgres.sh"
SERVERS = Path("/usr/lib/postgresql")


def sample(seed, n_actions=1, n_envs=4, **attributes):
    trial = optuna.create_study(sampler=RandomSampler(seed)).ask()
    for name, value in attributes.items():
        trial.set_user_attr(name, value)
    return trial, HYPERPARAMS_SAMPLER["ppo_ext"](trial, n_actions, n_envs, {})


@pytest.mark.parametrize("n_envs", [1, 6, 16, 4096])
@pytest.mark.parametrize(
    ("env_id", "policy"),
    [
        ("CartPole-v1", "MlpPolicy"),
        ("Pendulum-v1", "MlpPolicy"),
        ("Pendulum-v1", "MlpTransformerPolicy"),
        ("Pendulum-v1", "MlpLstmPolicy"),
    ],
)
def test_samples_are_legal(env_id, policy, n_envs):
    """Samples are legal for any number of environments, and `--trial-id` finds the same again."""
    n_actions = sum(gym.make(env_id).action_space.shape)
    for seed in range(20):
        trial, sampled = sample(seed, n_actions, n_envs, policy=policy, n_timesteps=100_000)
        assert HYPERPARAMS_CONVERTER["ppo_ext"](trial.params) == sampled
        size = sampled["n_steps"] * n_envs
        assert sampled["batch_size"] <= size
        assert size % sampled["batch_size"] == 0
        assert sampled["batch_size"] >= min(tuning.SMALLEST_MINIBATCH, size)
        assert size <= max(10_000, 8 * n_envs)
        PPOExt(policy, None, _init_setup_model=False, **sampled)
    PPOExt(policy, env_id, device="cpu", **{**sampled, "n_steps": 8, "batch_size": 8})


def test_space_is_sampled():
    """Each value of each choice occurs, and what needs another choice occurs with it alone."""
    sampled = [sample(seed)[1] for seed in range(100)]
    values = {name: {str(each.get(name)) for each in sampled} for name in sampled[0] if name != "policy_kwargs"}
    assert values["action_dist"] == {"gaussian", "squashed_gaussian", "beta"}
    assert values["advantage_norm"] == {"minibatch", "rollout", "ema"}
    assert values["lr_decay"] == {"constant", "linear"}
    assert values["use_sde"] == {"True", "False"}
    assert values["bounds_coef"] == {str(coef) for coef in tuning.BOUNDS_COEFS}
    assert values["noise_color"] == {"0.0", "0.5", "1.0"}
    assert values["kl_coef"] == {"0.0", "1.0"}
    assert values["normalize_value"] == {"True", "False"}
    networks = {(kwargs["net_type"], *kwargs["net_arch"]["vf"]) for kwargs in (each["policy_kwargs"] for each in sampled)}
    assert networks == {(kind, *layers) for kind, sizes in tuning.NETWORKS.items() for layers in sizes.values()}
    for each in sampled:
        assert (each["kl_target"] is not None) == (each["kl_coef"] > 0)
        assert each["critic_learning_rate"] in (None, 3 * each["learning_rate"])
        assert each["adaptive_lr_kl"] is None or (each["kl_coef"] == 0 and each["lr_decay"] == "constant")
        assert each["action_dist"] == "gaussian" or each["bounds_coef"] == 0
        assert each["action_dist"] != "beta" or each["policy_kwargs"]["log_std_init"] == 0
        assert each["noise_color"] == 0 or (each["action_dist"] != "beta" and not each["use_sde"])
        assert each["adaptive_lr_kl"] is not None or each["adaptive_lr_rule"] == "threshold"
    assert any(each["adaptive_lr_kl"] for each in sampled)
    assert values["adaptive_lr_rule"] == {"threshold", "proportional"}
    assert any(each["critic_learning_rate"] for each in sampled)


def test_what_has_no_effect_is_not_sampled():
    """
    One step per update begins where the policy has not moved: neither a clip range nor a control of the KL divergence would
    act on it. In a single minibatch, statistics per minibatch are those of the rollout.
    """
    seen = {"one step": 0, "one minibatch": 0, "several": 0}
    for seed in range(300):
        trial, sampled = sample(seed)
        one_minibatch = sampled["batch_size"] == 4 * sampled["n_steps"]
        one_step = one_minibatch and sampled["n_epochs"] == 1
        seen["one step" if one_step else "one minibatch" if one_minibatch else "several"] += 1
        assert one_step == ("kl_control" not in trial.params) == ("clip_range" not in sampled)
        assert not one_step or (sampled["adaptive_lr_kl"], sampled["kl_coef"], sampled["kl_target"]) == (None, 0.0, None)
        assert one_minibatch == ("advantage_norm_of_rollout" in trial.params) == ("advantage_norm" not in trial.params)
        assert sampled["advantage_norm"] in (["rollout", "ema"] if one_minibatch else ["minibatch", "rollout", "ema"])
    assert min(seen.values()) > 0


def test_trials_of_earlier_studies():
    """Trials that sampled what has no effect can still be trained with."""
    trial, sampled = sample(0)
    earlier = {**trial.params, "kl_control": "adaptive_lr", "kl": 0.01, "advantage_norm": "minibatch"}
    converted = HYPERPARAMS_CONVERTER["ppo_ext"](earlier)
    assert (converted["adaptive_lr_kl"], converted["advantage_norm"]) == (0.01, "minibatch")
    assert converted.keys() == sampled.keys()
    old = {name: value for name, value in trial.params.items() if name not in ("net_type", "normalize_value")} | {
        "net_arch": "medium"
    }
    converted = HYPERPARAMS_CONVERTER["ppo_ext"](old)
    assert "normalize_value" not in converted
    assert "net_type" not in converted["policy_kwargs"]
    assert converted["policy_kwargs"]["net_arch"] == {"pi": [256, 256], "vf": [256, 256]}


def test_discrete_actions_have_no_choice_of_distribution():
    """Options of continuous actions are not sampled for discrete ones."""
    for seed in range(20):
        _, sampled = sample(seed, n_actions=0)
        assert not {"action_dist", "use_sde", "bounds_coef"} & sampled.keys()
        assert "log_std_init" not in sampled["policy_kwargs"]


def test_a_critic_of_its_own_is_needed_for_its_learning_rate():
    """No learning rate of the critic is sampled where actor and critic share layers."""
    assert not any(sample(seed, policy="CnnPolicy")[1]["critic_learning_rate"] for seed in range(20))


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpTransformerPolicy"])
def test_size_of_the_transformer_is_sampled(policy):
    """The size of the transformer is sampled for policies that have one."""
    _, sampled = sample(0, policy=policy)
    of_transformer = {"context_length", "d_model", "n_heads", "n_layers", "gate", "n_stacked", "share_features_extractor"}
    assert of_transformer & sampled["policy_kwargs"].keys() == (of_transformer if policy == "MlpTransformerPolicy" else set())


def test_size_of_the_lstm_is_sampled():
    """The kind and size of the recurrent network is sampled for policies that have one."""
    _, sampled = sample(0, policy="MlpLstmPolicy")
    assert sampled["policy_kwargs"].keys() > {"rnn", "lstm_hidden_size", "enable_critic_lstm"}
    assert "rnn" not in sample(0)[1]["policy_kwargs"]


def entries():
    return yaml.safe_load(HYPERPARAMS.read_text())


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "MountainCarContinuous-v0", "CartPoleNoVel-v1"])
def test_samples_go_with_the_entries(env_id, tmp_path, monkeypatch):
    """What an entry has on and a trial has off is off: gSDE, action distributions, decays."""
    made = []
    look_instead_of_learning(monkeypatch, made.append)
    experiment = manager(env_id=env_id, folder=tmp_path, optimize_hyperparameters=True, n_timesteps=2000, n_trials=1)
    experiment.setup_experiment()
    study = optuna.create_study(direction="maximize", sampler=RandomSampler(0))
    study.optimize(experiment.objective, n_trials=10)
    assert len(made) == 10
    for model, trial in zip(made, study.trials, strict=True):
        assert trial.user_attrs["policy"] == entries()[env_id]["policy"]
        assert model.n_steps * model.n_envs <= max(200, 8 * model.n_envs, tuning.ROLLOUTS[0])
        assert model.use_sde == (trial.params.get("action_dist") == "gsde")


def test_a_clash_with_the_entry_prunes_the_trial(tmp_path, capsys):
    """Options of the user's YAML that exclude what is sampled cost a trial, not the study."""
    experiment = manager(folder=tmp_path, optimize_hyperparameters=True, n_timesteps=100, eval_freq=-1)
    experiment.setup_experiment()
    experiment._hyperparams["policy_kwargs"] = dict(mean_tanh=True)
    study = optuna.create_study(direction="maximize", sampler=RandomSampler(0))
    study.enqueue_trial({"action_dist": "beta"})
    study.enqueue_trial({"action_dist": "gaussian", "bounds_coef": 0.0, "n_steps_pow": 7, "n_epochs": 1})
    study.optimize(experiment.objective, n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"]
    assert "Trial 0 is pruned" in capsys.readouterr().out


def test_normalization_has_the_sampled_discount(tmp_path, monkeypatch):
    """VecNormalize has the sampled discount in the trial, as in the training with its id."""
    seen = []
    look_instead_of_learning(monkeypatch, lambda model: seen.append((model.gamma, model.get_vec_normalize_env().gamma)))
    arguments = dict(folder=tmp_path, optimize_hyperparameters=True, n_timesteps=2000)
    # With a setting that the model does not have, there is a `VecNormalize`.
    experiment = manager(**arguments, hyperparams=dict(normalize=dict(epsilon=1e-8)))
    experiment.setup_experiment()
    optuna.create_study(sampler=RandomSampler(0)).optimize(experiment.objective, n_trials=4, n_jobs=2)
    assert len({gamma for gamma, _ in seen}) == 4
    for gamma, of_normalization in seen:
        assert gamma == of_normalization


def test_a_sampler_of_the_users_own(tmp_path, monkeypatch):
    """With a sampler of the user that samples no discount, that of the entry stays."""
    monkeypatch.setitem(HYPERPARAMS_SAMPLER, "ppo_ext", lambda *_: {"n_steps": 128, "batch_size": 64})
    experiment = manager(folder=tmp_path, optimize_hyperparameters=True, n_timesteps=512, eval_freq=256)
    experiment.setup_experiment()
    study = optuna.create_study()
    study.optimize(experiment.objective, n_trials=1)
    assert study.best_trial.params == {}


def test_a_study_goes_on_with_other_environments():
    """A study goes on with another number of environments, which the size of the rollout follows."""
    study = optuna.create_study(sampler=RandomSampler(0))
    for n_envs in (4, 8):
        trial = study.ask()
        sampled = HYPERPARAMS_SAMPLER["ppo_ext"](trial, 1, n_envs, {})
        study.tell(trial, 0.0)
        assert sampled["batch_size"] * 2 ** trial.params["n_minibatches_pow"] >= sampled["n_steps"] * n_envs


def test_trial_that_sampled_nothing(tmp_path):
    """A trial that sampled nothing, such as one whose worker was killed at once, is refused."""
    url = f"sqlite:///{tmp_path}/study.db"
    optuna.create_study(storage=url, study_name="study").ask()
    with pytest.raises(ValueError, match="`--trial-id 0`: it did not sample"):
        manager(storage=url, study_name="study", trial_id=0).read_hyperparameters()


WORKER = """
import sys
from sb3_ppo_ext.zoo import study_storage as storage
storage.HEARTBEAT_INTERVAL, storage.GRACE_PERIOD = 1, 2
from rl_zoo3.train import train
sys.argv = ["train", *sys.argv[1:]]
train()
"""
# Trials of some seconds
TRIALS = ["--algo", "ppo_ext", "--env", "Pendulum-v1", "-n", "3000", "-optimize", "--no-optim-plots", "--sampler", "random"]


def start_worker(url, n_trials, folder):
    study = ["--storage", url, "--study-name", "study", "--max-total-trials", str(n_trials)]
    command = [sys.executable, "-c", WORKER, *TRIALS, *study, *QUICK]
    output = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return subprocess.Popen(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, **output)


def assert_complete(*workers):
    for worker in workers:
        _, errors = worker.communicate(timeout=300)
        assert worker.returncode == 0, errors.decode()


def trials(url):
    opened = JournalStorage(JournalFileBackend(url)) if url.endswith(".log") else url
    try:
        return optuna.load_study(study_name="study", storage=opened).trials
    except KeyError:  # not yet
        return []


def killed_during_a_trial(url, n_trials, folder):
    """Start a worker, kill it during a trial, and return the trial."""
    victim = start_worker(url, n_trials, folder)
    while not any(trial.state is TrialState.RUNNING and trial.params for trial in trials(url)):
        assert victim.poll() is None, victim.stderr.read()
        time.sleep(0.05)
    lost = trials(url)[-1]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    return lost


def assert_survives_a_kill(url, folder, n_trials=6):
    """Of two workers one is killed during a trial; the other one completes the study, and tries that trial again."""
    lost = killed_during_a_trial(url, n_trials, folder)
    time.sleep(3)  # until it counts as dead
    assert_complete(*(start_worker(url, n_trials, folder) for _ in range(2)))
    after = trials(url)
    assert after[lost.number].state is TrialState.FAIL
    again = [trial for trial in after if trial.system_attrs.get("failed_trial") == lost.number]
    assert [trial.state for trial in again] == [TrialState.COMPLETE]
    assert lost.params.items() <= again[0].params.items()
    finished = [trial for trial in after if trial.state is TrialState.COMPLETE]
    assert n_trials <= len(finished) <= n_trials + 1  # two workers may end at once
    assert len(after) == len(finished) + 1


def assert_starts_at_once(url, folder):
    """Workers that find an empty database together: each comes to its end, and the study has what was asked for."""
    assert_complete(*(start_worker(url, 3, folder) for _ in range(3)))
    assert 3 <= len(trials(url)) <= 5


@pytest.mark.slow
def test_sqlite_survives_a_kill(tmp_path):
    """A study in an SQLite database is completed although a worker was killed during a trial."""
    assert_starts_at_once(f"sqlite:///{tmp_path}/first.db", tmp_path)
    assert_survives_a_kill(f"sqlite:///{tmp_path}/study.db", tmp_path)


@pytest.mark.slow
def test_journal_survives_a_kill(tmp_path):
    """Another worker brings the study to its end, where the lost trial counts as one."""
    path = str(tmp_path / "study.log")
    lost = killed_during_a_trial(path, 3, tmp_path)
    assert_complete(start_worker(path, 3, tmp_path))
    after = trials(path)
    assert [trial.number for trial in after if trial.state is TrialState.RUNNING] == [lost.number]
    assert len(after) == 3


@pytest.mark.slow
@pytest.mark.skipif(not SERVERS.exists() or not shutil.which("runuser"), reason="needs PostgreSQL's server")
def test_postgres_survives_a_kill(tmp_path_factory):
    """The script starts a server whose studies survive a kill, and are there when it is started again."""
    folder = Path("/tmp" if os.getuid() == 0 else tmp_path_factory.getbasetemp()) / f"postgres-{os.getpid()}"
    environment = {**os.environ, "POSTGRES_PORT": "5439", "HOST": "nowhere"}

    def server(command):
        completed = subprocess.run([POSTGRES, command, folder], capture_output=True, text=True, env=environment, check=True)
        return completed.stdout.strip()

    work = tmp_path_factory.mktemp("work")
    try:
        url = server("start")
        assert url == server("url") == server("start")
        assert_starts_at_once(url, work)
        optuna.delete_study(study_name="study", storage=url)
        assert_survives_a_kill(url, work)
        n_trials = len(trials(url))
        server("stop")
        environment["POSTGRES_HOST"] = "127.0.0.1"  # others may come
        assert server("start") == url.replace("localhost", "127.0.0.1") == server("url")
        assert len(trials(url)) == n_trials
        output = run(*RL_ZOO3, "train", *TRIALS, "--storage", url, "--study-name", "study", "--n-trials", 1, *QUICK, cwd=work)
        assert f"Number of finished trials:  {n_trials + 1}" in output
    finally:
        server("stop")
        shutil.rmtree(folder)


@pytest.mark.skipif(not SERVERS.exists() or os.getuid() != 0, reason="needs PostgreSQL's server, and to be root")
def test_a_folder_that_the_server_may_not_enter(tmp_path):
    """The script refuses it, says so, and leaves nothing behind."""
    (tmp_path / "closed").mkdir(mode=0o700)
    folder = tmp_path / "closed" / "postgres"
    completed = subprocess.run([POSTGRES, "start", folder], capture_output=True, text=True)
    assert completed.returncode == 1
    assert completed.stderr == f"postgres may not enter {folder}: name a folder elsewhere\n"
    assert not folder.exists()


def test_without_a_server(tmp_path):
    """The script says what to install."""
    script = tmp_path / "postgres.sh"
    script.write_text(POSTGRES.read_text().replace("/usr/lib/postgresql", str(tmp_path / "nowhere")))
    completed = subprocess.run(["/bin/bash", script, "start"], capture_output=True, text=True, env={"PATH": "/bin"})
    assert completed.returncode == 1
    assert completed.stderr == "There is no PostgreSQL server: apt install postgresql\n"


@pytest.mark.parametrize("others", ["table studies already exists", "UNIQUE constraint failed: alembic_version.version_num"])
def test_an_empty_database_is_tried_again(others, tmp_path, monkeypatch):
    """The storage is tried again while another worker makes its tables, and at no other trouble."""
    real, tried = storage.HeartbeatStorage, []

    def busy(message):
        def make(url):
            tried.append(message)
            if len(tried) < 3:
                raise OperationalError("CREATE TABLE studies", {}, Exception(message))
            return real(url)

        return make

    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(storage, "HeartbeatStorage", busy(others))
    assert isinstance(storage.open_storage(f"sqlite:///{tmp_path}/study.db"), real)
    assert len(tried) == 3
    tried.clear()
    monkeypatch.setattr(storage, "HeartbeatStorage", busy("wrong password"))
    with pytest.raises(OperationalError, match="wrong password"):
        storage.open_storage(f"sqlite:///{tmp_path}/study.db")
    assert len(tried) == 1


def test_storage_of_a_study_is_the_users_again(tmp_path, monkeypatch):
    """While a study runs, its database has a heartbeat; afterwards it is the user's again, and a journal stays what it is."""
    url, seen = f"sqlite:///{tmp_path}/study.db", []
    monkeypatch.setattr("sb3_ppo_ext.zoo.experiment.write_best_trial", lambda experiment: None)
    experiment = manager(folder=tmp_path, storage=url, study_name="study", optimize_hyperparameters=True)
    hyperparameters_optimization(lambda: seen.append(experiment.storage), experiment)
    assert isinstance(seen[0], storage.HeartbeatStorage)
    assert seen[0].get_heartbeat_interval() == 60
    assert not seen[0].endswith(".log")
    assert experiment.storage == url
    for journal in (None, "study.log", "sqlite:///study.log"):
        experiment.storage = journal
        hyperparameters_optimization(lambda: seen.append(experiment.storage), experiment)
        assert seen[-1] is journal

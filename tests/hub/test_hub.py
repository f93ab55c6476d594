"""Models on the Hub, without a network: the folder that is uploaded, its card, and loading it without trusting it."""

import json
import pickle
import re
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import huggingface_hub
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from huggingface_hub import ModelCard
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import SimpleMultiObsEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecMonitor, VecNormalize
from support.masks import make_masked
from support.torch_envs import TorchPendulum
from support.toys import make_toys

from sb3_ppo_ext import PPOExt, TensorVecNormalize, TorchVecEnv
from sb3_ppo_ext.hub import load_folder, load_from_hub, push_to_hub, save_folder
from sb3_ppo_ext.hub.card import command_of
from sb3_ppo_ext.hub.normalization import normalized, statistics_of
from sb3_ppo_ext.hub.settings import options_of, policy_name

ENV_ID = "Pendulum-v1"
BOUNDS = dict(min_action=-1.0, max_action=1.0)
ZIP = f"ppo_ext-{ENV_ID}.zip"
OPTIONS = dict(n_steps=64, n_epochs=2, learning_rate="lin_0.002", action_dist="beta", policy_kwargs={"net_arch": [8]})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model, trained with normalisation and logs."""
    env = VecNormalize(make_vec_env(ENV_ID, n_envs=4, seed=0), gamma=0.9, clip_obs=5.0)
    log = str(tmp_path_factory.mktemp("logs"))
    return PPOExt("MlpPolicy", env, seed=0, gamma=0.9, tensorboard_log=log, device="cpu", **OPTIONS).learn(1000)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Its folder."""
    return save_folder(model, tmp_path_factory.mktemp("hub"), runs=model.tensorboard_log, n_eval_episodes=3, seed=7)


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of the folder without the bulky files, to be damaged."""
    copied = tmp_path / "copy"
    copied.mkdir()
    for name in (ZIP, "config.json", "vec_normalize.json", "vec_normalize.pkl"):
        (copied / name).write_bytes((folder / name).read_bytes())
    return copied


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.integration
def test_files(folder):
    """The files are those of RL Zoo and huggingface_sb3, and the plain form of the statistics."""
    zoo = {"args.yml", "config.yml", "env_kwargs.yml", "train_eval_metrics.zip", "vec_normalize.pkl", "results.json"}
    ours = {"README.md", "config.json", "learning_curve.png", "vec_normalize.json"}
    assert {path.name for path in folder.iterdir()} == {ZIP} | zoo | ours
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((folder / "results.json").read_text())
    assert (results["n_eval_episodes"], results["seed"], results["is_deterministic"]) == (3, 7, True)


def test_metadata(folder):
    """The Hub's reader finds library, tags and result in the card."""
    data = ModelCard.load(folder / "README.md").data
    assert data.library_name == "stable-baselines3"
    assert {ENV_ID, "reinforcement-learning", "deep-reinforcement-learning", "stable-baselines3"} <= set(data.tags)
    [result] = data.eval_results
    measured = json.loads((folder / "results.json").read_text())
    assert (result.task_type, result.dataset_name, result.metric_type) == ("reinforcement-learning", ENV_ID, "mean_reward")
    assert result.metric_value == f"{measured['mean_reward']:.2f} +/- {measured['std_reward']:.2f}"


def test_results_are_those_of_the_policy(model, folder):
    """The returns are those of an evaluation with fixed statistics and rewards as they are."""
    env = normalized(make_vec_env(ENV_ID), statistics_of(model.get_vec_normalize_env()))
    env.seed(7)
    mean, std = evaluate_policy(model, env, 3)
    measured = json.loads((folder / "results.json").read_text())
    assert (measured["mean_reward"], measured["std_reward"]) == (mean, std)
    assert -2000 < mean < -100


def test_card(model, folder):
    """The card names the returns, how they were measured, options, seed, the plot and the versions."""
    text = (folder / "README.md").read_text()
    assert "over 3 episodes with deterministic actions, with seed 7 of the environment" in text
    assert "![Returns and statistics of the training](learning_curve.png)" in text
    assert re.search(r"\| 0 \| -\d+\.\d\d \|", text)  # the seed of the training, and its last return
    assert 'load_from_hub("USER/NAME")' in text
    assert f"| torch | {version('torch')} |" in text
    assert 'policy_kwargs={"net_arch": [8]}' in text


def test_code_of_the_card_repeats_the_training(model, folder):
    """The Python code under "Training" makes a model with the same parameters and statistics."""
    text = (folder / "README.md").read_text().split("## Training")[1]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    namespace = {}
    exec(code, namespace)
    again = namespace["model"]
    assert options_of(again) == options_of(model)
    for ours, theirs in zip(model.policy.parameters(), again.policy.parameters(), strict=True):
        assert th.equal(ours, theirs)
    assert statistics_of(again.get_vec_normalize_env()) == statistics_of(model.get_vec_normalize_env())


def test_keyword_arguments_of_the_training(tmp_path):
    """The policy is evaluated in the environment that it was trained in, which the card and the configuration describe."""
    make = partial(make_vec_env, ENV_ID, seed=0, env_kwargs=dict(g=1.0, render_mode="rgb_array"))
    model = PPOExt("MlpPolicy", make(n_envs=2), seed=0, n_steps=32, batch_size=32, device="cpu").learn(64)
    folder = save_folder(model, tmp_path / "folder", n_eval_episodes=2, seed=np.int64(3))
    config, results = (json.loads((folder / name).read_text()) for name in ("config.json", "results.json"))
    env = make()
    env.seed(3)
    assert config["env_kwargs"] == {"g": 1.0}
    assert results["mean_reward"] == pytest.approx(evaluate_policy(model, env, 2, warn=False)[0])
    assert "make_vec_env('Pendulum-v1', n_envs=2, seed=0, env_kwargs={'g': 1.0})".replace("'", '"') in (
        (folder / "README.md").read_text()
    )
    folder = save_folder(model, tmp_path / "other", env_id=ENV_ID, n_eval_episodes=1)
    assert json.loads((folder / "config.json").read_text())["env_kwargs"] == {}


class OwnPolicy(ActorCriticPolicy):
    """A policy of a script."""


def test_what_the_code_leaves_out(tmp_path):
    """The card names wrappers, and the policy of a script, which its code cannot make."""

    def make(n_envs=1):
        wrapped = make_vec_env(ENV_ID, n_envs, wrapper_class=gym.wrappers.RescaleAction, wrapper_kwargs=BOUNDS)
        return VecFrameStack(VecMonitor(wrapped), 2)

    model = PPOExt(OwnPolicy, make(2), n_steps=32, batch_size=32, device="cpu").learn(64)
    text = (save_folder(model, tmp_path / "folder", env=make(), n_eval_episodes=1) / "README.md").read_text()
    comments = re.findall(r"# (.*), which is not in this file", text)
    assert comments == ["policy: OwnPolicy", "wrapper: RescaleAction", "wrapper: VecFrameStack"]
    with pytest.raises(ValueError, match=r"Box\(-2.0, 2.0, \(1,\), float32\), not Box\(-1.0, 1.0"):
        save_folder(model, tmp_path / "other", env=VecFrameStack(make_vec_env(ENV_ID), 2))


def test_loading(model, folder):
    """The model that is loaded acts as the original on the same observations, and its statistics stay fixed."""
    loaded, env = load_folder(folder, device="cpu")
    assert options_of(loaded) == options_of(model)
    assert (env.training, env.norm_reward) == (False, False)
    assert statistics_of(env) == statistics_of(model.get_vec_normalize_env())
    observations = env.reset()
    for _ in range(3):
        actions, _ = loaded.predict(observations, deterministic=True)
        np.testing.assert_array_equal(actions, model.predict(observations, deterministic=True)[0])
        observations, _, _, _ = env.step(actions)
    assert loaded.get_env() is env
    assert loaded.learn(64).num_timesteps > 0


class Attack:
    """Its pickle makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_executed(copy, tmp_path):
    """A pickle in the folder is read with `trusted=True` alone, also where there is no plain form."""
    made = tmp_path / "made"
    (copy / "vec_normalize.pkl").write_bytes(pickle.dumps(Attack(made)))
    load_folder(copy)
    assert not made.exists()
    (copy / "vec_normalize.json").unlink()
    with pytest.raises(ValueError, match=r"has no plain form.*trusted=True"):
        load_folder(copy)
    assert not made.exists()
    with pytest.raises(AttributeError):
        load_folder(copy, trusted=True)
    assert made.exists()


def test_pickled_statistics_are_read_with_trust(model, copy):
    """Without the plain form, as in the Zoo's uploads, the same statistics come from the pickle."""
    (copy / "vec_normalize.json").unlink()
    _, env = load_folder(copy, trusted=True)
    assert statistics_of(env) == statistics_of(model.get_vec_normalize_env())
    assert (env.training, env.norm_reward) == (False, False)


def test_models_of_sb3_need_trust(tmp_path):
    """A zip without the plain form of its attributes is refused with the remedy, and loaded with trust."""
    PPO("MlpPolicy", "CartPole-v1", device="cpu").save(tmp_path / "ppo-CartPole-v1")
    with pytest.raises(ValueError, match=r"trusted=True"):
        load_folder(tmp_path, "CartPole-v1")
    loaded, _ = load_folder(tmp_path, "CartPole-v1", trusted=True)
    assert isinstance(loaded, PPOExt)
    assert load_folder(tmp_path, trusted=True)[1] is None


def test_environment_of_the_folder(copy):
    """An id that imports a module, and keyword arguments, are used with `trusted=True` alone."""
    change_config(copy, env_id="antigravity:Pendulum-v1")
    with pytest.raises(ValueError, match="not made without `trusted=True`"):
        load_folder(copy)
    change_config(copy, env_id=ENV_ID, env_kwargs={"g": 5.0})
    with pytest.raises(ValueError, match="keyword arguments"):
        load_folder(copy)
    _, env = load_folder(copy, trusted=True)
    assert env.get_attr("g") == [5.0]
    _, env = load_folder(copy, ENV_ID)
    assert env.get_attr("g") == [10.0]


@pytest.mark.parametrize(
    ("damage", "arguments", "message"),
    [
        (lambda folder: (folder / ZIP).rename(folder / "one.txt"), {}, "there is no zip"),
        (lambda folder: (folder / "two.zip").touch(), {}, "there are ppo_ext-Pendulum-v1.zip, two.zip"),
        (lambda folder: None, {"filename": "../x.zip"}, "no such file"),
        (lambda folder: (folder / "config.json").write_text("{"), {}, "config.json is damaged"),
        (lambda folder: (folder / "vec_normalize.json").write_text("{}"), {}, "does not fit, or is damaged"),
        (lambda folder: change_config(folder, env_id="NoSuchEnv-v0"), {}, "NoSuchEnv"),
        (lambda folder: change_config(folder, env_id=None), {}, "reads normalised observations"),
        (lambda folder: None, {"env": 3}, "give an environment or its id"),
        (lambda folder: None, {"env": VecNormalize(make_vec_env(ENV_ID))}, "it normalises already"),
    ],
)
def test_folders_that_are_refused(copy, damage, arguments, message):
    """A ValueError says what is wrong with the folder, or with an argument."""
    damage(copy)
    with pytest.raises(ValueError, match=message):
        load_folder(copy, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_eval_episodes": 0}, "n_eval_episodes"),
        ({"env": "CartPole-v1"}, "wrappers of the training"),
        ({"video": "no_such.mp4"}, "there is no such file"),
        ({"runs": "no_such_folder"}, "no `progress.csv`"),
        ({"command": "```"}, "give the text of a shell command"),
        ({"env_kwargs": {"a": object()}}, "can be saved"),
        ({"env_kwargs": 3}, "env_kwargs"),
    ],
)
def test_arguments_that_are_refused(model, tmp_path, arguments, message):
    """Wrong arguments are refused before anything is written."""
    with pytest.raises(ValueError, match=message):
        save_folder(model, tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_full_folders_are_left_alone(model, tmp_path):
    """Files that are there already are not mixed with those of a model."""
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ValueError, match="not an empty folder"):
        save_folder(model, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_evaluation_leaves_the_environment_as_it_was(model, tmp_path):
    """The statistics and settings of a normalisation that is given do not change."""
    env = VecNormalize(make_vec_env(ENV_ID), gamma=0.9)
    before = statistics_of(env)
    save_folder(model, tmp_path / "new", env=env, n_eval_episodes=1)
    assert (env.training, env.norm_reward) == (True, True)
    assert statistics_of(env) == before


def test_other_environments(tmp_path):
    """Environments without an id are named by the user; keyword arguments are saved; without logs there is no plot."""
    env = DummyVecEnv([lambda: SimpleMultiObsEnv(discrete_actions=False)])
    model = PPOExt("MultiInputPolicy", env, n_steps=8, batch_size=8, device="cpu")
    with pytest.raises(ValueError, match="no id of Gymnasium"):
        save_folder(model, tmp_path / "new", n_eval_episodes=1)
    made = save_folder(model, tmp_path / "new", env=env, env_id="mine/Grid-v0", env_kwargs={"a": 1}, n_eval_episodes=1)
    assert (made / "ppo_ext-mine-Grid-v0.zip").is_file()
    assert not (made / "learning_curve.png").exists()
    assert 'env_kwargs={"a": 1}' in (made / "README.md").read_text()
    loaded, loaded_env = load_folder(made, env)
    assert loaded_env.observation_space == loaded.observation_space
    assert policy_name(loaded) == "MultiInputPolicy"


def test_masks_of_a_method(tmp_path):
    """The evaluation, and the code of the card, act with the masks of the environment's method; this one refuses others."""
    options = dict(n_steps=8, batch_size=8, device="cpu")
    model = PPOExt("MlpPolicy", make_masked(), action_masking=True, **options)
    made = save_folder(model, tmp_path / "new", env=make_masked(n_envs=1), env_id="Masked-v0", n_eval_episodes=3)
    assert 'action_masks=env.env_method("action_masks"))' in (made / "README.md").read_text()
    with pytest.raises(ValueError, match="has no method `action_masks`"):
        save_folder(model, tmp_path / "other", env=make_toys(action_space=model.action_space), env_id="Toy-v0")


def test_statistics_of_dictionaries():
    """Each key keeps its statistics, and keys that are not normalised stay so."""
    env = VecNormalize(DummyVecEnv([SimpleMultiObsEnv]), norm_obs_keys=["vec"])
    env.reset()
    env.step([0])
    plain = json.loads(json.dumps(statistics_of(env)))
    again = normalized(DummyVecEnv([SimpleMultiObsEnv]), plain)
    assert statistics_of(again) == plain
    np.testing.assert_array_equal(again.obs_rms["vec"].mean, env.obs_rms["vec"].mean)
    assert again.norm_obs_keys == ["vec"]


def test_statistics_of_tensor_environments():
    """Environments that step in tensors get a normalisation in tensors, with the same statistics."""
    env = TensorVecNormalize(TorchVecEnv(TorchPendulum(2)))
    env.reset()
    env.step(np.zeros((2, 1), np.float32))
    plain = json.loads(json.dumps(statistics_of(env)))
    again = normalized(TorchVecEnv(TorchPendulum(2)), plain)
    assert isinstance(again, TensorVecNormalize)
    assert statistics_of(again) == plain
    assert statistics_of(normalized(make_vec_env(ENV_ID), plain)) == plain


class FakeApi:
    """What the tests need of huggingface_hub's `HfApi`; it remembers what it is asked for."""

    calls: ClassVar[list] = []

    def __init__(self, token=None):
        self.calls.append(("token", token))

    def create_repo(self, repo_id, private, exist_ok):
        self.calls.append(("create", repo_id, private, exist_ok))
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, repo_id, folder_path, commit_message):
        text = (Path(folder_path) / "README.md").read_text()
        self.calls.append(("upload", repo_id, sorted(path.name for path in Path(folder_path).iterdir()), text, commit_message))


@pytest.fixture
def calls(monkeypatch):
    """Calls of the fake Hub."""
    FakeApi.calls.clear()
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    return FakeApi.calls


def test_push(model, folder, calls):
    """A repository is made, and the folder of the model uploaded, whose card names the repository."""
    address = push_to_hub(model, "me/walker", private=True, token="t", n_eval_episodes=1)
    assert address == "https://huggingface.co/me/walker"
    token, create, (upload, repo_id, names, text, _) = calls
    assert (token, create) == (("token", "t"), ("create", "me/walker", True, True))
    assert (upload, repo_id) == ("upload", "me/walker")
    assert {ZIP, "README.md", "vec_normalize.json"} <= set(names)
    assert 'load_from_hub("me/walker")' in text
    calls.clear()
    push_to_hub(folder, "me/walker", commit_message="As it is")
    assert calls[-1][3:] == ((folder / "README.md").read_text(), "As it is")


@pytest.mark.parametrize(
    ("repo_id", "arguments"),
    [("walker", {}), ("a/b/c", {}), ("/b", {}), (None, {}), ("me/walker", {"env": "CartPole-v1"}), ("me/x", {"seed": "a"})],
)
def test_nothing_wrong_is_uploaded(model, calls, repo_id, arguments):
    """Wrong arguments are refused before a repository is made."""
    with pytest.raises((ValueError, TypeError)):
        push_to_hub(model, repo_id, n_eval_episodes=1, **arguments)
    assert not calls


def test_folders_of_something_else_are_not_uploaded(folder, tmp_path, calls):
    """A folder without a card is refused, and so are arguments that come too late."""
    with pytest.raises(ValueError, match="save_folder"):
        push_to_hub(tmp_path, "me/walker")
    with pytest.raises(ValueError, match="n_eval_episodes"):
        push_to_hub(folder, "me/walker", n_eval_episodes=3)
    assert not calls


def test_load_from_hub(folder, monkeypatch):
    """Only the files that are read are downloaded, of the revision that is asked for."""
    asked = []

    def snapshot_download(repo_id, **kwargs):
        asked.append((repo_id, kwargs))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model, env = load_from_hub("me/walker", revision="v1", device="cpu")
    assert isinstance(env, VecNormalize)
    assert isinstance(model.action_space, spaces.Box)
    [(repo_id, kwargs)] = asked
    assert (repo_id, kwargs["revision"], kwargs["token"]) == ("me/walker", "v1", None)
    assert set(kwargs["allow_patterns"]) == {"config.json", "vec_normalize.json", "vec_normalize.pkl", "*.zip"}


@pytest.mark.integration
def test_the_zoo_reads_it(folder, tmp_path, monkeypatch):
    """RL Zoo's `load_from_hub` makes a folder of a run, which acts as on our evaluation."""
    from rl_zoo3 import load_from_hub as zoo
    from rl_zoo3.utils import create_test_env, get_saved_hyperparams

    monkeypatch.setattr(zoo, "load_from_hub", lambda _, filename: str(folder / filename))
    zoo.download_from_hub("ppo_ext", zoo.EnvironmentName(ENV_ID), 0, str(tmp_path), "me")
    run = tmp_path / "ppo_ext" / f"{ENV_ID}_1"
    hyperparams, stats_path = get_saved_hyperparams(str(run / ENV_ID), test_mode=True)
    env = create_test_env(ENV_ID, stats_path=stats_path, hyperparams=hyperparams, seed=7, should_render=False)
    env.seed(7)
    mean, _ = evaluate_policy(PPOExt.load(run / f"{ENV_ID}.zip", device="cpu"), env, 3)
    assert mean == json.loads((folder / "results.json").read_text())["mean_reward"]


def test_files_of_a_run_of_the_zoo(model, tmp_path):
    """Command, seed, hyperparameters and keyword arguments come from the run; the address of a database stays there."""
    run = tmp_path / "run"
    (run / ENV_ID).mkdir(parents=True)
    (run / "progress.csv").write_text("time/total_timesteps,rollout/ep_rew_mean\n64,-900\n128,-800\n")
    secret = "postgresql://me:secret@host/x"
    (run / ENV_ID / "args.yml").write_text(f"seed: 5\nalgo: ppo_ext\nstorage: {secret}\nenv_kwargs:\n  g: 9.0\n")
    (run / ENV_ID / "config.yml").write_text("n_envs: 6\nnormalize: true\n")
    (run / ENV_ID / "command.txt").write_text(f"rl_zoo3 train --algo ppo_ext --storage {secret}")
    made = save_folder(model, tmp_path / "new", runs=[run, run.parent], n_eval_episodes=1)
    text = (made / "README.md").read_text()
    assert "```bash\nrl_zoo3 train --algo ppo_ext --storage postgresql://host/x --seed 5\n```" in text
    assert f"| {model.seed} | -800.00 |" in text
    assert json.loads((made / "args.yml").read_text()) == {"algo": "ppo_ext", "seed": 5, "env_kwargs": {"g": 9.0}}
    assert (made / "config.yml").read_text() == (run / ENV_ID / "config.yml").read_text()
    assert 'env_kwargs={"g": 9.0}' in text
    assert f'make_vec_env("{ENV_ID}", n_envs=6, ' in text  # not that of the loaded model
    assert not [path for path in made.iterdir() if b"secret" in path.read_bytes()]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (
            "/home/me/bin/python /home/me/bin/rl_zoo3 train --algo ppo_ext --env A-v1",
            "rl_zoo3 train --algo ppo_ext --env A-v1",
        ),
        ("python -m rl_zoo3.train -params a:'b'", """rl_zoo3 train -params 'a:'"'"'b'"'"''"""),
        ("C:\\me\\python.exe C:\\me\\rl_zoo3\\train.py --seed 3", "rl_zoo3 train --seed 3"),
        ("rl_zoo3 train --storage postgresql://me:secret@host:5433/x", "rl_zoo3 train --storage postgresql://host:5433/x"),
        (
            "rl_zoo3 train -params policy_kwargs:dict(net_arch=[8, 8], a={'x': -1}) n_steps:8 --seed 3",
            """rl_zoo3 train -params 'policy_kwargs:dict(net_arch=[8, 8], a={'"'"'x'"'"': -1})' n_steps:8 --seed 3""",
        ),
        ("python mine.py", None),
    ],
)
def test_command_of_a_run(tmp_path, text, command):
    """The command of RL Zoo is named without the paths of the machine."""
    (tmp_path / "command.txt").write_text(text)
    assert command_of(tmp_path) == command
    assert command_of(tmp_path / "missing") is None


def test_seed_that_the_zoo_drew(tmp_path):
    """The command names it, unless it was given."""
    (tmp_path / "command.txt").write_text("rl_zoo3 train --algo ppo_ext")
    assert command_of(tmp_path, 5) == "rl_zoo3 train --algo ppo_ext --seed 5"
    (tmp_path / "command.txt").write_text("rl_zoo3 train --seed=4")
    assert command_of(tmp_path, 5) == "rl_zoo3 train --seed=4"


def test_code_with_classes_and_functions(tmp_path):
    """Classes of PyTorch are imported; what has no code is a comment, and the rest can be executed."""
    options = dict(
        policy_kwargs=dict(activation_fn=th.nn.ReLU, optimizer_class=th.optim.AdamW),
        clip_range=lambda left: 0.1,
        max_grad_norm=float("inf"),
    )
    env = VecNormalize(make_vec_env(ENV_ID), clip_reward=np.inf)
    model = PPOExt("MlpPolicy", env, n_steps=64, seed=0, device="cpu", **options)
    text = (save_folder(model, tmp_path / "new", n_eval_episodes=1) / "README.md").read_text()
    assert "# clip_range: " in text
    code = re.search(r"```python\n(.*?)model.learn", text.split("## Training")[1], re.DOTALL)[1]
    namespace = {}
    exec(code, namespace)
    assert options_of(namespace["model"]) == {name: value for name, value in options_of(model).items() if name != "clip_range"}
    assert namespace["model"].max_grad_norm == namespace["model"].get_vec_normalize_env().clip_reward == float("inf")

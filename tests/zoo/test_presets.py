"""Tests of `make` and `presets`: tuned hyperparameters from Python."""

import importlib.util

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize, unwrap_vec_normalize
from support.parity import assert_equal
from support.snippets import ROOT, blocks
from support.torch_envs import TorchPendulum
from support.toys import VECTOR, Samples
from support.zoo import manager, saved
from torch import nn

from sb3_ppo_ext import (
    FastDummyVecEnv,
    MlpTransformerPolicy,
    ParallelVecEnv,
    PPOExt,
    TorchVecEnv,
    hyperparameters,
    make,
    presets,
)
from sb3_ppo_ext.envs import choice_of_vec_env
from sb3_ppo_ext.zoo import environment_counts
from sb3_ppo_ext.zoo import presets as zoo_presets

DICT = spaces.Dict(image=spaces.Box(0, 255, (40, 40, 1), np.uint8), speed=VECTOR)
for name, space in {"vector": VECTOR, "dict": DICT, "text": spaces.Text(5)}.items():
    gym.register(f"Observing-{name}-v0", Samples, max_episode_steps=20, kwargs=dict(observation_space=space))


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(
    ("env_id", "hyperparams"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"n_steps": 64, "n_envs": 3}),
        ("MountainCarContinuousNoVel-v0", {"n_steps": 32, "frame_stack": 2, "normalize": False}),
        pytest.param("HalfCheetah-v5", {"n_steps": 32}, marks=pytest.mark.integration),
    ],
)
def test_equal_to_the_zoo(env_id, hyperparams, tmp_path):
    """Two iterations of the training are those of the Zoo, to the bit, whoever normalises."""
    experiment = manager(env_id=env_id, folder=tmp_path, seed=3, eval_freq=-1, verbose=0, hyperparams=dict(hyperparams))
    expected, _ = experiment.setup_experiment()
    timesteps = 2 * expected.n_steps * expected.n_envs
    expected.learn(timesteps)
    model, env = make(env_id, seed=3, device="cpu", **hyperparams)
    assert env.num_envs == expected.n_envs
    assert unwrap_vec_normalize(env) is None
    model.learn(timesteps)
    assert_equal(expected.policy.state_dict(), model.policy.state_dict(), "policy")
    assert_equal(expected.policy.optimizer.state_dict(), model.policy.optimizer.state_dict(), "optimizer")


def test_order_of_wrappers():
    """As in RL Zoo, `vec_env_wrapper` gets observations that are not stacked yet."""
    _, env = make("CartPole-v1", frame_stack=2, vec_env_wrapper="stable_baselines3.common.vec_env.VecCheckNan")
    env.close()
    assert [type(each).__name__ for each in (env, env.venv)] == ["VecFrameStack", "VecCheckNan"]


@pytest.mark.integration
def test_arguments_replace_the_entry():
    """Number and class of the environments, and hyperparameters of PPOExt and of the Zoo, can be given."""
    model, env = make("CartPole-v1", n_envs=3, seed=0, vec_env_cls=ParallelVecEnv, learning_rate=1e-3, action_dist="gaussian")
    env.close()
    assert isinstance(env, ParallelVecEnv)
    assert env.num_envs == 3
    assert model.lr_schedule(1.0) == model.lr_schedule(0.5) == 1e-3
    _, env = make("CartPole-v1", n_envs=2, device="cpu", vec_env_cls=DummyVecEnv)
    assert type(env) is DummyVecEnv
    model, env = make("CartPole-v1", device="cpu", normalize=True, frame_stack=2)
    assert model.normalize_obs
    assert isinstance(env, VecFrameStack)
    assert env.observation_space.shape == (8,)
    assert isinstance(env.unwrapped, FastDummyVecEnv)
    assert env.num_envs == presets()["CartPole-v1"]["n_envs"]


def test_arguments_of_the_environment():
    """Keyword arguments reach the environment."""
    _, env = make("Pendulum-v1", n_envs=1, env_kwargs={"g": 3.0})
    assert env.get_attr("g") == [3.0]


def test_seed_of_numpy():
    """Seeds may be numbers of NumPy, as from ``np.arange``."""
    model, _ = make("CartPole-v1", seed=np.int64(3), device="cpu")
    assert model.seed == 3


def test_nothing_is_printed_or_written(tmp_path, monkeypatch, capsys):
    """Without `verbose`, nothing is printed, and no folder of a run is created."""
    monkeypatch.chdir(tmp_path)
    model, _ = make("CartPole-v1")
    model.learn(256)
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())
    make("CartPole-v1", verbose=1)
    assert "gae_lambda" in capsys.readouterr().out


def test_the_zoo_chooses_the_policy(tmp_path):
    """The Zoo chooses a policy that reads the observations, and saves its name, unless the user names one."""
    arguments = dict(env_id="Observing-dict-v0", folder=tmp_path, eval_freq=-1)
    model, hyperparams = manager(**arguments, hyperparams=dict(n_steps=8)).setup_experiment()
    assert hyperparams["policy"] == "MultiInputPolicy"
    assert isinstance(model.policy, model.policy_aliases["MultiInputPolicy"])
    given = dict(n_steps=8, policy="MultiInputTransformerPolicy")
    _, hyperparams = manager(**arguments, hyperparams=given).setup_experiment()
    assert hyperparams["policy"] == "MultiInputTransformerPolicy"


@pytest.mark.integration
def test_minigrid(tmp_path, train_here):
    """MiniGrid's tasks without an entry are trained with its wrapper for flat observations."""
    train_here("--env", "MiniGrid-Empty-8x8-v0", "-n", "256", "-params", "n_envs:2", "--gym-packages", "minigrid")
    assert saved(tmp_path, "MiniGrid-Empty-8x8-v0").exists()


def test_minatar(monkeypatch):
    """MinAtar's games are trained with the entry of all of them."""
    monkeypatch.setattr(zoo_presets, "_entry_point", lambda env_id: "minatar.gym:BaseEnv")
    model, env = make("Observing-vector-v0", n_envs=2, n_steps=512)
    assert (env.num_envs, model.batch_size, model.vf_clip_mode) == (2, 1024, "max")
    assert any(isinstance(module, nn.ReLU) for module in model.policy.modules())
    model.learn(1024)


def test_presets():
    """All entries are listed, those of the Zoo as well, and what is changed in them has no effect on the next call."""
    found = presets()
    assert found["HalfCheetah-v5"]["lr_decay"] == "linear"
    assert found["BipedalWalkerHardcore-v3"]["n_timesteps"] > 0
    assert {"default", "memory", "recurrent", "minatar", "minigrid"} <= found.keys()
    assert "shared" not in found
    found["CartPole-v1"]["gamma"] = 0.0
    assert presets()["CartPole-v1"]["gamma"] == 0.98


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("env='CartPol-v1'.*CartPole", dict(env="CartPol-v1")),
        ("n_envs=0", dict(env="CartPole-v1", n_envs=0)),
        ("vec_env_cls='dummy'", dict(env="CartPole-v1", vec_env_cls="dummy")),
        ("verbose='x'", dict(env="CartPole-v1", verbose="x")),
        ("env_kwargs=5", dict(env="CartPole-v1", env_kwargs=5)),
        ("env=5", dict(env=5)),
        ("env=.*it makes a `dict`", dict(env=dict)),
        ("n_envs='all'", dict(env="CartPole-v1", n_envs="all")),
        ("n_envs=4.*there are 1", dict(env=Samples(), n_envs=4)),
        ("env_kwargs=.*made already", dict(env=Samples(), env_kwargs={"g": 1})),
        ("env_wrapper=.*made already", dict(env=DummyVecEnv([lambda: gym.make("CartPole-v1")]), env_wrapper=gym.Wrapper)),
        ("normalize=.*'epsilon'", dict(env="CartPole-v1", normalize="dict(epsilon=1.0)")),
        ("normalize=.*gamma=0.98", dict(env="CartPole-v1", normalize=dict(gamma=0.5))),
        ("normalize='all'", dict(env="CartPole-v1", normalize="all")),
        ("env_wrapper='no.Wrapper'", dict(env="CartPole-v1", env_wrapper="no.Wrapper")),
        ("seed=-1", dict(env="CartPole-v1", seed=-1)),
        ("seed='a'", dict(env="CartPole-v1", seed="a")),
        ("space", dict(env="Observing-text-v0", policy="MlpLstmPolicy")),
        ("`learning_rate` or", dict(env="CartPole-v1", learning_rat=1e-3)),
    ],
)
def test_bad_arguments(match, arguments):
    """Arguments that are not valid are refused, with a remedy."""
    with pytest.raises(ValueError, match=match):
        make(**arguments)


def test_values_that_the_zoo_does_not_take():
    """Classes and functions, and None where it is a value, are those of PPOExt."""
    schedules = dict(learning_rate=lambda left: 1e-3 * left, clip_range_vf=None)
    schedules |= dict(adaptive_lr_kl=None, adaptive_lr_rule="threshold")
    model, env = make("CartPole-v1", policy=MlpTransformerPolicy, **schedules)
    assert isinstance(model.policy, MlpTransformerPolicy)
    assert (model.lr_schedule(1.0), model.lr_schedule(0.5)) == (1e-3, 5e-4)
    assert model.clip_range_vf is None
    env.close()


def test_make_leaves_dictionaries_alone():
    """The discount factor that goes into `normalize` is not written into the dictionary of the user."""
    normalize = dict(norm_reward=False)
    make("CartPole-v1", normalize=normalize, gamma=0.5)
    assert normalize == dict(norm_reward=False)


def observing(**kwargs):
    return Samples(**kwargs)


KINDS = {
    "class": (lambda: Samples, 8),
    "function": (lambda: observing, 8),
    "environment": (observing, 1),
    "vectorised": (lambda: DummyVecEnv([observing] * 3), 3),
    "tensors": (lambda: TorchVecEnv(TorchPendulum(4)), 4),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_environments(name):
    """Whatever the environment is given as, it is trained with `default`, which keeps the samples of an update."""
    make_env, n_envs = KINDS[name]
    env = make_env()
    model, made = make(env, seed=0, device="cpu")
    assert made.num_envs == model.n_envs == n_envs
    assert made is env or not isinstance(env, VecEnv)
    assert model.normalize_obs is model.normalize_reward is True
    n_samples = 1024 if isinstance(model.action_space, spaces.Box) else 2048
    assert model.n_steps * n_envs == pytest.approx(n_samples, rel=0.04)
    assert unwrap_vec_normalize(model.env) is None


def test_wrapped_environments_have_no_preset_of_their_id():
    """What wrappers have made another task of is trained with `default`; what only watches it is not."""
    stacked = FrameStackObservation(gym.make("Pendulum-v1"), 2)
    model, _ = make(stacked, device="cpu")
    assert not model.use_sde
    assert model.observation_space == stacked.observation_space
    model, _ = make(Monitor(gym.make("Pendulum-v1")), device="cpu")
    assert model.use_sde  # as its preset


def test_normalised_environments_stay_as_they_are():
    """A VecNormalize of the user normalises instead of the model."""
    model, _ = make(VecNormalize(DummyVecEnv([observing])), device="cpu")
    assert model.normalizer is None


def test_evaluation_has_raw_environments(tmp_path):
    """The model, and what was saved of it, act in environments as they are."""
    model, env = make("MountainCarContinuous-v0", n_envs=2, seed=0, device="cpu", n_steps=32)
    model.learn(64).save(tmp_path / "model.zip")
    assert model.normalizer.obs_rms.count > 60
    loaded = PPOExt.load(tmp_path / "model.zip", trusted=False)
    observation = env.observation_space.sample()
    expected, _ = model.predict(observation, deterministic=True)
    np.testing.assert_array_equal(loaded.predict(observation, deterministic=True)[0], expected)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("n_envs", "n_steps"), [(2, 1024), (8, 256), (12, 176), (10, 192), (64, 32), (1, 2048)])
def test_the_number_of_environments_is_free(n_envs, n_steps, recwarn):
    """The samples of an update stay the same, or nearly so in minibatches of equal size."""
    model, _ = make(observing, n_envs=n_envs, device="cpu")
    assert (model.n_envs, model.n_steps) == (n_envs, n_steps)
    assert not [each for each in recwarn if "samples per update" in str(each.message) or "truncated mini-batch" in str(each)]
    assert make(observing, n_envs=n_envs, device="cpu", n_steps=50)[0].n_steps == 50


@pytest.mark.parametrize(("n_envs", "n_steps"), [(1500, 16), (160, 16)])
def test_numbers_of_environments_that_change_the_samples(n_envs, n_steps):
    """There is a warning where they cannot, because a rollout would be too short."""
    with pytest.warns(UserWarning, match=f"n_envs={n_envs}.*has 2048 samples per update, and this one {n_envs * n_steps}"):
        model, _ = make(observing, n_envs=n_envs, device="cpu")
    assert model.n_steps == n_steps


@pytest.mark.parametrize(
    ("cores", "n_envs", "kind", "width"),
    [(1, 8, FastDummyVecEnv, 8), (12, 12, ParallelVecEnv, 256), (12, 12, ParallelVecEnv, 8)],
)
@pytest.mark.integration
def test_all_cores(cores, n_envs, kind, width, monkeypatch):
    """With "auto", there is an environment on each core, and a thread for large networks."""
    for module in (environment_counts, choice_of_vec_env, zoo_presets):
        monkeypatch.setattr(module, "available_cores", lambda: cores)
    monkeypatch.setattr(choice_of_vec_env, "COST", 0.0)
    model, env = make(observing, n_envs="auto", device="cpu", policy_kwargs=dict(net_arch=[width, width]))
    env.close()
    assert model.native_threads == (cores if width == 256 else 1)
    assert (type(env), env.num_envs, model.n_steps) == (kind, n_envs, {8: 256, 12: 176}[n_envs])


def test_without_the_zoo(monkeypatch):
    """Our entries need no RL Zoo; Atari's are those of the Zoo."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "rl_zoo3" else find(name, *args))
    assert "default" in presets()
    assert "BipedalWalkerHardcore-v3" not in presets()
    model, _ = make("MountainCarContinuous-v0", device="cpu", policy="MlpLstmPolicy")
    assert model.policy_class.__name__ == "MlpLstmPolicy"
    with pytest.raises(ValueError, match="Atari come with RL Zoo"):
        make("ALE/Pong-v5")


def test_ids_with_a_module():
    """The module in front of the id is imported, as Gymnasium does; one that cannot be is named."""
    model, _ = make("gymnasium:CartPole-v1")
    assert model.n_steps == presets()["CartPole-v1"]["n_steps"]
    with pytest.raises(ValueError, match=r"env=.*no_such_module"):
        make("no_such_module:CartPole-v1")


def test_preset_for_simulators():
    """The entry for simulators has rsl_rl's values, and its minibatches are a quarter of a rollout."""
    entry = presets()["simulator"]
    assert (entry["n_epochs"], entry["learning_rate"], entry["adaptive_lr_kl"]) == (5, 1e-3, 0.01)
    assert entry["batch_size"] * 4 == entry["n_envs"] * entry["n_steps"]
    given = {name: value for name, value in entry.items() if name not in ("n_envs", "n_timesteps", "normalize", "policy")}
    PPOExt("MlpPolicy", "CartPole-v1", **{**given, "batch_size": 6}, device="cpu").learn(24)


@pytest.mark.integration
def test_entry_for_memory_is_the_arm_of_the_study(monkeypatch, tmp_path):
    """`make`, the Zoo and the first snippet of the documentation make the model of the arm that the study recommends."""
    monkeypatch.syspath_prepend(ROOT / "benchmark" / "studies")
    robustness, snippet = importlib.import_module("robustness"), {}
    exec(blocks("docs/memory.md")[0].code.replace("model.learn", "#"), snippet)
    policy = dict(policy="MlpTransformerPolicy")
    made, _ = make("CartPole-v1", **policy)
    of_zoo, _ = manager(env_id="CartPole-v1", folder=tmp_path, eval_freq=-1, hyperparams=policy).setup_experiment()
    [rate] = {float(rate) for rate in robustness.RATES} & {made.learning_rate}
    arm = robustness.make_model("counting", f"transformer, {robustness.SHORT_HELD}", rate, seed=0)
    differs = {"seed": None, "device": None}
    first, *others = ({**hyperparameters(model), **differs} for model in (made, of_zoo, snippet["model"], arm))
    assert all(each == first for each in others)
    assert presets()["memory"]["n_timesteps"] == robustness.SHORT

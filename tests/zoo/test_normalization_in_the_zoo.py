"""`normalize` of an entry is what the model does: a run has one file. Older runs, with a `VecNormalize`, still work."""

import gymnasium as gym
import numpy as np
import optuna
import pytest
import yaml
from gymnasium import spaces
from optuna.samplers import RandomSampler
from stable_baselines3.common.vec_env import VecNormalize, unwrap_vec_normalize
from support.parity import assert_equal
from support.toys import BOX_ACTION, VECTOR, ToyEnv
from support.zoo import config, manager, saved

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.export.__main__ import main as export

pytest.importorskip("rl_zoo3")

pytestmark = pytest.mark.integration
ENV = "Pendulum-v1"
SMALL = dict(n_envs=2, n_steps=32, batch_size=32, n_epochs=2)
PARAMS = ["-params", *(f"{name}:{value}" for name, value in SMALL.items())]
# With a setting that the model does not have, there is a `VecNormalize`. This one is its default.
WRAPPED = "normalize:dict(epsilon=1e-8)"
MIXED = spaces.Dict(speed=VECTOR, gear=spaces.Discrete(3))
gym.register("ZooMixed-v0", lambda: ToyEnv(MIXED, BOX_ACTION))
gym.register("ZooSmallImage-v0", lambda: ToyEnv(spaces.Dict(a=VECTOR, b=spaces.Box(0, 255, (8, 8, 3), np.uint8)), BOX_ACTION))


@pytest.fixture(autouse=True)
def _short_episodes(short_episodes):
    short_episodes(ENV)


def trained(folder, env_id=ENV, **hyperparams):
    given = {**SMALL, "backend": "eager", **hyperparams}
    experiment = manager(env_id=env_id, folder=folder, hyperparams=given, eval_freq=64, n_timesteps=192, log_interval=1)
    model, saved_hyperparams = experiment.setup_experiment()
    experiment.learn(model)
    return model, saved_hyperparams, experiment


def statistics_of(normalizer):
    parts = normalizer.obs_rms.values() if isinstance(normalizer.obs_rms, dict) else [normalizer.obs_rms]
    return [(each.mean, each.var, each.count) for each in [*parts, normalizer.ret_rms]]


@pytest.mark.parametrize(
    ("env_id", "normalize", "options"),
    [
        (ENV, {}, (True, True)),
        (ENV, dict(norm_reward=False, clip_obs=1.0), (True, False)),
        (ENV, dict(clip_reward=0.5), (True, True)),
        ("ZooMixed-v0", {}, (["speed"], True)),
    ],
)
def test_equal_to_the_wrapper(env_id, normalize, options, tmp_path):
    """Parameters, statistics and evaluations are those of a training with `VecNormalize`, to the bit."""
    policy = "MultiInputPolicy" if env_id == "ZooMixed-v0" else "MlpPolicy"
    seen = []
    for more in ({}, {"epsilon": 1e-8}):
        same = dict(policy=policy, gamma=0.9, normalize_freq="step")
        model, _, experiment = trained(tmp_path, env_id, normalize={**normalize, **more} or True, **same)
        results = np.load(f"{experiment.save_path}/evaluations.npz")["results"]
        normalizer = unwrap_vec_normalize(model.env) or model.normalizer
        assert (model.normalizer is None) == bool(more)
        seen.append((model.policy.state_dict(), statistics_of(normalizer), results))
        if not more:
            assert (model.normalize_obs, model.normalize_reward) == options
    assert_equal(*seen, "training")


def test_one_file(tmp_path, train_here, enjoy_here):
    """A run has no statistics besides its model, and is watched, continued and exported with it alone."""
    train_here("--env", ENV, "-n", "128", "--eval-freq", "64", "--eval-episodes", "1", *PARAMS, "normalize:True")
    path = saved(tmp_path, ENV)
    assert not list(tmp_path.rglob("vecnormalize.pkl"))
    stored = config(tmp_path, ENV)
    assert "normalize" not in stored
    assert stored["normalize_obs"] is stored["normalize_reward"] is True
    assert "Mean reward" in enjoy_here(ENV, 41)
    count = PPOExt.load(path).normalizer.obs_rms.count
    assert count > 128
    train_here("--env", ENV, "-n", "64", "-i", path, *PARAMS, "normalize:dict(clip_obs=5.0)", "normalize_freq:'rollout'")
    continued = PPOExt.load(saved(tmp_path, ENV))
    assert continued.normalizer.obs_rms.count > count + 60
    assert (continued.clip_obs, continued.normalize_freq) == (10.0, "rollout")  # as in the agent; as given
    export([str(path.parent), "--output", str(tmp_path / "actor.onnx")])


def test_runs_with_a_vec_normalize(tmp_path, train_here, enjoy_here):
    """Runs with a second file are watched, continued and exported with it, whatever the entry says."""
    train_here("--env", ENV, "-n", "128", *PARAMS, WRAPPED)
    path = saved(tmp_path, ENV)
    pickled = path.parent / ENV / "vecnormalize.pkl"
    env = PPOExt("MlpPolicy", ENV).env
    count = VecNormalize.load(str(pickled), env).obs_rms.count
    assert "Loading running average" in enjoy_here(ENV, 41)
    for normalize in ("True", "False"):
        train_here("--env", ENV, "-n", "64", "-i", path, *PARAMS, f"normalize:{normalize}")
        continued = saved(tmp_path, ENV).parent / ENV / "vecnormalize.pkl"
        assert VecNormalize.load(str(continued), env).obs_rms.count > count + 60
        assert PPOExt.load(saved(tmp_path, ENV)).normalizer is None
        assert "Loading running average" in enjoy_here(ENV, 41)
    export([str(path.parent), "--output", str(tmp_path / "actor.onnx")])


def test_checkpoints_with_a_vec_normalize(tmp_path, train_here):
    """From a checkpoint of such a run, a run goes on with a `VecNormalize`, without the file."""
    train_here("--env", ENV, "-n", "128", "--save-freq", "64", *PARAMS, WRAPPED)
    checkpoint = max((saved(tmp_path, ENV).parent / "checkpoints").glob("*.zip"))
    train_here("--env", ENV, "-n", "192", "-i", checkpoint, *PARAMS, "normalize:True")
    assert (saved(tmp_path, ENV).parent / ENV / "vecnormalize.pkl").exists()
    assert PPOExt.load(saved(tmp_path, ENV)).normalizer is None


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (dict(normalize=True, normalize_obs=False), (False, True, 10.0, "step")),
        (dict(normalize="dict(norm_obs=False, clip_reward=2.0)", normalize_freq="rollout"), (False, True, 2.0, "rollout")),
        (dict(normalize=False, normalize_reward=True), (False, True, 10.0, "step")),
        (dict(normalize=dict(norm_obs=True, norm_reward=False)), (True, False, 10.0, "step")),
    ],
)
def test_users_decide(given, options, tmp_path):
    """Options of the model have precedence over `normalize`."""
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump({ENV: {**SMALL, "policy": "MlpPolicy", "n_timesteps": 100, **given}}))
    model, stored = manager(env_id=ENV, folder=tmp_path, config=str(path), eval_freq=-1).setup_experiment()
    found = tuple(getattr(model, name) for name in ("normalize_obs", "normalize_reward", "clip_reward", "normalize_freq"))
    assert found == options
    assert unwrap_vec_normalize(model.env) is None
    assert {name: value for name, value in stored.items() if name.startswith("normalize_")}.items() >= {
        name: value for name, value in given.items() if name.startswith("normalize_")
    }.items()


@pytest.mark.parametrize(
    ("env_id", "normalize", "reason"),
    [
        (ENV, "dict(epsilon=0.1)", "the model has no setting `epsilon`"),
        (ENV, "dict(gamma=0.5)", "the returns of the model have its own discount factor, 0.99"),
        ("ZooSmallImage-v0", "dict(norm_obs_keys=['b'])", "the model normalises no images"),
    ],
)
def test_what_the_model_cannot_do(env_id, normalize, reason, tmp_path, capsys):
    """What only `VecNormalize` can do remains as it was, and a line says so."""
    policy = "MlpPolicy" if env_id == ENV else "MultiInputPolicy"
    given = {**SMALL, "policy": policy, "n_timesteps": 100, "normalize": normalize}
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump({env_id: given}))
    model, stored = manager(env_id=env_id, folder=tmp_path, config=str(path), eval_freq=-1).setup_experiment()
    assert isinstance(model.env, VecNormalize) or model.get_vec_normalize_env() is not None
    assert model.normalizer is None
    assert stored["normalize"] == normalize
    assert f"in a file of its own: {reason}" in capsys.readouterr().out


@pytest.mark.parametrize("normalize", [True, {"epsilon": 1e-8}], ids=["model", "wrapper"])
def test_discount_of_the_time_limit(normalize, tmp_path):
    """`gamma: auto` is the number for the time limit, for the model and for the returns by which rewards are divided."""
    given = {**SMALL, "gamma": "auto", "normalize": normalize}
    experiment = manager(env_id="MountainCar-v0", folder=tmp_path, hyperparams=given, eval_freq=-1)
    model, stored = experiment.setup_experiment()
    assert (model.gamma, stored["gamma"]) == (0.975, "auto")
    wrapper = model.get_vec_normalize_env()
    # The model divides by returns with its own discount factor.
    assert (None if wrapper is None else wrapper.gamma) == (None if normalize is True else 0.975)


def test_normalised_twice(tmp_path):
    """A `VecNormalize` of the user's besides `normalize` is refused by name."""
    wrapper = "stable_baselines3.common.vec_env.VecNormalize"
    experiment = manager(env_id=ENV, folder=tmp_path, hyperparams=dict(normalize=True, vec_env_wrapper=wrapper), eval_freq=-1)
    with pytest.raises(ValueError, match="`normalize_obs=True` is not valid: the environment is in a `VecNormalize`"):
        experiment.setup_experiment()


def test_trials(tmp_path, monkeypatch):
    """In a study, models normalise, with the discount factor that is sampled."""
    seen = []
    learn = PPOExt.learn

    def spy(self, *args, **kwargs):
        seen.append((self.normalize_obs, self.normalize_reward, self.get_vec_normalize_env()))
        return learn(self, *args, **kwargs)

    monkeypatch.setattr(PPOExt, "learn", spy)
    experiment = manager(
        env_id=ENV, folder=tmp_path, hyperparams=dict(normalize=True), optimize_hyperparameters=True, n_timesteps=256
    )
    experiment.setup_experiment()
    study = optuna.create_study(direction="maximize", sampler=RandomSampler(0))
    study.optimize(experiment.objective, n_trials=1)
    assert seen == [(True, True, None)]
    assert study.trials[0].state.name == "COMPLETE"

"""RL Zoo's commands with environments of gymnax by name."""

from importlib.util import find_spec

import gymnasium as gym
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from support import zoo

from sb3_ppo_ext import JaxVecEnv, PPOExt, TensorVecNormalize

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("jax"),
    pytest.mark.skipif(find_spec("gymnax") is None, reason="needs gymnax"),
]
SMALL = ["n_envs:4", "n_steps:32", "batch_size:64", "n_epochs:1"]
PENDULUM, CART_POLE = "gymnax-Pendulum-v1", "gymnax-CartPole-v1"


@pytest.mark.slow
def test_commands(tmp_path):
    """`train`, `enjoy` and `-optimize` find the environment by its name."""
    arguments = ["--env", "gymnax/CartPole-v1", "-n", "256", "--save-freq", "128", "-params", *SMALL]
    printed = zoo.train(*arguments, cwd=tmp_path)
    assert "using those of" not in printed
    assert PPOExt.load(zoo.saved(tmp_path, CART_POLE)).n_envs == 4
    words = ["--algo", "ppo_ext", "--env", "gymnax/CartPole-v1", "-f", "logs", "-n", "300", "--no-render"]
    assert "Mean reward" in zoo.run(*zoo.RL_ZOO3, "enjoy", *words, cwd=tmp_path)
    trials = ["-optimize", "--n-trials", "2", "--n-startup-trials", "1", "--n-evaluations", "1", "--n-eval-envs", "2"]
    printed = zoo.train("--env", "gymnax/CartPole-v1", "-n", "256", *trials, cwd=tmp_path)
    assert "Best trial" in printed


@pytest.mark.slow
def test_normalised(tmp_path, train_here, enjoy_here):
    """With `normalize`, the model has the statistics, which `enjoy` and a training that goes on read."""
    train_here("--env", "gymnax/Pendulum-v1", "-n", "256", "-params", *SMALL, "normalize:True", "--eval-freq", "128")
    path = zoo.saved(tmp_path, PENDULUM)
    count = PPOExt.load(path).normalizer.obs_rms.count
    assert count == pytest.approx(260, abs=1)
    assert "Mean reward" in enjoy_here("gymnax/Pendulum-v1", 300)
    train_here("--env", "gymnax/Pendulum-v1", "-n", "128", "-i", path, "-params", *SMALL, "normalize:True")
    again = zoo.saved(tmp_path, PENDULUM)
    assert again != path
    assert PPOExt.load(again).normalizer.obs_rms.count == pytest.approx(count + 132, abs=5)


@pytest.mark.slow
def test_normalised_by_a_wrapper(tmp_path, train_here, enjoy_here):
    """The file of a `VecNormalize` is in SB3's format, and read by `enjoy` and a training that goes on."""
    normalize = "normalize:dict(epsilon=1e-8)"  # a setting that the model does not have
    train_here("--env", "gymnax/Pendulum-v1", "-n", "256", "-params", *SMALL, normalize)
    path = zoo.saved(tmp_path, PENDULUM)
    pickled = path.parent / PENDULUM / "vecnormalize.pkl"
    count = VecNormalize.load(pickled, DummyVecEnv([lambda: gym.make("Pendulum-v1")])).obs_rms.count
    assert count == pytest.approx(260, abs=1)
    assert "Mean reward" in enjoy_here("gymnax/Pendulum-v1", 300)
    train_here("--env", "gymnax/Pendulum-v1", "-n", "128", "-i", path, "-params", *SMALL, normalize)
    again = zoo.saved(tmp_path, PENDULUM).parent / PENDULUM / "vecnormalize.pkl"
    assert again != pickled
    assert TensorVecNormalize.load(again, JaxVecEnv("Pendulum-v1")).obs_rms.count == pytest.approx(count + 132, abs=5)


def environment(folder, **hyperparams):
    """The environment of a training, made by the Zoo."""
    keywords = {"n_envs": 4, "n_steps": 32, "batch_size": 64, "normalize": False, **hyperparams}
    model, _ = zoo.manager(env_id="gymnax/Pendulum-v1", folder=folder, hyperparams=keywords, eval_freq=-1).setup_experiment()
    return model.get_env()


def test_environments(tmp_path):
    """Copies are steps of one `JaxVecEnv`, normalised in tensors, with parameters from `env_kwargs`."""
    env = environment(tmp_path)
    assert type(env) is JaxVecEnv
    assert env.num_envs == 4
    normalize = dict(epsilon=1e-8)  # a setting that the model does not have
    env = environment(tmp_path, normalize=normalize, env_kwargs={"env_params": {"max_steps_in_episode": 7}})
    assert type(env) is TensorVecNormalize
    env.reset()
    for _ in range(7):
        _, _, dones, infos = env.step([env.action_space.sample() for _ in range(4)])
    assert dones.all()
    assert infos[0]["TimeLimit.truncated"]


def test_wrapped_copies(tmp_path):
    """With wrappers of single copies, there are single copies."""
    wrapper = {"gymnasium.wrappers.RescaleAction": {"min_action": -1, "max_action": 1}}
    env = environment(tmp_path, env_wrapper=wrapper, n_envs=1)
    assert isinstance(env, DummyVecEnv)

"""The time limit of environments, and the discount factor that `gamma="auto"` takes from it."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize
from support.torch_envs import TorchPendulum
from support.toys import ToyEnv

from sb3_ppo_ext import ParallelVecEnv, PPOExt, TorchVecEnv, VectorEnvAdapter, make
from sb3_ppo_ext.envs.time_limits import discount_for, time_limit_of, time_limit_of_all


@pytest.mark.parametrize(
    ("limit", "expected"), [(200, 0.975), (400, 0.9875), (50, 0.95), (5, 0.95), (9999, 0.995), (None, 0.99)]
)
def test_discount(limit, expected):
    """It looks a fifth of an episode ahead: 1 / (1 - gamma) is n / 5, between 20 and 200 steps; SB3's where n is not known."""
    assert discount_for(limit) == pytest.approx(expected)


def _copies(make_venv):
    return make_venv([partial(gym.make, "Pendulum-v1")] * 2)


def _adapted(mode, **kwargs):
    return VectorEnvAdapter(gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode=mode, **kwargs))


def _limited():
    return TimeLimit(ToyEnv(), 150)


@pytest.mark.parametrize(
    ("make_venv", "limit"),
    [
        (partial(_copies, DummyVecEnv), 200),
        pytest.param(partial(_copies, SubprocVecEnv), 200, marks=pytest.mark.integration),
        pytest.param(partial(_copies, ParallelVecEnv), 200, marks=pytest.mark.integration),
        (lambda: VecNormalize(_copies(DummyVecEnv)), 200),
        (partial(_adapted, "sync"), 500),
        pytest.param(partial(_adapted, "async"), 500, marks=pytest.mark.integration),
        (partial(_adapted, "sync", max_episode_steps=100), 100),
        pytest.param(partial(_adapted, "async", max_episode_steps=100), 100, marks=pytest.mark.integration),
        (partial(_adapted, "vector_entry_point"), 500),
        (partial(_adapted, "vector_entry_point", max_episode_steps=100), 100),
        (lambda: VectorEnvAdapter(gym.vector.SyncVectorEnv([_limited] * 2)), 150),
        (lambda: VectorEnvAdapter(gym.vector.SyncVectorEnv([ToyEnv])), None),
        pytest.param(lambda: VectorEnvAdapter(gym.vector.AsyncVectorEnv([_limited] * 2)), 150, marks=pytest.mark.integration),
        pytest.param(lambda: VectorEnvAdapter(gym.vector.AsyncVectorEnv([ToyEnv])), None, marks=pytest.mark.integration),
        (lambda: DummyVecEnv([lambda: TimeLimit(ToyEnv(), 30)]), 30),
        (lambda: DummyVecEnv([ToyEnv]), None),
        (lambda: TorchVecEnv(TorchPendulum(2)), None),
    ],
)
def test_limits(make_venv, limit):
    """It is found in one process or several, beneath wrappers, and in environments that step at once."""
    venv = make_venv()
    try:
        assert time_limit_of_all(venv) == limit
    finally:
        venv.close()


def test_limits_of_gymnax():
    """Also if the environment itself ends episodes that are too long."""
    pytest.importorskip("gymnax")
    from sb3_ppo_ext import JaxVecEnv

    assert time_limit_of_all(JaxVecEnv("CartPole-v1", num_envs=2)) == 500
    assert time_limit_of_all(JaxVecEnv("CartPole-v1", num_envs=2, max_episode_steps=40)) == 40


def test_limits_of_a_users_class():
    """A class without attributes of its environments has no limit, and nothing is raised."""

    class Without(DummyVecEnv):
        def get_attr(self, attr_name, indices=None):
            if attr_name != "render_mode":  # which SB3 itself asks for
                raise NotImplementedError
            return [None]

    assert time_limit_of_all(Without([partial(gym.make, "Pendulum-v1")])) is None


@pytest.mark.parametrize("found", [100, [], None, KeyError()], ids=repr)
def test_odd_answers_of_a_users_class(found):
    """What a class answers in another form, or not at all, is no limit; it can be trained with."""

    class Odd(DummyVecEnv):
        def get_attr(self, attr_name, indices=None):
            if attr_name != "_max_episode_steps":
                return super().get_attr(attr_name, indices)
            if isinstance(found, Exception):
                raise found
            return found

    env = Odd([lambda: TimeLimit(ToyEnv(), 100)])
    assert time_limit_of_all(env) is None
    assert PPOExt("MlpPolicy", env, n_steps=16, batch_size=16, gamma="auto", device="cpu").gamma == 0.99


@pytest.mark.parametrize(
    ("value", "limit"), [(0, None), (-1, None), ("100", None), (float("inf"), None), (True, None), (np.int64(40), 40)]
)
def test_attributes_that_are_no_limits(value, limit):
    """Users' environments have the attribute as well, with whatever value."""

    class Own(ToyEnv):
        _max_episode_steps = value

    assert time_limit_of_all(DummyVecEnv([Own])) == time_limit_of(Own()) == limit


def test_smallest_limit():
    """Of several wrappers, the one that ends the episodes counts for the start of the first one."""
    assert time_limit_of(TimeLimit(gym.make("Pendulum-v1"), 1000)) == 200
    assert time_limit_of(TimeLimit(gym.make("Pendulum-v1"), 50)) == 50
    assert time_limit_of(gym.make("Pendulum-v1").unwrapped) is None


def test_saved_before_training(tmp_path):
    """The number is in the zip even if nothing was trained after the change."""
    model = PPOExt("MlpPolicy", "Pendulum-v1", n_steps=64, device="cpu")
    model.gamma = "auto"
    model.save(tmp_path / "model")
    assert PPOExt.load(tmp_path / "model").gamma == 0.975


def test_same_run_as_with_the_number(tmp_path, capsys):
    """The model trains with the number, normalises rewards with it, says it, saves it, and can be told to look again."""
    models = []
    for gamma in ("auto", 0.975):
        env = make_vec_env("Pendulum-v1", n_envs=2, seed=0)
        options = dict(n_steps=64, normalize_reward=True, verbose=1, seed=0, device="cpu")
        models.append(PPOExt("MlpPolicy", env, gamma=gamma, **options).learn(256))
    assert "gamma=0.975: episodes have at most 200 steps" in capsys.readouterr().out
    auto, number = models
    assert auto.gamma == auto.rollout_buffer.gamma == 0.975
    for one, other in zip(auto.policy.parameters(), number.policy.parameters(), strict=True):
        np.testing.assert_array_equal(one.detach(), other.detach())
    auto.save(tmp_path / "model")
    assert PPOExt.load(tmp_path / "model").gamma == 0.975
    again = PPOExt.load(tmp_path / "model", env=auto.get_env())
    again.gamma = "auto"
    again.set_env(DummyVecEnv([lambda: TimeLimit(gym.make("Pendulum-v1").unwrapped, 100)] * 2))
    again.learn(128)
    assert again.gamma == again.rollout_buffer.gamma == 0.95


def test_refused(tmp_path):
    """Another string, and a model whose environments are not known."""
    with pytest.raises(ValueError, match=r'`gamma=.?0,99.*give a number, or "auto"'):
        PPOExt("MlpPolicy", "Pendulum-v1", gamma="0,99")
    PPOExt("MlpPolicy", "Pendulum-v1", n_steps=64).save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"`gamma='auto'` is not valid: .* give `env` as well"):
        PPOExt.load(tmp_path / "model", custom_objects={"gamma": "auto"})


@pytest.mark.integration
def test_presets():
    """`make` takes it as well, for any environment."""
    model, env = make("Acrobot-v1", gamma="auto", device="cpu")
    assert model.gamma == 0.99
    env.close()
    model, env = make(partial(TimeLimit, gym.make("Pendulum-v1").unwrapped, 300), n_envs=1, gamma="auto", device="cpu")
    assert model.gamma == pytest.approx(1 - 5 / 300)
    env.close()

"""Several processes are taken where the steps that they take at the same time last longer than what that costs."""

import pytest
from support.toys import ToyEnv
from support.vec_envs import Slow

from sb3_ppo_ext import FastDummyVecEnv, ParallelVecEnv, make
from sb3_ppo_ext.envs import choice_of_vec_env
from sb3_ppo_ext.envs.choice_of_vec_env import choose_vec_env, seconds_per_step


@pytest.fixture
def cores(monkeypatch):
    return lambda n: monkeypatch.setattr(choice_of_vec_env, "available_cores", lambda: n)


@pytest.mark.parametrize(
    ("n_cores", "n_envs", "seconds", "cls"),
    [
        (2, 2, 7e-6, FastDummyVecEnv),  # CartPole
        (2, 16, 7e-6, ParallelVecEnv),
        (2, 2, 35e-6, ParallelVecEnv),  # HalfCheetah
        (8, 3, 35e-6, ParallelVecEnv),
        (1, 16, 1.0, FastDummyVecEnv),
        (2, 1, 1.0, FastDummyVecEnv),
    ],
)
def test_rule(n_cores, n_envs, seconds, cls, cores, monkeypatch):
    """It depends on the time of a step, on the number of environments, and on the cores; the reason says so."""
    cores(n_cores)
    monkeypatch.setattr(choice_of_vec_env, "seconds_per_step", lambda make: seconds)
    choice = choose_vec_env(ToyEnv, n_envs)
    assert choice.cls is cls
    assert choice.reason.startswith(cls.__name__)


def test_measurement():
    """The time of a step is that of one environment, which is closed afterwards."""
    closed = []
    env = Slow(0.002, p_end=0.5)
    env.close = lambda: closed.append(True)
    assert 0.002 < seconds_per_step(lambda: env) < 0.1
    assert closed == [True]


@pytest.mark.integration
def test_make(cores, capsys, monkeypatch):
    """With `n_envs="auto"` and `verbose=1`, one line says what was taken and why."""
    cores(2)
    monkeypatch.setattr(choice_of_vec_env, "COST", 1.5e-3)
    for cls, expected in ((Slow, ParallelVecEnv), (ToyEnv, FastDummyVecEnv)):
        _, env = make(cls, n_envs="auto", n_steps=8, batch_size=8, verbose=1, device="cpu")
        assert type(env) is expected
        assert capsys.readouterr().out.count(f"{expected.__name__}: a step of one environment takes") == 1
        env.close()

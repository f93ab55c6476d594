"""Copies of an environment begin at different steps of their first episodes."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv
from support.zoo import manager

from sb3_ppo_ext import ParallelVecEnv, StaggeredStart, make

ENV_ID, LIMIT, N_ENVS = "Pendulum-v1", 200, 64


def first_ends(venv, n_steps=LIMIT):
    """Step in which the first episode of each environment ends, 0 if it does not, and the infos of all ends."""
    ends, infos = np.zeros(venv.num_envs, int), []
    for step in range(1, n_steps + 1):
        _, _, dones, found = venv.step(np.zeros((venv.num_envs, *venv.action_space.shape), np.float32))
        ends[dones & (ends == 0)] = step
        infos += [info for info, done in zip(found, dones, strict=True) if done]
    return ends, infos


@pytest.mark.parametrize("vec_env_cls", [DummyVecEnv, pytest.param(ParallelVecEnv, marks=pytest.mark.integration)])
def test_spread_evenly(vec_env_cls):
    """With successive seeds, whatever the first one is; what is truncated is no episode for the monitor."""
    venv = make_vec_env(ENV_ID, N_ENVS, seed=123, vec_env_cls=vec_env_cls, wrapper_class=StaggeredStart)
    venv.reset()
    ends, infos = first_ends(venv)
    gaps = np.diff(np.sort(ends))
    assert ends.min() <= 2 * LIMIT // N_ENVS
    assert ends.max() >= LIMIT - 2 * LIMIT // N_ENVS
    assert gaps.max() <= 2 * LIMIT // N_ENVS
    assert all(info["TimeLimit.truncated"] and "terminal_observation" in info for info in infos)
    assert not any("episode" in info for info in infos[: N_ENVS // 2])
    # The next episodes are whole ones, so that the environments stay spread.
    later, infos = first_ends(venv)
    assert [info["episode"]["l"] for info in infos] == [LIMIT] * N_ENVS
    np.testing.assert_array_equal(later, ends)
    # A reset in the middle begins anew, in the same way
    venv.reset()
    np.testing.assert_array_equal(first_ends(venv)[0], ends)
    venv.close()


class Terminates(gym.Env):
    """Ends at the third step, and has no time limit of its own."""

    observation_space = action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 3, False, {}


def test_ends_of_the_task():
    """An end of the task is none of the wrapper; without a time limit, nothing changes."""
    for env, seed, expected in [
        (StaggeredStart(Terminates()), 1, [(False, False), (False, False), (True, False)]),
        (StaggeredStart(TimeLimit(Terminates(), 100)), 0, [(False, True)]),
        (StaggeredStart(TimeLimit(Terminates(), 4)), 1, [(False, False), (False, False), (True, False)]),
    ]:
        env.reset(seed=seed)
        found = []
        while not found or not any(found[-1]):
            found.append(env.step(np.zeros(1, np.float32))[2:4])
        assert found == expected
        env.reset()
        assert [env.step(np.zeros(1, np.float32))[2:4] for _ in range(3)] == [(False, False), (False, False), (True, False)]


@pytest.mark.parametrize(
    ("given", "is_staggered"),
    [
        (dict(n_envs=64), True),
        (dict(n_envs=16), False),
        (dict(n_envs=64, n_steps=32), False),
        (dict(n_envs=64, staggered_start=False), False),
        (dict(staggered_start=True), True),
    ],
)
def test_from_make(given, is_staggered):
    """Where an entry is left few steps of each environment, or where it is asked for."""
    model, venv = make(lambda: gym.make(ENV_ID), seed=0, device="cpu", **given)
    assert venv.env_is_wrapped(StaggeredStart) == [is_staggered] * venv.num_envs
    assert "staggered_start" not in vars(model)


def test_what_cannot_be_staggered():
    """By itself, nothing is said; what is asked for is refused."""
    venv = make_vec_env(ENV_ID, 64)
    assert make(venv, device="cpu")[1] is venv
    for asked in ("yes", 1):
        with pytest.raises(ValueError, match="`staggered_start="):
            make(ENV_ID, staggered_start=asked)
    with pytest.raises(ValueError, match="`staggered_start=True` is not valid: it is for environments that are made one by"):
        make(venv, staggered_start=True)


def test_in_the_zoo(tmp_path):
    """Only for training, and the run saves it."""
    experiment = manager(env_id=ENV_ID, folder=tmp_path, hyperparams=dict(n_envs=128, n_timesteps=2000), eval_freq=500)
    model, stored = experiment.setup_experiment()
    assert stored["staggered_start"] is True
    assert model.env.env_is_wrapped(StaggeredStart) == [True] * 128
    evaluated = experiment.create_envs(2, eval_env=True)
    assert evaluated.env_is_wrapped(StaggeredStart) == [False] * 2
    with pytest.raises(ValueError, match="`staggered_start="):
        manager(env_id=ENV_ID, folder=tmp_path, hyperparams=dict(staggered_start="no")).setup_experiment()

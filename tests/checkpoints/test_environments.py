"""State of environments: what is restored in copies that have another past goes on as the original."""

import copy
import re

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecMonitor, VecNormalize

from sb3_ppo_ext import FastDummyVecEnv, VectorEnvAdapter
from sb3_ppo_ext.checkpoints.environments import Step, reason_not_to_restore, state_of


def steps_of(env, number):
    """Steps with random actions."""
    steps = []
    for _ in range(number):
        actions = np.array([env.action_space.sample() for _ in range(env.num_envs)])
        steps.append(Step(actions.copy(), copy.deepcopy(env.step(actions)[:3])))
    return steps


def reason(env, before=13, after=30):
    """Reason why a state in the middle of episodes cannot be restored."""
    env.seed(3)
    env.action_space.seed(3)
    env.reset()
    steps_of(env, before)
    state = state_of(env)
    return reason_not_to_restore(env, state, steps_of(env, after))


def envs(env_id, n_envs=2, **kwargs):
    return make_vec_env(env_id, n_envs, vec_env_cls=FastDummyVecEnv, env_kwargs={"max_episode_steps": 20}, **kwargs)


def wrapped(*wrappers):
    def wrap(env):
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    return envs("Pendulum-v1", wrapper_class=wrap)


GO_ON = {
    "classic control": lambda: envs("CartPole-v1"),
    "toy text": lambda: envs("FrozenLake-v1"),
    "monitor file": lambda: envs("Pendulum-v1", monitor_dir="monitor"),
    "VecNormalize": lambda: VecNormalize(envs("Pendulum-v1")),
    "frame stack": lambda: VecFrameStack(VecNormalize(envs("Pendulum-v1")), 3),
    "VecMonitor": lambda: VecMonitor(DummyVecEnv([lambda: gym.make("Pendulum-v1")]), "monitor"),
    "wrappers": lambda: wrapped(
        lambda env: gym.wrappers.TimeAwareObservation(env),
        lambda env: gym.wrappers.FrameStackObservation(env, 3),
        lambda env: gym.wrappers.TransformObservation(env, lambda observation: 2 * observation, env.observation_space),
    ),
    "vectorized wrapper": lambda: VectorEnvAdapter(gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")),
    "vectorized": lambda: VectorEnvAdapter(gym.make_vec("CartPole-v1", 2)),
}


@pytest.mark.parametrize("name", GO_ON)
def test_go_on(name, tmp_path, monkeypatch):
    """The state of an environment and of its wrappers is whole."""
    monkeypatch.chdir(tmp_path)
    env = GO_ON[name]()
    assert reason(env) is None
    # Copies have not written to the files of the originals.
    assert all(len(path.read_text().splitlines()) <= 5 for path in tmp_path.rglob("*.csv"))


@pytest.mark.integration
@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Humanoid-v5", "Reacher-v5"])
def test_mujoco(env_id):
    """MuJoCo's state is outside Python, and its environments forget it when they are pickled."""
    assert reason(envs(env_id)) is None


@pytest.mark.integration
def test_mujoco_with_another_model():
    """Parameters of the model that were changed are restored as well."""
    env = envs("HalfCheetah-v5")
    for each in env.envs:
        each.unwrapped.model.body_mass[:] *= 2
        each.unwrapped.model.opt.gravity[2] = -5.0
        each.unwrapped.model.opt.timestep = 0.005
    assert reason(env) is None


@pytest.mark.integration
def test_atari():
    """The emulator of Atari games is outside Python, too."""
    ale_py = pytest.importorskip("ale_py")
    gym.register_envs(ale_py)
    env = make_vec_env("ALE/Breakout-v5", 1)
    assert reason(env) is None


class Hidden(gym.Wrapper):
    """Its reward depends on something that cannot be read."""

    def __init__(self, env):
        super().__init__(env)
        hidden = [0]
        self.count = lambda: hidden.__setitem__(0, hidden[0] + 1) or hidden[0]

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, reward + self.count(), *rest


class Counted(gym.Wrapper):
    """Its reward depends on a counter of its own, which a function changes, and on one of all its copies."""

    steps = 0
    ends: list[int] = []  # noqa: RUF012

    def __init__(self, env):
        super().__init__(env)
        self.own, self.count = 0, lambda: self.count_own()

    def count_own(self):
        self.own += 1
        return self.own % 5

    def step(self, action):
        type(self).steps += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        if truncated:
            self.ends.append(self.steps)
        return observation, reward + self.count() + self.steps % 7 + len(self.ends), terminated, truncated, info


class Connected(gym.Wrapper):
    """Holds something that can be neither pickled nor copied."""

    def __init__(self, env):
        super().__init__(env)
        self.file = open("/dev/null")  # noqa: SIM115


class Shown(gym.Wrapper):
    """Claims to show a window."""

    render_mode = "human"


def test_the_originals_are_left_alone():
    """Neither functions nor attributes of a class lead from copies to the originals."""
    env = wrapped(Counted)
    ends = Counted.ends
    assert reason(env) is None
    assert [each.get_wrapper_attr("own") for each in env.envs] == [43, 43]
    assert Counted.steps == 86
    assert Counted.ends is ends
    assert ends == [39, 40, 79, 80]
    env = wrapped(Hidden)
    assert "rewards" in reason(env)
    assert env.envs[0].get_wrapper_attr("count")() == 44


CANNOT = {
    "Box2D": (lambda: envs("LunarLander-v3"), "observations of copies"),
    "hidden state": (lambda: wrapped(Hidden), "rewards of copies"),
    "file": (lambda: wrapped(Connected), "cannot be copied .*Connected.file"),
    "window": (lambda: wrapped(Shown), "render_mode"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_cannot_go_on(name):
    """A state that is not whole is noticed, with the reason."""
    make, expected = CANNOT[name]
    env = make()
    assert re.search(expected, reason(env))
    env.step(np.array([env.action_space.sample()] * 2))  # the originals go on


@pytest.mark.integration
def test_processes():
    """Environments in other processes are neither restored nor disturbed."""
    env = make_vec_env("Pendulum-v1", 2, vec_env_cls=SubprocVecEnv)
    assert "SubprocVecEnv.processes" in reason(env)
    steps_of(env, 3)
    env.close()

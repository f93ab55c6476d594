"""Our vectorised environments say what SB3's say, step by step."""

import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor, VecNormalize
from support.parity import assert_equal
from support.toys import DICT, IMAGE, VECTOR, ToyEnv
from support.vec_envs import Asked, Plain, Talkative, as_floats, rollout, without_clock

from sb3_ppo_ext import CheckedSubprocVecEnv, FastDummyVecEnv, ParallelVecEnv, PPOExt, VectorEnvAdapter
from sb3_ppo_ext.zoo.experiment import setup_experiment


@pytest.mark.parametrize("space", [VECTOR, IMAGE, DICT], ids=["vector", "image", "dict"])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_fast_is_dummy(space, n_envs):
    """Observations, rewards, dones, infos and reset infos are those of DummyVecEnv, and no later step changes them."""
    fns = [lambda: Monitor(Plain(observation_space=space))] * n_envs
    expected, actual = (without_clock(rollout(cls(fns))) for cls in (DummyVecEnv, FastDummyVecEnv))
    assert any(info.get("TimeLimit.truncated") for infos in actual[5::5] for info in infos if isinstance(info, dict))
    assert_equal(expected, actual)


def test_fast_survives_an_environment_that_writes_in_place():
    """
    What a step returned stays as it was, the terminal observation included, where SB3 has the first one of the next episode.
    """
    fast, plain = (rollout(FastDummyVecEnv([cls] * 2)) for cls in (Talkative, Plain))
    terminal = [info["terminal_observation"] for infos in fast[5::5] for info in infos if "terminal_observation" in info]
    expected = [info["terminal_observation"] for infos in plain[5::5] for info in infos if "terminal_observation" in info]
    assert len(terminal) > 3
    np.testing.assert_array_equal(terminal, expected)
    assert_equal(plain[2::5], fast[2::5])


class Moving(ToyEnv):
    """Its infos hold an array that it changes in place."""

    def reset(self, **kwargs):
        self.position = np.zeros(1)
        return super().reset(**kwargs)

    def step(self, action):
        self.position += 1.0
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"position": self.position, "nested": {"position": self.position}}


def positions_kept(algorithm, **options):
    """Positions in the infos of eight steps, which a callback has kept until the end."""
    infos = []

    def keep(local_variables, _):
        infos.append(local_variables["infos"][0])
        return True

    algorithm("MlpPolicy", Moving(), n_steps=8, batch_size=8, seed=0, device="cpu", **options).learn(8, callback=keep)
    return [(float(info["position"][0]), float(info["nested"]["position"][0])) for info in infos]


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_no_later_step_changes_infos(backend):
    """What a callback keeps of the infos of an environment that is not vectorised is what it keeps with SB3."""
    expected = positions_kept(PPO)
    assert expected[:3] == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert positions_kept(PPOExt, backend=backend) == expected


class Record(dict):
    """An info with methods of its own."""

    def position_of(self, index):
        return self["position"][index]


class Recording(ToyEnv):
    """Its infos are of a class of its own."""

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, Record(position=np.ones(2))


@pytest.mark.parametrize("vec_env_class", [DummyVecEnv, FastDummyVecEnv])
def test_class_of_infos(vec_env_class):
    """Infos keep their class."""
    env = vec_env_class([Recording])
    env.reset()
    (info,) = env.step(env.action_space.sample()[None])[3]
    assert type(info) is Record
    assert info.position_of(1) == 1.0


FORK = dict(start_method="fork")  # which starts faster


@pytest.mark.integration
@pytest.mark.skipif(sys.platform == "win32", reason="cannot fork")
@pytest.mark.parametrize("space", [VECTOR, DICT], ids=["vector", "dict"])
def test_checked_is_subproc(space):
    """Each step is that of SubprocVecEnv, types included, and that of DummyVecEnv."""
    seen = []
    for cls, kwargs in ((SubprocVecEnv, FORK), (CheckedSubprocVecEnv, dict(timeout=100, **FORK)), (DummyVecEnv, {})):
        env = cls([lambda: Monitor(Plain(observation_space=space))] * 2, **kwargs)
        seen.append(without_clock(rollout(env)))
        env.close()
    assert_equal(*seen[:2])
    assert_equal(as_floats(seen[1][2::5]), as_floats(seen[2][2::5]))


def test_ppo_ext_takes_it():
    """PPOExt takes FastDummyVecEnv for an environment that is not vectorised."""
    for env in ("CartPole-v1", ToyEnv()):
        assert type(PPOExt("MlpPolicy", env, device="cpu").env) is FastDummyVecEnv


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("space", [VECTOR, DICT], ids=["vector", "dict"])
@pytest.mark.parametrize("vector_class", [SyncVectorEnv, pytest.param(AsyncVectorEnv, marks=pytest.mark.integration)])
def test_adapter_is_dummy(vector_class, space, mode):
    """In each mode of resetting, the adapter returns what DummyVecEnv returns."""
    fns = [lambda: Plain(observation_space=space)] * 3
    adapter = VectorEnvAdapter(vector_class(fns, autoreset_mode=mode))
    expected, actual = (without_clock(rollout(env)) for env in (DummyVecEnv(fns), adapter))
    adapter.close()
    assert_equal(as_floats(expected), as_floats(actual))


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("space", [VECTOR, DICT], ids=["vector", "dict"])
def test_adapter_copies_what_gymnasium_does_not(space, mode):
    """No later step changes an observation, and no reset the last one of an episode."""
    seen = []
    for copy in (True, False):
        fns = [lambda: Plain(observation_space=space)] * 3
        seen.append(without_clock(rollout(VectorEnvAdapter(SyncVectorEnv(fns, copy=copy, autoreset_mode=mode)))))
    assert_equal(*seen)


def test_seeds_and_options_are_for_one_reset():
    """Seeds and options count for one reset, as with DummyVecEnv."""
    for env in (DummyVecEnv([Asked] * 2), FastDummyVecEnv([Asked] * 2), VectorEnvAdapter(SyncVectorEnv([Asked] * 2))):
        env.seed(5)
        env.set_options({"level": 1})
        env.reset(), env.reset()
        assert env.get_attr("asked") == [[(seed, {"level": 1}), (None, None)] for seed in (5, 6)]
    env.set_options([{"level": 1}, {"level": 2}])
    with pytest.raises(ValueError, match=r"options=.*reset all copies with the same"):
        env.reset()


def test_envpool():
    """Each step is that of Gymnasium's CartPole from the state before, the last of an episode included."""
    envpool = pytest.importorskip("envpool")
    env = VectorEnvAdapter(envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, seed=0))
    single = gym.make("CartPole-v1").unwrapped
    single.reset()
    observations, lengths, n_cut_off = env.reset(), np.zeros(4, int), 0
    rng = np.random.default_rng(0)
    for _ in range(700):
        actions = rng.integers(2, size=4)
        # The first one is balanced, until its time is up.
        actions[0] = observations[0] @ [0.05, 0.1, 1.0, 0.3] > 0
        following, _, dones, infos = env.step(actions)
        lengths += 1
        for i in range(4):
            single.state, single.steps_beyond_terminated = observations[i].astype(np.float64), None
            expected, _, terminated, _, _ = single.step(int(actions[i]))
            last = infos[i]["terminal_observation"] if dones[i] else following[i]
            np.testing.assert_allclose(last, expected, atol=1e-5)
            cut_off = infos[i]["TimeLimit.truncated"]
            assert terminated == (dones[i] and not cut_off)
            assert not cut_off or lengths[i] == 500
            assert not dones[i] or np.abs(following[i]).max() <= 0.05
            n_cut_off += cut_off
        lengths[dones] = 0
        observations = following
    assert n_cut_off > 0


def test_cart_poles():
    """Each step of Gymnasium's vectorised CartPole is that of a single one, and poles that fell begin anew."""
    env = VecMonitor(VectorEnvAdapter(gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="vector_entry_point")))
    env.seed(0)
    observations, lengths, current, n_done = env.reset(), [], np.zeros(8, int), 0
    assert env.observation_space == gym.make("CartPole-v1").observation_space
    single = gym.make("CartPole-v1").unwrapped
    single.reset()
    rng = np.random.default_rng(0)
    for _ in range(200):
        actions = rng.integers(2, size=8)
        before, (observations, rewards, dones, infos) = observations, env.step(actions)
        current += 1
        assert (rewards == 1).all()
        for i in range(8):
            single.state, single.steps_beyond_terminated = before[i].astype(np.float64), None
            expected, _, terminated, _, _ = single.step(actions[i])
            assert terminated == dones[i]
            last = infos[i]["terminal_observation"] if dones[i] else observations[i]
            np.testing.assert_allclose(last, expected, rtol=1e-4, atol=1e-5)
            if dones[i]:
                assert abs(observations[i]).max() <= 0.05
                assert infos[i]["episode"]["l"] == current[i]
                assert not infos[i]["TimeLimit.truncated"]
                lengths.append(current[i])
                current[i] = 0
                n_done += 1
    assert n_done > 20


def test_cart_poles_are_cut_off():
    """The end at the time limit is a truncation, and no failure."""
    env = VectorEnvAdapter(
        gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point", max_episode_steps=5)
    )
    env.reset()
    for step in range(1, 21):
        _, _, dones, infos = env.step(np.array([0, 1, 0, 1]) if step % 2 else np.array([1, 0, 1, 0]))
        assert (dones == (step % 5 == 0)).all()
        assert all(info["TimeLimit.truncated"] == (step % 5 == 0) for info in infos)


def test_ppo_ext_learns_from_an_adapter():
    """PPOExt trains on an adapter within the wrappers of SB3, and its seed makes it reproducible."""

    def trained():
        venv = gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="vector_entry_point")
        env = VecNormalize(VecMonitor(VectorEnvAdapter(venv)))
        return PPOExt("MlpPolicy", env, n_steps=64, batch_size=128, seed=1, device="cpu").learn(3000)

    one, other = trained(), trained()
    assert len(one.ep_info_buffer) > 20
    for a, b in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
        assert a.equal(b)


class Unknown(VectorEnv):
    """A vectorised environment of nobody's, which begins new episodes in the next step, and can reset some copies."""

    def __init__(self, num_envs):
        self.copies = SyncVectorEnv([ToyEnv] * num_envs)
        self.num_envs, self.metadata = num_envs, self.copies.metadata
        self.single_observation_space, self.single_action_space = VECTOR, self.copies.single_action_space

    def reset(self, *, seed=None, options=None):
        return self.copies.reset(options=options)

    def step(self, actions):
        return self.copies.step(actions)


def test_adapter_refuses():
    """Environments that are not vectorised, and those that cannot reset single copies, are refused."""
    with pytest.raises(ValueError, match=r"`venv=.*DummyVecEnv"):
        VectorEnvAdapter(ToyEnv())
    unknown = Unknown(2)
    with pytest.raises(ValueError, match=r"`venv=.*SameStep.*partial_reset"):
        VectorEnvAdapter(unknown)
    calls = []

    def partial_reset(env, mask):
        calls.append(mask)
        return env.reset(options={"reset_mask": mask})

    env = VectorEnvAdapter(unknown, partial_reset)
    env.reset()
    for _ in range(7):
        env.step(np.array([env.action_space.sample()] * 2))
    assert calls


def test_attributes_of_copies():
    """Attributes are read and set, and methods called, by name and for single copies."""
    env = VectorEnvAdapter(SyncVectorEnv([ToyEnv] * 3, autoreset_mode=AutoresetMode.SAME_STEP))
    assert env.get_attr("length") == [7, 7, 7]
    env.set_attr("length", 3, indices=[1])
    assert env.get_attr("length", indices=[0, 1]) == [7, 3]
    assert env.env_method("get_wrapper_attr", "length") == [7, 3, 7]
    assert env.env_is_wrapped(Monitor) == [False] * 3
    with pytest.raises(NotImplementedError, match="get_wrapper_attr"):
        env.env_method("get_wrapper_attr", "length", indices=[0])


def test_the_zoo_takes_it():
    """The Zoo takes our vectorised environments for `ppo_ext` in place of SB3's, unless the user has chosen a class."""
    for chosen in (None, SubprocVecEnv):
        for before, after in [(DummyVecEnv, FastDummyVecEnv), (SubprocVecEnv, ParallelVecEnv)]:
            name = SimpleNamespace(gym_id="CartPole-v1")
            given = dict(env_name=name, vec_env_class=chosen or before, default_vec_env_cls=chosen)
            experiment = SimpleNamespace(**given, _hyperparams={}, callbacks=[], save_path="logs", verbose=0)
            assert setup_experiment(lambda: "results", experiment) == "results"
            assert experiment.vec_env_class is (chosen or after)


def test_make_vec_env_takes_it():
    """`make_vec_env` takes FastDummyVecEnv as `vec_env_cls`."""
    env = make_vec_env("CartPole-v1", 2, seed=0, vec_env_cls=FastDummyVecEnv)
    assert env.reset().shape == (2, 4)

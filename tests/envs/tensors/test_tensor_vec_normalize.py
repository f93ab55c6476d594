"""VecNormalize in tensors: the same numbers as SB3's, the same files, and SB3's tools."""

import pickle
from copy import deepcopy

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize, sync_envs_normalization
from support.host_waits import no_host_waits
from support.torch_envs import TorchCartPole, TorchPendulum
from support.torch_simulators import PUSH, LikeIsaacLab

from sb3_ppo_ext import PPOExt, TensorVecNormalize, TorchVecEnv


def pendulums(seed=0):
    env = TorchVecEnv(TorchPendulum(5, max_episode_steps=7))
    env.seed(seed)
    return env


def isaac():
    return TorchVecEnv(LikeIsaacLab(5), action_space=PUSH)


def statistics(rms):
    return {key: (part.mean, part.var, part.count) for key, part in (rms.items() if isinstance(rms, dict) else [("", rms)])}


def assert_close(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        return [assert_close(ours[key], theirs[key]) for key in theirs]
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def assert_same_statistics(ours, theirs):
    for rms in ("obs_rms", "ret_rms"):
        if hasattr(theirs, rms):
            expected = statistics(getattr(theirs, rms))
            for key, values in statistics(getattr(ours, rms)).items():
                for given, wanted in zip(values, expected[key], strict=True):
                    np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-8)


SETTINGS = [
    (pendulums, {}),
    (pendulums, {"norm_obs": False}),
    (pendulums, {"norm_reward": False, "clip_obs": 0.5}),
    (pendulums, {"gamma": 0.5, "epsilon": 0.1, "clip_reward": 0.3}),
    (pendulums, {"training": False}),
    (isaac, {}),
    (isaac, {"norm_obs_keys": ["policy"]}),
]


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("make", "kwargs"), SETTINGS)
def test_numbers_are_those_of_vec_normalize(make, kwargs):
    """Observations, rewards, infos, originals and statistics are SB3's over the same steps, also while not training."""
    theirs, ours, tensors = VecNormalize(make(), **kwargs), *(TensorVecNormalize(make(), **kwargs) for _ in range(2))
    assert_close(ours.reset(), theirs.reset())
    tensors.reset_tensors()
    n_ended = 0
    for step in range(30):
        actions = np.random.uniform(-1, 1, (5, 1)).astype(np.float32)
        theirs.training = ours.training = tensors.training = kwargs.get("training", True) and not 10 <= step < 15
        expected, given = theirs.step(actions), ours.step(actions)
        in_tensors = tensors.step_tensors(th.from_numpy(actions))
        for wanted, array in zip(expected[:3], given[:3], strict=True):
            assert_close(array, wanted)
        observations = in_tensors.observations
        is_dict = isinstance(observations, dict)
        numpy = {key: part.numpy() for key, part in observations.items()} if is_dict else observations.numpy()
        assert_close(numpy, expected[0])
        assert_close(in_tensors.rewards.numpy(), expected[1])
        for index in np.flatnonzero(expected[2]):
            n_ended += 1
            assert_close(given[3][index]["terminal_observation"], expected[3][index]["terminal_observation"])
            assert given[3][index]["episode"]["r"] == pytest.approx(expected[3][index]["episode"]["r"])
        assert_close(ours.get_original_obs(), theirs.get_original_obs())
        assert_close(ours.get_original_reward(), theirs.get_original_reward())
        assert_same_statistics(ours, theirs)
        np.testing.assert_allclose(ours.returns, theirs.returns, rtol=1e-6)
    assert_same_statistics(tensors, theirs)
    assert n_ended >= 15
    assert_close(ours.reset(), theirs.reset())
    assert_same_statistics(ours, theirs)


@pytest.mark.parametrize(("make", "kwargs"), [(pendulums, {}), (lambda: TorchVecEnv(TorchCartPole(3)), {})])
def test_the_host_does_not_wait(make, kwargs):
    """A step in tensors asks for no value of a tensor."""
    env = TensorVecNormalize(make(), **kwargs)
    shape = (env.num_envs, *env.action_space.shape)
    actions = th.zeros(shape, dtype=th.int64 if isinstance(env.action_space, spaces.Discrete) else th.float32)
    with no_host_waits():
        env.reset_tensors()
        for _ in range(12):
            env.step_tensors(actions)


def trained(cls):
    env = cls(pendulums())
    env.reset()
    for _ in range(20):
        env.step(np.ones((5, 1), np.float32))
    return env


@pytest.mark.parametrize(("saver", "loader"), [(VecNormalize, TensorVecNormalize), (TensorVecNormalize, VecNormalize)])
def test_files(saver, loader, tmp_path):
    """Each loads the file of the other, with statistics and settings, and goes on equally."""
    env = trained(saver)
    env.clip_obs = 3.0
    env.save(str(tmp_path / "vecnormalize.pkl"))
    loaded = loader.load(str(tmp_path / "vecnormalize.pkl"), pendulums(3))
    assert type(loaded) is loader
    assert loaded.clip_obs == 3.0
    assert_same_statistics(loaded, env)
    same = saver.load(str(tmp_path / "vecnormalize.pkl"), pendulums(3))
    assert type(same) is saver
    assert_close(loaded.reset(), same.reset())
    actions = np.ones((5, 1), np.float32)
    for given, wanted in zip(loaded.step(actions)[:2], same.step(actions)[:2], strict=True):
        assert_close(given, wanted)


def test_pickles_are_those_of_sb3():
    """A pickle has SB3's classes alone, so that it can be read without this package."""
    env = trained(TensorVecNormalize)
    copy = pickle.loads(data := pickle.dumps(env))
    assert b"sb3_ppo_ext" not in data
    assert b"support" not in data
    assert type(copy) is VecNormalize
    assert type(copy.obs_rms) is type(copy.ret_rms) is RunningMeanStd
    assert vars(copy).keys() == vars(pickle.loads(pickle.dumps(trained(VecNormalize)))).keys()
    assert type(deepcopy(env.obs_rms)) is RunningMeanStd


def test_statistics_can_be_read_and_assigned():
    """Statistics are assigned as a whole or by their parts, and are not shared with what they were assigned from."""
    env, other = trained(TensorVecNormalize), TensorVecNormalize(pendulums())
    other.obs_rms, other.ret_rms = env.obs_rms, env.ret_rms
    assert_same_statistics(other, env)
    other.obs_rms.mean = np.ones(3)
    other.obs_rms.var, other.obs_rms.count = np.full(3, 4.0), 7.0
    assert env.obs_rms.mean[0] != 1
    other.training = False
    other.norm_reward = False
    raw = other.venv.reset()
    other.venv.seed(0), env.venv.seed(0)
    np.testing.assert_allclose(other.normalize_obs(raw), np.clip((raw - 1) / 2, -10, 10), rtol=1e-5)
    np.testing.assert_allclose(other.unnormalize_obs(other.normalize_obs(raw)), raw, atol=1e-5)
    assert other.obs_rms.copy().count == 7
    expected = RunningMeanStd(shape=(3,))
    expected.mean, expected.var, expected.count = np.ones(3), np.full(3, 4.0), 7.0
    expected.update(raw), other.obs_rms.update(raw)
    np.testing.assert_allclose(other.obs_rms.var, expected.var)


def test_attributes_that_a_checkpoint_restores():
    """Pickled attributes that are written into another object, as checkpoints do, go on equally."""
    env, other = trained(TensorVecNormalize), trained(TensorVecNormalize)
    env.step(np.ones((5, 1), np.float32))
    attributes = {name: vars(env)[name] for name in ("obs_rms", "ret_rms", "_returns")}
    vars(other).update(pickle.loads(pickle.dumps(attributes)))
    assert_same_statistics(other, env)
    other.step(np.ones((5, 1), np.float32))
    assert other.obs_rms.count == env.obs_rms.count + 5


def test_without_observations():
    """Without `norm_obs` there are no statistics of observations, as in SB3."""
    assert not hasattr(TensorVecNormalize(pendulums(), norm_obs=False), "obs_rms")


def test_sb3s_tools():
    """`get_vec_normalize_env`, `sync_envs_normalization` and `EvalCallback` work with it."""
    env, evaluation = (TensorVecNormalize(pendulums(seed)) for seed in (0, 1))
    evaluation.training = False
    model = PPOExt("MlpPolicy", env, n_steps=16, batch_size=40, n_epochs=1, device="cpu")
    assert model.get_vec_normalize_env() is env
    callback = EvalCallback(evaluation, n_eval_episodes=2, eval_freq=16, verbose=0)
    model.learn(160, callback=callback)
    assert callback.last_mean_reward < 0
    sync_envs_normalization(env, evaluation)
    assert_same_statistics(evaluation, env)
    assert env.obs_rms.count > 160
    sync_envs_normalization(env, plain := VecNormalize(pendulums()))
    assert_same_statistics(plain, env)


BAD = {
    "venv": [lambda: TensorVecNormalize(VecFrameStack(pendulums(), 2)), lambda: TensorVecNormalize.of(VecNormalize(dummy()))],
    "load_path": [
        lambda: TensorVecNormalize.load("none.pkl", pendulums()),
        lambda: TensorVecNormalize.load(__file__, pendulums()),
    ],
    "norm_obs_keys": [lambda: TensorVecNormalize(pendulums(), norm_obs_keys=["x"])],
}


def dummy():
    import gymnasium as gym

    return DummyVecEnv([lambda: gym.make("Pendulum-v1")])


@pytest.mark.parametrize(("name", "make"), [(name, make) for name, makers in BAD.items() for make in makers])
def test_bad_arguments(name, make):
    """Each bad argument is a ValueError that names it."""
    with pytest.raises(ValueError, match=name):
        make()

"""The intrinsic reward of Random Network Distillation."""

import pickle
import random

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from support.device_training import tensor_env
from support.toys import DICT, IMAGE, make_toys

from sb3_ppo_ext import ParallelVecEnv, PPOExt, RNDReward
from sb3_ppo_ext.envs.rnd_reward import without_rewards_of_rnd


class Counting(gym.Env):
    """Observations are the number of the step, doubled, and its negative; rewards 10, 20, ...; episodes of three steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, factor=1.0):
        self.factor = factor

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._observation(), {}

    def _observation(self):
        return np.array([2.0 * self.t, -self.t], np.float32) * self.factor

    def step(self, action):
        self.t += 1
        return self._observation(), 10.0 * self.t, self.t == 3, False, {"own": self.t}


def make_counting(**kwargs):
    return RNDReward(DummyVecEnv([lambda: Monitor(Counting()), lambda: Monitor(Counting(0.5))]), **kwargs)


def step(env, n=1):
    for _ in range(n):
        results = env.step(np.zeros(env.num_envs, int))
    return results


def outputs(network, x):
    """Outputs of a network with two hidden layers, in NumPy."""
    layers = [layer for layer in network if isinstance(layer, th.nn.Linear)]
    for index, layer in enumerate(layers):
        x = x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        x = np.maximum(x, 0) if index < len(layers) - 1 else x
    return x


def test_numbers_by_hand():
    """Errors, running statistics and rewards of five steps, with a terminal observation, computed step by step."""
    env = make_counting(coef=0.3, gamma=0.9, clip_obs=1.2, n_features=5, net_arch=[7, 6])
    env.reset()
    mean, var, count = np.zeros(2), np.ones(2), 1e-4
    sums, sum_mean, sum_var, sum_count = np.zeros(2), 0.0, 1.0, 1e-4

    def joined(mean, var, count, batch):
        n, delta = len(batch), batch.mean(axis=0) - mean
        total = count + n
        squares = var * count + batch.var(axis=0) * n + delta**2 * count * n / total
        return mean + delta * n / total, squares / total, total

    clipped = False
    for number in (1, 2, 3, 1, 2):
        observations, rewards, dones, infos = step(env)
        assert dones.all() == (number == 3)
        np.testing.assert_array_equal(observations[0], [0, 0] if number == 3 else [2 * number, -number])
        seen = np.array([[2.0, -1.0], [1.0, -0.5]]) * number  # not the observation of the new episode
        mean, var, count = joined(mean, var, count, seen)
        standardized = (seen - mean) / np.sqrt(var + 1e-8)
        clipped |= bool((np.abs(standardized) > 1.2).any())
        x = np.clip(standardized, -1.2, 1.2)
        errors = ((outputs(env.predictor, x) - outputs(env.target, x)) ** 2).mean(axis=1)
        sums = 0.9 * sums + errors
        sum_mean, sum_var, sum_count = joined(sum_mean, sum_var, sum_count, sums)
        intrinsic = errors / np.sqrt(sum_var + 1e-8)
        np.testing.assert_allclose([info["intrinsic_reward"] for info in infos], intrinsic, rtol=1e-4)
        np.testing.assert_allclose(rewards, 10 * number + 0.3 * intrinsic, rtol=1e-5)
        assert [info["extrinsic_reward"] for info in infos] == [10 * number] * 2
        assert [info["own"] for info in infos] == [number] * 2
        assert rewards.dtype == np.float32
    assert clipped


@pytest.mark.parametrize("episodic", [False, True])
def test_episodic_sums(episodic):
    """The sums that the reward is normalised by begin anew with an episode if the user says so."""
    env = make_counting(episodic=episodic)
    env.reset()
    step(env, 3)
    assert (env.returns == 0).all() == episodic


def test_returns_are_those_of_the_environment():
    """A `Monitor` inside of the wrapper reports returns without intrinsic rewards, a `VecMonitor` around it with them."""
    env = VecMonitor(make_counting(coef=100.0))
    env.reset()
    *_, infos = step(env, 3)
    assert infos[0]["episode"]["r"] > 61
    inner = make_counting(coef=100.0)
    inner.reset()
    *_, infos = step(inner, 3)
    assert infos[0]["episode"]["r"] == 60
    assert infos[0]["terminal_observation"].tolist() == [6, -3]


def test_predictor_learns_what_it_sees():
    """The error of what was seen vanishes, that of something else stays, and the target stays what it is."""
    env = make_toys(observation_space=spaces.Discrete(6), n_envs=8)
    env.observation_space = spaces.Discrete(6)
    wrapper = RNDReward(env, n_steps=16, learning_rate=1e-2, n_epochs=4)
    target = [p.clone() for p in wrapper.target.parameters()]
    seen, unseen = np.eye(6, dtype=np.float32)[:5], np.eye(6, dtype=np.float32)[5:]
    before = wrapper.errors(seen).mean(), wrapper.errors(unseen).mean()
    for _ in range(20):
        wrapper.seen = [seen] * 16
        wrapper._learn()
    assert wrapper.errors(seen).mean() < 0.01 * before[0]
    assert wrapper.errors(unseen).mean() > 0.2 * before[1]
    assert wrapper.seen == []
    assert all(th.equal(one, other) for one, other in zip(target, wrapper.target.parameters(), strict=True))


def test_learns_every_few_steps():
    """The predictor learns after every `n_steps` steps, from all observations of these."""
    env = make_counting(n_steps=4, batch_size=3)
    env.reset()
    before = env.predictor[0].weight.clone()
    step(env, 3)
    assert th.equal(env.predictor[0].weight, before)
    assert len(env.seen) == 3
    step(env)
    assert not th.equal(env.predictor[0].weight, before)
    assert {int(state["step"]) for state in env.optimizer.state.values()} == {3}  # 8 observations, 3 at a time


def test_generators_of_its_own():
    """The global generators of Python, NumPy and PyTorch are not used; the seed decides."""
    th.manual_seed(0)
    np.random.seed(0)
    before = th.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    envs = [make_counting(n_steps=2, seed=seed) for seed in (1, 1, 2)]
    rewards = []
    for env in envs:
        env.reset()
        rewards.append([step(env)[1].tolist() for _ in range(6)])
    assert th.equal(before[0], th.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()
    assert rewards[0] == rewards[1] != rewards[2]


def test_without_training():
    """Without `training`, everything is passed on as it is, and nothing is learned."""
    env = VecNormalize(make_counting(n_steps=1), norm_reward=False, norm_obs=False)
    without_rewards_of_rnd(env)
    env.reset()
    state = pickle.dumps(env.venv)
    _, rewards, _, infos = step(env, 2)
    assert rewards.tolist() == [20, 20]
    assert "intrinsic_reward" not in infos[0]
    assert pickle.dumps(env.venv) == state


def test_saved_and_loaded(tmp_path):
    """What was learned is saved and loaded, around other environments; the rest starts with these."""
    env = make_counting(n_steps=2, coef=0.5)
    env.reset()
    step(env, 5)
    env.save(tmp_path / "rnd.pkl")
    other = RNDReward.load(tmp_path / "rnd.pkl", make_counting().venv)
    assert (other.coef, other.obs_rms.count, other.ret_rms.var) == (0.5, env.obs_rms.count, env.ret_rms.var)
    other.reset()
    env.reset()
    env.seen = []
    for _ in range(4):
        np.testing.assert_array_equal(step(other)[1], step(env)[1])
    with pytest.raises(ValueError, match=r"`venv=.*not those of the saved wrapper"):
        RNDReward.load(tmp_path / "rnd.pkl", make_toys())
    with pytest.raises(FileNotFoundError, match=r"`load_path=.*other.pkl'` is not valid: there is no such file"):
        RNDReward.load(tmp_path / "other.pkl", make_counting().venv)
    (tmp_path / "other.pkl").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"`load_path=.*cannot be unpickled.*`RNDReward.save`"):
        RNDReward.load(tmp_path / "other.pkl", make_counting().venv)
    (tmp_path / "other.pkl").write_bytes(pickle.dumps(3))
    with pytest.raises(ValueError, match=r"`load_path=3` is not valid: that is what .*other.pkl holds"):
        RNDReward.load(tmp_path / "other.pkl", make_counting().venv)


PARTS = spaces.Dict(
    {"joints": spaces.Box(-1, 1, (2, 2), np.float64), "gear": spaces.Discrete(3), "flags": spaces.MultiBinary(2)}
)


@pytest.mark.parametrize(
    ("space", "keys", "size"),
    [
        (PARTS, None, 9),
        (PARTS, ["gear", "joints"], 7),
        (DICT, ["joints"], 3),
        (spaces.Discrete(4), None, 4),
        (spaces.MultiDiscrete([3, 2]), None, 5),
    ],
    ids=["Dict", "some keys", "without images", "Discrete", "MultiDiscrete"],
)
def test_observations(space, keys, size):
    """Vectors of any shape and discrete observations are explored, as parts of dictionaries as well."""
    env = RNDReward(make_toys(observation_space=space), obs_keys=keys)
    assert env.obs_rms.mean.shape == (size,)
    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    PPOExt(policy, env, n_steps=16, batch_size=16, n_epochs=1).learn(64)
    assert env.obs_rms.count > 63


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(coef=-1), "`coef=-1`.*at least 0"),
        (dict(gamma=1.1), "`gamma=1.1`.*between 0 and 1"),
        (dict(clip_obs=0), "`clip_obs=0`.*greater than 0"),
        (dict(learning_rate="1e-3"), "`learning_rate='1e-3'`.*give a number"),
        (dict(n_steps=0), "`n_steps=0`"),
        (dict(n_epochs=1.5), "`n_epochs=1.5`.*an integer"),
        (dict(batch_size=0), "`batch_size=0`"),
        (dict(net_arch=64), "`net_arch=64`.*sizes of the hidden layers"),
        (dict(net_arch=[64, 0]), r"`net_arch\[1\]=0`"),
        (dict(n_features=0), "`n_features=0`"),
        (dict(seed=-1), "`seed=-1`"),
        (dict(obs_keys=["a"]), r"`obs_keys=\['a'\]`.*no dictionaries"),
    ],
    ids=str,
)
def test_bad_arguments(kwargs, message):
    """Arguments that are not valid are refused with the remedy."""
    with pytest.raises(ValueError, match=message):
        make_counting(**kwargs)


def test_what_is_not_supported():
    """Images, keys that do not exist and environments in tensors are refused by name."""
    with pytest.raises(ValueError, match=r"`venv=.*no networks for images.*`obs_keys`"):
        RNDReward(make_toys(observation_space=IMAGE))
    with pytest.raises(ValueError, match=r"observations 'camera' are in.*images"):
        RNDReward(make_toys(observation_space=DICT))
    for keys in (["engine"], [], "joints"):
        with pytest.raises(ValueError, match=r"`obs_keys=.*'camera', 'gear', 'joints'"):
            RNDReward(make_toys(observation_space=DICT), obs_keys=keys)
    with pytest.raises(ValueError, match=r"`venv=.*steps in tensors"):
        RNDReward(tensor_env("cpu"))
    with pytest.raises(ValueError, match=r"`venv=.*vectorised environments"):
        RNDReward(gym.make("CartPole-v1"))


@pytest.mark.integration
def test_parallel_environments():
    """The wrapper around environments in other processes gives the same rewards as around those in this one."""
    rewards = []
    for vec_env_class in (DummyVecEnv, ParallelVecEnv):
        env = RNDReward(vec_env_class([Counting, Counting]), n_steps=2)
        env.reset()
        rewards.append([step(env)[1].tolist() for _ in range(7)])
        env.close()
    assert rewards[0] == rewards[1]


class Chain(gym.Env):
    """A corridor of 24 cells from its left end. Each step costs a little, but for the right end, which is worth 10."""

    LENGTH = 24
    observation_space = spaces.Discrete(LENGTH)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell, self.t = 0, 0
        return self.cell, {}

    def step(self, action):
        self.t += 1
        self.cell = max(self.cell + (1 if action == 1 else -1), 0)
        reached = self.cell == self.LENGTH - 1
        reward = 10.0 if reached else -0.01 * (action == 1)
        return self.cell, reward, reached, self.t >= 2 * self.LENGTH, {}


def trained_on_chain(algorithm, wraps, **options):
    env = DummyVecEnv([lambda: Monitor(Chain())] * 8)
    env = RNDReward(env, n_steps=32, coef=0.5) if wraps else env
    given = dict(n_steps=64, batch_size=128, n_epochs=4, learning_rate=1e-3, ent_coef=0.0, seed=0, device="cpu")
    return algorithm("MlpPolicy", env, **given, **options).learn(40_000)


@pytest.mark.slow
def test_exploration():
    """A reward that is hardly found by chance is found with the intrinsic reward, also by SB3's PPO."""
    returns = {}
    for algorithm, wraps in ((PPOExt, False), (PPOExt, True), (PPO, True)):
        model = trained_on_chain(algorithm, wraps)
        evaluation = DummyVecEnv([lambda: Monitor(Chain())])
        returns[algorithm, wraps], _ = evaluate_policy(model, evaluation, n_eval_episodes=1, deterministic=True)
    assert returns[PPOExt, False] < 0.1
    assert returns[PPOExt, True] > 9
    assert returns[PPO, True] > 9

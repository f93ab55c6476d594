"""`LastRewardWrapper` shows the reward of the last step wherever a policy acts."""

from copy import deepcopy

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize, VecTransposeImage
from support.memory import SIZES, SMALL
from support.toys import DICT, IMAGE, VECTOR, ToyEnv

from sb3_ppo_ext import LastRewardWrapper, PPOExt

SPACES = {"vector": VECTOR, "image": IMAGE, "dictionary": DICT, "number": spaces.Discrete(4)}


def last_reward(observation):
    return observation["last_reward"] if isinstance(observation, dict) else observation[-1:]


def without(observation):
    """The observation of the wrapped environment."""
    if not isinstance(observation, dict):
        return observation[:-1]
    parts = {key: part for key, part in observation.items() if key != "last_reward"}
    return parts.get("obs", parts)


@pytest.mark.parametrize("name", SPACES)
def test_what_it_shows(name):
    """Observations contain the reward before them, 0 after a reset, and are otherwise those of the environment."""
    env, plain = LastRewardWrapper(ToyEnv(deepcopy(SPACES[name]))), ToyEnv(deepcopy(SPACES[name]))
    env.action_space.seed(0)
    for seed in (1, 2):
        (observation, _), (expected, _) = env.reset(seed=seed), plain.reset(seed=seed)
        reward, done = 0.0, False
        while not done:
            assert env.observation_space.contains(observation)
            assert last_reward(observation) == np.float32(reward)
            np.testing.assert_equal(without(observation), expected)
            action = env.action_space.sample()
            observation, reward, terminated, truncated, _ = env.step(action)
            expected, reward_here, *_ = plain.step(action)
            assert reward == reward_here
            done = terminated or truncated


@pytest.mark.parametrize(
    ("dtype", "expected"), [(np.float32, np.float32), (np.float64, np.float64), (np.uint8, np.float32), (np.int64, np.float64)]
)
def test_types_of_vectors(dtype, expected):
    """A vector keeps its bounds, in a type that holds both the vector and the reward."""
    space = LastRewardWrapper(ToyEnv(spaces.Box(0, 3, (2,), dtype))).observation_space
    assert space == spaces.Box(np.array([0, 0, -np.inf], expected), np.array([3, 3, np.inf], expected), dtype=expected)


def test_key_that_exists():
    """Dictionaries with such a key are refused."""
    env = LastRewardWrapper(ToyEnv(DICT))
    with pytest.raises(ValueError, match=r"`env=.*the key 'last_reward' already"):
        LastRewardWrapper(env)


@pytest.mark.parametrize(
    ("policy", "space"), [("MlpTransformerPolicy", VECTOR), ("MultiInputTransformerPolicy", IMAGE), ("MlpPolicy", VECTOR)]
)
def test_tools_of_sb3(policy, space):
    """Policies that see the last reward are evaluated by `EvalCallback` and `evaluate_policy`."""

    def make(training):
        env = make_vec_env(lambda: LastRewardWrapper(ToyEnv(space)), 2, vec_env_cls=DummyVecEnv)
        return VecNormalize(env, training=training) if space is VECTOR else VecTransposeImage(env)

    policy_kwargs = {} if policy == "MlpPolicy" else dict(SIZES, context_length=7)
    model = PPOExt(policy, make(training=True), policy_kwargs=policy_kwargs, **SMALL)
    evaluation = EvalCallback(make(training=False), eval_freq=8, n_eval_episodes=2, verbose=0)
    model.learn(32, callback=evaluation)
    assert np.isfinite(evaluation.last_mean_reward)
    assert np.isfinite(evaluate_policy(model, make(training=False), 2)[0])


def test_path_for_the_zoo():
    """RL Zoo finds the wrapper by its public name."""
    get_wrapper_class = pytest.importorskip("rl_zoo3.utils").get_wrapper_class
    wrap = get_wrapper_class({"env_wrapper": "sb3_ppo_ext.LastRewardWrapper"})
    assert wrap(ToyEnv()).observation_space.shape == (4,)

"""Rewards that are no numbers are refused by name, with the wrapper that helps, by every vectorised class."""

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv
from support.toys import ToyEnv

from sb3_ppo_ext import FastDummyVecEnv, ParallelVecEnv, PPOExt
from sb3_ppo_ext.common.guards import EnvironmentDataError
from sb3_ppo_ext.common.reward_errors import describe_bad_reward


class Rewarding(ToyEnv):
    """Changes its rewards from the third step on."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, self.change(reward) if self.t > 2 else reward, *rest


MANY = "mo_gymnasium.wrappers.LinearReward"
BAD = {
    "vector": (lambda reward: np.array([reward, 1.0]), MANY),
    "list of two": (lambda reward: [reward, 1.0], MANY),
    "array of one": (lambda reward: np.array([reward]), r"np.asarray\(reward\).item\(\)"),
    "list of one": (lambda reward: [reward], r"np.asarray\(reward\).item\(\)"),
    "none": (lambda reward: None, "0.0 where there is none"),
    "word": (lambda reward: "good", "0.0 where there is none"),
    "empty": (lambda reward: np.zeros(0), "0.0 where there is none"),
}
CLASSES = {
    "plain": lambda fn: fn(),
    "fast": lambda fn: FastDummyVecEnv([fn]),
    "fast in Monitor": lambda fn: FastDummyVecEnv([lambda: Monitor(fn())]),
    "make_vec_env": lambda fn: make_vec_env(fn, 2),
    "wrapped": lambda fn: gym.wrappers.RecordEpisodeStatistics(fn()),
    "parallel": lambda fn: ParallelVecEnv([fn] * 2, n_workers=1),
}
SMALL = dict(n_steps=8, batch_size=8, n_epochs=1, device="cpu")


@pytest.mark.parametrize("cls", [pytest.param(c, marks=[pytest.mark.integration] * (c == "parallel")) for c in CLASSES])
@pytest.mark.parametrize("kind", BAD)
def test_refused(kind, cls):
    """The message shows the reward and says what helps, and nothing is learned."""
    change, remedy = BAD[kind]
    env = CLASSES[cls](lambda: Rewarding(change))
    model = PPOExt("MlpPolicy", env, **SMALL)
    before = model.policy.mlp_extractor.policy_net[0].weight.clone()
    try:
        # NumPy writes None as NaN.
        with pytest.raises(EnvironmentDataError, match=f"reward of .* must be a number, not .*{remedy}|reward is not finite"):
            model.learn(16)
    finally:
        model.env.close()
    assert model.num_timesteps == 0
    assert model.policy.mlp_extractor.policy_net[0].weight.equal(before)


@pytest.mark.parametrize("kind", sorted(BAD.keys() - {"none"}))
def test_without_a_monitor(kind):
    """SB3's DummyVecEnv has no name for the reward that it writes into an array; the message says that it is the reward."""
    model = PPOExt("MlpPolicy", DummyVecEnv([lambda: Rewarding(BAD[kind][0])]), **SMALL)
    with pytest.raises(EnvironmentDataError, match="reward of environment 0 must be a number"):
        model.learn(16)


class Misleading(ToyEnv):
    """Returns something else that is wrong, and a reward of 1."""

    def __init__(self, ends, info):
        super().__init__()
        self.ends, self.info = ends, info

    def step(self, action):
        return super().step(action)[0], 1.0, self.ends, False, self.info


@pytest.mark.parametrize(
    ("ends", "info", "error"), [(False, None, "item assignment"), (np.array([False, True]), {}, "truth value")]
)
def test_other_data(ends, info, error):
    """What is wrong with something else is not said of the reward."""
    model = PPOExt("MlpPolicy", DummyVecEnv([lambda: Misleading(ends, info)]), **SMALL)
    with pytest.raises((TypeError, ValueError), match=error) as raised:
        model.learn(16)
    assert "reward" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("vector", lambda reward: float(np.dot(reward, [0.5, 0.5]))),
        ("list of two", lambda reward: float(np.dot(reward, [0.5, 0.5]))),
        ("array of one", lambda reward: np.asarray(reward).item()),
        ("list of one", lambda reward: np.asarray(reward).item()),
    ],
)
def test_remedies(kind, remedy):
    """The wrapper that the message names makes it train."""
    change = BAD[kind][0]

    class Always(ToyEnv):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return observation, change(reward), *rest

    PPOExt("MlpPolicy", gym.wrappers.TransformReward(Always(), remedy), **SMALL).learn(16)


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.bool_(True), np.array(1.0)])
def test_numbers(reward):
    """All kinds of numbers are rewards."""
    PPOExt("MlpPolicy", Rewarding(lambda _: reward), **SMALL).learn(16)


def test_other_errors_pass():
    """An error of the environment itself is not taken for one of its reward."""

    def fail(reward):
        raise TypeError("of the environment")

    with pytest.raises(TypeError, match=r"^of the environment$") as raised:
        PPOExt("MlpPolicy", Rewarding(fail), **SMALL).learn(16)
    assert describe_bad_reward(raised.value) is None

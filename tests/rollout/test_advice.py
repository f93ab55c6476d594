"""What is legal and seldom meant is said once, with a remedy, and nothing is said of what is meant."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from support.engines import SMALL, make
from support.parity import assert_equal
from support.toys import DICT, VECTOR, ToyEnv, make_toys, warned

from sb3_ppo_ext import PPOExt


def assert_said_once(model, beginning, timesteps=64):
    """A model says it in its first training run alone."""
    for expected in (1, 0):
        found = warned(lambda: model.learn(timesteps))
        assert sum(message.startswith(beginning) for message in found) == expected, found


class Rounding(ToyEnv):
    """Takes real numbers where its action space has integers."""

    def step(self, action):
        return super().step(np.round(action).astype(np.int64))


def test_integers_as_box_actions():
    """A policy samples real numbers for a Box of integers."""
    env = DummyVecEnv([lambda: Rounding(action_space=spaces.Box(0, 3, (2,), np.int64))] * 2)
    assert_said_once(PPOExt("MlpPolicy", VecMonitor(env), **SMALL), "The action space is a Box of integers (int64)")


def test_discount_factors():
    """VecNormalize has a discount factor of its own, which matters where it scales rewards."""
    env = VecNormalize(make_toys(), gamma=0.9)
    assert_said_once(PPOExt("MlpPolicy", env, **SMALL), "VecNormalize scales rewards by returns with gamma=0.9")
    for same in (VecNormalize(make_toys(), gamma=0.9, norm_reward=False), VecNormalize(make_toys(), gamma=0.99)):
        assert warned(lambda same=same: PPOExt("MlpPolicy", same, **SMALL).learn(64)) == []


class OfClass(gym.Wrapper):
    """Its observation space belongs to the class."""

    space = spaces.Dict(DICT.spaces)

    def __init__(self):
        super().__init__(ToyEnv(observation_space=spaces.Dict(DICT.spaces)))
        self.observation_space = self.space


def test_flattened_images():
    """VecNormalize writes into the space of a class, in which images of other environments are then flattened as well."""
    env = VecNormalize(VecMonitor(DummyVecEnv([OfClass])), norm_obs_keys=["camera", "joints"])
    model = PPOExt("MultiInputPolicy", env, n_steps=8, batch_size=8, n_epochs=1, device="cpu")
    assert_said_once(model, "The images 'camera' are normalised by VecNormalize, and then flattened", 8)
    other = PPOExt("MultiInputPolicy", VecMonitor(DummyVecEnv([OfClass])), n_steps=8, batch_size=8, n_epochs=1, device="cpu")
    assert_said_once(other, "The images 'camera' have numbers beyond their space", 8)
    fresh = make_toys(observation_space=spaces.Dict({**DICT.spaces, "grid": spaces.Box(-1.0, 1.0, (3, 3, 3), np.float32)}))
    assert warned(lambda: PPOExt("MultiInputPolicy", fresh, n_steps=8, batch_size=8, n_epochs=1).learn(16)) == []


class Lives(gym.Wrapper):
    """Ends an episode earlier than the monitor inside."""

    def step(self, action):
        observation, reward, _, truncated, info = self.env.step(action)
        return observation, reward, True, truncated, info

    def reset(self, **kwargs):
        return self.env.reset(**kwargs) if not hasattr(self.env.unwrapped, "t") else (self.env.unwrapped.observation, {})


def test_environments_without_a_monitor():
    """Nothing logs the returns of episodes."""
    assert_said_once(PPOExt("MlpPolicy", DummyVecEnv([ToyEnv]), **SMALL), "Episodes end, but the infos have no statistics", 16)
    env = DummyVecEnv([lambda: Lives(make_toys(1, length=1000, p_end=0.0).envs[0])])
    for monitored in (VecMonitor(DummyVecEnv([ToyEnv])), ToyEnv(), env):
        assert warned(lambda monitored=monitored: PPOExt("MlpPolicy", monitored, **SMALL).learn(16)) == []


@pytest.mark.parametrize("option", ["learning_rate", "clip_range", "ent_coef", "lr_decay"])
def test_schedules_that_end_again(option):
    """A second call of `learn` that goes on lets schedules jump back and end again, as in SB3."""
    value = "linear" if option == "lr_decay" else "lin_0.01"
    model = make(**{option: value})
    assert warned(lambda: model.learn(32)) == []
    found = warned(lambda: model.learn(32, reset_num_timesteps=False))
    assert len(found) == 1
    assert option in found[0]
    assert warned(lambda: model.learn(32, reset_num_timesteps=False)) == []
    constant = make()
    assert warned(lambda: constant.learn(32).learn(32, reset_num_timesteps=False)) == []


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("timesteps", [96, 97, 100])
@pytest.mark.parametrize("option", ["learning_rate", "clip_range", "clip_range_vf", "ent_coef", "critic_learning_rate"])
def test_no_schedule_is_negative(option, timesteps):
    """The last rollout may end after ``total_timesteps``: schedules then get a progress of 0, never a negative one."""
    seen = []

    def schedule(progress):
        seen.append(progress)
        return 0.1 * progress

    model = make(**{option: schedule}).learn(timesteps)
    assert model.num_timesteps >= timesteps
    assert min(seen) == 0.0
    assert model._current_progress_remaining == 0.0


def test_as_sb3_until_the_end():
    """With a schedule of SB3's documentation, all updates up to the end are SB3's, bit for bit; SB3's last one unlearns."""
    options = dict(n_steps=16, batch_size=16, n_epochs=2, seed=0, device="cpu", learning_rate=lambda progress: 1e-2 * progress)
    theirs = PPO("MlpPolicy", make_toys(), **options).learn(64).policy.state_dict()
    ours = PPOExt("MlpPolicy", make_toys(), backend="eager", **options).learn(64).policy.state_dict()
    assert_equal(theirs, ours, "policy")
    theirs = PPO("MlpPolicy", make_toys(), **options).learn(80)
    ours = PPOExt("MlpPolicy", make_toys(), backend="eager", **options).learn(80)
    assert theirs.logger.name_to_value["train/learning_rate"] < 0
    assert ours.logger.name_to_value["train/learning_rate"] == 0


def test_load_of_an_instance(tmp_path):
    """`model.load` returns another model, and says so; `PPOExt.load` and subclasses say nothing."""
    model = make()
    model.save(tmp_path / "model")
    found = warned(lambda: model.load(tmp_path / "model"))
    assert ["set_parameters" in message for message in found] == [True]
    assert model.load(tmp_path / "model", env=make_toys()).num_timesteps == 0

    class Sub(PPOExt):
        """As in a script."""

    assert warned(lambda: [cls.load(tmp_path / "model") for cls in (PPOExt, Sub)]) == []
    assert type(Sub.load(tmp_path / "model")) is Sub


def test_vector_space_is_left_alone():
    """Nothing is said of an ordinary environment."""
    assert warned(lambda: PPOExt("MlpPolicy", make_toys(observation_space=VECTOR), **SMALL).learn(64)) == []

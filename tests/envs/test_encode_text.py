"""Strings in observations become numbers."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from support.toys import Words

from sb3_ppo_ext import EncodeText, PPOExt


class Talking(gym.Env):
    """Says what is to be done: the action whose number is said is rewarded."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation_space):
        self.observation_space = observation_space

    def _observed(self):
        self.wanted = int(self.np_random.integers(2))
        text = ["take the left one", "take the right one"][self.wanted]
        if not isinstance(self.observation_space, spaces.Dict):
            return text
        return {"mission": text, "image": np.zeros((2, 2), np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observed(), {}

    def step(self, action):
        reward = float(action == self.wanted)
        return self._observed(), reward, False, False, {}


DICT = spaces.Dict(image=spaces.Box(0, 1, (2, 2), np.float32), mission=Words())


def test_a_dictionary():
    """Strings become numbers, and other parts stay as they are; the space fits."""
    env = EncodeText(Talking(DICT), n_words=4, n_codes=8)
    assert env.observation_space["mission"] == spaces.Box(0, 1, (32,), np.uint8)
    assert env.observation_space["image"] == DICT["image"]
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space
    codes = observation["mission"].reshape(4, 8)
    assert codes.sum(axis=1).tolist() == [1, 1, 1, 1]
    assert type(env.reset()[0]["image"]) is np.ndarray


def test_a_string():
    """An observation that is a string becomes a vector, and the environment is one of Gymnasium's."""
    env = EncodeText(Talking(spaces.Text(30, charset="abcdefghijklmnopqrstuvwxyz ")))
    assert env.observation_space.shape == (32 * 64,)
    check_env(env, skip_render_check=True)
    assert env.spec is None


def test_codes():
    """A code depends on the word and on its place, not on its case; further words are left out."""
    env = EncodeText(Talking(spaces.Text(100)), n_words=3, n_codes=1024)

    def codes(text):
        return env.observation(text).reshape(3, 1024)

    red, blue = codes("Go, red"), codes("go , blue door")
    assert np.array_equal(red[:2], blue[:2])
    assert not np.array_equal(red[2], blue[2])
    assert red.sum() == blue.sum() == 3
    assert np.array_equal(codes("red door")[0], red[2])
    assert codes("").sum() == 0


@pytest.mark.parametrize(
    ("space", "kwargs", "message"),
    [
        (spaces.Box(0, 1, (2,)), {}, "no part of its observations is a string, but Box"),
        (spaces.Dict(a=spaces.Discrete(2)), {}, "no part of its observations is a string, but Dict"),
        (DICT, dict(n_words=0), "`n_words=0`"),
        (DICT, dict(n_codes=1.5), "`n_codes=1.5`"),
    ],
)
def test_bad_arguments(space, kwargs, message):
    """It refuses what it has nothing to do for, and sizes that are none."""
    with pytest.raises(ValueError, match=message):
        EncodeText(Talking(space), **kwargs)


def test_a_policy_reads_it():
    """A policy learns to do what is said."""
    env = gym.wrappers.TimeLimit(EncodeText(Talking(DICT)), 20)
    model = PPOExt("MultiInputPolicy", env, n_steps=128, batch_size=32, learning_rate=3e-3, seed=0, device="cpu")
    model.learn(1024)
    assert np.mean([episode["r"] for episode in list(model.ep_info_buffer)[-10:]]) > 17


@pytest.mark.parametrize("space", [spaces.Text(9), spaces.Dict(speed=spaces.Box(-1, 1, (2,)), order=spaces.Text(9))])
def test_strings_without_it(space):
    """The message for strings that no policy can read names this wrapper."""
    env = gym.Env()
    env.observation_space, env.action_space = space, spaces.Discrete(2)
    with pytest.raises(ValueError, match=r"sb3_ppo_ext\.EncodeText\(env\)"):
        PPOExt("MlpPolicy" if isinstance(space, spaces.Text) else "MultiInputPolicy", env)


def test_unknown_spaces_without_samples():
    """A space of an unknown class, which has no samples, is refused as such."""
    env = gym.Env()
    env.observation_space, env.action_space = spaces.Space(), spaces.Discrete(2)
    with pytest.raises(ValueError, match="which no policy can read: use Box"):
        PPOExt("MlpPolicy", env)

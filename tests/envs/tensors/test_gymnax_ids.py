"""Environments of gymnax by name, through Gymnasium's registry."""

from importlib.util import find_spec

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.vec_env import DummyVecEnv
from support.processes import run_fresh

from sb3_ppo_ext import JaxVecEnv
from sb3_ppo_ext.envs.tensors import gymnax_ids

# Not imported here: it takes seconds.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("jax"),
    pytest.mark.skipif(find_spec("gymnax") is None, reason="needs gymnax"),
]


def test_ids_are_those_of_gymnax():
    """All ids of gymnax are registered, except the one that needs a data set."""
    from gymnax.registration import registered_envs

    assert set(gymnax_ids.NAMES) == set(registered_envs) - {"MNISTBandit-bsuite", "SimpleBandit-bsuite"}
    assert {f"gymnax/{name}" for name in gymnax_ids.NAMES} <= set(gym.envs.registry)


def test_single_environment():
    """One copy keeps Gymnasium's rules, and steps as a vectorised environment with the same seed and actions."""
    env = gym.make("gymnax/CartPole-v1", env_params={"max_steps_in_episode": 12})
    check_env(env.unwrapped, skip_render_check=True)
    single = DummyVecEnv([lambda: env])
    copies = JaxVecEnv("CartPole-v1", {"max_steps_in_episode": 12})
    single.seed(4), copies.seed(4)
    np.testing.assert_array_equal(single.reset(), copies.reset())
    for action in (1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0):
        given, expected = single.step([action]), copies.step(np.array([action]))
        for one, other in zip(given[1:3], expected[1:3], strict=True):
            np.testing.assert_array_equal(one, other)
    assert given[3][0]["TimeLimit.truncated"]
    np.testing.assert_array_equal(given[3][0]["terminal_observation"], expected[3][0]["terminal_observation"])


def test_images_are_refused():
    """There are no images."""
    with pytest.raises(ValueError, match="--no-render"):
        gymnax_ids.GymnaxEnv("CartPole-v1", render_mode="human")


def test_registering_is_light():
    """The ids are registered without JAX, also by a `module:id` of Gymnasium, which makes one."""
    code = """
import sys, gymnasium as gym, sb3_ppo_ext.envs.tensors.gymnax_ids
print("jax" in sys.modules, "gymnax/Pendulum-v1" in gym.registry)
"""
    assert run_fresh(code) == "False True\n"
    assert gym.make("sb3_ppo_ext.envs.tensors.gymnax_ids:gymnax/Pendulum-v1").action_space.shape == (1,)

"""Rollouts as tensors: equal to SB3's buffer."""

import pickle

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from support.toys import make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.rollout.buffer import ARRAYS, TensorRolloutBuffer
from sb3_ppo_ext.rollout.gae import discounted_sums

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
SPACES = {
    "box": (BOX, spaces.Box(-1.0, 1.0, (2,), np.float32)),
    "discrete": (spaces.Discrete(5), spaces.Discrete(4)),
    "dict": (spaces.Dict(a=BOX, b=spaces.Box(0, 255, (2, 4, 4), np.uint8)), spaces.MultiDiscrete([3, 2])),
    "binary": (spaces.MultiBinary(3), spaces.MultiBinary(2)),
}


def sampled(space, n):
    parts = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([part[key] for part in parts]) for key in space.spaces}
    return np.stack(parts)


def fill(buffers, n_steps, n_envs, observation_space, action_space, p_end=0.2):
    """Add the same random steps to several buffers."""
    rng = np.random.default_rng(0)
    observation_space.seed(0), action_space.seed(0)
    for _ in range(n_steps):
        observations, actions = sampled(observation_space, n_envs), sampled(action_space, n_envs)
        rewards, starts = rng.normal(size=n_envs).astype(np.float32), rng.random(n_envs) < p_end
        values, log_probs = (th.from_numpy(rng.normal(size=n_envs).astype(np.float32)) for _ in range(2))
        for buffer in buffers:
            buffer.add(observations, actions, rewards, starts, values.unsqueeze(1), log_probs)
    last_values, dones = th.from_numpy(rng.normal(size=(n_envs, 1)).astype(np.float32)), rng.random(n_envs) < p_end
    for buffer in buffers:
        buffer.compute_returns_and_advantage(last_values, dones)


def pair(name, n_steps=7, n_envs=3):
    observation_space, action_space = SPACES[name]
    of_sb3 = DictRolloutBuffer if isinstance(observation_space, spaces.Dict) else RolloutBuffer
    kwargs = dict(device="cpu", gae_lambda=0.9, gamma=0.97, n_envs=n_envs)
    buffers = [cls(n_steps, observation_space, action_space, **kwargs) for cls in (of_sb3, TensorRolloutBuffer)]
    fill(buffers, n_steps, n_envs, observation_space, action_space)
    return buffers


def assert_equal(one, other):
    if isinstance(one, dict):
        for key in one:
            assert_equal(one[key], other[key])
    else:
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SPACES)
def test_arrays_are_those_of_sb3(name):
    """The arrays are equal before and after minibatches are drawn, and so are the minibatches."""
    expected, actual = pair(name)
    for array in ARRAYS:
        assert_equal(getattr(expected, array), getattr(actual, array))
    assert actual.full
    minibatches = []
    for buffer in (expected, actual):
        np.random.seed(5)
        minibatches.append(list(buffer.get(4)))
    for one, other in zip(*minibatches, strict=True):
        for part, values in zip(one, other, strict=True):
            assert_equal(part, values)
            if isinstance(part, th.Tensor):
                assert part.shape == values.shape
    for array in ARRAYS:
        assert_equal(getattr(expected, array), getattr(actual, array))


def test_arrays_can_be_written():
    """On the CPU, the arrays are the memory of the tensors; a new array is copied into them."""
    _, buffer = pair("box")
    buffer.rewards[0, 0] = 7.0
    assert buffer.tensors["rewards"][0, 0] == 7.0
    buffer.advantages = np.full((7, 3), 2.0)
    assert (buffer.tensors["advantages"] == 2.0).all()


def test_memory_is_kept():
    """A new rollout uses the memory of the last one."""
    _, buffer = pair("dict")
    before = buffer.tensors["observations"]["b"].data_ptr()
    buffer.reset()
    assert not buffer.full
    assert buffer.tensors["observations"]["b"].data_ptr() == before


@pytest.mark.parametrize("n_steps", [1, 2, 3, 8, 33, 200])
def test_discounted_sums(n_steps):
    """The parallel scan gives the sums of the loop over the steps."""
    generator = th.Generator().manual_seed(0)
    deltas, decays = (th.rand(n_steps, 4, generator=generator, dtype=th.float64) for _ in range(2))
    expected, following = th.zeros_like(deltas), th.zeros(4, dtype=th.float64)
    for step in reversed(range(n_steps)):
        expected[step] = following = deltas[step] + decays[step] * following
    th.testing.assert_close(discounted_sums(deltas, decays), expected)


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy", "MlpTransformerPolicy"])
def test_a_pickled_buffer_is_one(policy):
    """What is written into a pickled buffer arrives in the memory of the policy, and in the arrays of the buffer."""
    model = PPOExt(policy, make_toys(), n_steps=8, batch_size=8, n_epochs=1, device="cpu", seed=0).learn(16)
    buffer = pickle.loads(pickle.dumps(model.rollout_buffer))
    assert_equal(buffer.observations, model.rollout_buffer.observations)
    buffer.reset()
    written = np.full_like(buffer.observations[0], 0.25)
    buffer.observe(written, np.ones(2))
    assert_equal(buffer.observations[0], written)
    if buffer.memory is not None:
        n_before = buffer.memory.n_before
        assert_equal(buffer.memory.rows.observations[n_before].numpy(), written)
        assert_equal(buffer.memory.rows.starts[n_before].numpy(), np.ones(2, np.float32))

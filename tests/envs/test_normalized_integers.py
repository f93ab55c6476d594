"""Observations of integers that `VecNormalize` normalises, which are no integers any more."""

import warnings

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from support.parity import assert_equal
from support.toys import Samples

from sb3_ppo_ext import PPOExt

OPTIONS = dict(n_steps=32, batch_size=32, n_epochs=2, seed=0, device="cpu")
RAM = spaces.Box(0, 255, (8,), np.uint8)
PARTS = spaces.Dict({"ram": RAM, "speed": spaces.Box(-1, 1, (2,), np.float32), "level": spaces.Box(-3, 5, (1,), np.int64)})


class Memory(Samples):
    """The first byte says what the better action is."""

    def __init__(self, observation_space=RAM):
        super().__init__(observation_space)

    def reset(self, **kwargs):
        self.time = 0
        self.seen, info = super().reset(**kwargs)
        return self.seen, info

    def step(self, action):
        self.time += 1
        ram = self.seen["ram"] if isinstance(self.seen, dict) else self.seen
        self.seen, *_ = super().step(action)
        return self.seen, float(action == (ram[0] > 127)), self.time % 16 == 0, False, {}

    def action_masks(self):
        return np.ones(2, bool)


def normalized(space=RAM, **kwargs):
    return VecNormalize(DummyVecEnv([lambda: Monitor(Memory(space))] * 2), norm_reward=False, **kwargs)


@pytest.mark.many(one_in=5)
@pytest.mark.parametrize("backend", ["auto", "native", "fused", "device"])
@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy", "MlpTransformerPolicy"])
def test_stored_as_the_policy_reads_them(backend, policy):
    """The rollout buffer has what the policy has acted on, and nothing is warned of."""
    if (backend, policy) in {("native", "MlpLstmPolicy"), ("native", "MlpTransformerPolicy"), ("device", "MlpLstmPolicy")}:
        pytest.skip("not supported")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = PPOExt(policy, normalized(), backend=backend, **OPTIONS).learn(64)
    stored = np.asarray(model.rollout_buffer.observations)
    assert stored.dtype == np.float32
    assert len(np.unique(stored)) > 100
    assert stored.std() == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("masking", [False, True])
def test_parts_of_dictionaries(masking):
    """Parts that are not normalised stay integers, and masks as they are."""
    model = PPOExt("MultiInputPolicy", normalized(PARTS, norm_obs_keys=["ram", "speed"]), action_masking=masking, **OPTIONS)
    model.learn(64)
    kinds = {key: part.dtype.kind for key, part in model.rollout_buffer.observations.items() if key != "action_mask"}
    assert kinds == {"ram": "f", "speed": "f", "level": "i"}


def test_other_environments():
    """The buffer fits environments that are normalised from then on, or not any more."""
    model = PPOExt("MlpPolicy", DummyVecEnv([Memory] * 2), **OPTIONS).learn(64)
    assert model.rollout_buffer.observations.dtype == np.uint8
    model.set_env(normalized())
    model.learn(64)
    assert model.rollout_buffer.observations.dtype == np.float32
    model.set_env(DummyVecEnv([Memory] * 2))
    model.learn(64)
    assert model.rollout_buffer.observations.dtype == np.uint8


def test_as_sb3():
    """The eager engine equals SB3, which rounds them, and says so."""
    theirs = PPO("MlpPolicy", normalized(), **OPTIONS).learn(64)
    with pytest.warns(UserWarning, match=r"`VecNormalize` normalises observations in Box\(0, 255, \(8,\), uint8\)"):
        ours = PPOExt("MlpPolicy", normalized(), backend="eager", **OPTIONS).learn(64)
    assert_equal(theirs.policy.state_dict(), ours.policy.state_dict(), "policy")


def test_normalized_masks():
    """A mask that is normalised would be 1 everywhere."""
    space = spaces.Dict({"ram": RAM, "mask": spaces.Box(0, 1, (2,), np.float32)})
    options = dict(action_masking=True, action_mask_key="mask", **OPTIONS)
    with pytest.raises(ValueError, match=r"`action_mask_key='mask'` is not valid: .*`norm_obs_keys=\['ram'\]`"):
        PPOExt("MultiInputPolicy", normalized(space), **options)
    PPOExt("MultiInputPolicy", normalized(space, norm_obs_keys=["ram"]), **options)

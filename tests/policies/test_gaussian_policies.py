"""The keywords of Gaussian policies: `mean_tanh`, `learn_std` and `log_std_init`."""

import warnings

import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO
from support.policies import SCHEDULE, SMALL, make
from support.toys import BOX_ACTION, VECTOR, RolloutRecorder, make_toys
from support.zips import Zip

from sb3_ppo_ext import MlpPolicy, PPOExt


def test_mean_within_the_bounds():
    """`mean_tanh` bounds the mean to the box; samples are those of a Gaussian, and are clipped."""
    model = make(policy_kwargs=dict(mean_tanh=True, log_std_init=0.5))
    low, high = BOX_ACTION.low, BOX_ACTION.high
    observation = np.float32([0.3, -0.2, 0.9])
    middle = model.predict(observation, deterministic=True)[0]
    np.testing.assert_allclose(middle, (low + high) / 2, atol=0.05)
    linear = model.policy.action_net[0]
    with th.no_grad():
        linear.bias.copy_(th.tensor([0.5, 50.0]))
        linear.weight.zero_()
    expected = [(low[0] + high[0]) / 2 + (high[0] - low[0]) / 2 * np.tanh(0.5), high[1]]
    np.testing.assert_allclose(model.predict(observation, deterministic=True)[0], expected, rtol=1e-6)
    recorder = RolloutRecorder()
    model.learn(32, callback=recorder)
    actions = recorder.rollouts[0]["actions"]
    assert (actions > high).any()
    np.testing.assert_array_equal(np.clip(recorder.steps[0]["actions"], low, high), recorder.steps[0]["clipped_actions"])
    # Another function: parameters of a policy without it do not fit.
    with pytest.raises(RuntimeError, match=r"action_net\.weight"):
        make().set_parameters(model.get_parameters())


@pytest.mark.parametrize("action_dist", ["gaussian", "squashed_gaussian"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_standard_deviation_that_is_not_learned(action_dist, optimizer):
    """With `learn_std=False` the standard deviation stays, and everything else learns."""
    fixed = dict(learn_std=False, log_std_init=-1.0)
    model = make(action_dist, policy_kwargs=fixed, optimizer=optimizer, ent_coef=0.1, learning_rate=0.01)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(64)
    after = model.policy.state_dict()
    assert th.equal(after["log_std"], th.full((2,), -1.0))
    assert not th.equal(after["action_net.weight"], before["action_net.weight"])
    assert model.logger.name_to_value["train/std"] == pytest.approx(np.exp(-1))


@pytest.mark.parametrize("algorithm", [PPO, PPOExt])
def test_configured_standard_deviation_wins(algorithm):
    """A fixed standard deviation wins over that of a zip, in `load` and in `set_parameters`, with a warning."""
    kwargs = dict(SMALL, policy_kwargs=dict(net_arch=[8, 8], log_std_init=0.3))
    learned = algorithm("MlpPolicy", make_toys(), **kwargs).learn(64)
    saved = Zip(learned)
    fixed = dict(net_arch=[8, 8], learn_std=False, log_std_init=-1.5)
    with pytest.warns(UserWarning, match=r"stays at exp of `log_std_init=-1\.5` .* is not used"):
        loaded = saved.load(env=make_toys(), device="cpu", policy_kwargs=fixed)
    assert loaded.policy.log_std.tolist() == [-1.5, -1.5]
    assert th.equal(loaded.policy.action_net.weight, learned.policy.action_net.weight)
    loaded.learn(32)
    assert loaded.policy.log_std.tolist() == [-1.5, -1.5]
    other = make(policy_kwargs=fixed)
    with pytest.warns(UserWarning, match="is not used"):
        other.set_parameters(saved.open())
    assert other.policy.log_std.tolist() == [-1.5, -1.5]
    # Its own zip has nothing to say, and what else is in `policy_kwargs` cannot change, as in SB3.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Zip(loaded).load(device="cpu").policy.log_std.tolist() == [-1.5, -1.5]
    for other in (dict(net_arch=[4]), dict(ortho_init=False)):
        with pytest.raises(ValueError, match="policy kwargs"):
            saved.load(policy_kwargs={**fixed, **other})
    with pytest.raises(ValueError, match="policy kwargs"):
        saved.load(policy_kwargs=dict(net_arch=[8, 8], log_std_init=-1.5))


def test_parameters_can_be_assigned():
    """`load_state_dict(assign=True)` does not make a fixed standard deviation learn again."""
    policies = [MlpPolicy(VECTOR, BOX_ACTION, SCHEDULE, learn_std=fixed, log_std_init=-1.0) for fixed in (True, False)]
    policies[1].load_state_dict(policies[0].state_dict(), assign=True)
    assert policies[1].action_net.weight.data_ptr() == policies[0].action_net.weight.data_ptr()
    assert not policies[1].log_std.requires_grad

"""Losses beside the policy's and the value function's: a subclass's own, and that of the bounds."""

import copy

import numpy as np
import pytest
import torch as th
from support.parity import assert_equal
from support.training import Recording, changed, logged, make, run

from sb3_ppo_ext import PPOExt


class Symmetric(PPOExt):
    """Wants the mean action for a mirrored observation to be the mirrored one."""

    def extra_actor_loss(self, rollout_data, distribution):
        mirrored = self.policy.get_distribution(-rollout_data.observations)
        difference = (distribution.mode() + mirrored.mode()).square().mean()
        return 10.0 * difference, {"asymmetry": difference, "symmetry/batch": float(len(rollout_data.actions))}


def test_extra_actor_loss():
    """A subclass's loss is minimised and logged."""
    model = make(Symmetric, policy_kwargs=dict(net_arch=[8]), learning_rate=0.01)
    with th.no_grad():
        model.policy.action_net.bias.fill_(0.5)  # the same for both mirror images
    model.learn(32)
    first = logged(model)
    assert first["train/extra_actor_loss"] == pytest.approx(10 * first["train/asymmetry"])
    model.learn(640)
    assert logged(model)["train/asymmetry"] < 0.05 * first["train/asymmetry"]
    assert logged(model)["symmetry/batch"] == 8


def test_extra_actor_loss_has_a_distribution_of_its_own():
    """
    Another distribution that the hook asks for does not overwrite its own: a policy that is its mirror image has no asymmetry.
    """
    model = make(Symmetric, policy_kwargs=dict(net_arch=[]), learning_rate=0.0)
    with th.no_grad():
        model.policy.action_net.weight.fill_(1.0)
    model.learn(32)
    assert logged(model)["train/asymmetry"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["approx_kl", "grad_norm", "loss"])
def test_names_that_the_hook_cannot_log(name):
    """The hook cannot log under names that mean something else."""

    class Clashing(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return 0.0, {name: 1.0}

    with pytest.raises(ValueError, match=f"`extra_actor_loss='{name}'`.*another one"):
        make(Clashing).learn(32)


def test_number_as_extra_actor_loss():
    """A number as loss has no gradient, but is logged."""

    class Constant(PPOExt):
        def extra_actor_loss(self, rollout_data, distribution):
            return np.float32(3.0), {}

    model = run(Constant, backend="eager")
    assert logged(model)["train/extra_actor_loss"] == 3.0
    assert_equal(run(backend="eager").policy.state_dict(), model.policy.state_dict(), "policy")


def test_extra_actor_loss_sees_what_the_policy_loss_uses():
    """The hook gets SB3's minibatches, whose advantages are normalised."""
    model = make(Recording, advantage_norm="minibatch").learn(32)
    for data, _ in model.seen:
        assert data.advantages.mean().item() == pytest.approx(0, abs=1e-6)
        assert data.advantages.std().item() == pytest.approx(1, abs=1e-5)


def test_bounds_loss_of_a_squashed_policy():
    """The bounds loss acts on the mean before the squashing, whose bounds are -1 and 1."""
    policy_kwargs = dict(squash_output=True)
    common = dict(use_sde=True, policy_kwargs=policy_kwargs, bounds_limit=0.0)
    one, other = run(**common), run(**common, bounds_coef=0.1)
    assert changed(one, other) == "actor"
    first = make(**common, bounds_coef=0.1, n_epochs=1, batch_size=32)
    before = copy.deepcopy(first.policy.state_dict())
    first.learn(32)
    first.policy.load_state_dict(before)
    means = first.policy.get_distribution(th.tensor(first.rollout_buffer.observations)).distribution.mean
    assert logged(first)["train/bounds_loss"] == pytest.approx(means.square().sum(dim=1).mean().item(), rel=1e-4)
    assert 0 <= logged(other)["train/actions_at_bounds"] < 0.5


def test_bounds_loss_pulls_the_mean_back():
    """A mean far outside of the bounds comes back, in units of the bounds."""
    model = make(bounds_coef=1.0, learning_rate=0.02, normalize_advantage=False, vf_coef=0.0, n_epochs=10)
    with th.no_grad():
        model.policy.action_net.bias.copy_(th.tensor([4.0, -6.5]))  # z = 4 and -3.5 in [-1, 1] x [-2, 3]
    model.learn(320)
    observation = th.zeros(1, 3)
    z = (model.policy.get_distribution(observation).mode() - T_MIDDLE) / T_HALF
    assert z.abs().max() < 1.6


T_MIDDLE, T_HALF = th.tensor([0.0, 0.5]), th.tensor([1.0, 2.5])

"""Auxiliary losses with hybrid action spaces: smoothness is that of all parts, mirror images are refused."""

import pytest
import torch as th
from support.hybrid import KICK
from support.toys import make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.distributions import location

SMALL = dict(n_steps=16, batch_size=16, n_epochs=2, seed=3, device="cpu", policy_kwargs=dict(net_arch=[8]))


def test_smoothness_is_that_of_all_parts():
    """The losses of CAPS act on the probabilities of discrete parts as on the means of boxes."""
    losses = {"caps_temporal": 1.0, "caps_spatial": dict(coef=0.5, std=0.1)}
    models = [PPOExt("MlpPolicy", make_toys(action_space=KICK), auxiliary_losses=each, **SMALL) for each in (losses, None)]
    for model in models:
        model.learn(64)
    assert models[0].logger.name_to_value["train/caps_temporal_loss"] > 0
    observations = th.randn(5, 3)
    weights = [model.policy.action_net.weight for model in models]
    assert not th.equal(*weights)
    found = location(models[0].policy.get_distribution(observations))
    (gradient,) = th.autograd.grad(found.square().sum(), [weights[0]])
    assert (gradient.abs().sum(dim=1) > 0).all()


def test_mirror_images_are_refused():
    """There is no form for the mirror image of a dictionary of actions."""
    losses = {"mirror": dict(coef=0.5, obs=[0, 1, [2, -1]], action=[0])}
    with pytest.raises(ValueError, match="cannot be mirrored"):
        PPOExt("MlpPolicy", make_toys(action_space=KICK), auxiliary_losses=losses, **SMALL).learn(32)

"""On a device, distributions do not wait for it, compute what SB3's do, and let nobody act whose outputs are NaN."""

import math

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import make_proba_distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from support.toys import BOX_ACTION, make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.distributions import family_of, kl_divergence, on_device, parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are trying to run PPOExt on the GPU"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]
ACTIONS = {
    "gaussian": BOX_ACTION,
    "categorical": spaces.Discrete(4),
    "multi-categorical": spaces.MultiDiscrete([3, 2]),
    "Bernoulli": spaces.MultiBinary(3),
}
OPTIONS = {
    **{name: dict(env=dict(action_space=space)) for name, space in ACTIONS.items()},
    "beta": dict(action_dist="beta"),
    "squashed Gaussian": dict(action_dist="squashed_gaussian"),
    "gSDE": dict(use_sde=True),
    "transformer": dict(policy="MlpTransformerPolicy"),
}


class Own(ActorCriticPolicy):
    """A policy of a user."""


def make(sim, policy="MlpPolicy", env=None, **options):
    return PPOExt(policy, make_toys(**(env or {})), device=sim.name, n_steps=8, batch_size=8, n_epochs=1, seed=0, **options)


def break_policy(model, value=math.nan):
    with th.no_grad():
        model.policy.action_net.bias.fill_(value)


@pytest.mark.parametrize("actions", ["gSDE", *ACTIONS])
def test_equal_to_sb3(actions):
    """Samples, modes, densities, entropies, KL divergences and gradients equal SB3's to the bit."""
    space, use_sde = ACTIONS.get(actions, BOX_ACTION), actions == "gSDE"
    of_sb3 = make_proba_distribution(space, use_sde)
    layer = of_sb3.proba_distribution_net(5)
    layer, log_std = layer if isinstance(layer, tuple) else (layer, None)
    ours = on_device(of_sb3, th.device("cpu"))
    assert type(ours) is not type(of_sb3)
    assert family_of(ours) is family_of(of_sb3)
    latents, results = th.randn(7, 5), []
    for distribution in (of_sb3, ours):
        th.manual_seed(1)
        if use_sde:
            distribution.sample_weights(log_std, batch_size=7)
        inputs = [layer(latents), *([] if log_std is None else [log_std]), *([latents] if use_sde else [])]
        distribution.proba_distribution(*inputs)
        sampled = distribution.get_actions()
        log_prob, entropy = distribution.log_prob(sampled), distribution.entropy()
        divergence = kl_divergence(parameters(distribution).detach().roll(1, 0), distribution)
        gradient = th.autograd.grad((log_prob + entropy + divergence).sum(), layer.weight)[0]
        results.append([sampled, distribution.get_actions(deterministic=True), log_prob, entropy, divergence, gradient])
    for expected, actual in zip(*results, strict=True):
        assert expected.dtype == actual.dtype
        assert th.equal(expected, actual)


@pytest.mark.integration
@pytest.mark.parametrize("options", OPTIONS)
def test_no_waits(sim, options):
    """A call of the policy and an evaluation of actions make nobody wait for the device."""
    model = make(sim, **OPTIONS[options])
    if options == "transformer":
        model.learn(16)
        rollout = next(model.rollout_buffer.get(8))
        with sim.counting() as counts:
            model.policy.evaluate_actions(rollout.observations, rollout.actions)
    else:
        observations = th.zeros(2, 3, device=sim.name)
        if model.use_sde:
            model.policy.reset_noise(2)  # As each rollout does
        with sim.counting() as counts:
            actions = model.policy(observations)[0]
            model.policy.get_distribution(observations).entropy()
            # `evaluate_actions` checks latents of users, this does not.
            getattr(model.policy, "evaluate_samples", model.policy.evaluate_actions)(observations, actions)
    assert (counts.to_host, counts.items) == (0, 0)


@pytest.mark.integration
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_policy(sim, options, value):
    """A policy whose outputs are not finite is refused while a rollout is collected, and when it predicts."""
    model = make(sim, **OPTIONS[options])
    if value == math.inf and options == "Bernoulli":
        pytest.skip("an infinite logit is a probability of 1")
    break_policy(model, value)
    message = "not finite.*action_net.*bias" if options not in ("beta", "squashed Gaussian") else "not finite"
    with pytest.raises(ValueError, match=message):
        model.learn(16)
    assert model.num_timesteps == 0
    if value == math.inf:
        return  # SB3 clips infinite actions.
    observation = np.zeros((2, 3), np.float32)
    if model.use_sde:
        model.policy.reset_noise(2)
    for deterministic in (False, True):
        with pytest.raises(ValueError, match="not finite"):
            model.predict(observation, deterministic=deterministic)


@pytest.mark.integration
def test_whose_policies(sim):
    """Policies of users keep SB3's distributions, and so do all policies on the CPU."""
    assert type(make(sim).policy.action_dist).__name__ == "GaussianOnDevice"
    for model in (make(sim, policy=Own), PPOExt("MlpPolicy", make_toys(), device="cpu")):
        assert type(model.policy.action_dist).__module__ == "stable_baselines3.common.distributions"

"""Engines without a model: a policy, a rollout buffer and an immutable configuration are all that an update needs."""

import copy
import dataclasses

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from support.engines import relative_error
from support.toys import BOX_ACTION, VECTOR

from sb3_ppo_ext import MlpPolicy
from sb3_ppo_ext.engines.engine import Setup
from sb3_ppo_ext.engines.registry import ENGINES, choose_backend
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.losses import PENALTIES, LossConfig, Penalty
from sb3_ppo_ext.update.rollout_data import Rollout

pytestmark = pytest.mark.usefixtures("quick_compiler")

BACKENDS = [name for name in ENGINES if name != "compile"]
SPACES = {"box": BOX_ACTION, "discrete": spaces.Discrete(3), "multi-discrete": spaces.MultiDiscrete([2, 3])}
LOSS = LossConfig(clip_range=0.2, ent_coef=0.01, action_bounds=(th.tensor([-1.0, -2.0]), th.tensor([1.0, 3.0])))


def compiled(*case):
    """A case of the engine that compiles, which takes seconds."""
    return pytest.param("compile", *case, marks=pytest.mark.integration)


def make_policy(action_space=BOX_ACTION, policy_class=ActorCriticPolicy, **kwargs):
    th.manual_seed(0)
    return policy_class(VECTOR, action_space, lambda _: 3e-3, net_arch=[8], **kwargs)


def fill(policy, n_steps=16, n_envs=2):
    """A rollout buffer with what the policy does on random observations, and random advantages."""
    th.manual_seed(1)
    rng = np.random.default_rng(0)
    buffer = RolloutBuffer(n_steps, VECTOR, policy.action_space, "cpu", n_envs=n_envs)
    for _ in range(n_steps):
        observations = rng.uniform(-1, 1, (n_envs, *VECTOR.shape)).astype(np.float32)
        with th.no_grad():
            actions, values, log_probs = policy(th.from_numpy(observations))
        actions = actions.numpy().reshape(n_envs, -1)
        buffer.add(observations, actions, rng.normal(size=n_envs), np.zeros(n_envs), values, log_probs)
    buffer.compute_returns_and_advantage(th.zeros(n_envs), np.zeros(n_envs))
    return buffer


def updated(backend, policy, config, engine=None):
    """A copy of the policy after one update."""
    policy = copy.deepcopy(policy)
    policy.optimizer = th.optim.Adam(policy.parameters(), lr=3e-3, eps=1e-5)
    buffer = fill(policy)
    np.random.seed(0)
    result = ENGINES[backend](policy).update(Rollout(buffer), config)
    return policy, result


def assert_same(one, other, rtol=1e-4):
    for name, expected in one.state_dict().items():
        assert relative_error(expected, other.state_dict()[name]) < rtol, name


CASES = [*((name, "box") for name in BACKENDS), ("native", "discrete"), ("native", "multi-discrete"), compiled("box")]


@pytest.mark.parametrize(("backend", "action_space"), CASES)
def test_engine_without_a_model(backend, action_space):
    """It updates as the reference does, and says what it measured."""
    discrete = action_space == "discrete"
    config = UpdateConfig(LOSS, n_epochs=3, batch_size=8, discrete_actions=discrete)
    policy = make_policy(SPACES[action_space])
    expected, reference = updated("eager", policy, config)
    actual, result = updated(backend, policy, config)
    assert relative_error(policy.action_net.weight, actual.action_net.weight) > 1e-3
    assert_same(expected, actual)
    assert result.n_epochs == 3
    for name in ("approx_kl", "loss", "grad_norm", "entropy_loss", "clip_fraction"):
        assert result.metrics.mean(name) == pytest.approx(reference.metrics.mean(name), rel=1e-3, abs=1e-5), name


def test_configurations_do_not_change():
    """Neither that of an update nor that of its loss."""
    config = UpdateConfig(LOSS)
    for of, name in ((config, "n_epochs"), (config.loss, "clip_range")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(of, name, 1)


def everything(inputs, config):
    """A penalty that reads all that there is."""
    ratio = inputs.ratio * inputs.log_ratio.exp().detach()
    of_critic = (inputs.values - inputs.data.returns).abs().mean()
    of_actor = (ratio - 1).square().mean() + 0.1 * inputs.log_prob.square().mean() - 0.3 * inputs.entropy.mean()
    drift = (inputs.distribution.distribution.mean - inputs.old_distribution.chunk(2, dim=1)[0]).square().mean()
    return of_actor + of_critic + drift + (ratio * inputs.data.advantages * inputs.data.observations.mean(dim=1)).mean()


def of_ratio(inputs, config):
    """One that reads the ratio alone."""
    return (inputs.ratio - 1).square().mean()


def of_values(inputs, config):
    """One that reads the critic alone."""
    return inputs.values.square().mean()


LOSSES = {
    "everything": Penalty(
        "coef",
        ("data", "values", "log_prob", "entropy", "log_ratio", "ratio", "distribution", "old_distribution"),
        everything,
    ),
    "ratio": Penalty("coef", ("ratio",), of_ratio),
    "values": Penalty("coef", ("values",), of_values),
}


DRAWS = [dict(accumulate_grad=2, priority_alpha=0.5, priority_segment=4), dict(), dict(accumulate_grad=2)]


@pytest.mark.parametrize(
    ("backend", "name", "options"),
    [
        *((name, "everything", {}) for name in BACKENDS if name != "eager"),
        *(("native", name, options) for name, options in zip(LOSSES, DRAWS, strict=True)),
    ],
    ids=str,
)
def test_new_penalty(backend, name, options, monkeypatch):
    """A row is all that it takes: on each engine it acts as in the reference, whatever it reads."""
    monkeypatch.setitem(PENALTIES, "new", LOSSES[name])
    policy = make_policy()
    off, on = (
        UpdateConfig(dataclasses.replace(LOSS, penalties=penalties), n_epochs=3, batch_size=8, **options)
        for penalties in ({}, {"new": 2.0})
    )
    expected, reference = updated("eager", policy, on)
    actual, result = updated(backend, policy, on)
    without, _ = updated("eager", policy, off)
    assert max(relative_error(p, q) for p, q in zip(without.parameters(), expected.parameters(), strict=True)) > 1e-3
    assert_same(expected, actual, rtol=1e-3)
    assert result.metrics.mean("new") == pytest.approx(reference.metrics.mean("new"), rel=1e-3)
    assert result.metrics.mean("loss") == pytest.approx(reference.metrics.mean("loss"), rel=1e-3)


def test_choice_of_a_backend():
    """The first that supports the setup, and why those before it do not; what is named and not supported gives way."""
    policy = make_policy()
    setup = Setup(policy, fill(policy))
    assert choose_backend("auto", setup) == ("native", {})
    assert choose_backend("fused", setup) == ("fused", {})
    name, reasons = choose_backend("auto", setup._replace(has_extra_loss=True))
    assert name == "fused"
    assert "extra_actor_loss" in reasons["native"]
    name, reasons = choose_backend("native", setup._replace(has_extra_loss=True))
    assert (name, reasons.keys()) == ("eager", {"native"})


@pytest.mark.parametrize("action_dist", ["squashed_gaussian", "beta"])
def test_bounded_distributions_without_a_model(action_dist):
    """Native and eager agree on these as well."""
    policy = make_policy(policy_class=MlpPolicy, action_dist=action_dist)
    config = UpdateConfig(dataclasses.replace(LOSS, penalties={"kl": 0.5}), n_epochs=3, batch_size=8)
    assert_same(updated("eager", policy, config)[0], updated("native", policy, config)[0], rtol=1e-3)

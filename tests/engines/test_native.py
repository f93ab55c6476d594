"""The native backend computes what the reference computes, to rounding, and is never taken where it does not."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback, EvalCallback, EveryNTimesteps
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    StateDependentNoiseDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import VecNormalize
from support.engines import FUSED, SMALL, UPDATES, VECTORS, assert_same_update, make, relative_error
from support.options import DEFAULTS, SINGLE, VALUES, is_legal
from support.parity import assert_equal
from support.toys import BOX_ACTION, DICT, IMAGE, VECTOR, RolloutRecorder, ToyEnv, make_toys
from torch import nn

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.common.guards import NonFinitePolicyError
from sb3_ppo_ext.distributions import FAMILIES, numpy_distribution
from sb3_ppo_ext.distributions.torch_fallback import TorchFallback
from sb3_ppo_ext.engines.eager import EagerEngine
from sb3_ppo_ext.engines.fused import FusedEngine
from sb3_ppo_ext.engines.native import extension, gradients
from sb3_ppo_ext.engines.native.engine import NativeEngine
from sb3_ppo_ext.engines.native.minibatches import mean_of_each, normalize_each
from sb3_ppo_ext.engines.native.policy import unsupported_reason
from sb3_ppo_ext.engines.steppers import FusedAdamStepper, GradientMemory
from sb3_ppo_ext.rollout import collector
from sb3_ppo_ext.rollout.user_code import runs_user_code
from sb3_ppo_ext.update.losses import AUXILIARY_LOSSES, AuxiliaryLoss

_mlp = pytest.importorskip("sb3_ppo_ext.engines.native._mlp", reason="the extension module was not built")


@pytest.fixture(params=_mlp.available())
def instruction_set(request):
    _mlp.use(request.param)
    yield request.param
    _mlp.use(_mlp.available()[0])


# The extension module


def network_of(sizes, activation, module):
    """A module of torch, and the same as a network, with its gradients."""
    layers = [nn.Linear(*ends) for ends in itertools.pairwise(sizes)]
    torch_net = nn.Sequential(*[part for layer in layers for part in (layer, module())][:-1])
    gradients = [np.zeros(p.shape, np.float32) for p in torch_net.parameters()]
    arrays = [p.detach().numpy() for p in torch_net.parameters()]
    rows = zip(arrays[::2], arrays[1::2], gradients[::2], gradients[1::2], strict=True)
    return torch_net, _mlp.Network(list(rows), activation), gradients


@pytest.mark.parametrize(("activation", "module"), [("tanh", nn.Tanh), ("relu", nn.ReLU)])
@pytest.mark.parametrize("sizes", [(3, 64, 64, 1), (17, 33, 6), (5, 7), (4, 8, 19, 20, 3), (1, 1, 1), (40, 100, 16, 2)])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
def test_network(instruction_set, sizes, activation, module, n):
    """Outputs and gradients are those of torch in double precision; gradients can be added up."""
    th.manual_seed(0)
    torch_net, network, gradients = network_of(sizes, activation, module)
    x, d_out = th.randn(n, sizes[0]), th.randn(n, sizes[-1])
    out, latents = np.empty((n, sizes[-1]), np.float32), np.empty((n, sizes[-2]), np.float32)
    network.pack()
    network.forward(x.numpy(), out)
    network.latents(latents)
    torch_net.double()
    expected = torch_net(x.double())
    expected.backward(d_out.double())
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(latents, torch_net[:-1](x.double()).detach().numpy(), rtol=1e-5, atol=2e-6)
    for add in (False, True):
        network.backward(d_out.numpy(), add)
        for parameter, gradient in zip(torch_net.parameters(), gradients, strict=True):
            assert relative_error(parameter.grad * (1 + add), th.from_numpy(gradient)) < 1e-5


def test_network_takes_over_parameters():
    """When it is told to; numbers out of range and NaN come through."""
    torch_net, network, _ = network_of((2, 4, 1), "tanh", nn.Tanh)
    out = np.empty((3, 1), np.float32)
    for scale in (1.0, -2.0):
        with th.no_grad():
            torch_net[0].weight.mul_(scale)
        network.pack()
        x = np.float32([[1, 2], [1e30, -1e30], [np.nan, 0]])
        network.forward(x, out)
        np.testing.assert_allclose(out, torch_net(th.from_numpy(x)).detach().numpy(), rtol=1e-5)
    assert np.isnan(out[2])


def test_network_refuses_arrays_that_do_not_fit():
    """With a `ValueError`, and not by reading somewhere else."""
    _, network, _ = network_of((2, 4, 1), "tanh", nn.Tanh)
    ones = lambda *shape: np.ones(shape, np.float32)  # noqa: E731
    for x, out in [
        (ones(3, 3), ones(3, 1)),
        (ones(3, 2), ones(2, 1)),
        (ones(3, 2).astype(float), ones(3, 1)),
        (ones(2, 3).T, ones(3, 1)),
    ]:
        with pytest.raises((ValueError, BufferError)):
            network.forward(x, out)
    network.forward(ones(3, 2), ones(3, 1))
    with pytest.raises(ValueError, match="float32"):
        network.backward(ones(2, 1), False)
    with pytest.raises(ValueError, match="float32"):
        network.latents(ones(3, 5))
    with pytest.raises(ValueError, match="fit together"):
        _mlp.Network([(ones(3, 2), ones(3), ones(3, 2), ones(3)), (ones(1, 4), ones(1), ones(1, 4), ones(1))], "tanh")
    with pytest.raises(ValueError, match="float32"):
        _mlp.Network([(ones(3, 2), ones(2), ones(3, 2), ones(3))], "tanh")
    with pytest.raises(ValueError, match="activation"):
        _mlp.Network([(ones(3, 2), ones(3), ones(3, 2), ones(3))], "sine")
    with pytest.raises(ValueError, match="layers"):
        _mlp.Network([], "tanh")
    with pytest.raises(ValueError, match="float32"):
        _mlp.Adam([(ones(3), ones(2), ones(3), ones(3))])
    with pytest.raises(ValueError, match="float32"):
        _mlp.gae(ones(4, 2), ones(4, 2), ones(4, 2), ones(2), ones(2), 0.9, 0.9, ones(3, 2))
    with pytest.raises(ValueError, match="instruction set"):
        _mlp.use("abacus")


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("n", [1, 17, 64, 1030, 5000])
def test_adam(instruction_set, n, weight_decay):
    """Parameters and moments are torch's; so is the norm."""
    rng = np.random.default_rng(0)
    parameter, gradient, first, second = (rng.normal(size=n).astype(np.float32) for _ in range(4))
    first[:] = second[:] = 0
    theirs = nn.Parameter(th.tensor(parameter))
    optimizer = th.optim.Adam([theirs], lr=1e-3, eps=1e-5, weight_decay=weight_decay)
    ours = _mlp.Adam([(parameter, gradient, first, second)])
    for step in range(1, 20):
        gradient[:] = rng.normal(size=n)
        assert ours.norm() == pytest.approx(np.linalg.norm(gradient.astype(np.float64)), rel=1e-6)
        theirs.grad = th.tensor(gradient) * 0.5
        optimizer.step()
        ours.step(step, 0.5, 1e-3, 0.9, 0.999, 1e-5, weight_decay)
    state = optimizer.state[theirs]
    for expected, actual in [(theirs.detach(), parameter), (state["exp_avg"], first), (state["exp_avg_sq"], second)]:
        assert relative_error(expected, th.from_numpy(actual)) < 2e-6


@pytest.mark.parametrize("n_envs", [1, 3])
def test_gae(n_envs):
    """That of SB3's buffer."""
    rng = np.random.default_rng(0)
    buffer = RolloutBuffer(32, VECTOR, BOX_ACTION, "cpu", 0.9, 0.97, n_envs)
    buffer.rewards, buffer.values = rng.normal(size=(2, 32, n_envs)).astype(np.float32)
    buffer.episode_starts = (rng.random((32, n_envs)) < 0.2).astype(np.float32)
    last_values, dones = rng.normal(size=n_envs).astype(np.float32), rng.random(n_envs) < 0.5
    buffer.compute_returns_and_advantage(th.from_numpy(last_values), dones)
    arrays = (buffer.rewards, buffer.values, buffer.episode_starts, last_values, dones.astype(np.float32))
    advantages = np.empty_like(buffer.rewards)
    _mlp.gae(*arrays, 0.97, 0.9, advantages)
    np.testing.assert_allclose(advantages, buffer.advantages, rtol=1e-5, atol=1e-6)


# The NumPy sides of the action distributions

# What the constructor of a family takes, if not three dimensions
SIZES = {"categorical": 4, "multi_categorical": [3, 2], "beta": 2}
# Of some families, further keywords of the constructor and the range of the logarithms of the standard deviations
MORE = {
    "squashed_gaussian": [({}, (-6.0, 2.5))],
    "state_dependent_noise": [(dict(full_std=False), None), (dict(use_expln=True), None), (dict(squash_output=True), None)],
}
CASES = [(family, *case, False) for family in FAMILIES for case in [({}, None), *MORE.get(family.name, [])]]
# By PyTorch, which is not given latents, nor actions of the shape that a categorical distribution takes
CASES += [(family, {}, None, True) for family in FAMILIES if family.name not in ("state_dependent_noise", "categorical")]


def make_distribution(family, kwargs, log_stds, dtype=th.float64):
    """A distribution of the family, the number of its outputs, and its `log_std`."""
    distribution = family.torch_class(SIZES.get(family.name, 3), **kwargs)
    made = distribution.proba_distribution_net(4)
    layer, log_std = made if isinstance(made, tuple) else (made, None)
    if log_std is not None:
        log_std.data = th.linspace(*(log_stds or (-1.0, 0.5)), log_std.numel(), dtype=dtype).reshape(log_std.shape)
    return distribution, layer.out_features + 4 * family.numpy_class.needs_latents, log_std


def distribution_of(distribution, outputs, log_std):
    if isinstance(distribution, StateDependentNoiseDistribution):
        return distribution.proba_distribution(outputs[:, :3], log_std, outputs[:, 3:])
    return distribution.proba_distribution(outputs, *(() if log_std is None else (log_std,)))


@pytest.mark.parametrize("ent_coef", [0.0, 0.3])
@pytest.mark.parametrize(("family", "kwargs", "log_stds", "fallback"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_numpy_distributions(family, kwargs, log_stds, fallback, ent_coef):
    """Log probabilities, entropies and gradients are those of autograd in double precision."""
    th.manual_seed(0)
    distribution, n_outputs, log_std = make_distribution(family, kwargs, log_stds)
    numpy_side = (TorchFallback if fallback else numpy_distribution)(distribution, log_std)
    assert type(numpy_side) is (TorchFallback if fallback else family.numpy_class)
    if isinstance(distribution, StateDependentNoiseDistribution):
        distribution.sample_weights(log_std, 5)
    outputs = 3 * th.randn(5, n_outputs, dtype=th.float64)
    d_log_prob = th.randn(5, dtype=th.float64)
    actions = distribution_of(distribution, outputs, log_std).sample().double().detach()
    stored = actions.reshape(5, -1).numpy()
    log_prob = numpy_side.log_prob(outputs.numpy(), stored)
    gradient = numpy_side.gradient(d_log_prob.numpy(), ent_coef)

    leaf = outputs.clone().requires_grad_()
    made = distribution_of(copy.copy(distribution), leaf, log_std)
    expected = made.log_prob(actions)
    np.testing.assert_allclose(log_prob, expected.detach().numpy(), rtol=1e-6)
    entropies = made.entropy()
    # Without a closed form SB3 estimates it from the actions.
    entropies = -expected if entropies is None else entropies
    described = numpy_side.described(outputs.numpy())
    np.testing.assert_allclose(numpy_side.entropies(described), entropies.detach().numpy(), rtol=1e-6)
    found = numpy_side.parameters(described)
    if family.is_bounded:
        np.testing.assert_allclose(found, distribution_of(distribution, outputs, log_std).parameters().detach().numpy())
    else:
        assert found is None

    (expected @ d_log_prob - ent_coef * entropies.mean()).backward()
    n_means = gradient.shape[1]
    np.testing.assert_allclose(gradient, leaf.grad[:, :n_means].numpy(), rtol=1e-8, atol=1e-8)
    assert not leaf.grad[:, n_means:].any()
    if log_std is not None:
        np.testing.assert_allclose(numpy_side.d_log_std, log_std.grad.numpy(), rtol=1e-8, atol=1e-10)
    # Once more replaces the gradient, or is added to it.
    for accumulate, times in [(False, 1), (True, 2), (True, 3)]:
        numpy_side.log_prob(outputs.numpy(), stored)
        np.testing.assert_array_equal(numpy_side.gradient(d_log_prob.numpy(), ent_coef, accumulate=accumulate), gradient)
        if log_std is not None:
            np.testing.assert_allclose(numpy_side.d_log_std, times * log_std.grad.numpy(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.numpy_class.needs_latents], ids=lambda family: family.name)
def test_samples(family):
    """Follow the distribution: Kolmogorov's and Smirnov's distance to as many samples of PyTorch's."""
    n = 20000
    np.random.seed(0)
    th.manual_seed(0)
    distribution, n_outputs, log_std = make_distribution(family, {}, None, th.float32)
    numpy_side = numpy_distribution(distribution, log_std)
    outputs = np.resize(np.float32([0.5, -1.0, 2.0, 0.0]), (1, n_outputs))
    samples = np.concatenate(
        [numpy_side.sample(outputs, numpy_side.scaled(noise)) for noise in numpy_side.noise(n, 1, n_outputs)]
    )
    own = None if log_std is None else log_std.detach()
    expected = distribution_of(distribution, th.from_numpy(outputs).expand(n, -1), own).sample().numpy()
    for ours, theirs in zip(samples.reshape(n, -1).T, expected.reshape(n, -1).T, strict=True):
        both = np.sort(np.concatenate([ours, theirs]))
        shares = [np.searchsorted(np.sort(part), both, side="right") / n for part in (ours, theirs)]
        # Exceeded once in a thousand
        assert np.abs(shares[0] - shares[1]).max() < 1.95 * np.sqrt(2 / n)


def test_samples_of_categories():
    """Are as frequent as they should be."""
    th.manual_seed(0)
    outputs = np.float32([[0.5, -1.0, 2.0, 0.0]])
    numpy_side = numpy_distribution(CategoricalDistribution(4), None)
    samples = np.concatenate([numpy_side.sample(outputs, noise) for noise in numpy_side.noise(20000, 1, 4)])
    np.testing.assert_allclose(np.bincount(samples) / 20000, th.from_numpy(outputs[0]).softmax(0).numpy(), atol=0.01)


def test_normalize_each():
    """Minibatch by minibatch, also where the last one is smaller, or a single sample."""
    values = np.random.default_rng(0).normal(3, 2, size=31).astype(np.float32)
    for sizes in ([31], [8, 8, 8, 7], [10, 10, 10, 1], [1] * 31):
        parts = np.split(values, np.cumsum(sizes)[:-1])
        np.testing.assert_allclose(mean_of_each(values, np.array(sizes)), [part.mean() for part in parts], rtol=1e-6)
        expected = [(p - p.mean()) / (p.std(ddof=1) + 1e-8) if len(p) > 1 else p for p in parts]
        np.testing.assert_allclose(normalize_each(values, np.array(sizes)), np.concatenate(expected), rtol=1e-4, atol=1e-6)


# Updates


@pytest.mark.parametrize("name", UPDATES)
def test_update(name):
    """Equals the reference's."""
    assert_same_update(**UPDATES[name])


@pytest.mark.parametrize("options", [o for o in SINGLE if "backend" not in o], ids=str)
def test_update_with_each_option(options):
    """Equals the reference's."""
    # Muon divides each matrix by its singular values, small ones included.
    assert_same_update(rtol=1e-4 if options.get("optimizer") == "muon" else 1e-5, **options)


@pytest.mark.parametrize("name", [name for name in VALUES if name != "backend"])
def test_update_with_pairs_of_options(name):
    """Each option with each other one."""
    values = [{other: value} for other in VALUES for value in VALUES[other] if other not in ("backend", name)]
    for other in np.random.default_rng(len(name)).permutation(len(values))[:3]:
        options = {name: VALUES[name][0], **values[other]}
        if is_legal({**DEFAULTS, **options}, BOX_ACTION):
            assert_same_update(**{"rtol": 1e-4, **options})


AUXILIARY = {
    ("distribution", "ratio"): lambda inputs, config: (inputs.distribution.entropy() * (inputs.ratio - 1).abs()).mean(),
    ("entropy", "log_prob"): lambda inputs, config: (inputs.entropy + inputs.log_prob).square().mean(),
    ("values", "data"): lambda inputs, config: (inputs.values * inputs.data.advantages).mean(),
    # The entropy of a Gaussian whose standard deviation is fixed has no gradient.
    ("entropy",): lambda inputs, config: -inputs.entropy.mean(),
}


@pytest.mark.parametrize("options", [{}, dict(action_dist="beta"), dict(policy_kwargs=dict(learn_std=False))], ids=str)
@pytest.mark.parametrize("reads", AUXILIARY, ids=", ".join)
def test_any_auxiliary_loss(monkeypatch, reads, options):
    """Equals the reference's, whatever it reads, without a word about it in the engine."""
    monkeypatch.setitem(AUXILIARY_LOSSES, "kl", AuxiliaryLoss("kl_coef", reads, AUXILIARY[reads]))
    assert_same_update(kl_coef=0.5, learning_rate=1e-3, **options)


def test_reports_in_the_middle_of_an_update(monkeypatch):
    """Of long ones, so that not all is kept: each epoch counts once."""
    monkeypatch.setattr(gradients, "MAX_MEASURED", 8)
    assert_same_update(learning_rate=1e-2, ent_coef=0.1, rtol=1e-4)


@pytest.mark.parametrize("name", FUSED)
def test_fused_update(name):
    """Equals the reference's, with any policy."""
    assert_same_update(other="fused", **FUSED[name])


def test_actor_rests_in_the_first_update():
    """When the optimiser has made no steps that differ from parameter to parameter."""
    options = dict(max_clip_fraction=0.05, learning_rate=1e-3, clip_range=0.001)
    eager, fused = (make(backend=backend, **options).learn(32).policy.state_dict() for backend in ("eager", "fused"))
    assert all(relative_error(eager[name], fused[name]) < 1e-5 for name in eager)


def test_fused_is_refused():
    """On parameters that the module cannot read."""
    with pytest.raises(ValueError, match=r"`backend='fused'`.*float32"):
        make(backend="fused", policy=Double)
    assert type(make(backend="auto", policy=Double)._find_engine()) is EagerEngine


# Rollouts


class Steps(BaseCallback):
    """Keeps what the environment said, without a look at values."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_step(self):
        names = ("rewards", "dones", "infos", "clipped_actions", "actions", "new_obs")
        self.seen.append({name: copy.deepcopy(self.locals[name]) for name in names})
        return True


ROLLOUTS = {
    "box": {},
    "discrete": dict(env=dict(action_space=spaces.Discrete(4))),
    "multi-discrete": dict(env=dict(action_space=spaces.MultiDiscrete([3, 2]))),
    "multi-binary": dict(env=dict(action_space=spaces.MultiBinary(3))),
    "discrete observations": dict(env=dict(observation_space=spaces.Discrete(5))),
    "dict of vectors": dict(env=dict(observation_space=VECTORS), policy="MultiInputPolicy"),
    "truncated together": dict(env=dict(n_envs=5, p_end=0.0)),
    "float64 observations": dict(env=dict(observation_space=spaces.Box(-1.0, 1.0, (3,), np.float64))),
    "box of shape (2, 2)": dict(env=dict(action_space=spaces.Box(-1, 1, (2, 2), np.float32))),
    "squashed": dict(action_dist="squashed_gaussian"),
    "beta": dict(action_dist="beta"),
    "gSDE": dict(use_sde=True),
    "gSDE, squashed": dict(use_sde=True, policy_kwargs=dict(squash_output=True, log_std_init=-2.0)),
}


@pytest.mark.parametrize("estimates", [False, True])
@pytest.mark.parametrize("name", ROLLOUTS)
def test_rollout(name, estimates, monkeypatch):
    """The buffer holds what SB3 would have stored for these actions: values, log probabilities, returns, bootstraps."""
    monkeypatch.setattr(collector, "runs_user_code", lambda callback: estimates)
    model, steps = make(**ROLLOUTS[name]), Steps()
    _, callback = model._setup_learn(10**6, CallbackList([steps]))
    first = copy.deepcopy(model._last_obs)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    buffer, policy = model.rollout_buffer, model.policy
    assert buffer.full
    assert buffer.pos == model.n_steps

    expected = RolloutBuffer(16, VECTOR, BOX_ACTION, gamma=0.99, gae_lambda=0.95, n_envs=model.n_envs)
    observation, starts = first, np.ones(model.n_envs, bool)
    for t, step in enumerate(steps.seen):
        with th.no_grad():
            obs_tensor, _ = policy.obs_to_tensor(observation)
            actions = th.as_tensor(buffer.actions[t]).float()
            actions = actions.flatten() if isinstance(model.action_space, spaces.Discrete) else actions
            values, log_probs, _ = policy.evaluate_actions(obs_tensor, actions)
            for index, info in enumerate(step["infos"]):
                if info.get("TimeLimit.truncated"):
                    terminal, _ = policy.obs_to_tensor(info["terminal_observation"])
                    step["rewards"][index] += 0.99 * policy.predict_values(terminal).item()
        np.testing.assert_allclose(buffer.values[t], values.numpy().flatten(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(buffer.log_probs[t], log_probs.numpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(buffer.rewards[t], step["rewards"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(buffer.episode_starts[t], starts)
        np.testing.assert_allclose(
            step["clipped_actions"], model._actions_for_env(_shaped(buffer.actions[t], model)), rtol=1e-6
        )
        stored = {k: v[t] for k, v in buffer.observations.items()} if isinstance(first, dict) else buffer.observations[t]
        for key, array in (observation if isinstance(first, dict) else {"": observation}).items():
            kept = stored[key] if key else stored
            # As the policy reads it, that is rounded to float32
            assert kept.dtype != np.float64
            np.testing.assert_array_equal(kept.ravel(), array.ravel().astype(kept.dtype))
        observation, starts = step["new_obs"], step["dones"]
    expected.rewards, expected.values, expected.episode_starts = buffer.rewards, buffer.values, buffer.episode_starts
    with th.no_grad():
        last_values = policy.predict_values(policy.obs_to_tensor(observation)[0])
    expected.compute_returns_and_advantage(last_values, starts)
    np.testing.assert_allclose(buffer.advantages, expected.advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(buffer.returns, expected.returns, rtol=1e-4, atol=1e-5)


def _shaped(actions, model):
    return (
        actions.flatten()
        if isinstance(model.action_space, spaces.Discrete)
        else actions.reshape(-1, *model.action_space.shape)
    )


def test_callbacks_that_read_estimates_find_them():
    """Values and log probabilities of the step, under SB3's names; the buffer has those of the steps before."""
    model, recorder = make(), RolloutRecorder()
    model.learn(64, callback=recorder)
    for name in ("values", "log_probs", "actions"):
        seen = np.stack([np.asarray(step[name]).reshape(2, -1) for step in recorder.steps])
        stored = np.concatenate([rollout[name].reshape(16, 2, -1) for rollout in recorder.rollouts])
        np.testing.assert_allclose(seen, stored, rtol=1e-6)
    observed = th.cat([step["obs_tensor"] for step in recorder.steps]).numpy()
    np.testing.assert_array_equal(
        observed, np.concatenate([r["observations"] for r in recorder.rollouts]).reshape(observed.shape)
    )
    assert [step["n_steps"] for step in recorder.steps] == [*range(16)] * 2


def test_callback_that_changes_the_policy():
    """In the middle of a rollout: the next action is the new one's; what was taken before has the old one's estimates."""

    class Setter(BaseCallback):
        def _on_step(self):
            if self.n_calls == 10:
                with th.no_grad():
                    for parameter in self.model.policy.parameters():
                        parameter.add_(0.1)
                    self.model.policy.action_net.bias.fill_(100.0)
                    self.model.policy.log_std.fill_(-2.0)
            return True

    model = make(env=dict(p_end=0.0))
    _, callback = model._setup_learn(10**6, Setter())
    before = copy.deepcopy(model.policy)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    buffer = model.rollout_buffer
    assert (buffer.actions[:10] < 50).all()
    assert (buffer.actions[10:] > 50).all()
    for policy, steps in ((before, slice(10)), (model.policy, slice(10, None))):
        observations, actions = (th.from_numpy(array[steps]).flatten(0, 1) for array in (buffer.observations, buffer.actions))
        with th.no_grad():
            values, log_probs, _ = policy.evaluate_actions(observations, actions)
            normal = policy.get_distribution(observations).distribution
        assert 0.5 < ((actions - normal.mean) / normal.stddev).std() < 1.5
        np.testing.assert_allclose(buffer.values[steps].ravel(), values.flatten().numpy(), rtol=1e-5)
        np.testing.assert_allclose(buffer.log_probs[steps].ravel(), log_probs.numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("n_envs", [1, 5])
@pytest.mark.parametrize("options", [dict(), dict(sde_sample_freq=4), dict(policy_kwargs=dict(squash_output=True))], ids=str)
def test_exploration_of_gsde(n_envs, options):
    """The whole rollout is the reference's, although a callback changes the noise in the middle; so is what follows it."""

    class Wider(BaseCallback):
        def _on_step(self):
            if self.n_calls == 6:
                with th.no_grad():
                    self.model.policy.log_std.fill_(-1.0)
            return True

    models = []
    for backend in ("eager", "native"):
        model = make(env=dict(n_envs=n_envs), backend=backend, use_sde=True, n_epochs=1, batch_size=16 * n_envs, **options)
        model.policy.log_std.data.fill_(-2.0)
        _, callback = model._setup_learn(10**6, Wider())
        th.manual_seed(0)
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
        models.append(model)
    eager, native = models
    for name in RolloutRecorder.ARRAYS:
        expected, actual = (getattr(model.rollout_buffer, name) for model in models)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4, err_msg=name)
    for name in ("exploration_mat", "exploration_matrices"):
        assert th.equal(*(getattr(model.policy.action_dist, name) for model in models)), name
    np.testing.assert_allclose(native.predict(native._last_obs)[0], eager.predict(eager._last_obs)[0], rtol=1e-5, atol=1e-6)


def test_first_ratios_of_gsde():
    """Are 1, for rollout and update evaluate the same distribution."""
    model = make(use_sde=True, n_epochs=1, batch_size=32).learn(32)
    logged = model.logger.name_to_value
    assert logged["train/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert logged["train/ratio_max"] == pytest.approx(1, abs=1e-5)


def test_whose_code_runs():
    """Not SB3's own callbacks, however nested; everybody else's, functions and methods that were replaced included."""

    class Own(BaseCallback):
        def _on_step(self):
            return True

    class OfASimilarName(Own):
        __module__ = "stable_baselines3_of_mine"

    class Subclass(EvalCallback):
        pass

    plain = [EvalCallback(ToyEnv()), EveryNTimesteps(5, EvalCallback(ToyEnv())), CallbackList([EvalCallback(ToyEnv())])]
    assert not any(map(runs_user_code, plain))
    nested = EvalCallback(ToyEnv(), callback_on_new_best=Own()), EvalCallback(ToyEnv(), callback_after_eval=Own())
    replaced = EvalCallback(ToyEnv())
    replaced._on_step = lambda: True
    own = Own(), OfASimilarName(), Subclass(ToyEnv()), replaced, *nested
    for callback in (*own, EveryNTimesteps(5, Own()), CallbackList([plain[0], Own()]), ConvertCallback(lambda *_: True)):
        assert runs_user_code(callback), callback
    seen = []
    make().learn(16, callback=lambda local, _: seen.append(local["values"]) or True)
    assert seen[0].shape == (2, 1)


@pytest.mark.parametrize("stop_at", [5, 16, 20])
def test_callback_that_stops(stop_at):
    """At the same step as the reference, with as much counted."""
    models = [make(backend=backend).learn(96, callback=RolloutRecorder(stop_at)) for backend in ("eager", "native")]
    assert models[0].num_timesteps == models[1].num_timesteps
    assert models[0]._n_updates == models[1]._n_updates


@pytest.mark.parametrize("action_dist", ["gaussian", "beta", None])
def test_policy_that_is_not_finite(action_dist):
    """The environment never gets an action of it, and what the rollout counted is taken back."""
    space = None if action_dist else spaces.Discrete(3)
    model = make(dict(action_space=space) if space else {}, action_dist=action_dist or "gaussian").learn(32)

    class Break(BaseCallback):
        def _on_step(self):
            if self.n_calls == 4:
                with th.no_grad():
                    self.model.policy.action_net.bias[0] = math.nan
            return True

    with pytest.raises(NonFinitePolicyError, match=r"step 4 of the rollout.*action_net.bias"):
        model.learn(32, callback=Break(), reset_num_timesteps=False)
    assert model.num_timesteps == 32


@pytest.mark.parametrize("policy", ["MlpPolicy", "MultiInputPolicy", "MlpTransformerPolicy"])
def test_observations_are_kept_in_float32(policy):
    """As the policy reads them, where the environment has float64; the reference keeps them as SB3 does."""
    space = spaces.Box(-1.0, 1.0, (3,), np.float64)
    space = spaces.Dict({"joints": space, "gear": spaces.Discrete(3)}) if policy == "MultiInputPolicy" else space
    for backend in ("auto", "eager"):
        model = make(dict(observation_space=space), policy, backend=backend).learn(32)
        kept = model.rollout_buffer.observations
        kept = kept["joints"] if policy == "MultiInputPolicy" else kept
        is_reference = backend == "eager" and policy != "MlpTransformerPolicy"
        assert kept.dtype == (np.float64 if is_reference else np.float32)
        assert kept.any()


def test_vec_normalize():
    """It sees each step, and the rollout is normalised."""
    model = PPOExt("MlpPolicy", VecNormalize(make_toys()), backend="native", **SMALL).learn(64)
    assert model.env.obs_rms.count == pytest.approx(2 * 33, abs=1e-3)
    assert abs(model.rollout_buffer.observations.mean()) < 0.5


# One training, several engines


def test_reproducible():
    """The same seed gives the same bits."""
    one, other = (make(action_dist="beta").learn(96) for _ in range(2))
    assert_equal(one.policy.state_dict(), other.policy.state_dict(), "policy")


@pytest.mark.parametrize("action_dist", ["gaussian", "beta"])
def test_engines_share_zips(action_dist, tmp_path):
    """A zip of one goes on in the other, moments and steps of the optimiser included; SB3 loads it as well."""
    for first, second in [("native", "eager"), ("eager", "native")]:
        model = make(backend=first, action_dist=action_dist).learn(64)
        model.save(tmp_path / "model")
        loaded = PPOExt.load(tmp_path / "model", env=make_toys(), backend=second)
        assert_equal(model.policy.optimizer.state_dict(), loaded.policy.optimizer.state_dict(), "optimizer")
        loaded.learn(32, reset_num_timesteps=False)
        steps = {int(state["step"]) for state in loaded.policy.optimizer.state.values()}
        assert steps == {loaded._n_updates * 4}
    if action_dist == "gaussian":
        assert PPO.load(tmp_path / "model").num_timesteps == 64


def test_engine_can_change_in_the_middle():
    """Between two updates, and after the parameters were replaced."""
    model = make()
    for backend in ("native", "eager", "native", "auto"):
        model.backend = backend
        model.learn(32, reset_num_timesteps=False)
    assert {int(state["step"]) for state in model.policy.optimizer.state.values()} == {4 * 3 * 4}
    other = make(seed=4)
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.data = parameter.data.clone()
    model.set_parameters(other.get_parameters())
    observations = VECTOR.sample()[np.newaxis]
    native = model._find_engine().native
    native.pack()
    expected = other.policy.predict_values(th.from_numpy(observations)).detach().numpy()
    np.testing.assert_allclose(native.critic(native.features(observations)), expected, rtol=1e-5)


def test_copies():
    """A model that has not learned is copied as with the reference; what is bound to memory is bound anew."""
    model = make()
    assert type(model._find_engine()) is NativeEngine
    model.env = model._vec_normalize_env = None
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied._engines == {}
        assert type(copied._find_engine()) is NativeEngine
        assert copied._find_engine().policy is copied.policy is not model.policy
    assert model._engines


# Which engine


class Double(ActorCriticPolicy):
    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.double()


class OwnForward(ActorCriticPolicy):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OwnExtractor(FlattenExtractor):
    pass


class OwnNoise(ActorCriticPolicy):
    def _build(self, lr_schedule):
        self.action_dist.learn_features = True
        super()._build(lr_schedule)


class OwnLoss(PPOExt):
    def extra_actor_loss(self, rollout_data, distribution):
        return 0.0, {}


class OwnBuffer(RolloutBuffer):
    pass


REFUSED = {
    "gSDE of another kind": dict(policy=OwnNoise, use_sde=True),
    "CombinedExtractor": dict(env=dict(observation_space=DICT), policy="MultiInputPolicy"),
    "NatureCNN": dict(env=dict(observation_space=IMAGE), policy="CnnPolicy"),
    "OwnForward computes": dict(policy=OwnForward),
    "OwnExtractor": dict(policy_kwargs=dict(features_extractor_class=OwnExtractor)),
    "activations .*GELU": dict(policy_kwargs=dict(activation_fn=nn.GELU)),
    "OwnBuffer": dict(rollout_buffer_class=OwnBuffer),
    "too many layers": dict(policy_kwargs=dict(net_arch=[4] * 16)),
    "large layers": dict(policy_kwargs=dict(net_arch=[512, 512])),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_native_does_not_support(reason, capsys):
    """`"native"` refuses it with the reason, `"auto"` says it and takes the reference."""
    with pytest.raises(ValueError, match=f"`backend='native'`.*{reason}.*auto"):
        make(**REFUSED[reason])
    model = make(backend="auto", verbose=1, **REFUSED[reason])
    assert "Backend: fused (not native: " in capsys.readouterr().out
    assert type(model._find_engine()) is FusedEngine


def test_loss_of_a_subclass():
    """It may differentiate what it likes."""
    with pytest.raises(ValueError, match="extra_actor_loss"):
        OwnLoss("MlpPolicy", ToyEnv(), backend="native")
    assert type(OwnLoss("MlpPolicy", ToyEnv(), **SMALL)._find_engine()) is FusedEngine


def test_reasons_that_come_later():
    """Parameters in double precision, frozen ones, hooks, a layer of another kind."""

    def of(change):
        policy = make().policy
        change(policy)
        return unsupported_reason(policy)

    assert of(lambda policy: None) is None
    assert "float32" in of(lambda policy: policy.double())
    assert "frozen" in of(lambda policy: policy.value_net.weight.requires_grad_(False))
    assert "hooks" in of(lambda policy: policy.value_net.register_forward_hook(lambda *args: None))
    assert "nn.Linear" in of(lambda policy: setattr(policy, "value_net", nn.LazyLinear(1)))
    assert "own way" in of(lambda policy: setattr(policy, "forward", lambda obs: None))
    assert "its own" in of(lambda policy: policy.register_parameter("extra", nn.Parameter(th.ones(1))))
    assert "nn.Linear" in of(lambda policy: setattr(policy, "action_net", nn.Linear(64, 2, bias=False)))


def test_without_the_extension_module(monkeypatch, capsys):
    """All works, on PyTorch; a line says why."""
    monkeypatch.setattr(extension, "module", None)
    model = make(backend="auto", verbose=1)
    assert "Backend: eager (not native: the extension module was not built" in capsys.readouterr().out
    model.learn(32)
    with pytest.raises(ValueError, match="C compiler"):
        make()


def test_optimizers_that_torch_steps():
    """Those that are not plainly Adam, and those whose step somebody has replaced."""

    def takes(model):
        return FusedAdamStepper.takes(model.policy.optimizer, GradientMemory.of(model.policy))

    model = make()
    assert takes(model)
    th.optim.lr_scheduler.LambdaLR(model.policy.optimizer, lambda step: 1.0)
    assert not takes(model)
    model.learn(32)
    assert {int(state["step"]) for state in model.policy.optimizer.state.values()} == {12}
    for kwargs in (dict(amsgrad=True), dict(maximize=True)):
        assert not takes(make(policy_kwargs=dict(optimizer_kwargs=kwargs)))


def test_auto_takes_native(capsys):
    """By default, and says so."""
    PPOExt("MlpPolicy", ToyEnv(), verbose=1, **SMALL)
    assert "Backend: native" in capsys.readouterr().out
    assert DEFAULTS["backend"] == "auto"

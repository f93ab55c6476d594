"""The NumPy side of each action distribution against autograd and samples of PyTorch."""

import copy

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    StateDependentNoiseDistribution,
)
from support.hybrid import integer_parts

from sb3_ppo_ext.distributions import FAMILIES, numpy_distribution
from sb3_ppo_ext.distributions.masked import MaskedDistribution
from sb3_ppo_ext.distributions.torch_fallback import TorchFallback

# Distributions with masks are those without, given outputs that are masked.
OF_OUTPUTS = [family for family in FAMILIES if not issubclass(family.torch_class, MaskedDistribution)]
# What the constructor of a family takes, if not three dimensions
SIZES = {"categorical": 4, "multi_categorical": [3, 2], "beta": 2, "hybrid": integer_parts()}


# Of some families, further keywords of the constructor and the range of the logarithms of the standard deviations
MORE = {
    "squashed_gaussian": [({}, (-6.0, 2.5))],
    "state_dependent_noise": [(dict(full_std=False), None), (dict(use_expln=True), None), (dict(squash_output=True), None)],
}


CASES = [(family, *case, False) for family in OF_OUTPUTS for case in [({}, None), *MORE.get(family.name, [])]]


# By PyTorch, which is not given latents, nor actions of the shape that a categorical distribution takes
CASES += [(family, {}, None, True) for family in OF_OUTPUTS if family.name not in ("state_dependent_noise", "categorical")]


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


@pytest.mark.parametrize("family", [f for f in OF_OUTPUTS if not f.numpy_class.needs_latents], ids=lambda family: family.name)
def test_samples(family):
    """Samples follow the distribution, by the Kolmogorov-Smirnov distance to as many of PyTorch's."""
    n_steps, n_envs = 100, 200
    n = n_steps * n_envs
    np.random.seed(0)
    th.manual_seed(0)
    distribution, n_outputs, log_std = make_distribution(family, {}, None, th.float32)
    numpy_side = numpy_distribution(distribution, log_std)
    outputs = np.resize(np.float32([0.5, -1.0, 2.0, 0.0]), (1, n_outputs))
    of_envs = np.tile(outputs, (n_envs, 1))
    samples = np.concatenate(
        [numpy_side.sample(of_envs, numpy_side.scaled(noise)) for noise in numpy_side.noise(n_steps, n_envs, n_outputs)]
    )
    own = None if log_std is None else log_std.detach()
    expected = distribution_of(distribution, th.from_numpy(outputs).expand(n, -1), own).sample().numpy()
    for ours, theirs in zip(samples.reshape(n, -1).T, expected.reshape(n, -1).T, strict=True):
        both = np.sort(np.concatenate([ours, theirs]))
        shares = [np.searchsorted(np.sort(part), both, side="right") / n for part in (ours, theirs)]
        # Exceeded once in a thousand
        assert np.abs(shares[0] - shares[1]).max() < 1.95 * np.sqrt(2 / n)


def test_samples_of_categories():
    """Each category is drawn as often as its probability says."""
    th.manual_seed(0)
    outputs = np.float32([[0.5, -1.0, 2.0, 0.0]])
    numpy_side = numpy_distribution(CategoricalDistribution(4), None)
    samples = np.concatenate([numpy_side.sample(outputs, noise) for noise in numpy_side.noise(20000, 1, 4)])
    np.testing.assert_allclose(np.bincount(samples) / 20000, th.from_numpy(outputs[0]).softmax(0).numpy(), atol=0.01)

"""Densities, entropies and divergences, against sums, numerical integration and finite differences."""

import itertools
import math
from typing import get_args

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    SquashedDiagGaussianDistribution,
    StateDependentNoiseDistribution,
)
from support.hybrid import integer_parts

from sb3_ppo_ext.distributions import (
    ACTION_DISTS,
    FAMILIES,
    ActionDist,
    BoundedBetaDistribution,
    TanhGaussianDistribution,
    family_of,
    kl_divergence,
    numpy_distribution,
    parameters,
    unsquashed_mean,
    why_not_numpy,
)
from sb3_ppo_ext.distributions.base import clamp
from sb3_ppo_ext.distributions.beta import _beta_mass_below
from sb3_ppo_ext.distributions.masked import MaskedDistribution
from sb3_ppo_ext.distributions.squashed_gaussian import _logistic_mixture, log_tanh_derivative
from sb3_ppo_ext.distributions.torch_fallback import TorchFallback

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _same_numbers():
    """Start this module's own random numbers anew for each test."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state
    th.manual_seed(0)


def tensor(*shape):
    return th.tensor(RNG.normal(size=shape))


def gaussian(mean, log_std, family=DiagGaussianDistribution):
    return family(mean.shape[1]).proba_distribution(mean, log_std)


@pytest.mark.parametrize("family", [DiagGaussianDistribution, SquashedDiagGaussianDistribution])
def test_gaussian(family):
    """The KL divergence of Gaussians is the integral, one dimension after the other."""
    old, new = (gaussian(tensor(5, 2), tensor(2) / 2, family) for _ in range(2))
    x = th.linspace(-30, 30, 200001, dtype=th.float64)[:, None, None]
    log_p, log_q = (d.distribution.log_prob(x) for d in (old, new))
    expected = th.trapezoid(log_p.exp() * (log_p - log_q), x, dim=0).sum(dim=1)
    th.testing.assert_close(kl_divergence(parameters(old), new), expected)


def test_state_dependent_noise():
    """With gSDE the KL divergence is that of Gaussians whose standard deviations depend on the observation."""

    def noisy(latent):
        distribution = StateDependentNoiseDistribution(2)
        _, log_std = distribution.proba_distribution_net(3, log_std_init=-0.5)
        return distribution.proba_distribution(th.randn(4, 2), log_std + th.randn(3, 2) / 3, latent)

    latent = th.randn(4, 3)
    old, new = noisy(latent), noisy(latent)
    (m1, s1), (m2, s2) = ((d.distribution.mean, d.distribution.stddev) for d in (old, new))
    expected = ((s2 / s1).log() + (s1**2 + (m1 - m2) ** 2) / (2 * s2**2) - 0.5).sum(dim=1)
    th.testing.assert_close(kl_divergence(parameters(old), new), expected)


def test_categorical():
    """The KL divergence is the sum over the actions."""
    old, new = (CategoricalDistribution(4).proba_distribution(tensor(5, 4)) for _ in range(2))
    p, q = (d.distribution.probs for d in (old, new))
    th.testing.assert_close(kl_divergence(parameters(old), new), (p * (p / q).log()).sum(dim=1))


def test_multi_categorical():
    """The KL divergence is the sum over the dimensions."""
    old, new = (MultiCategoricalDistribution([3, 2]).proba_distribution(tensor(5, 5)) for _ in range(2))
    expected = sum(
        (a.probs * (a.probs / b.probs).log()).sum(dim=1) for a, b in zip(old.distribution, new.distribution, strict=True)
    )
    th.testing.assert_close(kl_divergence(parameters(old), new), expected)


def test_bernoulli():
    """The KL divergence is the sum over the dimensions, of both outcomes."""
    old, new = (BernoulliDistribution(3).proba_distribution(tensor(5, 3)) for _ in range(2))
    p, q = (d.distribution.probs for d in (old, new))
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum(dim=1)
    th.testing.assert_close(kl_divergence(parameters(old), new), expected)


# So that there are four numbers for each observation; two dimensions otherwise
SIZES = {"categorical": 4, "multi_categorical": [2, 2], "bernoulli": 4, "hybrid": integer_parts()}
SIZES |= {f"masked_{name}": SIZES[name] for name in ("categorical", "multi_categorical")}


def make(family, x):
    """A distribution of the family, of four numbers for each observation, shape `(batch_size, 4)`."""
    distribution = family.torch_class(SIZES.get(family.name, 2))
    if isinstance(distribution, MaskedDistribution):
        distribution.masks = th.tensor([True, False, True, True]).expand(len(x), 4)
    if not family.has_log_std:
        return distribution.proba_distribution(x)
    means, log_std = x[:, :2], x[0, 2:]
    if family.name == "state_dependent_noise":
        return distribution.proba_distribution(means, log_std.expand(3, 2), th.ones(len(x), 3, dtype=x.dtype))
    return distribution.proba_distribution(means, log_std)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.kl_divergence is not None], ids=lambda f: f.name)
def test_gradient(family):
    """The gradient of the KL divergence is that of finite differences, and 0 where both distributions are the same."""
    at, other = tensor(3, 4).requires_grad_(), parameters(make(family, tensor(3, 4)))
    assert th.autograd.gradcheck(lambda x: kl_divergence(other, make(family, x)), (at,))
    same = kl_divergence(parameters(make(family, at.detach())), make(family, at)).sum()
    assert same.item() == pytest.approx(0, abs=1e-12)
    assert th.autograd.grad(same, at)[0].abs().max() < 1e-12


OF_ONE_CLASS = {"state_dependent_noise", "categorical", "masked_categorical", "masked_multi_categorical"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_registry(family):
    """Subclasses belong to the family, but a NumPy implementation is for exactly one class: theirs calls PyTorch."""

    class Subclass(family.torch_class):
        pass

    size = SIZES.get(family.name, 2)
    assert family_of(family.torch_class(size)) is family_of(Subclass(size)) is family
    log_std = th.nn.Parameter(th.zeros(3, 2) if family.name == "state_dependent_noise" else th.zeros(2))
    log_std = log_std if family.has_log_std else None
    assert type(numpy_distribution(family.torch_class(size), log_std)) is family.numpy_class
    assert type(numpy_distribution(Subclass(size), log_std)) is TorchFallback
    assert type(numpy_distribution(family.torch_class(size), log_std, th.nn.Tanh())) is TorchFallback
    assert why_not_numpy(family.torch_class(size)) is None
    # PyTorch's calls are not given latents, nor actions of the shape that a categorical distribution takes.
    assert (why_not_numpy(Subclass(size)) is not None) == (family.name in OF_ONE_CLASS)


def test_registry_names():
    """The values of `action_dist` are those that its type allows."""
    assert tuple(ACTION_DISTS) == get_args(ActionDist)
    assert all(family.name == name for name, family in ACTION_DISTS.items())
    assert {name for name, family in ACTION_DISTS.items() if family.is_bounded} == {"squashed_gaussian", "beta"}


def test_unknown_family():
    """A distribution of an unknown class has no parameters that could be compared."""

    class Other(Distribution):
        __abstractmethods__ = frozenset()

    Other.__abstractmethods__ = frozenset()
    assert parameters(Other()) is None
    assert type(numpy_distribution(Other(), None)) is TorchFallback
    with pytest.raises(ValueError, match="Other has no known KL divergence"):
        kl_divergence(tensor(3, 2), Other())


def test_unsquashed_mean():
    """The mean of SB3's squashed Gaussian before the squashing is the mean it was given."""
    mean = tensor(3, 2) * 5
    assert th.equal(unsquashed_mean(gaussian(mean, tensor(2), SquashedDiagGaussianDistribution)), mean)
    with pytest.raises(ValueError, match="BoundedBetaDistribution has no mean that could leave the bounds"):
        unsquashed_mean(beta(tensor(3, 2)))


# Beta and squashed Gaussian. Their latents run through a grid of actions, dense where these come close to a bound, in units
# of the bounds; the integrals are those of the trapezoids over it, which know nothing of any Jacobian.

FAR = th.cat([th.linspace(-18, 18, 40001, dtype=th.float64), th.linspace(-0.8, 0.8, 20001, dtype=th.float64)]).sort().values


def squashed(mean, log_std, dtype=th.float64):
    mean = th.as_tensor(mean, dtype=dtype)
    log_std = th.as_tensor(log_std, dtype=dtype).expand(mean.shape[-1])
    return TanhGaussianDistribution(mean.shape[1]).proba_distribution(mean, log_std)


def beta(outputs, dtype=th.float64, **kwargs):
    outputs = th.as_tensor(outputs, dtype=dtype)
    return BoundedBetaDistribution(outputs.shape[1] // 2, **kwargs).proba_distribution(outputs)


def outputs_of(alpha, beta):
    """Outputs of the network of which softplus makes alpha - 1 and beta - 1."""
    excess = th.tensor([[alpha, beta]], dtype=th.float64) - 1
    return excess + (-(-excess).expm1()).log()


SQUASHED_GRID = [(mean, log_std) for mean in (-6.0, -1.5, 0.0, 0.3, 3.0) for log_std in (-3.0, -1.0, 0.0, 0.5, 1.0)]
BETA_GRID = [(1.01, 1.01), (1.3, 1.3), (1.5, 4.0), (2.0, 2.0), (20.0, 1.05), (60.0, 25.0), (200.0, 300.0), (1.2, 80.0)]
UNCAPPED = dict(max_concentration=1e12)


def squashed_grid(distribution):
    """Latents and their images in [-1, 1], dense around the mean of a narrow Gaussian."""
    narrow = distribution.distribution.mean + distribution.distribution.stddev * th.linspace(-10, 10, 40001, dtype=th.float64)
    u = th.cat([FAR, narrow.flatten()]).sort().values
    return u[:, None], th.tanh(u)


def beta_grid(distribution):
    x = th.cat([(th.tanh(FAR[FAR.abs() < 7]) + 1) / 2, th.linspace(1e-6, 1 - 1e-6, 20001, dtype=th.float64)]).sort().values
    return x[:, None], 2 * x - 1


DISTRIBUTIONS = [(squashed([[mean]], log_std), squashed_grid) for mean, log_std in SQUASHED_GRID]
DISTRIBUTIONS += [(beta(outputs_of(*pair), **UNCAPPED), beta_grid) for pair in BETA_GRID]


@pytest.mark.parametrize(("distribution", "grid"), DISTRIBUTIONS)
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-2.0, 3.0), (100.0, 100.5)])
def test_density_is_one_in_all(distribution, grid, low, high):
    """The density integrates to 1 over the actions between any bounds."""
    latents, z = grid(distribution)
    actions, density = low + (high - low) * (z + 1) / 2, distribution.log_prob(latents).exp() / ((high - low) / 2)
    assert th.trapezoid(density, actions).item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("distribution", "grid"), DISTRIBUTIONS)
def test_entropy(distribution, grid):
    """The entropy is minus the integral of p log p."""
    latents, z = grid(distribution)
    log_prob = distribution.log_prob(latents)
    expected = -th.trapezoid(log_prob.exp() * log_prob, z)
    assert distribution.entropy().item() == pytest.approx(expected.item(), abs=1e-4)


def test_entropy_of_wide_and_saturated_gaussians():
    """The entropy of the squashed Gaussian is right to a millionth, where 32 nodes of Gauss-Hermite are off by 0.03."""
    z = th.linspace(-12, 12, 200001, dtype=th.float64)
    for mean, log_std in itertools.product([0.0, 0.7, 5.0, 50.0], [-5.0, 0.0, 1.0, 1.6, 2.0]):
        distribution = squashed([[mean]], log_std)
        u = mean + math.exp(log_std) * z
        expected = th.trapezoid(th.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * log_tanh_derivative(u), z)
        expected = expected + distribution.distribution.entropy()
        assert distribution.entropy().item() == pytest.approx(expected.item(), abs=2e-6)


def test_entropy_of_uniform_and_narrow():
    """
    The entropy of the uniform distribution is the logarithm of the width, that of a narrow Gaussian in the middle the Gaussian
    entropy.
    """
    assert beta([[-50.0, -50.0]]).entropy().item() == pytest.approx(math.log(2))
    narrow = squashed([[0.0]], -5.0)
    assert narrow.entropy().item() == pytest.approx(narrow.distribution.entropy().item(), abs=1e-4)


def test_entropy_in_inference_mode():
    """What is cached in inference mode can be used in training."""
    _logistic_mixture.cache_clear()
    with th.inference_mode():
        squashed([[0.3]], 0.0).entropy()
    log_std = th.zeros(1, dtype=th.float64, requires_grad=True)
    squashed([[0.3]], log_std).entropy().sum().backward()
    assert log_std.grad.item() != 0


@pytest.mark.parametrize("name", ["squashed", "beta"])
def test_several_dimensions(name):
    """Log probability, entropy and KL divergence are sums over the dimensions."""
    if name == "squashed":
        mean, log_std = tensor(4, 3), tensor(3) / 2
        distribution, parts = squashed(mean, log_std), [squashed(mean[:, [i]], log_std[[i]]) for i in range(3)]
    else:
        outputs = tensor(4, 6)
        distribution, parts = beta(outputs), [beta(outputs[:, [i, i + 3]]) for i in range(3)]
    latents = distribution.sample()
    each = [latents[:, [i]] for i in range(3)]
    th.testing.assert_close(distribution.log_prob(latents), sum(p.log_prob(x) for p, x in zip(parts, each, strict=True)))
    th.testing.assert_close(distribution.entropy(), sum(part.entropy() for part in parts))
    others = [part.parameters().flip(0) for part in parts]
    other = distribution.parameters().flip(0)
    expected = sum(kl_divergence(o, part) for o, part in zip(others, parts, strict=True))
    th.testing.assert_close(kl_divergence(other, distribution), expected)


PAIRS = list(itertools.combinations(BETA_GRID, 2))


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_kl_divergence_of_betas(old, new):
    """The KL divergence of Beta distributions is the integral."""
    p, q = (beta(outputs_of(*pair), **UNCAPPED) for pair in (old, new))
    x, z = beta_grid(p)
    log_p, log_q = p.log_prob(x), q.log_prob(x)
    expected = th.trapezoid(log_p.exp() * (log_p - log_q), z).item()
    assert kl_divergence(parameters(p), q).item() == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("old", "new"), list(itertools.combinations(SQUASHED_GRID[5:20:3], 2)))
def test_kl_divergence_of_squashed_gaussians(old, new):
    """The KL divergence of squashed Gaussians is the integral over the actions, in which the Jacobian cancels."""
    p, q = (squashed([[mean]], log_std) for mean, log_std in (old, new))
    u, z = squashed_grid(p)
    log_p, log_q = p.log_prob(u), q.log_prob(u)
    expected = th.trapezoid(log_p.exp() * (log_p - log_q), z).item()
    assert kl_divergence(parameters(p), q).item() == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_kl_divergence_is_exact_in_float32():
    """The KL divergence of two concentrated distributions that are close is right, where float32 leaves nothing of it."""
    old, new = ([[200.0, 210.0]], [[200.5, 210.0]])
    single = kl_divergence(beta(old, th.float32).parameters(), beta(new, th.float32))
    double = kl_divergence(beta(old).parameters(), beta(new))
    assert single.dtype == th.float32
    assert beta(old, th.float32).parameters().dtype == th.float64
    assert single.item() == pytest.approx(double.item(), rel=1e-4)
    assert 0 < double.item() < 1e-3


@pytest.mark.parametrize("quantity", ["log_prob", "entropy", "kl_divergence"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.is_bounded], ids=lambda family: family.name)
def test_gradients_of_bounded_distributions(family, quantity):
    """Gradients are those of finite differences, from the middle out to where the policy is saturated."""
    at = th.tensor([[0.3, -1.0, -0.7, 0.4], [8.0, -9.0, -3.0, 5.0]], dtype=th.float64).requires_grad_()
    other = parameters(make(family, tensor(2, 4)))
    latents = make(family, tensor(2, 4)).sample()

    def function(x):
        distribution = make(family, x)
        return {
            "log_prob": lambda: distribution.log_prob(latents),
            "entropy": distribution.entropy,
            "kl_divergence": lambda: kl_divergence(other, distribution),
        }[quantity]()

    assert th.autograd.gradcheck(function, (at,))


def test_gradient_of_the_entropy():
    """
    The gradient is that of the true entropy, to 1 %. SB3's stand-in for a distribution without a closed form, minus the log
    probability of the actions taken, has a gradient of 0 on average.
    """

    def integral(mean, log_std):
        distribution = squashed([[mean]], log_std)
        u, z = squashed_grid(distribution)
        log_prob = distribution.log_prob(u)
        return -th.trapezoid(log_prob.exp() * log_prob, z).item()

    for mean, log_std in [(0.0, 0.5), (0.0, -1.0), (1.0, 0.0), (2.5, 0.8)]:
        at = [th.tensor([[mean]], dtype=th.float64), th.tensor([log_std], dtype=th.float64)]
        for tensor in at:
            tensor.requires_grad_()
        squashed(*at).entropy().sum().backward()
        h = 1e-3
        expected = (integral(mean, log_std + h) - integral(mean, log_std - h)) / (2 * h)
        assert at[1].grad.item() == pytest.approx(expected, rel=0.01)
        expected = (integral(mean + h, log_std) - integral(mean - h, log_std)) / (2 * h)
        assert at[0].grad.item() == pytest.approx(expected, rel=0.01, abs=1e-4)

    th.manual_seed(0)
    log_std = th.tensor([0.5], requires_grad=True)
    distribution = gaussian(th.zeros(200_000, 1), log_std, SquashedDiagGaussianDistribution)
    with th.no_grad():
        actions = distribution.sample()
    (-distribution.log_prob(actions, distribution.gaussian_actions.detach())).mean().backward()
    assert abs(log_std.grad.item()) < 0.01
    log_std.grad = None
    squashed([[0.0]], log_std, th.float32).entropy().sum().backward()
    assert log_std.grad.item() < -0.2


def test_the_log_cosh_is_a_mixture():
    """The mixture of smoothed absolute values is log cosh to a millionth at any point."""
    u = th.linspace(-20, 20, 4001, dtype=th.float64)[:, None]
    narrow = squashed(u, -5.0)
    jacobian = narrow.entropy() - narrow.distribution.entropy().flatten()
    # The second derivative adds variance / 2.
    smoothing = math.exp(-10) * (1 - th.tanh(u.flatten()) ** 2)
    th.testing.assert_close(jacobian, log_tanh_derivative(u).flatten() - smoothing, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["squashed", "beta"])
def test_samples_have_the_density(name):
    """Samples pass the Kolmogorov-Smirnov test against the density, at 1 %, with a fixed seed."""
    th.manual_seed(0)
    n = 20_000
    grid = [(0.4, 0.2), (3.0, -1.0)] if name == "squashed" else [(1.2, 1.4), (30.0, 2.0)]
    for pair in grid:
        if name == "squashed":
            distribution, (latents, z) = squashed([[pair[0]]] * n, pair[1]), squashed_grid(squashed([[pair[0]]], pair[1]))
            one = squashed([[pair[0]]], pair[1])
        else:
            one = beta(outputs_of(*pair))
            distribution, (latents, z) = beta(outputs_of(*pair).expand(n, 2)), beta_grid(one)
        cumulative = th.cumulative_trapezoid(one.log_prob(latents).exp(), z)
        samples = 2 * distribution.position(distribution.sample().numpy().flatten()) - 1
        expected = np.interp(np.sort(samples), z[1:].numpy(), cumulative.numpy())
        steps = np.arange(n + 1) / n
        statistic = max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())
        assert statistic < 1.63 / np.sqrt(n)


EXTREMES = [-1000.0, -50.0, -10.0, -1.0, 0.0, 1.0, 10.0, 50.0, 1000.0]


@pytest.mark.parametrize("dtype", [th.float32, th.float64])
def test_nothing_is_nan_or_infinite(dtype):
    """Values and gradients are finite whatever the network puts out, and for actions at the very bounds."""
    all_outputs = th.tensor(list(itertools.product(EXTREMES, EXTREMES)), dtype=dtype)
    for log_std in (-50.0, -5.0, 0.0, 2.0, 50.0):
        mean, std = all_outputs[:, :1].clone().requires_grad_(), th.tensor([log_std], dtype=dtype).requires_grad_()
        distribution = squashed(mean, std, dtype)
        latents = [
            distribution.sample().detach(),
            distribution.mode().detach(),
            th.full_like(mean, 50.0),
            th.full_like(mean, -50.0),
        ]
        assert_finite(distribution, latents, (mean, std))
    all_outputs.requires_grad_()
    for deterministic_action in ("mean", "mode"):
        distribution = beta(all_outputs, dtype, deterministic_action=deterministic_action)
        edges = [th.full((len(all_outputs), 1), edge, dtype=dtype) for edge in (0.0, 1e-6, 1 - 1e-6, 1.0)]
        assert_finite(
            distribution,
            [distribution.sample().detach(), distribution.get_actions(deterministic=True).detach(), *edges],
            (all_outputs,),
        )


def assert_finite(distribution, latents, leaves):
    old = distribution.parameters().detach().roll(7, 0)
    for x in latents:
        assert th.isfinite(x).all()
        assert ((distribution.position(x.numpy()) >= 0) & (distribution.position(x.numpy()) <= 1)).all()
        for value in (distribution.log_prob(x), distribution.entropy(), kl_divergence(old, distribution)):
            assert th.isfinite(value).all()
            gradients = th.autograd.grad(value.sum(), leaves, retain_graph=True, allow_unused=True)
            assert all(th.isfinite(gradient).all() for gradient in gradients if gradient is not None)
    assert all(math.isfinite(value) for value in distribution.statistics(distribution.parameters().detach()).values())


def test_float32_is_exact_enough():
    """Log probabilities and entropies in float32 are those in float64, saturated or not."""
    th.manual_seed(0)
    for mean, log_std in itertools.product([0.0, 3.0, 12.0], [-2.0, 0.0, 1.0]):
        single, double = (squashed([[mean]] * 1000, log_std, dtype) for dtype in (th.float32, th.float64))
        u = single.sample()
        assert single.log_prob(u).dtype == single.entropy().dtype == th.float32
        th.testing.assert_close(single.log_prob(u).double(), double.log_prob(u.double()), rtol=1e-5, atol=2e-5)
        th.testing.assert_close(single.entropy().double(), double.entropy(), rtol=1e-5, atol=1e-5)
    for outputs in ([-1.0, -1.0], [5.0, -3.0], [300.0, 700.0]):
        single, double = (beta([outputs] * 1000, dtype) for dtype in (th.float32, th.float64))
        x = single.sample()
        assert x.dtype == single.log_prob(x).dtype == single.entropy().dtype == single.mean().dtype == th.float32
        th.testing.assert_close(single.log_prob(x).double(), double.log_prob(x.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["squashed", "beta"])
def test_autocast(name):
    """Half precision is for the networks: what follows is in float32, and as exact as their outputs allow."""
    layer = th.nn.Linear(3, 4)
    observations, log_std = th.randn(50, 3), th.zeros(4)
    with th.autocast("cpu", dtype=th.bfloat16):
        outputs = layer(observations)
        assert outputs.dtype == th.bfloat16
        distribution = squashed(outputs, log_std, outputs.dtype) if name == "squashed" else beta(outputs, outputs.dtype)
        latents = distribution.sample()
        values = [
            latents,
            distribution.log_prob(latents),
            distribution.entropy(),
            kl_divergence(parameters(distribution).flip(0), distribution),
        ]
    assert {value.dtype for value in values} == {th.float32}
    exact = squashed(outputs, log_std) if name == "squashed" else beta(outputs.double())
    expected = [exact.log_prob(latents.double()), exact.entropy(), kl_divergence(parameters(exact).flip(0), exact)]
    for value, number in zip(values[1:], expected, strict=True):
        th.testing.assert_close(value.double(), number, rtol=1e-5, atol=1e-5)


def test_clamp():
    """Inside of the range it is the identity; outside the gradient leads back, and no further out."""
    at = th.tensor([-3.0, -3.0, 0.5, 0.5, 3.0, 3.0], requires_grad=True)
    clamped = clamp(at, -1.0, 2.0)
    assert clamped.tolist() == [-1.0, -1.0, 0.5, 0.5, 2.0, 2.0]
    # Where the gradient is negative, a step makes the value larger.
    (clamped * th.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])).sum().backward()
    assert at.grad.tolist() == [0.0, -1.0, 1.0, -1.0, 1.0, 0.0]


def test_standard_deviation_comes_back():
    """A standard deviation that an optimiser has driven out of its range comes back, on either side."""
    for start in (-9.0, 9.0):
        log_std = th.tensor([start], requires_grad=True)
        optimizer = th.optim.Adam([log_std], lr=0.1)
        for _ in range(300):
            optimizer.zero_grad()
            (squashed(th.zeros(1, 1), log_std, th.float32).distribution.stddev.log() - 0.5).square().sum().backward()
            optimizer.step()
        assert log_std.item() == pytest.approx(0.5, abs=0.05)


def test_concentration_is_capped():
    """However large the outputs, the concentration has a limit with a gradient back, and the mode stays where it is."""
    for outputs, mode in [([1e6, 1e6], 0.5), ([3e5, 1e5], 0.75), ([50.0, 0.0], 50 / (50 + math.log(2)))]:
        at = th.tensor([outputs], dtype=th.float64, requires_grad=True)
        distribution = beta(at)
        assert distribution.parameters().sum().item() <= 1002
        assert distribution.mode().item() == pytest.approx(mode, rel=1e-6)
        distribution.entropy().sum().backward()
        assert (at.grad <= 0).any()
        assert (at.grad != 0).all()
    assert beta([[3e5, 1e5]], max_concentration=10.0).parameters().sum().item() == pytest.approx(12, rel=1e-3)
    # Far below it, it is not felt.
    th.testing.assert_close(beta(outputs_of(1.5, 3.0)).parameters(), th.tensor([[1.5, 3.0]]).double(), rtol=3e-3, atol=0)


def test_mean_and_mode_of_beta():
    """Mean and mode are those computed by hand; those of the uniform distribution lie in the middle."""
    distribution = beta(outputs_of(3.0, 2.0), **UNCAPPED)
    assert distribution.mean().item() == pytest.approx(3 / 5)
    assert distribution.mode().item() == pytest.approx(2 / 3)
    assert distribution.get_actions(deterministic=True).item() == distribution.mean().item()
    other = beta(outputs_of(3.0, 2.0), deterministic_action="mode", **UNCAPPED)
    assert other.get_actions(deterministic=True).item() == distribution.mode().item()
    # Far out, where alpha and beta themselves are 1 to the last digit
    assert beta([[-40.0, -41.0]], deterministic_action="mode").mode().item() == pytest.approx(1 / (1 + math.exp(-1)))
    with pytest.raises(ValueError, match="`deterministic_action='median'`"):
        BoundedBetaDistribution(1, deterministic_action="median")
    flat = beta([[-1000.0, -1000.0]])
    assert flat.mean().item() == flat.mode().item() == 0.5


def test_deterministic_action_of_the_squashed_gaussian():
    """The deterministic action is the image of the mean."""
    distribution = squashed([[0.7, -3.0]], 0.0)
    assert distribution.get_actions(deterministic=True).tolist() == [[0.7, -3.0]]
    np.testing.assert_allclose(2 * distribution.position(distribution.mode().numpy()) - 1, np.tanh([[0.7, -3.0]]))


def test_initial_beta_is_nearly_uniform():
    """A new policy is within a twentieth of a nat of the uniform distribution, whatever the input."""
    th.manual_seed(0)
    distribution = BoundedBetaDistribution(2)
    layer = distribution.proba_distribution_net(64)
    th.nn.init.orthogonal_(layer.weight, gain=0.01)
    distribution = distribution.proba_distribution(layer(th.randn(100, 64)))
    assert (2 * math.log(2) - distribution.entropy() < 0.05).all()


@pytest.mark.parametrize("family", [TanhGaussianDistribution, BoundedBetaDistribution])
def test_latents_and_positions(family):
    """One is the inverse of the other; at a bound, the latent is that of an action close to it."""
    position = np.array([0.0, 1e-6, 0.01, 0.5, 0.9, 1 - 1e-6, 1.0])
    back = family.position(family.latents(position))
    np.testing.assert_allclose(back[1:-1], position[1:-1], rtol=1e-9)
    np.testing.assert_allclose(back[[0, -1]], [1e-6, 1 - 1e-6], rtol=1e-6)


def test_statistics():
    """The mass within 1 % of the bounds is the integral over both ends; standard deviation and concentration are means."""
    for distribution, grid in [DISTRIBUTIONS[3], DISTRIBUTIONS[9], DISTRIBUTIONS[12], *DISTRIBUTIONS[-8:]]:
        latents, z = grid(distribution)
        density = distribution.log_prob(latents).exp()
        middle = (z > -0.98) & (z < 0.98)
        expected = 1 - th.trapezoid(density[middle], z[middle]).item()
        assert distribution.statistics(distribution.parameters())["mass_near_bounds"] == pytest.approx(expected, abs=5e-4)
    for alpha, beta_, expected in [(1.01, 1.3, 0.012418074), (1.2, 800.0, 0.999455923), (1.5, 200.0, 0.741238848)]:
        # By scipy.stats.beta.cdf(0.01, alpha, beta)
        numbers = [th.tensor([[value]], dtype=th.float64) for value in (alpha, beta_)]
        assert _beta_mass_below(0.01, *numbers).item() == pytest.approx(expected, abs=1e-5)
    # Of many, some are enough.
    many = th.cat([th.ones(50_000, 2), 1 + th.rand(50_000, 2)])
    assert beta([[0.0, 0.0]]).statistics(many)["concentration"] == pytest.approx(2.5, abs=0.03)
    assert squashed([[0.0]], -0.5).statistics(th.tensor([[0.0, 1.0, 0.5, 0.3]]))["std"] == pytest.approx(0.4)
    both = th.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 3.0, 4.0, 5.0]])
    assert beta([[0.0, 0.0]]).statistics(both) == {"mass_near_bounds": pytest.approx(0.01, abs=2e-3), "concentration": 4.5}


def test_by_themselves():
    """The distributions work in a user's own code as SB3's do: network, samples with log probabilities, actions."""
    th.manual_seed(0)
    latent = th.randn(5, 8)
    family = BoundedBetaDistribution(2)
    outputs = family.proba_distribution_net(latent_dim=8)(latent)
    samples, log_prob = family.log_prob_from_params(outputs)
    assert th.equal(family.log_prob(samples), log_prob)
    assert th.equal(family.actions_from_params(outputs, deterministic=True), family.mean())
    family = TanhGaussianDistribution(2)
    assert family.proba_distribution_net(latent_dim=8, log_std_init=1)[1].tolist() == [1, 1]
    net, log_std = family.proba_distribution_net(latent_dim=8, log_std_init=-0.3)
    samples, log_prob = family.log_prob_from_params(net(latent), log_std)
    assert th.equal(family.log_prob(samples), log_prob)
    assert log_std.tolist() == pytest.approx([-0.3, -0.3])
    assert th.equal(family.actions_from_params(net(latent), log_std, deterministic=True), net(latent))
    # Samples carry the gradient of their parameters, as those of SB3's Gaussian.
    assert family.sample().requires_grad

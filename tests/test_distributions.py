"""The KL divergence, against sums and numerical integration."""

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

from sb3_ppo_ext.distributions import kl_divergence, parameters, unsquashed_mean

RNG = np.random.default_rng(0)


def tensor(*shape):
    return th.tensor(RNG.normal(size=shape))


def gaussian(mean, log_std, family=DiagGaussianDistribution):
    return family(mean.shape[1]).proba_distribution(mean, log_std)


@pytest.mark.parametrize("family", [DiagGaussianDistribution, SquashedDiagGaussianDistribution])
def test_gaussian(family):
    """By integration, one dimension after the other."""
    old, new = (gaussian(tensor(5, 2), tensor(2) / 2, family) for _ in range(2))
    x = th.linspace(-30, 30, 200001, dtype=th.float64)[:, None, None]
    log_p, log_q = (d.distribution.log_prob(x) for d in (old, new))
    expected = th.trapezoid(log_p.exp() * (log_p - log_q), x, dim=0).sum(dim=1)
    th.testing.assert_close(kl_divergence(parameters(old), new), expected)


def test_state_dependent_noise():
    """It is a Gaussian as well, whose standard deviation depends on the observation."""

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
    """The sum over the actions."""
    old, new = (CategoricalDistribution(4).proba_distribution(tensor(5, 4)) for _ in range(2))
    p, q = (d.distribution.probs for d in (old, new))
    th.testing.assert_close(kl_divergence(parameters(old), new), (p * (p / q).log()).sum(dim=1))


def test_multi_categorical():
    """The sum over the dimensions."""
    old, new = (MultiCategoricalDistribution([3, 2]).proba_distribution(tensor(5, 5)) for _ in range(2))
    expected = sum(
        (a.probs * (a.probs / b.probs).log()).sum(dim=1) for a, b in zip(old.distribution, new.distribution, strict=True)
    )
    th.testing.assert_close(kl_divergence(parameters(old), new), expected)


def test_bernoulli():
    """The sum over the dimensions, of both outcomes."""
    old, new = (BernoulliDistribution(3).proba_distribution(tensor(5, 3)) for _ in range(2))
    p, q = (d.distribution.probs for d in (old, new))
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum(dim=1)
    th.testing.assert_close(kl_divergence(parameters(old), new), expected)


@pytest.mark.parametrize("family", ["gaussian", "categorical", "multi-categorical", "bernoulli"])
def test_gradient(family):
    """By finite differences; 0 where both are the same."""
    make = {
        "gaussian": lambda x: gaussian(x[:, :2], x[0, 2:]),
        "categorical": lambda x: CategoricalDistribution(4).proba_distribution(x),
        "multi-categorical": lambda x: MultiCategoricalDistribution([2, 2]).proba_distribution(x),
        "bernoulli": lambda x: BernoulliDistribution(4).proba_distribution(x),
    }[family]
    at, other = tensor(3, 4).requires_grad_(), parameters(make(tensor(3, 4)))
    assert th.autograd.gradcheck(lambda x: kl_divergence(other, make(x)), (at,))
    same = kl_divergence(parameters(make(at.detach())), make(at)).sum()
    assert same.item() == pytest.approx(0, abs=1e-12)
    assert th.autograd.grad(same, at)[0].abs().max() < 1e-12


def test_unknown_family():
    """It has no parameters that we know."""

    class Other(Distribution):
        __abstractmethods__ = frozenset()

    Other.__abstractmethods__ = frozenset()
    assert parameters(Other()) is None


def test_unsquashed_mean():
    mean = tensor(3, 2) * 5
    assert th.equal(unsquashed_mean(gaussian(mean, tensor(2), SquashedDiagGaussianDistribution)), mean)

"""Each loss against numbers computed by hand, and each hand-written slope against autograd."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.distributions import DiagGaussianDistribution

from sb3_ppo_ext.update import losses
from sb3_ppo_ext.update.losses import (
    PENALTIES,
    SURROGATES,
    LossConfig,
    approximate_kl,
    bounds_loss,
    clip_fraction,
    entropy_loss,
    policy_loss,
    value_slope,
)

T = th.tensor


def clipped_surrogate_loss(advantages, ratio, clip_range, dual_clip=None, weights=None):
    return policy_loss(advantages, ratio, LossConfig(clip_range, dual_clip=dual_clip), weights)


def spo_loss(advantages, ratio, clip_range, weights=None):
    return policy_loss(advantages, ratio, LossConfig(clip_range, surrogate="spo"), weights)


def value_loss(values, old_values, returns, clip_range_vf=None, mode="clip", weights=None):
    config = LossConfig(0.2, clip_range_vf=clip_range_vf, vf_clip_mode=mode)
    return losses.value_loss(values, old_values, returns, config, weights)


def test_clipped_surrogate_loss():
    """Gains are clipped, losses are not: min(2, 1.2), min(0.5, 0.8), min(-2, -1.2), min(-0.5, -0.8)."""
    loss = clipped_surrogate_loss(T([1.0, 1.0, -1.0, -1.0]), T([2.0, 0.5, 2.0, 0.5]), 0.2)
    assert loss.item() == pytest.approx(-(1.2 + 0.5 - 2.0 - 0.8) / 4)


def test_clipped_surrogate_gradient():
    """The gradient is 0 where the ratio has gone past the range in the direction that the advantage wants."""
    ratio = T([2.0, 0.5, 2.0, 0.5], requires_grad=True)
    clipped_surrogate_loss(T([1.0, 1.0, -1.0, -1.0]), ratio, 0.2).backward()
    assert ratio.grad.tolist() == [0.0, -0.25, 0.25, 0.0]


@pytest.mark.parametrize(("clip_range_vf", "expected"), [(None, (9 + 1) / 2), (0.5, (2.5**2 + 1) / 2)])
def test_value_loss(clip_range_vf, expected):
    """For errors of 3 and 1; clipped, the first value moves from 0 to 0.5 only, 2.5 below its target."""
    loss = value_loss(T([6.0, 1.0]), T([0.0, 1.0]), T([3.0, 2.0]), clip_range_vf)
    assert loss.item() == pytest.approx(expected)


def test_entropy_loss():
    """The loss is the negative mean; without a closed form -log_prob stands for the entropy."""
    assert entropy_loss(T([1.0, 2.0]), T([0.0, 0.0])).item() == -1.5
    assert entropy_loss(None, T([-1.0, -4.0])).item() == -2.5


def test_approximate_kl():
    """The estimate is the mean of (r - 1) - log r, for r = 2 and 0.5."""
    log_ratio = T([math.log(2), -math.log(2)])
    kl = approximate_kl(log_ratio.exp(), log_ratio)
    assert kl.item() == pytest.approx((1 - math.log(2) - 0.5 + math.log(2)) / 2)


def test_clip_fraction():
    """The edge of the range is not outside of it."""
    assert clip_fraction(T([1.0, 1.19, 1.21, 0.5]), 0.2).item() == 0.5
    assert clip_fraction(T([1.5, 0.5]), 0.5).item() == 0.0


# What SB3 does not have


def test_dual_clip():
    """For A < 0 the objective is at least 3 A: ratios 5, 2 and 0.5 cost 3, 2 and 0.8; A > 0 is as without."""
    advantages, ratio = T([-1.0, -1.0, -1.0, 1.0]), T([5.0, 2.0, 0.5, 5.0])
    assert clipped_surrogate_loss(advantages, ratio, 0.2, dual_clip=3.0).item() == pytest.approx((3 + 2 + 0.8 - 1.2) / 4)
    ratio.requires_grad_()
    clipped_surrogate_loss(advantages, ratio, 0.2, dual_clip=3.0).backward()
    assert ratio.grad.tolist() == [0.0, 0.25, 0.0, 0.0]


def test_spo_loss():
    """A = 2, r = 1.5, c = 0.25: 3 - 2 / 0.5 * 0.25 = 2; A = -1, r = 0.5: -0.5 - 0.5 = -1."""
    assert spo_loss(T([2.0, -1.0]), T([1.5, 0.5]), 0.25).item() == pytest.approx(-(2.0 - 1.0) / 2)


def test_spo_is_best_at_the_edge_of_the_range():
    """The gradient vanishes at r = 1 + sign(A) c, where that of the clipped surrogate jumps, and turns back beyond."""
    for advantage in (3.0, -0.5):
        best = 1 + math.copysign(0.2, advantage)
        ratios = T([best, best - 0.01, best + 0.01], requires_grad=True)
        spo_loss(T([advantage] * 3), ratios, 0.2).backward()
        assert ratios.grad[0].item() == pytest.approx(0, abs=1e-6)
        assert ratios.grad[1] < 0 < ratios.grad[2]


def test_spo_at_the_end_of_a_schedule():
    """With a range of 0 the loss stays finite."""
    ratio = T([1.0, 1.1], requires_grad=True)
    spo_loss(T([1.0, -1.0]), ratio, 0.0).backward()
    assert th.isfinite(ratio.grad).all()


def test_value_loss_max():
    """Errors of 3 and 1, clipped 2.5 and 1.5 (old value 0.5 beyond the target): the larger ones are 3 and 1.5."""
    loss = value_loss(T([6.0, 1.0]), T([0.0, 0.0]), T([3.0, 2.0]), 0.5, mode="max")
    assert loss.item() == pytest.approx((9 + 1.5**2) / 2)


def test_value_loss_max_goes_on_where_clip_stops():
    """Beyond the range but on the wrong side of the target, only "max" has a gradient."""
    for mode, gradient in (("clip", 0.0), ("max", 2 * 3.0)):
        values = T([6.0], requires_grad=True)
        value_loss(values, T([0.0]), T([3.0]), 0.5, mode).backward()
        assert values.grad.item() == gradient


def test_bounds_loss():
    """
    In [-2, 4] the middle is 1 and half the width 3: 5.5 is z = 1.5, and -3.5 is z = -1.5, 0.4 past a limit of 1.1. In
    [-1, 1], 1.05 is inside of it and -1.3 is 0.2 past it.
    """
    mean_actions = T([[5.5, 1.05], [-3.5, -1.3]])
    loss = bounds_loss(mean_actions, T([-2.0, -1.0]), T([4.0, 1.0]), 1.1)
    assert loss.item() == pytest.approx((0.4**2 + 0.4**2 + 0.2**2) / 2)


def test_bounds_loss_without_bounds():
    """Infinite dimensions, half-infinite ones and those without width contribute nothing, and no NaN to the gradient."""
    inf = math.inf
    mean_actions = T([[1e6, 1e6, -1e6, 7.0, 3.0]], requires_grad=True)
    loss = bounds_loss(mean_actions, T([-inf, 0.0, -inf, 2.0, -1.0]), T([inf, inf, 0.0, 2.0, 1.0]), 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(4.0)
    assert mean_actions.grad.tolist() == [[0.0, 0.0, 0.0, 0.0, 4.0]]


def test_weights():
    """Each sample's share is multiplied by its weight; equal weights change nothing."""
    advantages, ratio, weights = T([1.0, -1.0]), T([1.1, 1.1]), T([0.5, 1.5])
    assert clipped_surrogate_loss(advantages, ratio, 0.2, weights=weights).item() == pytest.approx(-(0.55 - 1.65) / 2)
    assert spo_loss(advantages, ratio, 0.2, weights).item() == pytest.approx(
        -(0.5 * (1.1 - 0.01 / 0.4) + 1.5 * (-1.1 - 0.01 / 0.4)) / 2
    )
    values, targets = T([1.0, 2.0]), T([0.0, 0.0])
    assert value_loss(values, values, targets, weights=weights).item() == pytest.approx((0.5 + 6) / 2)
    for mode in ("clip", "max"):
        clipped = value_loss(values, T([0.0, 0.0]), targets, 0.5, mode, weights)
        assert clipped.item() == pytest.approx(0.25 if mode == "clip" else (0.5 + 6) / 2)
        ones = value_loss(values, targets, targets, 0.5, mode, T([1.0, 1.0]))
        assert ones.item() == pytest.approx(value_loss(values, targets, targets, 0.5, mode).item())


RNG = np.random.default_rng(0)
A, R, V, OLD, TARGET = (RNG.normal(size=64) for _ in range(5))
R = np.exp(R / 3)
W = RNG.random(64) * 2
LOW, HIGH = np.array([-1.0, -2.0, 0.0, -1.0]), np.array([1.0, 3.0, 5.0, np.inf])


def numpy_clip(r):
    return np.minimum(A * r, A * np.clip(r, 0.8, 1.2))


AGAINST_NUMPY = {
    "clip": (
        lambda r: clipped_surrogate_loss(T(A), r, 0.2, weights=T(W)),
        lambda r: -np.mean(W * numpy_clip(r)),
        R,
    ),
    "dual clip": (
        lambda r: clipped_surrogate_loss(T(A), r, 0.2, 1.5),
        lambda r: -np.mean(np.where(A < 0, np.maximum(numpy_clip(r), 1.5 * A), numpy_clip(r))),
        R,
    ),
    "spo": (lambda r: spo_loss(T(A), r, 0.2, T(W)), lambda r: -np.mean(W * (r * A - abs(A) / 0.4 * (r - 1) ** 2)), R),
    "value clip": (
        lambda v: value_loss(v, T(OLD), T(TARGET), 0.3, "clip", T(W)),
        lambda v: np.mean(W * (TARGET - OLD - np.clip(v - OLD, -0.3, 0.3)) ** 2),
        V,
    ),
    "value max": (
        lambda v: value_loss(v, T(OLD), T(TARGET), 0.3, "max"),
        lambda v: np.mean(np.maximum((TARGET - v) ** 2, (TARGET - OLD - np.clip(v - OLD, -0.3, 0.3)) ** 2)),
        V,
    ),
    "bounds": (
        lambda m: bounds_loss(m, T(LOW), T(HIGH), 0.4),
        lambda m: np.mean(
            sum(np.maximum(abs((m[:, i] - (LOW + HIGH)[i] / 2) / ((HIGH - LOW)[i] / 2)) - 0.4, 0) ** 2 for i in range(3))
        ),
        RNG.normal(size=(16, 4)) * 3,
    ),
    "approximate KL": (lambda r: approximate_kl(r, r.log()), lambda r: np.mean(r - 1 - np.log(r)), R),
}  # fmt: skip


@pytest.mark.parametrize("name", AGAINST_NUMPY)
def test_against_numpy_and_finite_differences(name):
    """The value is that of NumPy in float64, the gradient that of finite differences."""
    ours, numpys, x = AGAINST_NUMPY[name]
    x = T(x, requires_grad=True)
    assert ours(x).item() == pytest.approx(numpys(x.detach().numpy()), rel=1e-12)
    assert th.autograd.gradcheck(ours, (x,))


# Slopes that are written by hand


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("clip_range", [0.2, 0.0])
@pytest.mark.parametrize("name", SURROGATES)
def test_slope_of_each_surrogate(name, clip_range, dual_clip):
    """In float64 the objectives are the same, and the slopes are autograd's by the log probability."""
    surrogate, config = SURROGATES[name], LossConfig(clip_range, surrogate=name, dual_clip=dual_clip)
    log_ratio = T(np.log(R), requires_grad=True)
    expected = surrogate.objective(T(A), log_ratio.exp(), config)
    expected.sum().backward()
    objectives, slope = surrogate.slope(A, R, config)
    np.testing.assert_allclose(objectives, expected.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(slope, log_ratio.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", ["clip", "max"])
@pytest.mark.parametrize("clip_range_vf", [None, 0.3])
@pytest.mark.parametrize("scale", [None, 0.4, 7.0])
def test_slope_of_the_value_loss(scale, clip_range_vf, mode):
    """In float64 the loss is the mean of the squares, and the slopes are half of autograd's."""
    config = LossConfig(0.2, clip_range_vf=clip_range_vf, vf_clip_mode=mode, value_scale=scale)
    values = T(V, requires_grad=True)
    expected = losses.value_loss(values, T(OLD), T(TARGET), config)
    (expected * len(V)).backward()
    errors, slope = value_slope(V, OLD, TARGET, config)
    assert np.mean(errors**2) == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(2 * slope, values.grad.numpy(), rtol=1e-10, atol=1e-12)


# Auxiliary losses


def rows(losses_by_name):
    for name, loss in losses_by_name.items():
        yield pytest.param(loss, id=name)
        if loss.fallback is not None:
            yield pytest.param(loss.fallback, id=f"{name}, without a closed form")


@pytest.mark.parametrize("loss", list(rows(PENALTIES)))
def test_auxiliary_loss_reads_what_it_declares(loss):
    """A loss reads what it declares and nothing else, for an engine computes only that."""
    distribution = DiagGaussianDistribution(2).proba_distribution(th.zeros(3, 2, requires_grad=True), th.zeros(2))
    ratio = T([1.0, 1.1, 0.9], requires_grad=True)
    known = dict(distribution=distribution, ratio=ratio, log_ratio=ratio.log(), log_prob=ratio.log() - 1, values=ratio)
    known |= dict(old_distribution=th.cat([th.full((3, 2), 0.5), th.ones(3, 2)], dim=1), entropy=distribution.entropy())
    inputs = SimpleNamespace(**{name: known[name] for name in loss.reads})
    bounds = (-th.ones(2), th.ones(2))
    value = loss.value(inputs, LossConfig(0.2, action_bounds=bounds, bounds_limit=0.0))
    assert value.shape == ()
    assert th.isfinite(value)

"""The terms of the loss, against numbers computed by hand."""

import math

import pytest
import torch as th

from sb3_ppo_ext.advantages import normalize
from sb3_ppo_ext.losses import approximate_kl, clip_fraction, clipped_surrogate_loss, entropy_loss, value_loss

T = th.tensor


def test_clipped_surrogate_loss():
    """Gains are clipped, losses are not: min(2, 1.2), min(0.5, 0.8), min(-2, -1.2), min(-0.5, -0.8)."""
    loss = clipped_surrogate_loss(T([1.0, 1.0, -1.0, -1.0]), T([2.0, 0.5, 2.0, 0.5]), 0.2)
    assert loss.item() == pytest.approx(-(1.2 + 0.5 - 2.0 - 0.8) / 4)


def test_clipped_surrogate_gradient():
    """There is none where the ratio has gone past the range in the direction that the advantage wants."""
    ratio = T([2.0, 0.5, 2.0, 0.5], requires_grad=True)
    clipped_surrogate_loss(T([1.0, 1.0, -1.0, -1.0]), ratio, 0.2).backward()
    assert ratio.grad.tolist() == [0.0, -0.25, 0.25, 0.0]


@pytest.mark.parametrize(("clip_range_vf", "expected"), [(None, (9 + 1) / 2), (0.5, (2.5**2 + 1) / 2)])
def test_value_loss(clip_range_vf, expected):
    """Errors of 3 and 1; clipped, the first value moves from 0 to 0.5 only, 2.5 below its target."""
    loss = value_loss(T([6.0, 1.0]), T([0.0, 1.0]), T([3.0, 2.0]), clip_range_vf)
    assert loss.item() == pytest.approx(expected)


def test_entropy_loss():
    """The negative mean; without a closed form -log_prob stands for it."""
    assert entropy_loss(T([1.0, 2.0]), T([0.0, 0.0])).item() == -1.5
    assert entropy_loss(None, T([-1.0, -4.0])).item() == -2.5


def test_approximate_kl():
    """(r - 1) - log r for r = 2 and 0.5."""
    log_ratio = T([math.log(2), -math.log(2)])
    kl = approximate_kl(log_ratio.exp(), log_ratio)
    assert kl.item() == pytest.approx((1 - math.log(2) - 0.5 + math.log(2)) / 2)


def test_clip_fraction():
    assert clip_fraction(T([1.0, 1.19, 1.21, 0.5]), 0.2).item() == 0.5


def test_normalize():
    """With the unbiased standard deviation, sqrt(2) here; one advantage is left alone."""
    expected = [-1 / math.sqrt(2), 1 / math.sqrt(2)]
    assert normalize(T([1.0, 3.0])).tolist() == pytest.approx(expected)
    assert normalize(T([5.0])).tolist() == [5.0]

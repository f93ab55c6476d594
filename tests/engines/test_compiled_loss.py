"""The loss of the extension module is that of NumPy, which autograd checks elsewhere: values, slopes and measurements."""

import numpy as np
import pytest
from gymnasium import spaces
from support.engines import make

from sb3_ppo_ext.distributions.masked import INVALID
from sb3_ppo_ext.engines.native.epoch import FlatRollout, NativeMinibatches
from sb3_ppo_ext.update.losses import SURROGATES, LossConfig, value_slope

pytest.importorskip("sb3_ppo_ext.engines.native._mlp", reason="the extension module was not built")
from sb3_ppo_ext.engines.native.compiled_loss import compiled_loss
from sb3_ppo_ext.engines.native.gradients import AnalyticGradients

N = 24
SPACES = {
    "Gaussian": spaces.Box(-1, 1, (3,), np.float32),
    "categorical": spaces.Discrete(4),
    "masked": spaces.Discrete(4),
    "several choices": spaces.MultiDiscrete([3, 1, 4]),
    "Bernoulli": spaces.MultiBinary(3),
}
OPTIONS = {
    "SB3's": {},
    "dual clip": dict(dual_clip=1.05),
    "SPO": dict(surrogate="spo"),
    "SPO, clip range 0": dict(surrogate="spo", clip_range=0.0),
    "values are clipped": dict(clip_range_vf=0.3),
    "values are clipped, the worse counts": dict(clip_range_vf=0.3, vf_clip_mode="max"),
    "normalised values": dict(clip_range_vf=0.3, vf_clip_mode="max", value_scale=2.5),
    "entropy": dict(ent_coef=0.3, vf_coef=1.5),
}


def minibatches_of(kind, weighted):
    """Distribution, outputs, values and minibatches with numbers at random."""
    rng = np.random.default_rng(0)
    native = make(env=dict(action_space=SPACES[kind]))._find_engine().native
    distribution = native.distribution
    if distribution.parameter is not None:
        distribution.parameter[:] = rng.normal(size=len(distribution.parameter))
        distribution.pack()
    outputs = rng.normal(0, 2, size=(N, native.actor.n_outputs)).astype(np.float32)
    if kind == "masked":
        outputs[:, 3], outputs[::2, 1] = INVALID, INVALID
    actions = np.stack([np.atleast_1d(SPACES[kind].sample()) for _ in range(N)]).astype(np.float32)
    if kind == "masked":
        actions[:] = 2 * rng.integers(2, size=(N, 1))
    values, old_values, returns, advantages = rng.normal(size=(4, N)).astype(np.float32)
    old = distribution.log_prob(outputs, actions) + rng.normal(0, 0.3, size=N).astype(np.float32)
    samples = FlatRollout(np.zeros((N, 1), np.float32), actions, old_values, old, advantages, returns)
    weights = rng.uniform(0, 2, size=N).astype(np.float32) if weighted else None
    return distribution, outputs, values, NativeMinibatches(np.arange(N), samples, np.array([N]), weights, distribution)


def by_numpy(distribution, outputs, values, m, config):
    """What is measured, and the gradients, as the slopes of the losses and of the distributions give them."""
    samples, weights = m.samples, 1.0 if m.weights is None else m.weights
    log_ratio = distribution.log_prob(outputs, samples.actions) - samples.log_probs
    ratio = np.exp(log_ratio)
    objectives, d_log_prob = SURROGATES[config.surrogate].slope(samples.advantages, ratio, config)
    errors, d_errors = value_slope(values, samples.values, samples.returns, config)
    d_outputs = distribution.gradient((d_log_prob * weights * np.float32(-1 / N)).astype(np.float32), config.ent_coef)
    d_values = d_errors * weights * (2 * config.vf_coef / N)
    d_log_std = None if distribution.d_log_std is None else distribution.d_log_std.copy()
    entropies = distribution.entropies(distribution.described(outputs))
    return [log_ratio, ratio, objectives, errors, entropies, d_outputs, d_values, d_log_std]


def in_c(distribution, outputs, values, m, config):
    """The same of the extension module, in two blocks."""
    loss, d_outputs, d_values = compiled_loss(distribution, m, config), np.empty_like(outputs), np.empty_like(values)
    squares = 0.0
    for part in (slice(10), slice(10, N)):
        arrays = [array[part] for array in (outputs, values, d_outputs, d_values)]
        squares += loss.add(part.start or 0, N, *arrays, part.start is not None)
    assert squares == pytest.approx(np.square(m.errors).sum(), rel=1e-5)
    measured = [m.log_ratios, m.ratios, m.objectives, m.errors, m.entropies]
    return [*measured, d_outputs, d_values, distribution.d_log_std]


@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", SPACES)
def test_equal(kind, options, weighted):
    """Each distribution with each option, in blocks and with weights, equals NumPy's to rounding."""
    config = LossConfig(**{**dict(clip_range=0.2, ent_coef=0.0, vf_coef=0.5), **OPTIONS[options]})
    inputs = minibatches_of(kind, weighted)
    expected = by_numpy(*inputs, config)
    for one, other in zip(expected, in_c(*inputs, config), strict=True):
        if one is not None:
            np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6 * max(1, np.abs(one).max()))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", SPACES)
def test_what_is_not_finite_is_seen(kind, number):
    """An output that is not finite makes its gradient or the ratio of its sample not finite, so that the step is refused."""
    distribution, outputs, values, m = minibatches_of(kind, weighted=False)
    outputs[5, 0] = number
    m.samples.actions[5, 0] = 0
    with np.errstate(all="ignore"):
        results = in_c(distribution, outputs, values, m, LossConfig(clip_range=0.2, ent_coef=0.1, vf_coef=0.5))
    assert not all(np.isfinite(part[5]).all() for part in results[:-1])
    assert np.isfinite(np.delete(results[5], 5, axis=0)).all()


def test_is_taken(monkeypatch):
    """Updates take the loss in C where it is known, and NumPy's with penalties and for other distributions."""
    taken = []
    add_block, add_compiled = AnalyticGradients._add_block, AnalyticGradients._add_compiled
    monkeypatch.setattr(AnalyticGradients, "_add_block", lambda *args: taken.append("NumPy") or add_block(*args))
    monkeypatch.setattr(AnalyticGradients, "_add_compiled", lambda *args: taken.append("C") or add_compiled(*args))
    for options, expected in (({}, "C"), (dict(bounds_coef=0.1), "NumPy"), (dict(action_dist="beta"), "NumPy")):
        make(**options).learn(32)
        assert set(taken) == {expected}
        taken.clear()


def test_actions_that_are_no_choices():
    """Something else than a choice in the rollout buffer is refused instead of reading beyond the logits."""
    for action in (-1, 4, np.nan, np.inf):
        inputs = minibatches_of("categorical", weighted=False)
        inputs[-1].samples.actions[3] = action
        with pytest.raises(ValueError, match="none of the choices"):
            in_c(*inputs, LossConfig(clip_range=0.2, ent_coef=0.0, vf_coef=0.5))

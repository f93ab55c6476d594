"""The loss of the extension module is that of NumPy, which autograd checks elsewhere: values, slopes and measurements."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from support.engines import make
from support.masks import make_masked

from sb3_ppo_ext.common.guards import NonFiniteGradientError
from sb3_ppo_ext.distributions import kl_divergence, parameters
from sb3_ppo_ext.distributions.masked import INVALID
from sb3_ppo_ext.engines.native import compiled_steps as native_steps
from sb3_ppo_ext.engines.native import gradients as native_gradients
from sb3_ppo_ext.engines.native import policy
from sb3_ppo_ext.engines.native.epoch import FlatRollout, NativeMinibatches
from sb3_ppo_ext.update.losses import PENALTIES, SURROGATES, LossConfig, bounds_loss, value_slope

pytest.importorskip("sb3_ppo_ext.engines.native._mlp", reason="the extension module was not built")
from sb3_ppo_ext.engines.native import _mlp
from sb3_ppo_ext.engines.native.compiled_loss import compiled_loss
from sb3_ppo_ext.engines.native.compiled_steps import CompiledSteps
from sb3_ppo_ext.engines.native.gradients import AnalyticGradients

N = 24
SPACES = {
    "Gaussian": spaces.Box(-1, 1, (3,), np.float32),
    "categorical": spaces.Discrete(4),
    "masked": spaces.Discrete(4),
    "several choices": spaces.MultiDiscrete([3, 1, 4]),
    "Bernoulli": spaces.MultiBinary(3),
    "squashed Gaussian": spaces.Box(-1, 1, (3,), np.float32),
    "Beta": spaces.Box(-1, 1, (3,), np.float32),
    "gSDE": spaces.Box(-1, 1, (3,), np.float32),
    "gSDE with expln": spaces.Box(-1, 1, (3,), np.float32),
    "gSDE with one deviation": spaces.Box(-1, 1, (3,), np.float32),
}
KINDS = {
    "squashed Gaussian": dict(action_dist="squashed_gaussian"),
    "Beta": dict(action_dist="beta"),
    "gSDE": dict(use_sde=True),
    "gSDE with expln": dict(use_sde=True, policy_kwargs=dict(use_expln=True)),
    "gSDE with one deviation": dict(use_sde=True, policy_kwargs=dict(full_std=False)),
}
BOUNDS = (th.tensor([-1.0, -0.5, -th.inf]), th.tensor([1.0, 2.0, th.inf]))
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
    native = make(env=dict(action_space=SPACES[kind]), **KINDS.get(kind, {}))._find_engine().native
    distribution = native.distribution
    if distribution.parameter is not None:
        distribution.parameter[:] = rng.normal(size=distribution.parameter.shape)
        if kind == "squashed Gaussian":
            distribution.parameter[:2] = -6, 3  # beyond the range
        distribution.pack()
    outputs = rng.normal(0, 2, size=(N, native.actor.n_outputs + native.actor.n_latents)).astype(np.float32)
    if kind == "masked":
        outputs[:, 3], outputs[::2, 1] = INVALID, INVALID
    actions = np.stack([np.atleast_1d(SPACES[kind].sample()) for _ in range(N)]).astype(np.float32)
    if kind == "masked":
        actions[:] = 2 * rng.integers(2, size=(N, 1))
    values, old_values, returns, advantages = rng.normal(size=(4, N)).astype(np.float32)
    old = distribution.log_prob(outputs, actions) + rng.normal(0, 0.3, size=N).astype(np.float32)
    with th.no_grad():
        before = parameters(distribution.make(th.from_numpy(outputs + rng.normal(0, 0.3, outputs.shape).astype(np.float32))))
    samples = FlatRollout(np.zeros((N, 1), np.float32), actions, old_values, old, advantages, returns, None, before.numpy())
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
    penalties = {name: PENALTIES[name] for name in config.penalties}
    loss = compiled_loss(distribution, m, config, penalties)
    # Latents, which gSDE reads, have no gradient.
    d_outputs, d_values = np.empty((N, sum(distribution.compiled()[1])), np.float32), np.empty_like(values)
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


@pytest.mark.parametrize("instruction_set", _mlp.available())
def test_small_probabilities(instruction_set):
    """Log probabilities and gradients of categorical distributions keep their digits where probabilities are small."""
    distribution, outputs, values, m = minibatches_of("categorical", weighted=False)
    outputs *= 20
    m.samples.log_probs[:], m.samples.advantages[:] = 0, -1  # Small ratios are not clipped for bad actions.
    m.samples.actions[:, 0] = outputs.argmax(1)
    _mlp.use(instruction_set)
    try:
        log_ratios, *_, d_outputs, _, _ = in_c(distribution, outputs, values, m, LossConfig(1.0, ent_coef=0.0, vf_coef=0.5))
    finally:
        _mlp.use(_mlp.available()[0])
    log_probs = th.from_numpy(outputs).double().log_softmax(1).numpy()
    best = (np.arange(N), outputs.argmax(1))
    np.testing.assert_allclose(log_ratios, log_probs[best], rtol=1e-6, atol=2e-7)
    others = np.ones_like(outputs, bool)
    others[best] = False
    # Of minus the ratio times the advantage, by the logits
    expected = -np.exp(log_probs) * np.exp(log_probs[best])[:, None] / N
    np.testing.assert_allclose(d_outputs[others], expected[others], rtol=2e-5, atol=1e-38)


@pytest.mark.parametrize("kind", SPACES)
def test_penalties(kind):
    """Values and gradients of the penalties are those of autograd, and descriptions of bounded distributions NumPy's."""
    coefs = {} if "gSDE" in kind else {"kl": 0.7}
    coefs |= {"bounds_loss": 0.3} if "Gaussian" in kind or "gSDE" in kind else {}
    config, plain = (LossConfig(0.2, penalties=penalties, action_bounds=BOUNDS, bounds_limit=0.4) for penalties in (coefs, {}))
    distribution, outputs, values, m = minibatches_of(kind, weighted=False)
    without, before = in_c(distribution, outputs, values, m, plain), m.samples.old
    without[-1] = None if without[-1] is None else without[-1].copy()
    results = in_c(distribution, outputs, values, m, config)
    leaf = th.from_numpy(outputs).requires_grad_()
    total = th.zeros(())
    if "kl" in coefs:
        kl = kl_divergence(th.from_numpy(before), distribution.make(leaf))
        np.testing.assert_allclose(m.penalized["kl"], kl.detach(), rtol=1e-4, atol=1e-5)
        total = total + coefs["kl"] * kl.mean()
    if "bounds_loss" in coefs:
        each = [bounds_loss(mean[None], *BOUNDS, 0.4) for mean in leaf[:, : results[5].shape[1]]]
        np.testing.assert_allclose(m.penalized["bounds_loss"], th.stack(each).detach(), rtol=1e-5)
        total = total + coefs["bounds_loss"] * th.stack(each).mean()
    leaves = [leaf] if distribution.log_std is None or "gSDE" in kind else [leaf, distribution.log_std]
    gradients = th.autograd.grad(total, leaves)
    expected = gradients[0][:, : results[5].shape[1]]
    np.testing.assert_allclose(results[5] - without[5], expected, rtol=1e-3, atol=1e-5)
    if len(leaves) > 1:
        inside = slice(2 if kind == "squashed Gaussian" else 0, None)
        np.testing.assert_allclose((results[-1] - without[-1])[inside], gradients[1][inside], rtol=1e-3, atol=1e-5)
    if m.rows is not None:
        np.testing.assert_array_equal(m.rows, distribution.described(outputs))


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
    """
    Updates are made in C where it knows all that they need. With another optimiser, they take the loss in C, and NumPy's with
    penalties and for other distributions.
    """
    taken = []

    def note(cls, method, what):
        original = getattr(cls, method)
        monkeypatch.setattr(cls, method, lambda *args: taken.append(what) or original(*args))

    note(AnalyticGradients, "_add_block", "NumPy")
    note(AnalyticGradients, "_add_compiled", "C")
    note(CompiledSteps, "make", "steps in C")
    cases = [({}, "steps in C"), (dict(optimizer="adamw"), "C"), (dict(native_threads=2), "C")]
    cases += [(dict(bounds_coef=0.1, kl_coef=0.1), "steps in C"), (dict(action_dist="beta", kl_coef=0.1), "steps in C")]
    cases += [(dict(use_sde=True, bounds_coef=0.1), "steps in C"), (dict(use_sde=True, native_threads=2), "C")]
    for options, expected in [*cases, (dict(use_sde=True, kl_coef=0.1), "NumPy")]:
        make(**options).learn(32)
        assert set(taken) == {expected}
        taken.clear()


def trained(options, n_steps=64):
    """Parameters, moments and logs of a short training."""
    np.random.seed(0)
    model = make(**options).learn(n_steps)
    state = model.policy.optimizer.state_dict()["state"].values()
    moments = [np.asarray(value) for each in state for value in each.values()]
    logs = {name: value for name, value in model.logger.name_to_value.items() if not name.startswith("time/")}
    return [parameter.detach().numpy() for parameter in model.policy.parameters()] + moments, logs


STEPS = {
    "Gaussian": dict(ent_coef=0.01),
    "more steps than in a call": dict(n_steps=80, batch_size=2),
    "masks": dict(make_env=make_masked, action_masking=True),
    "several minibatches in a step, the last one smaller": dict(accumulate_grad=2, batch_size=5),
    "segments": dict(priority_alpha=0.5),
    "normalised values": dict(normalize_value=True, clip_range_vf=0.1, vf_clip_mode="max"),
    "V-trace": dict(vtrace=True),
    "another advantage_norm": dict(advantage_norm="rollout"),
    "stopped by the KL divergence": dict(target_kl=1e-4, learning_rate=1e-2),
    "penalties": dict(bounds_coef=0.1, bounds_limit=0.1, kl_coef=0.5),
    "squashed": dict(action_dist="squashed_gaussian", kl_coef=0.1, kl_target=0.01, ent_coef=0.01),
    "Beta": dict(action_dist="beta", ent_coef=0.01, kl_coef=0.1),
    "gSDE": dict(use_sde=True, sde_sample_freq=4, ent_coef=0.01),
    "weight decay": dict(policy_kwargs=dict(optimizer_kwargs=dict(weight_decay=0.1))),
}


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_the_loop(name, monkeypatch):
    """Steps that the extension module makes are those of the loop, epoch by epoch, bit for bit, and so is what is logged."""
    monkeypatch.setattr(policy, "BLOCK", 3)
    monkeypatch.setattr(native_steps, "BLOCK", 3)
    if name != "more steps than in a call":
        monkeypatch.setattr(native_steps, "MAX_SAMPLES", 24)
    results, logs = trained(STEPS[name], STEPS[name].get("n_steps", 64) * 2)
    monkeypatch.setattr(native_gradients, "compiled_steps", lambda *args: None)
    monkeypatch.setattr(native_gradients, "MAX_SAMPLES", 1)
    expected, expected_logs = trained(STEPS[name], STEPS[name].get("n_steps", 64) * 2)
    for one, other in zip(expected, results, strict=True):
        np.testing.assert_array_equal(other, one)
    assert logs == pytest.approx(expected_logs, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("bad_gradients", ["raise", "skip"])
def test_steps_that_are_not_finite(bad_gradients, monkeypatch):
    """The loop looks at steps that are not finite: it names what is not, or skips them, and the others are made."""
    outcomes = []
    for chosen in (native_gradients.compiled_steps, lambda *args: None):
        monkeypatch.setattr(native_gradients, "compiled_steps", chosen)
        np.random.seed(0)
        model = make(bad_gradients=bad_gradients)
        model.learn(32)
        model.rollout_buffer.tensors["returns"][3, 0] = np.nan
        try:
            model.train()
            message = ""
        except NonFiniteGradientError as error:
            message = str(error)
        outcomes.append((message, model.n_skipped_updates, *(p.detach().numpy() for p in model.policy.parameters())))
    assert (bad_gradients == "raise") == ("value_loss nan" in outcomes[0][0])
    for one, other in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(one, other)


def test_actions_that_are_no_choices():
    """Something else than a choice in the rollout buffer is refused instead of reading beyond the logits."""
    for action in (-1, 4, np.nan, np.inf):
        inputs = minibatches_of("categorical", weighted=False)
        inputs[-1].samples.actions[3] = action
        with pytest.raises(ValueError, match="none of the choices"):
            in_c(*inputs, LossConfig(clip_range=0.2, ent_coef=0.0, vf_coef=0.5))

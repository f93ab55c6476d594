"""An update of each engine is that of the reference, to rounding, with each option."""

import numpy as np
import pytest
from support.cases import one_in
from support.engines import FUSED, UPDATES, assert_same_update, make, relative_error

from sb3_ppo_ext.engines.native import gradients
from sb3_ppo_ext.engines.native import policy as native_policy
from sb3_ppo_ext.engines.native.epoch import mean_of_each, normalize_each
from sb3_ppo_ext.update.losses import PENALTIES, Penalty

pytest.importorskip("sb3_ppo_ext.engines.native._mlp", reason="the extension module was not built")


# Options whose values act more here than in the cells of the covering array
ACTING = ("dual clip", "entropy", "weight decay", "values are clipped", "values are clipped, the worse counts")
ACTING += ("stopped by the KL divergence", "networks")


def test_normalize_each():
    """Advantages are normalised minibatch by minibatch, also in a smaller last one and in one of a single sample."""
    values = np.random.default_rng(0).normal(3, 2, size=31).astype(np.float32)
    for sizes in ([31], [8, 8, 8, 7], [10, 10, 10, 1], [1] * 31):
        parts = np.split(values, np.cumsum(sizes)[:-1])
        np.testing.assert_allclose(mean_of_each(values, np.array(sizes)), [part.mean() for part in parts], rtol=1e-6)
        expected = [(p - p.mean()) / (p.std(ddof=1) + 1e-8) if len(p) > 1 else p for p in parts]
        np.testing.assert_allclose(normalize_each(values, np.array(sizes)), np.concatenate(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", one_in(2, UPDATES, *ACTING))
def test_update(name):
    """The update of the native engine equals the reference's on each space, network and batch size."""
    assert_same_update(**UPDATES[name])


def test_reports_in_the_middle_of_an_update(monkeypatch):
    """Measurements of long updates are added up on the way, and each epoch counts once."""
    monkeypatch.setattr(gradients, "MAX_MEASURED", 8)
    assert_same_update(learning_rate=1e-2, ent_coef=0.1, rtol=1e-4)


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("name", FUSED)
def test_fused_update(name):
    """The update of the fused engine equals the reference's, with any policy."""
    assert_same_update(other="fused", **FUSED[name])


def test_frozen_actor_in_the_first_update():
    """The actor can be frozen before the optimiser has a state for any parameter."""
    options = dict(max_clip_fraction=0.05, learning_rate=1e-3, clip_range=0.001)
    eager, fused = (make(backend=backend, **options).learn(32).policy.state_dict() for backend in ("eager", "fused"))
    assert all(relative_error(eager[name], fused[name]) < 1e-5 for name in eager)


AUXILIARY = {
    ("distribution", "ratio"): lambda inputs, config: (inputs.distribution.entropy() * (inputs.ratio - 1).abs()).mean(),
    ("entropy", "log_prob"): lambda inputs, config: (inputs.entropy + inputs.log_prob).square().mean(),
    ("values", "data"): lambda inputs, config: (inputs.values * inputs.data.advantages).mean(),
    # The entropy of a Gaussian whose standard deviation is fixed has no gradient.
    ("entropy",): lambda inputs, config: -inputs.entropy.mean(),
}


READ = [(reads, {}) for reads in AUXILIARY]
READ += [(("entropy",), dict(policy_kwargs=dict(learn_std=False))), (("distribution", "ratio"), dict(action_dist="beta"))]


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("reads", "options"), READ, ids=str)
def test_any_auxiliary_loss(monkeypatch, reads, options):
    """A new auxiliary loss is the same in the native engine as in the reference, whatever it reads."""
    monkeypatch.setitem(PENALTIES, "kl", Penalty("kl_coef", reads, AUXILIARY[reads]))
    assert_same_update(kl_coef=0.5, learning_rate=1e-3, **options)


@pytest.mark.parametrize("options", [dict(priority_alpha=0.5, n_steps=64, kl_coef=0.1), dict(accumulate_grad=2)])
def test_minibatches_in_blocks(options, monkeypatch):
    """Minibatches and rollouts that exceed the caches are computed in blocks, and give the same update."""
    monkeypatch.setattr(native_policy, "BLOCK", 3)
    assert_same_update(batch_size=8, **options)

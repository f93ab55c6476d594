"""Accumulated gradients are those of a larger minibatch."""

import itertools

import pytest
import torch as th
from support.training import Recording, logged, make, run


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(advantage_norm="rollout"),
        dict(normalize_advantage=False),
        dict(n_steps=20),  # what is left makes a smaller step
        dict(n_steps=19),  # ... of minibatches that are not equal
        dict(priority_alpha=0.7, priority_segment=4),
        dict(priority_alpha=0.7, priority_segment=8),
        dict(batch_size_of_one=True),
        dict(kl_coef=1.0, bounds_coef=0.1, bounds_limit=0.0, ent_coef=0.1, surrogate="spo"),
        dict(vtrace=True, clip_range_vf=0.1, vf_clip_mode="max"),
        dict(target_kl=0.005, learning_rate=3e-3),
        dict(max_clip_fraction=0.2, learning_rate=0.02),
        dict(max_grad_norm=0.5, critic_learning_rate=1e-3),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_accumulated_gradients_are_those_of_a_larger_batch(options):
    """With any other option, 4 minibatches of 4 are one of 16, to rounding."""
    size = 1 if options.pop("batch_size_of_one", False) else 4
    options = {"learning_rate": 0.01, "optimizer": "sgd", "timesteps": 64, **options}
    large = run(batch_size=16, **options)
    small = run(batch_size=size, accumulate_grad=16 // size, **options)
    for name, expected in large.policy.state_dict().items():
        th.testing.assert_close(small.policy.state_dict()[name], expected, atol=2e-5, rtol=1e-4)
    for name in ("train/grad_norm", "train/n_updates"):
        assert logged(small)[name] == pytest.approx(logged(large)[name], rel=1e-3)


def test_target_kl_judges_the_accumulated_step(monkeypatch):
    """The KL divergence of a step is the mean over its minibatches: 1 in the first of four is 0.25 in all."""
    divergences = itertools.cycle([1.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(
        "sb3_ppo_ext.update.minibatch_loss.approximate_kl", lambda ratio, log_ratio: th.tensor(next(divergences))
    )
    for target_kl, n_minibatches in ((0.16, 4), (0.17, 24)):
        model = make(Recording, batch_size=4, accumulate_grad=4, target_kl=1.0001 * target_kl).learn(32)
        assert len(model.seen) == n_minibatches

"""Prioritised segments in training: what is drawn, how it is weighted and what is logged."""

import numpy as np
import pytest
from support.training import Recording, logged, make, run

from sb3_ppo_ext.update import estimates
from sb3_ppo_ext.update.minibatches import PrioritizedSegments


def test_segments_are_drawn_and_weighted():
    """Minibatches consist of successive steps, with V-trace as well."""
    model = make(Recording, priority_alpha=1.0, priority_segment=4, batch_size=8, vtrace=True).learn(32)
    observations = model.rollout_buffer.observations
    assert len(model.seen) == 3 * 4
    for data, _ in model.seen:
        assert len(data.observations) == 8
        for segment in data.observations.numpy().reshape(2, 4, -1):
            (first,) = np.flatnonzero((observations == segment[0]).all(axis=1))
            assert first % 4 == 0
            np.testing.assert_array_equal(observations[first : first + 4], segment)
    assert logged(model)["train/priority_beta"] == 1.0


def test_priority_beta_anneals():
    """beta goes from 0.4 to 1 over the training."""
    model = make(priority_alpha=0.5)
    model.learn(64, callback=lambda local, _: local["self"].num_timesteps <= 32)
    assert logged(model)["train/priority_beta"] == pytest.approx(0.4 + 0.6 / 2)


def test_priorities_follow_vtrace(monkeypatch):
    """The priorities are those of the advantages of each epoch."""
    seen = []

    class Segments(PrioritizedSegments):
        def __init__(self, advantages, *args):
            seen.append(advantages)
            super().__init__(advantages, *args)

    monkeypatch.setattr(estimates, "PrioritizedSegments", Segments)
    model = run(priority_alpha=0.5, vtrace=True, learning_rate=0.02)
    assert len(seen) == 3
    np.testing.assert_allclose(seen[0], model.rollout_buffer.advantages.reshape(2, 16).T, atol=1e-5)
    assert not np.allclose(seen[0], seen[1], atol=1e-3)


def test_priority_beta_past_the_end():
    """In a last rollout that ends past the end of the training, beta is 1."""
    assert logged(run(priority_alpha=0.5, timesteps=40))["train/priority_beta"] == 1.0


def test_segments_fit_into_short_rollouts():
    """Segments may be longer than the rollout, as a tuner may draw them; no minibatch is larger than it should be."""
    model = make(Recording, priority_alpha=0.5, priority_segment=64, n_steps=4, batch_size=2).learn(8)
    assert [len(data.actions) for data, _ in model.seen] == [2] * 12
    run(priority_alpha=0.5, priority_segment=3, n_steps=16, batch_size=256, timesteps=64)

"""Trainings warn once where episodes are longer than what the policy sees."""

from itertools import pairwise

import numpy as np
import pytest
from support.memory import make
from support.toys import warned

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.memory.context_watch import ContextWatch

LONGER = "longer than context_length"


def messages(function):
    return [message for message in warned(function) if LONGER in message]


def test_lengths_of_episodes():
    """Episodes are measured across rollouts, in each environment."""
    watch, rng = ContextWatch(10**6, 3), np.random.default_rng(0)
    starts = rng.random((40, 3)) < 0.15
    starts[0] = True
    expected = []
    for column in starts.T:
        expected += np.diff(np.flatnonzero(np.r_[column, True])).tolist()
    actual, bounds = [], [0, 1, 7, 8, 30, 40]
    for first, last in pairwise(bounds):
        dones = starts[last] if last < 40 else np.ones(3, bool)
        actual += watch._finished(starts[first:last], dones).tolist()
    assert sorted(actual) == sorted(expected)


def test_one_warning(tmp_path):
    """The warning says when, how many, and what to do; it comes once for each model, and again for a loaded one."""
    model = make(context_length=5, env=dict(length=7, p_end=0.0))
    (message,) = messages(lambda: model.learn(96))
    assert "after 0 timesteps, 4 of 4 finished episodes" in message
    assert "context_length=5, the longest one 7 steps" in message
    assert "MlpLstmPolicy" in message
    assert not messages(lambda: model.learn(32))
    model.save(tmp_path / "model")
    loaded = PPOExt.load(tmp_path / "model", env=model.env)
    assert len(messages(lambda: loaded.learn(32))) == 1


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize(("context_length", "length"), [(7, 7), (9, 7), (1, 7)])
def test_no_warning(context_length, length):
    """A context as long as the episodes is enough, and a policy without memory is nothing to warn of."""
    model = make(context_length=context_length, env=dict(length=length, p_end=0.0))
    assert not messages(lambda: model.learn(96))


def test_episodes_longer_than_rollouts():
    """An episode that spans several rollouts is counted when it ends."""
    model = make(context_length=30, n_steps=8, batch_size=8, env=dict(length=31, p_end=0.0))
    (message,) = messages(lambda: model.learn(80))
    assert "after 48 timesteps, 2 of 2" in message


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("backend", ["fused", "device"])
def test_no_second_warning_after_a_change(backend):
    """A changed option makes a new rollout buffer, which knows of the warning and of the lengths of the episodes so far."""
    model = make(context_length=5, env=dict(length=7, p_end=0.0), backend=backend)
    assert len(messages(lambda: model.learn(96))) == 1
    watch = model.rollout_buffer.memory.context_watch
    model.gamma = 0.5
    assert not messages(lambda: model.learn(96, reset_num_timesteps=False))
    assert model.rollout_buffer.memory.context_watch is watch

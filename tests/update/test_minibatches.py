"""Which samples make a minibatch, against SB3's buffer, numbers computed by hand and frequencies."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from support.parity import assert_equal
from support.toys import DICT, VECTOR

from sb3_ppo_ext.memory.windows import WindowMemory
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer, knows_indices
from sb3_ppo_ext.update import minibatches
from sb3_ppo_ext.update.rollout_data import Rollout, flatten


def full_buffer(observation_space=VECTOR, n_steps=6, n_envs=3):
    """A buffer in which every number tells its index."""
    buffer_class = DictRolloutBuffer if observation_space is DICT else RolloutBuffer
    buffer = buffer_class(n_steps, observation_space, spaces.Discrete(3), "cpu", n_envs=n_envs)
    for i, name in enumerate(("actions", "values", "log_probs", "advantages", "returns")):
        array = getattr(buffer, name)
        setattr(buffer, name, np.arange(array.size, dtype=array.dtype).reshape(array.shape) + 1000 * i)
    observations = buffer.observations
    for array in observations.values() if isinstance(observations, dict) else [observations]:
        array[:] = np.arange(array.size).reshape(array.shape) % 250
    buffer.full = True
    return buffer


@pytest.mark.parametrize("observation_space", [VECTOR, DICT], ids=["vector", "dict"])
@pytest.mark.parametrize("batch_size", [1, 4, 18, 100])
def test_minibatches_are_those_of_sb3(observation_space, batch_size):
    """The same samples come in the same order from the same random state."""
    theirs, ours = full_buffer(observation_space), full_buffer(observation_space)
    np.random.seed(3)
    expected = [data._asdict() for data in theirs.get(batch_size)]
    np.random.seed(3)
    flatten(ours)
    flatten(ours)  # once is enough
    rollout = Rollout(ours)
    draws = list(rollout.draws(batch_size, batch_size))
    assert_equal(expected, [rollout.samples(indices)._asdict() for indices, _ in draws], "minibatches")
    assert all(weights is None for _, weights in draws)


def test_time_major():
    """Flat samples come back to steps and environments."""
    buffer = full_buffer()
    advantages = buffer.advantages.copy()
    rollout = Rollout(buffer)
    np.testing.assert_array_equal(rollout.time_major(buffer.advantages), advantages)
    np.testing.assert_array_equal(rollout.time_major(buffer.advantages.flatten()), advantages)


def test_buffers_that_draw_themselves():
    """Buffers with a `get` of their own are told from those that draw as SB3 does."""

    class Own(RolloutBuffer):
        def get(self, batch_size=None):
            yield from super().get(batch_size)

    class Estimator(RolloutBuffer):
        def compute_returns_and_advantage(self, last_values, dones):
            pass

    assert knows_indices(RolloutBuffer)
    assert knows_indices(DictRolloutBuffer)
    assert knows_indices(Estimator)
    assert not knows_indices(Own)
    assert not knows_indices(object)


# Prioritised segments


class PrioritizedSegments(minibatches.PrioritizedSegments):
    """From and to NumPy."""

    def __init__(self, advantages, *args):
        super().__init__(th.as_tensor(advantages), *args)
        self.probabilities = self.probabilities.double()

    def epoch(self, batch_size):
        return (tuple(part.numpy() for part in draw) for draw in super().epoch(batch_size))


def inclusion_probabilities(probabilities, n_drawn):
    return minibatches.inclusion_probabilities(th.from_numpy(probabilities), n_drawn).numpy()


def segments(length=3, alpha=1.0, beta=0.4, n_steps=7, n_envs=2):
    """Segments of advantages that are -1 in the first environment and 3 in the second."""
    return PrioritizedSegments(np.tile(np.float32([-1, 3]), (n_steps, 1)), length, alpha, beta)


def test_segments_are_successive_steps_of_one_environment():
    """A segment is successive steps of one environment; the last one of a rollout is shorter."""
    drawn = segments()
    assert drawn.firsts.tolist() == [0, 3, 6, 7, 10, 13]
    assert drawn.lengths.tolist() == [3, 3, 1, 3, 3, 1]
    whole = {tuple(range(first, first + n)) for first, n in zip(drawn.firsts, drawn.lengths, strict=True)}
    for indices, weights in drawn.epoch(6):
        assert len(indices) == len(weights) == len(set(indices))
        starts = np.flatnonzero(np.isin(indices, drawn.firsts))
        assert {tuple(part) for part in np.split(indices, starts[1:])} <= whole


def test_probabilities_by_hand():
    """Probabilities are sums of 3, 3, 1, 9, 9, 3 to the power of 0.5, mixed with 5 % of the uniform distribution."""
    powers = np.array([3, 3, 1, 9, 9, 3]) ** 0.5
    expected = 0.95 * powers / powers.sum() + 0.05 / 6
    np.testing.assert_allclose(segments(alpha=0.5).probabilities, expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_probabilities_do_not_depend_on_the_scale(scale):
    """Very small and very large advantages have the same priorities."""
    advantages = np.random.default_rng(0).normal(size=(8, 4))
    one, scaled = (PrioritizedSegments(a, 2, 3.0, 0.4) for a in (advantages, advantages * scale))
    np.testing.assert_allclose(one.probabilities, scaled.probabilities, rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_no_advantage_is_uniform(value):
    """With advantages that are all 0, or one that is not finite, segments are drawn uniformly."""
    advantages = np.zeros((8, 2), np.float32)
    advantages[3, 1] = value
    drawn = PrioritizedSegments(advantages, 2, 0.6, 0.4)
    np.testing.assert_allclose(drawn.probabilities, 1 / 8)
    assert all((weights == 1).all() for _, weights in drawn.epoch(4))


@pytest.mark.parametrize(
    ("batch_size", "n_drawn", "n_minibatches"), [(6, 2, 3), (8, 2, 2), (3, 1, 5), (14, 4, 1), (18, 6, 1), (99, 6, 1)]
)
def test_epoch_is_as_long_as_the_rollout(batch_size, n_drawn, n_minibatches):
    """There are as many minibatches as SB3 makes of 14 samples; each holds as many segments as fit in."""
    draws = list(segments().epoch(batch_size))
    assert len(draws) == n_minibatches
    assert all(np.isin(segments().firsts, indices).sum() == n_drawn for indices, _ in draws)


def test_everything_drawn_weighs_the_same():
    """A minibatch of all the segments is the rollout, in which nothing is preferred."""
    ((indices, weights),) = segments(beta=1.0).epoch(18)
    assert sorted(indices) == list(range(14))
    np.testing.assert_array_equal(weights, 1)


@pytest.mark.parametrize("n_drawn", [1, 3, 10, 16, 20])
def test_inclusion_probabilities(n_drawn):
    """They sum to the number of draws, and are how often each is among those drawn."""
    p = 0.95 * np.random.default_rng(0).dirichlet(np.ones(20)) + 0.05 / 20
    q = inclusion_probabilities(p, n_drawn)
    assert q.sum() == pytest.approx(n_drawn)
    rng = np.random.default_rng(1)
    drawn = [np.argsort(rng.exponential(size=20) / p)[:n_drawn] for _ in range(20000)]
    frequencies = np.bincount(np.concatenate(drawn), minlength=20) / 20000
    np.testing.assert_allclose(q, frequencies, atol=0.03)


def test_weights_of_few_draws_are_those_of_prioritised_replay():
    """Up to the scaling the weights are (N p)^-beta."""
    p = np.random.default_rng(0).dirichlet(np.ones(2000))
    ours, theirs = inclusion_probabilities(p, 1) ** -0.4, (2000 * p) ** -0.4
    np.testing.assert_allclose(ours / ours.mean(), theirs / theirs.mean(), rtol=0.01)


def test_weights_have_mean_one_and_prefer_the_rare():
    """The weights of a minibatch have mean 1, and are larger for what is drawn less often."""
    for indices, weights in segments(beta=1.0, n_steps=60, n_envs=2).epoch(30):
        assert weights.mean() == pytest.approx(1)
        rare, frequent = weights[indices < 60], weights[indices >= 60]
        assert len(rare) == 0 or len(frequent) == 0 or rare.min() > frequent.max()


def test_larger_advantages_are_drawn_more_often():
    """Segments of the second environment, whose advantages are three times as large, are drawn more often."""
    th.manual_seed(0)
    indices = np.concatenate([part for _ in range(200) for part, _ in segments(n_steps=30).epoch(6)])
    ratio = (indices >= 30).sum() / (indices < 30).sum()
    assert 2.2 < ratio < 3


def test_weights_undo_the_priorities():
    """With beta = 1 the weighted mean over many minibatches is that of the rollout, and the plain one is not."""
    th.manual_seed(0)
    advantages = np.random.default_rng(0).lognormal(sigma=1.5, size=(64, 4))
    flat = advantages.T.flatten()
    drawn = PrioritizedSegments(advantages, 4, 1.0, 1.0)
    # Weights are scaled within a minibatch, so that large ones are needed.
    draws = [draw for _ in range(300) for draw in drawn.epoch(96)]
    weighted = np.mean([(weights * flat[indices]).mean() for indices, weights in draws])
    plain = np.mean([flat[indices].mean() for indices, _ in draws])
    assert weighted == pytest.approx(flat.mean(), rel=0.03)
    assert plain > 1.2 * flat.mean()


@pytest.mark.parametrize(("space", "length"), [(VECTOR, 8), (spaces.Box(0, 255, (36, 36, 1), np.uint8), 32)])
def test_segments_of_histories(space, length):
    """History-based policies draw short segments, so that a minibatch has many; images, which are costly, longer ones."""
    buffer = TensorRolloutBuffer(64, space, spaces.Discrete(3), "cpu", n_envs=2, memory=WindowMemory(20))
    buffer.pos, buffer.full = 64, True
    draws = [indices.numpy() for indices, _ in Rollout(buffer).draws(32, 32)]
    assert sorted(np.concatenate(draws)) == list(range(128))
    begins = np.concatenate([indices[np.diff(indices, prepend=-9) != 1] for indices in draws])
    assert set(begins % length) == {0}
    assert set(begins % (2 * length)) == {0, length}  # not even twice as long

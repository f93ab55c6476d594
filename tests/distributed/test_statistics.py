"""What ranks compute together: objects, moments, running statistics, segments and metrics."""

import copy
import pickle

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize
from support.thread_ranks import on_ranks, parts_of
from support.toys import make_toys

from sb3_ppo_ext.distributed.ranks import SINGLE
from sb3_ppo_ext.distributed.statistics import Moments, SharedMeanStd, share_statistics, unshare_statistics
from sb3_ppo_ext.envs.tensors.tensor_vec_normalize import TensorMeanStd
from sb3_ppo_ext.update import minibatches
from sb3_ppo_ext.update.advantages import AdvantageNormalizer, normalize, normalize_over
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.minibatches import PrioritizedSegments, SharedPrioritizedSegments, n_counted

pytest.importorskip("sb3_ppo_ext.distributed._shared_sum")
NUMBERS = np.random.default_rng(0).normal(3.0, 2.0, size=(12, 8)).astype(np.float32)


def test_objects():
    """All ranks get the objects of all ranks, in their order."""
    found = on_ranks(3, lambda ranks: ranks.gather({"rank": ranks.index, "text": "é" * ranks.index * 100}))
    assert found[0] == found[1] == found[2] == [{"rank": r, "text": "é" * r * 100} for r in range(3)]
    assert SINGLE.gather("one") == ["one"]


def test_broadcast():
    """All ranks get the numbers of rank 0, of any type and shape, NaN among them."""

    def run(ranks):
        tensors = [th.full((2, 3), 1.5 + ranks.index), th.tensor(7 + ranks.index), th.tensor([np.nan, ranks.index])]
        ranks.broadcast(tensors)
        return [tensor.numpy() for tensor in tensors]

    for found in on_ranks(2, run):
        np.testing.assert_array_equal(found[0], np.full((2, 3), 1.5))
        assert found[1] == 7
        assert found[1].dtype == np.int64
        np.testing.assert_array_equal(found[2], [np.nan, 0])


def test_moments():
    """Moments of the numbers of all ranks, one of which has none."""

    def run(ranks):
        return Moments.of(NUMBERS if ranks.index == 1 else NUMBERS[:0], ranks)

    for moments in on_ranks(2, run):
        assert moments.n == NUMBERS.size
        np.testing.assert_allclose(moments.mean, NUMBERS.mean(dtype=np.float64))
        np.testing.assert_allclose(moments.variance, NUMBERS.var(dtype=np.float64))
        assert (moments.low, moments.high) == (NUMBERS.min(), NUMBERS.max())


def test_advantages_of_the_rollout():
    """Advantages are normalised as those of all ranks together."""
    expected = normalize(th.from_numpy(NUMBERS.ravel())).numpy()
    found = on_ranks(2, lambda ranks: normalize_over(ranks, th.from_numpy(parts_of(NUMBERS, ranks).ravel())).numpy())
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(normalize_over(SINGLE, th.from_numpy(NUMBERS.ravel())).numpy(), expected)


@pytest.mark.parametrize("warm_start", [True, False])
def test_moving_averages(warm_start):
    """Moving averages are those of the rollouts of all ranks; one that is not finite on one rank is ignored by all."""
    rollouts = [NUMBERS, 2 * NUMBERS - 1, np.where(NUMBERS.max() - 1e-3 < NUMBERS, np.nan, NUMBERS), NUMBERS**2]

    def run(ranks):
        normalizer = AdvantageNormalizer(0.3, warm_start)
        for rollout in rollouts:
            part = rollout if ranks.size == 1 else parts_of(rollout, ranks)
            normalizer.observe(th.from_numpy(part), ranks)
        return normalizer.state_dict()

    expected = run(SINGLE)
    for found in on_ranks(3, run):
        for name in ("average", "weight", "mean", "std"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


def test_running_statistics():
    """Running statistics are those of SB3 for the rows of all ranks, also if a rank has none at some time."""

    def run(ranks):
        shared = SharedMeanStd(RunningMeanStd(shape=(8,)), ranks)
        for step in range(4):
            if step == 2 and ranks.index == 0:
                shared.update_with_nothing()
            else:
                shared.update(100 + step * parts_of(NUMBERS, ranks))
        return shared

    expected = RunningMeanStd(shape=(8,))
    for step in range(4):
        expected.update(100 + step * (NUMBERS[6:] if step == 2 else NUMBERS).astype(np.float64))
    for found in on_ranks(2, run):
        np.testing.assert_allclose(found.mean, expected.mean)
        np.testing.assert_allclose(found.var, expected.var, rtol=1e-5)
        assert found.count == expected.count


def test_running_statistics_in_tensors():
    """Running statistics in tensors are those of SB3 for the rows of all ranks, also if a rank has none."""

    def run(ranks):
        shared = TensorMeanStd(RunningMeanStd(shape=(8,)), th.device("cpu"))
        shared.ranks = ranks
        shared.update_tensor(th.from_numpy(parts_of(NUMBERS, ranks)))
        shared.update_with_nothing() if ranks.index else shared.update_tensor(th.from_numpy(NUMBERS))
        shared.update_with_nothing()
        return shared

    expected = RunningMeanStd(shape=(8,))
    for _ in range(2):
        expected.update(NUMBERS.astype(np.float64))
    for found in on_ranks(2, run):
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6)
        np.testing.assert_allclose(found.var, expected.var, rtol=1e-5)
        assert found.count == pytest.approx(expected.count)


def test_copies_of_running_statistics():
    """Copies and pickles are SB3's, which files and evaluation environments may keep."""
    shared = SharedMeanStd(RunningMeanStd(shape=(2,)), SINGLE)
    shared.update(NUMBERS[:, :2])
    for copied in (copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        assert type(copied) is RunningMeanStd
        np.testing.assert_array_equal(copied.mean, shared.mean)
        assert copied.count == shared.count


def test_normalizers_are_left_as_they_were():
    """Normalisers share their statistics during a training only."""
    env = VecNormalize(make_toys())
    share_statistics([env], SINGLE)
    assert (type(env.obs_rms), type(env.ret_rms)) == (SharedMeanStd, SharedMeanStd)
    env.reset()
    unshare_statistics([env])
    assert (type(env.obs_rms), type(env.ret_rms)) == (RunningMeanStd, RunningMeanStd)
    assert env.obs_rms.count > 1


def test_segments(monkeypatch):
    """The draws of all ranks together are those of one process with the advantages of all."""
    make = minibatches.PrioritizedSegments.__init__

    def seeded(self, *arguments):
        make(self, *arguments)
        self.generator = th.Generator().manual_seed(5)

    monkeypatch.setattr(PrioritizedSegments, "__init__", seeded)
    monkeypatch.setattr(np.random, "randint", lambda *_: 5)
    expected = [(i.numpy(), w.numpy()) for i, w in PrioritizedSegments(th.as_tensor(NUMBERS), 4, 0.9, 0.5).epoch(16)]

    def run(ranks):
        own = th.as_tensor(parts_of(NUMBERS, ranks, axis=1))
        return [(i.numpy(), w.numpy()) for i, w in SharedPrioritizedSegments(own, 4, 0.9, 0.5, ranks).epoch(8)]

    found, n_own = on_ranks(2, run), NUMBERS.size // 2
    n_empty = 0
    for number, (indices, weights) in enumerate(expected):
        drawn = {}
        for rank, draws in enumerate(found):
            n = n_counted(len(draws[number][0]), draws[number][1])
            n_empty += n == 0
            drawn |= dict(zip(draws[number][0][:n] + rank * n_own, draws[number][1][:n], strict=True))
        assert drawn == dict(zip(indices, weights, strict=True))


def test_empty_draws():
    """A rank without samples in a minibatch gets one that does not count."""
    advantages = np.zeros((4, 4), np.float32)
    advantages[:, 2:] = 100.0
    draws = on_ranks(
        2,
        lambda ranks: list(
            SharedPrioritizedSegments(th.as_tensor(parts_of(advantages, ranks, 1)), 4, 2.0, 0.5, ranks).epoch(2)
        ),
    )
    counts = np.array([[n_counted(len(indices), weights) for indices, weights in each] for each in draws])
    assert (counts[0] == 0).any()
    np.testing.assert_array_equal(counts.sum(axis=0), 4)


def test_metrics():
    """Measurements are averaged over the ranks, weighted by the number of samples where it differs."""

    def run(ranks, counts=None):
        metrics = Metrics()
        metrics["loss"] = [th.tensor(float(ranks.index)), th.tensor(2.0)]
        metrics["ratio"] = [th.ones(3)]
        metrics["adv/clamped_fraction"] = [th.tensor(0.5 * ranks.index)]
        metrics.average(ranks, None if counts is None else np.array(counts[ranks.index]))
        return metrics.numbers("loss").tolist(), metrics.mean("adv/clamped_fraction"), len(metrics["ratio"])

    assert on_ranks(2, run) == [([0.5, 2.0], 0.25, 1)] * 2
    assert on_ranks(2, lambda ranks: run(ranks, [[3.0, 0.0], [1.0, 5.0]])) == [([0.25, 2.0], 0.25, 1)] * 2

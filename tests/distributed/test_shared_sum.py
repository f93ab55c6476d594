"""Sums over ranks through shared memory, and their arguments."""

import errno
import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch as th
from support.thread_ranks import on_ranks

from sb3_ppo_ext.distributed import shared_sum

_shared_sum = pytest.importorskip("sb3_ppo_ext.distributed._shared_sum")


@pytest.mark.parametrize("size", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums(size, dtype):
    """Arrays of many lengths are added up in the order of the ranks: the sums are equal to the bit on all ranks."""
    arrays = [np.random.default_rng(0).normal(size=(size, n)).astype(dtype) for n in (1, 3, 32, 33, 1000, 12345)]

    def run(ranks):
        return [ranks.sum(th.from_numpy(array[ranks.index].copy())).numpy() for array in arrays * 5]

    expected = []
    for array in arrays * 5:
        total = array[0].copy()
        for other in array[1:]:
            total += other
        expected.append(total)
    for found in on_ranks(size, run):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("dtype", [th.float32, th.float64])
def test_means(size, is_shared, dtype):
    """Tensors and numbers become their weighted means, also those with gaps, and those of a rank without weight."""
    generator = th.Generator().manual_seed(0)
    shapes = [(3,), (64, 17), (2, 3, 4), ()]
    given = [[th.randn(shape, generator=generator, dtype=dtype) for shape in shapes] for _ in range(size)]
    weights = [128.0, 0.0, 3.0, 7.0, 49.0][:size]

    def run(ranks):
        if is_shared:
            ranks.share_means()
        tensors = [tensor.clone() for tensor in given[ranks.index]]
        tensors[1] = tensors[1].t().contiguous().t()
        before = [tensor.data_ptr() for tensor in tensors]
        averager = ranks.averager(tensors, 2)
        averager([0.0, 0.0], 1.0)
        for tensor, value in zip(tensors, given[ranks.index], strict=True):
            tensor.copy_(value)
        numbers = averager([float(ranks.index), 1.0], weights[ranks.index])
        assert [tensor.data_ptr() for tensor in tensors] == before
        return tensors, numbers

    results = on_ranks(size, run)
    for index in range(len(shapes)):
        expected = sum(w * tensors[index].double() for w, tensors in zip(weights, given, strict=True)) / sum(weights)
        for tensors, _ in results:
            th.testing.assert_close(tensors[index].double(), expected, rtol=1e-5, atol=1e-6)
            assert th.equal(tensors[index], results[0][0][index])
    expected = np.dot(weights, np.arange(size)) / sum(weights)
    np.testing.assert_allclose([numbers for _, numbers in results], [[expected, 1.0]] * size, rtol=1e-6)


def test_many_sums_of_ranks_at_different_speeds():
    """No rank reads a summand of another sum, whichever of them is ahead."""

    def run(ranks):
        generator = np.random.default_rng(ranks.index)
        totals = []
        for number in range(3000):
            if generator.random() < 0.01:
                threading.Event().wait(generator.random() * 2e-3)
            totals.append(float(ranks.sum(th.full((5,), float(number * (ranks.index + 1))))[4]))
        return totals

    for totals in on_ranks(3, run):
        np.testing.assert_array_equal(totals, np.arange(3000) * 6.0)


def test_numbers_that_are_not_finite():
    """NaN and infinity of one rank reach all."""

    def run(ranks):
        return ranks.sum(th.tensor([np.nan if ranks.index else 1.0, np.inf, 1.0])).numpy()

    for found in on_ranks(2, run):
        np.testing.assert_array_equal(found, [np.nan, np.inf, 2.0])


def reduction(size=2, capacity=100, index=0):
    return _shared_sum.Reduction(mmap.mmap(-1, _shared_sum.size_of(size, capacity)), index, size, capacity)


def test_a_rank_that_does_not_arrive():
    """A rank that waits too long names the one that is missing."""
    with pytest.raises(TimeoutError, match="rank 1 has not arrived"):
        reduction().sum(np.zeros(3), 0.2)


def test_a_rank_that_has_failed():
    """A rank that waits for one that has failed raises an error at once."""

    def run(ranks):
        if ranks.index == 1:
            raise KeyError("its own error")
        return ranks.sum(th.zeros(3))

    with pytest.raises((KeyError, RuntimeError)) as error:
        on_ranks(2, run)
    assert "its own error" in str(error.value) or "rank 1 has failed" in str(error.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3, np.int64), "float32 or float64"),
        (np.zeros(3, np.float16), "float32 or float64"),
        (np.zeros(1000), "the memory is for"),
    ],
)
def test_bad_arrays(array, message):
    """Arrays of another type, or too large ones, are refused."""
    with pytest.raises(ValueError, match=message):
        reduction().sum(array, 1.0)


def test_bad_buffers():
    """Arrays that cannot be written to, or have gaps, are refused."""
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    for array in (frozen, np.zeros((4, 4))[:, 1], "text"):
        with pytest.raises((ValueError, TypeError, BufferError)):
            reduction().sum(array, 1.0)


BAD_RANKS = [(2, 2, 10), (-1, 2, 10), (0, 0, 10), (0, 2, 0), (0, 2, 2**62), (0, 10**6, 1)]


def test_bad_means():
    """Means of arrays of another type, of too large ones, and of what is no list of arrays, are refused."""
    floats = np.zeros(3, np.float32)
    for arrays, error in [([np.zeros(3)], ValueError), ([floats, np.zeros(100, np.float32)], ValueError)]:
        with pytest.raises(error, match=r"float32|the memory is for"):
            reduction().mean(arrays, 1.0, 0.2)
    for arrays in (floats, [floats, "text"], [floats[::2]]):
        with pytest.raises((ValueError, TypeError, BufferError)):
            reduction().mean(arrays, 1.0, 0.2)
    with pytest.raises(TimeoutError, match="rank 1 has not arrived"):
        reduction().mean([floats, floats], 1.0, 0.2)


@pytest.mark.parametrize(("index", "size", "capacity"), BAD_RANKS)
def test_bad_ranks(index, size, capacity):
    """Ranks outside of the size, and sizes that do not fit, are refused."""
    with pytest.raises(ValueError, match="give"):
        _shared_sum.Reduction(mmap.mmap(-1, 4096), index, size, capacity)


def test_bad_memory():
    """Memory that is too small, not aligned, or not opened is refused."""
    with pytest.raises(ValueError, match="smaller"):
        _shared_sum.Reduction(bytearray(100), 0, 2, 1000)
    with pytest.raises(ValueError, match="already open"):
        reduction().__init__(mmap.mmap(-1, _shared_sum.size_of(2, 100)), 0, 2, 100)
    with pytest.raises(ValueError, match="no shared memory"):
        _shared_sum.Reduction.__new__(_shared_sum.Reduction).sum(np.zeros(1), 1.0)
    with pytest.raises(ValueError, match="give"):
        _shared_sum.size_of(0, 10)


@pytest.mark.skipif(not shared_sum.FOLDER.exists(), reason="no shared memory")
@pytest.mark.parametrize("n_failures", [1, 2])
def test_little_shared_memory(n_failures, tmp_path, monkeypatch):
    """Where shared memory is short, as in Docker, a file takes its place; nothing is left behind."""
    failures, allocate = iter([OSError(errno.ENOSPC, "No space left on device")] * n_failures), os.posix_fallocate

    def limited(*args):
        if (failure := next(failures, None)) is not None:
            raise failure
        allocate(*args)

    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(shared_sum, "FOLDER", memory)
    monkeypatch.setattr(os, "posix_fallocate", limited)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if n_failures == 1:
        descriptor, name = shared_sum._new_file(4096)
        assert Path(name).parent == tmp_path
        assert os.fstat(descriptor).st_size == 4096
        os.close(descriptor)
    else:
        with pytest.raises(OSError, match="No space left"):
            shared_sum._new_file(4096)
    assert not list(memory.iterdir())
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == (n_failures == 1)

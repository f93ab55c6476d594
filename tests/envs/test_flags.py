"""Flags in shared memory: whoever rings knows who is asleep, and nothing is lost."""

import re
import sys
import threading
import time

import numpy as np
import pytest

from sb3_ppo_ext.envs.parallel import flags

_flags = pytest.importorskip("sb3_ppo_ext.envs.parallel._flags", reason="the extension module was not built")


def memory(n):
    return np.zeros(n * _flags.STRIDE, np.uint8)


def test_constants():
    """Python and C agree."""
    assert (_flags.STRIDE, _flags.CLEAR, _flags.RUNG) == (flags.STRIDE, flags.CLEAR, flags.RUNG)


def test_a_receiver_that_looks():
    """A flag that is rung while nobody sleeps asks for nothing in the pipe, unless the sender says so."""
    sender, receiver = (_flags.Flags(shared) for shared in [memory(1)] * 2)
    assert receiver.wait(0) == _flags.CLEAR
    assert not sender.ring(0, False)
    assert receiver.wait(0) == _flags.RUNG
    assert not receiver.doze(0)
    receiver.clear()
    assert receiver.wait(1e-4) == _flags.CLEAR
    assert not sender.ring(0, True)
    assert receiver.wait(0) == _flags.WRITTEN
    assert receiver.doze(0)


def test_a_receiver_that_sleeps():
    """A sender learns that the receiver is asleep, and the receiver that there is something in the pipe, however often."""
    sender, receiver = (_flags.Flags(shared) for shared in [memory(3)] * 2)
    assert receiver.doze(1)
    assert receiver.doze(1)
    assert sender.ring_all() == [1]
    assert receiver.wait(0) == _flags.WRITTEN
    assert [receiver.doze(index) for index in range(3)] == [False, True, False]
    receiver.clear()
    assert sender.ring_all() == []


def test_all_have_to_be_rung():
    """`wait` waits for all flags, of which there may be none."""
    shared = memory(2)
    sender, receiver = _flags.Flags(shared), _flags.Flags(shared)
    sender.ring(1, False)
    assert receiver.wait(1e-4) == _flags.CLEAR
    threading.Timer(0.05, sender.ring, (0, False)).start()
    start = time.monotonic()
    assert receiver.wait(30) == _flags.RUNG  # Other threads go on meanwhile.
    assert time.monotonic() - start < 20
    assert _flags.Flags(memory(0)).wait(0) == _flags.RUNG


MESSAGES = [
    (lambda: _flags.Flags(np.zeros(100, np.uint8)), ValueError, "multiple of 128 bytes, not 100"),
    (lambda: _flags.Flags(memory(2)[1:129]), ValueError, "must be aligned"),
    (lambda: _flags.Flags(bytes(128)), BufferError, "not writable"),
    (lambda: _flags.Flags(np.zeros((128, 2), np.uint8)[:, 0]), ValueError, "contiguous"),
    (lambda: _flags.Flags(5), TypeError, "bytes-like"),
    (lambda: _flags.Flags(), TypeError, "memory"),
    (lambda: _flags.Flags(memory(2)).ring(2, False), IndexError, "no flag 2 of 2"),
    (lambda: _flags.Flags(memory(2)).ring(-1, False), IndexError, "no flag -1 of 2"),
    (lambda: _flags.Flags(memory(2)).ring(10**30, False), IndexError, "fit"),
    (lambda: _flags.Flags(memory(2)).ring("0", False), TypeError, "integer"),
    (lambda: _flags.Flags(memory(2)).ring(0), TypeError, "2 arguments"),
    (lambda: _flags.Flags(memory(2)).doze(2), IndexError, "no flag 2 of 2"),
    (lambda: _flags.Flags(memory(2)).doze(None), TypeError, "integer"),
    (lambda: _flags.Flags(memory(2)).wait("1"), TypeError, "real number"),
]


@pytest.mark.parametrize(("call", "error", "message"), MESSAGES, ids=[row[-1] for row in MESSAGES])
def test_messages(call, error, message):
    """Wrong calls raise an error that says what is wrong."""
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_waiting_ends():
    """Negative times, and those that are no number, are no time."""
    receiver = _flags.Flags(memory(1))
    for seconds in (-1, float("nan"), float("-inf")):
        assert receiver.wait(seconds) == _flags.CLEAR


def test_memory_lives_as_long_as_its_flags():
    """Flags keep their memory, and give it back."""
    shared = memory(1)
    before = sys.getrefcount(shared)
    for _ in range(100):
        one = _flags.Flags(shared)
    assert sys.getrefcount(shared) > before
    del one
    assert sys.getrefcount(shared) == before

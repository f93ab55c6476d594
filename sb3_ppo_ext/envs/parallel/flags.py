"""Flags by which two processes tell each other that there is something to read, and pipes where there are none."""

from __future__ import annotations

from typing import Any, Protocol

# The compiled code of `csrc`, see `_flags.pyi`; None if it was not built
module: Any
try:
    from sb3_ppo_ext.envs.parallel import _flags as module
except ImportError:  # built without GCC or Clang, as on Windows
    module = None

# Bytes of a flag, and states of flags, as in `csrc/flags.c`
STRIDE, CLEAR, RUNG = 128, 0, 2


class Flags(Protocol):
    """
    Flags between one process and others, in one direction. Each has one sender and one receiver.

    A sender rings a flag after it has written something. The receiver spins on it for a while, and then dozes: it waits for
    its pipe, into which the sender has to write something whenever it finds a flag whose receiver is asleep.
    """

    def ring(self, index: int, written: bool, /) -> bool:
        """
        :param index: Index of the flag
        :param written: Whether the sender is going to write to the pipe in any case
        :return: Whether the receiver is asleep
        """

    def ring_all(self) -> list[int]:
        """:return: Indices of those flags whose receivers are asleep"""

    def wait(self, seconds: float, /) -> int:
        """
        :param seconds: Time to spin
        :return: ``CLEAR`` if not all flags are rung after this time, ``RUNG`` if they are and there is nothing in a pipe, or
            another number
        """

    def doze(self, index: int, /) -> bool:
        """
        :param index: Index of the flag
        :return: Whether there is, or will be, something in the pipe
        """

    def clear(self) -> None:
        """Clear all flags, while nobody may ring them."""


class NoFlags:
    """
    What stands in for flags where the extension module was not built: everybody is asleep at once. All is written to pipes,
    which order the accesses to the shared memory as well, whatever the processor.

    :param n_flags: Number of flags
    """

    def __init__(self, n_flags: int):
        self.indices = list(range(n_flags))

    def ring(self, index: int, written: bool, /) -> bool:
        """:return: True"""
        return True

    def ring_all(self) -> list[int]:
        """:return: All indices"""
        return self.indices

    def wait(self, seconds: float, /) -> int:
        """:return: ``CLEAR``"""
        return CLEAR

    def doze(self, index: int, /) -> bool:
        """:return: True"""
        return True

    def clear(self) -> None:
        """Do nothing."""


def flags_in(memory: Any) -> Flags:
    """
    :param memory: Writable memory, ``STRIDE`` bytes for each flag, zero at first
    :return: Flags in it
    """
    return NoFlags(len(memory) // STRIDE) if module is None else module.Flags(memory)

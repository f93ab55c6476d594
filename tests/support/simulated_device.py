"""
A PyTorch device named "sim" in the memory of the CPU, which finds without a GPU most of what CUDA would refuse or wait for:
operations on tensors of both devices raise an error, and so does NumPy of a tensor on the device, and copies, `.item()` and
operations are counted. Its random numbers are those of the CPU. It says nothing about kernels, streams, CUDA graphs or speed.
`torch.save` needs tensors that were moved to the CPU.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch as th
from support.cpp_libraries import built

NAME = "sim"
SOURCE = Path(__file__).with_suffix(".cpp")


@dataclass
class Counts:
    """
    What happened in a block, known at its end.

    :param to_host: Number of copies from the device to the host, each of which waits for the device
    :param to_device: Number of copies from the host to the device
    :param items: Number of calls of `.item()` and the like, each of which waits for the device
    :param operations: Number of operations on the device, without views
    """

    to_host: int = 0
    to_device: int = 0
    items: int = 0
    operations: int = 0


class SimulatedDevice:
    """
    The device, which is there from now on until the process ends.

    :param library: The compiled operations, see :func:`load`
    """

    name = f"{NAME}:0"

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        th.utils.rename_privateuse1_backend(NAME)
        th._C._acc.register_python_privateuseone_hook(_Hook())
        th._register_device_module(NAME, _device_module())
        self._of_networks = _recurrent_networks()

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """
        Count what happens within the block. Blocks can be nested.

        :return: Counts, filled in when the block ends
        """
        counts, before = Counts(), self._totals()
        yield counts
        for field, new, old in zip(fields(counts), self._totals(), before, strict=True):
            setattr(counts, field.name, new - old)

    def _totals(self) -> list[int]:
        numbers = (ctypes.c_long * len(fields(Counts)))()
        self._library.sim_counts(numbers)
        return list(numbers)


@cache
def load() -> ctypes.CDLL | str:
    """
    Compile the operations, once per machine, and load them. Must be called before anything is differentiated in the process,
    because that is when autograd counts the devices.

    :return: The operations, or the reason why there are none
    """
    library = built(SOURCE)
    return "no C++ compiler for the simulated device" if library is None else ctypes.CDLL(str(library))


def _recurrent_networks() -> th.library.Library:
    """Recurrent networks, for which CUDA has kernels of its own, as operations on single steps."""
    from torch._decomp import decompositions

    networks = th.library.Library("aten", "IMPL")
    for name in ("lstm", "gru"):
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            networks.impl(f"{name}.input", getattr(decompositions, f"{name}_impl"), key)
    return networks


@cache
def simulated_device() -> SimulatedDevice:
    """
    :return: The device. Skips the test without a C++ compiler
    """
    library = load()
    if isinstance(library, str):
        pytest.skip(library)
    return SimulatedDevice(library)


class _Hook(th._C._acc.PrivateUse1Hooks):
    """What PyTorch asks of any accelerator."""

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def _device_module() -> ModuleType:
    """`torch.sim`. The generator is the CPU's, so that there is nothing to seed."""
    module = ModuleType(NAME)
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: th.get_rng_state(),
        set_rng_state=lambda state, device=None: th.set_rng_state(state),
    )
    return module

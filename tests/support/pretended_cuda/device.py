"""
A CUDA device that is pretended, in the memory of the CPU, for a build of PyTorch without CUDA. `device="cuda"` is then real
for all Python code, so that everything runs that asks for `device.type == "cuda"`. It finds, with its place,

- what would let the host wait for a GPU (:data:`events`),
- page-locked memory that the host writes before it was copied to the device; what the host reads before it was copied from
  there is rubbish (:data:`hazards`),
- operations on tensors of several devices, and on memory that was never written.

It says nothing about the number of kernels, several streams, the replay of CUDA graphs, the recurrent kernels of cuDNN, NCCL
and speed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from support.cpp_libraries import built, torch_folder

SOURCE = Path(__file__).with_name("pretended_cuda.cpp")
#: Number of devices, 1 or 2
N_DEVICES = int(os.environ.get("PRETENDED_CUDA_DEVICES", "2"))
# Code in which a wait is looked for
_ROOTS = ("sb3_ppo_ext/", "stable_baselines3/")


class Event(NamedTuple):
    """
    Something that the device has noticed.

    :param what: What it was, beginning with "WAIT" or "HAZARD"
    :param place: File and line, with that of its caller
    """

    what: str
    place: str


events: Counter[Event] = Counter()
hazards: list[Event] = []


class Found(NamedTuple):
    """
    What happened in a block, known at its end.

    :param events: How often each event has happened
    """

    events: Counter[Event]

    def number(self, *kinds: str) -> int:
        """
        :param kinds: How the events begin, all waits by default
        :return: How many there were
        """
        return sum(n for event, n in self.events.items() if event.what.startswith(kinds or ("WAIT",)))

    def __str__(self) -> str:
        return "\n".join(f"{n} x {event.what} at {event.place}" for event, n in self.events.most_common(12))


@contextmanager
def watching() -> Iterator[Found]:
    """
    :return: What happens in the block, filled in when it ends
    """
    found, before = Found(Counter()), events.copy()
    yield found
    found.events.update(events - before)


def is_installed() -> bool:
    """
    :return: Whether this process has the device
    """
    return bool(_kept)


def install() -> bool:
    """
    Let this process have the device until it ends. It must not have imported PyTorch, which asks for its devices once.

    :return: Whether it has one; without a C++ compiler it has not
    """
    assert "torch" not in sys.modules, "PyTorch was imported before the device was there"
    path = built(SOURCE, "-O0")
    if path is None:
        return False
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.pretended_set_count(N_DEVICES)
    listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_note)
    library.pretended_listen(listener)
    _kept.extend((library, listener))
    import torch

    assert torch.version.cuda is None, "this PyTorch has CUDA; give `-m gpu` alone"
    _fill_in(torch, library)
    return True


# What must live as long as the process
_kept: list[Any] = []


def _note(what: bytes) -> None:
    event = Event(what.decode(), _place())
    events[event] += 1
    if event.what.startswith("HAZARD"):
        hazards.append(event)


def _place() -> str:
    found: list[str] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        root = next((root for root in _ROOTS if root in name and "tests/" not in name), None)
        if root is not None:
            found.append(f"{name[name.rindex(root) :]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "?"


class _Stream:
    """The only stream of a device."""

    cuda_stream = 0

    def __init__(self, wait: Callable[[], None]):
        self.synchronize = wait

    def wait_stream(self, other: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


#: Those of an H200
PROPERTIES = types.SimpleNamespace(
    name="pretended",
    major=9,
    minor=0,
    total_memory=1 << 37,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 << 20,
    gcnArchName="",
)


def _fill_in(torch: Any, library: ctypes.CDLL) -> None:
    """What a build without CUDA lacks in Python."""

    def wait(device: Any = None) -> None:
        library.pretended_wait(b"synchronize")

    def index(device: Any = None) -> int:
        made = None if device is None else torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return int(library.pretended_current()) if made is None or made.index is None else made.index

    def exchange(device: int) -> int:
        return int(library.pretended_exchange(device))

    def initialize() -> None:
        state["is_initialized"] = True

    def current_device() -> int:
        initialize()
        return index()

    def seed_all(seed: int) -> None:
        for device in range(N_DEVICES):
            torch.ops.pretended_cuda.seed(device, seed)

    state = {"is_initialized": False}
    stream, zero, nothing = _Stream(wait), lambda device=None: 0, lambda *args, **kwargs: None
    operations = torch.ops.pretended_cuda
    vars(torch.cuda).update(
        is_available=lambda: True,
        is_initialized=lambda: state["is_initialized"],
        _lazy_init=initialize,
        init=initialize,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: N_DEVICES,
        current_device=current_device,
        set_device=lambda device: nothing(exchange(index(device))),
        # Dynamo, which knows some of these functions by their identity, wants each of them once.
        _exchange_device=lambda device: exchange(device),
        _maybe_exchange_device=lambda device: exchange(device),
        synchronize=wait,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        Stream=lambda *args, **kwargs: stream,
        manual_seed=lambda seed: operations.seed(index(), seed),
        manual_seed_all=seed_all,
        get_rng_state=lambda device="cuda": operations.get_state(index(device)),
        set_rng_state=lambda new, device="cuda": operations.set_state(index(device), new),
        get_rng_state_all=lambda: [operations.get_state(device) for device in range(N_DEVICES)],
        get_device_name=lambda device=None: PROPERTIES.name,
        get_device_properties=lambda device=None: PROPERTIES,
        get_device_capability=lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        is_bf16_supported=lambda *args, **kwargs: True,
        memory_allocated=zero,
        max_memory_allocated=zero,
        empty_cache=nothing,
        reset_peak_memory_stats=nothing,
    )
    vars(torch.cuda.random).update(manual_seed=torch.cuda.manual_seed, manual_seed_all=seed_all)
    vars(torch._C).update(
        _cuda_getCurrentRawStream=zero,
        _cuda_isCurrentStreamCapturing=lambda: False,
        _cuda_getDevice=index,
        _cuda_setDevice=exchange,
        _cuda_exchangeDevice=exchange,
        _cuda_maybeExchangeDevice=exchange,
    )
    _let_storages_move(torch)


def _let_storages_move(torch: Any) -> None:
    """`torch.load` and `deepcopy` copy storages, by functions in C++ that a build without CUDA lacks."""
    import torch.storage

    move, clone = torch._utils._to, torch.storage._StorageBase.clone

    def as_tensor(storage: Any) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def moved(storage: Any, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type != "cuda" or storage.device.type == "cuda":
            return move(storage, device, non_blocking)
        return as_tensor(storage).to(device).untyped_storage()

    def cloned(storage: Any) -> Any:
        return clone(storage) if storage.device.type != "cuda" else as_tensor(storage).clone().untyped_storage()

    torch.storage._to = torch._utils._to = moved
    torch.storage._StorageBase.clone = cloned

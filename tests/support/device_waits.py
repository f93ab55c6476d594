"""Count for what the host waits on CUDA: by PyTorch's profiler, or by the pretended device, which also knows where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch as th
from support.pretended_cuda import device as pretended

# What PyTorch's profiler calls a wait
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Waits(NamedTuple):
    """
    How often a function lets the host wait for the device.

    :param waits: Number of waits of any kind
    :param to_host: Number of copies to the host
    :param items: Number of calls of `.item()` and the like
    """

    waits: int
    to_host: int
    items: int


def counted(function: Callable[[], Any], places: list[str] | None = None) -> Waits:
    """
    :param function: What may wait
    :param places: List to which a text is added that says where it has waited, if that is known
    :return: How often it has waited
    """
    th.cuda.synchronize()
    return _by_the_device(function, places) if pretended.is_installed() else _by_the_profiler(function)


def assert_within(budget: int, function: Callable[[], Any]) -> None:
    """
    :param budget: Largest number of waits
    :param function: What may wait that often
    """
    places: list[str] = []
    waits = counted(function, places)
    assert max(waits) <= budget, f"{waits}, at most {budget} are allowed\n" + "\n".join(places)


def _by_the_device(function: Callable[[], Any], places: list[str] | None) -> Waits:
    with pretended.watching() as found:
        function()
    if places is not None:
        places.append(str(found))
    return Waits(found.number(), found.number("WAIT copy to the host"), found.number("WAIT item"))


def _by_the_profiler(function: Callable[[], Any]) -> Waits:
    activities = [th.profiler.ProfilerActivity.CPU, th.profiler.ProfilerActivity.CUDA]
    with th.profiler.profile(activities=activities) as profile:
        function()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert any(name.startswith("cuda") for name in counts), "the profiler has not seen the GPU"
    to_host = sum(count for name, count in counts.items() if name.startswith("Memcpy DtoH"))
    return Waits(sum(counts.get(name, 0) for name in _WAITS), to_host, counts.get("aten::_local_scalar_dense", 0))

"""Sums over the ranks on one machine through shared memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
import torch.distributed as dist

try:
    from sb3_ppo_ext.distributed import _shared_sum as module
except ImportError:  # built without a C compiler
    module: Any = None  # type: ignore[no-redef]

# Memory that has no file system behind it
FOLDER = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Seconds after which a rank that does not arrive is reported, as in torch's process groups
TIMEOUT = 1800.0


def on_one_machine(group: object, size: int) -> bool:
    """
    :param group: Process group
    :param size: Number of ranks
    :return: Whether all ranks can share memory
    """
    own = None
    if module is not None and os.access(FOLDER, os.W_OK) and BOOT_ID.exists():
        # Containers of one machine have the same boot id, but perhaps not the same shared memory.
        own = BOOT_ID.read_text(), os.stat(FOLDER).st_dev, os.readlink("/proc/self/ns/ipc"), os.readlink("/proc/self/ns/mnt")
    found: list[object] = [None] * size
    dist.all_gather_object(found, own, group=group)
    return own is not None and all(each == own for each in found)


class SharedSum:
    """
    Adds up tensors of all ranks on this machine.

    Each rank writes its summand to memory that all share, waits for the others, and adds all summands in the order of the
    ranks: the sums are equal bit for bit. The file of the memory is deleted as soon as all ranks have opened it, so that
    nothing is left behind even if all are killed.

    :param group: Process group of the ranks
    :param index: Own rank
    :param size: Number of ranks
    """

    def __init__(self, group: Any, index: int, size: int):
        self.group, self.index, self.size = group, index, size
        self.capacity = 0
        self.reduction: Any = None

    def __call__(self, tensor: th.Tensor) -> None:
        """
        :param tensor: Contiguous tensor in float32 or float64 on the CPU, which becomes the sum over all ranks
        :raises TimeoutError: if a rank does not arrive within half an hour
        :raises RuntimeError: if another rank has failed
        """
        self._exchange("sum", tensor.numel() * tensor.element_size(), tensor.numpy())

    def mean(self, arrays: list[np.ndarray], weight: float) -> None:
        """
        :param arrays: Contiguous arrays in float32, which become the means over all ranks
        :param weight: Weight of the arrays of this rank
        :raises TimeoutError: if a rank does not arrive within half an hour
        :raises RuntimeError: if another rank has failed
        """
        self._exchange("mean", 4 + sum([array.nbytes for array in arrays]), arrays, weight)

    def _exchange(self, name: str, n_bytes: int, *args: object) -> None:
        if n_bytes > self.capacity:
            self._allocate(max(1 << 16, 2 * n_bytes))
        try:
            getattr(self.reduction, name)(*args, TIMEOUT)
        except BaseException:
            self.abort()  # Others would be at another sum than this rank.
            raise

    def abort(self) -> None:
        """Let ranks that wait for this one raise an error. The next sum of all ranks begins with new memory."""
        if self.reduction is not None:
            self.reduction.abort()
        self.reduction, self.capacity = None, 0

    def _allocate(self, capacity: int) -> None:
        """Open new memory, which all ranks need at the same time, since their tensors have the same size."""
        n_bytes = module.size_of(self.size, capacity)
        names: list[Any] = [None]
        if self.index == 0:
            descriptor, names[0] = _new_file(n_bytes)
        try:
            dist.broadcast_object_list(names, src=dist.get_global_rank(self.group, 0), group=self.group)
            if self.index > 0:
                descriptor = os.open(names[0], os.O_RDWR)
            memory = mmap.mmap(descriptor, n_bytes)
            os.close(descriptor)
            dist.barrier(self.group)
        finally:
            if self.index == 0:
                os.unlink(names[0])
        self.reduction = module.Reduction(memory, self.index, self.size, capacity)
        self.capacity = capacity


def _new_file(n_bytes: int) -> tuple[int, str]:
    """Descriptor and path of a new file, in the folder of temporary files if memory is short: Docker shares 64 MB of it."""
    for folder in (FOLDER, Path(tempfile.gettempdir())):
        descriptor, name = tempfile.mkstemp(prefix="sb3_ppo_ext_", dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, n_bytes)
            return descriptor, name
        except OSError as error:
            os.close(descriptor)
            os.unlink(name)
            failure = error
    raise failure

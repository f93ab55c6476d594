"""Ranks: the processes that train one model, and what they exchange."""

from __future__ import annotations

import atexit
import os
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
import torch as th
import torch.distributed as dist

from sb3_ppo_ext.distributed.launch import Launch, own_gpu
from sb3_ppo_ext.distributed.shared_sum import SharedSum, on_one_machine

T = TypeVar("T")
Averager: TypeAlias = Callable[[list[float], float], list[float]]


class Ranks:
    """
    The processes that train one model. This class stands for a single one, for which there is nothing to exchange.

    All ranks must call the methods that exchange something in the same order, with arguments of the same shape.
    """

    index, size = 0, 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs, saves, evaluates and prints."""
        return self.index == 0

    @property
    def are_several(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1

    def sum(self, tensor: th.Tensor) -> th.Tensor:
        """
        :param tensor: Tensor in float32 or float64 on any device, which may be modified
        :return: Sum over all ranks, equal bit for bit on each of them, on the same device
        """
        return tensor

    def sums(self, array: np.ndarray) -> np.ndarray:
        """
        :param array: Array of numbers, which may be modified
        :return: Sum over all ranks, in float64, of the same shape
        """
        summands: np.ndarray = np.array(array, dtype=np.float64, ndmin=1)
        return self.sum(th.from_numpy(summands)).numpy().reshape(np.shape(array))

    def averager(self, tensors: list[th.Tensor], n: int) -> Averager:
        """
        :param tensors: Tensors in floating point, all on the same device
        :param n: How many further numbers there are
        :return: Function of these numbers and of the weight of this rank, at least 0. It replaces the tensors by their means
            over all ranks, in one exchange, and returns the means of the numbers in float32. They are equal bit for bit on
            all ranks
        """
        return lambda numbers, weight: numbers

    def gather(self, value: T) -> list[T]:
        """
        :param value: Object that can be pickled
        :return: The objects of all ranks, in their order
        """
        return [value]

    def broadcast(self, tensors: Iterable[th.Tensor]) -> None:
        """
        :param tensors: Tensors, to which the values of rank 0 are copied
        """

    def abort(self) -> None:
        """Let the other ranks raise an error instead of waiting for this one, which has failed."""


SINGLE = Ranks()


class SharedAverager:
    """
    The :meth:`Ranks.averager` of tensors in shared memory.

    :param shared: Exchange through shared memory
    :param tensors: Tensors in float32 on the CPU
    :param n: Number of further numbers
    """

    def __init__(self, shared: SharedSum, tensors: list[th.Tensor], n: int):
        self.shared, self.numbers = shared, np.empty(n, np.float32)
        plain = [tensor.contiguous() for tensor in tensors]
        self.arrays = [*(tensor.numpy() for tensor in plain), self.numbers]
        self.copied = [(tensor, copy) for tensor, copy in zip(tensors, plain, strict=True) if copy is not tensor]

    def __call__(self, numbers: list[float], weight: float) -> list[float]:
        for tensor, copy in self.copied:
            copy.copy_(tensor)
        self.numbers[:] = numbers
        self.shared.mean(self.arrays, weight)
        for tensor, copy in self.copied:
            tensor.copy_(copy)
        means: list[float] = self.numbers.tolist()
        return means


class ProcessGroup(Ranks):
    """
    Ranks that exchange data through ``torch.distributed``; sums on the CPU of a single machine through shared memory, which
    takes a small part of the time.

    :param launch: Place of this process
    """

    def __init__(self, launch: Launch):
        self.index, self.size = launch.rank, launch.size
        # The user's group may be unable to exchange tensors of the CPU.
        self.group = dist.new_group(backend="gloo")
        self.is_nccl = th.cuda.is_available() and "nccl" in str(dist.get_backend_config(dist.group.WORLD))
        self.shared = SharedSum(self.group, self.index, self.size) if on_one_machine(self.group, self.size) else None

    def sum(self, tensor: th.Tensor) -> th.Tensor:
        if tensor.device.type == "cuda" and self.is_nccl:
            dist.all_reduce(tensor)
            return tensor
        on_host = tensor.detach().cpu().contiguous()
        if self.shared is not None:
            self.shared(on_host)
        else:
            dist.all_reduce(on_host, group=self.group)
        return on_host.to(tensor.device)

    def averager(self, tensors: list[th.Tensor], n: int) -> Averager:
        if self.shared is not None and all(t.dtype == th.float32 and t.device.type == "cpu" for t in tensors):
            return SharedAverager(self.shared, tensors, n)
        return partial(self._average, tensors)

    def _average(self, tensors: list[th.Tensor], numbers: list[float], weight: float) -> list[float]:
        last = tensors[0].new_tensor([*numbers, 1.0])
        flat = self.sum(th.cat([*(tensor.reshape(-1) for tensor in tensors), last]) * weight)
        flat = flat / flat[-1]
        *means, last = flat.split([*(tensor.numel() for tensor in tensors), len(last)])
        th._foreach_copy_(tensors, [mean.view_as(tensor) for mean, tensor in zip(means, tensors, strict=True)])
        return last[:-1].tolist()

    def gather(self, value: T) -> list[T]:
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = np.zeros(self.size)
        lengths[self.index] = len(data)
        ends = np.cumsum(self.sums(lengths).astype(np.int64))
        starts = np.concatenate([[0], ends[:-1]])
        # Each rank contributes its own part. float32 holds bytes exactly.
        parts = th.zeros(int(ends[-1]))
        parts[starts[self.index] : ends[self.index]] = th.from_numpy(data.astype(np.float32))
        joined = self.sum(parts).to(th.uint8).numpy()
        return [pickle.loads(joined[start:end].tobytes()) for start, end in zip(starts, ends, strict=True)]

    def broadcast(self, tensors: Iterable[th.Tensor]) -> None:
        for tensor in tensors:
            # In float64, which holds all numbers of float32 and the counts of optimisers exactly
            given = tensor.detach().double() if tensor.device.type == "cpu" else tensor.detach().cpu().double()
            received = self.sum(given.reshape(-1) if self.is_first else th.zeros(tensor.numel(), dtype=th.float64))
            tensor.data.copy_(received.reshape(tensor.shape))

    def abort(self) -> None:
        if self.shared is not None:
            self.shared.abort()


_connected: dict[tuple[int, int], ProcessGroup] = {}


def connect(launch: Launch) -> Ranks:
    """
    Connect the ranks, once in a process. Each of them has to call this function.

    :param launch: Place of this process
    :return: Ranks of the training
    """
    if launch.size == 1:
        return SINGLE
    key = launch.rank, launch.size
    if key not in _connected:
        _initialize(launch)
        _connected[key] = ProcessGroup(launch)
    return _connected[key]


def _initialize(launch: Launch) -> None:
    """Create torch's process group from the environment variables of torchrun, unless the user has done so."""
    if dist.is_initialized():
        return
    store, rank, size = next(dist.rendezvous("env://"))
    # torchrun keeps the store when it starts the ranks again: without a prefix, they would try to reach those that have died.
    store = dist.PrefixStore(f"sb3_ppo_ext/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    # NCCL connects the GPUs when it is first used, which a training on the CPU never does.
    backend = "cpu:gloo,cuda:nccl" if _have_own_gpus(store, rank, size, own_gpu(launch)) else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    atexit.register(_disconnect)


def _have_own_gpus(store: dist.Store, rank: int, size: int, gpu: str | None) -> bool:
    """Whether each rank has a GPU that no other has, since NCCL refuses two on one. All ranks must come to the same answer."""
    store.set(f"gpu/{rank}", gpu or "")
    of_ranks = [store.get(f"gpu/{other}") for other in range(size)]
    return all(of_ranks) and len(set(of_ranks)) == size


def _disconnect() -> None:
    _connected.clear()
    if dist.is_initialized():
        dist.destroy_process_group()

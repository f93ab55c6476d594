"""Detection of a distributed training: the environment variables of torchrun, or a process group of the user's."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple, TypeAlias

import torch as th
import torch.distributed as dist

Distributed: TypeAlias = Literal["auto", "off"]


class Launch(NamedTuple):
    """
    The place of this process among those that train one model.

    :param rank: Rank, from 0
    :param size: Number of ranks
    :param local_rank: Rank among those on the same machine
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def find_launch(distributed: str) -> Launch:
    """
    :param distributed: Option ``distributed``
    :return: Rank of this process: that of the process group that the user has created, or else the one that torchrun has set;
        a single one with ``"off"``, or if there is neither. Other launchers that set ``RANK`` and ``WORLD_SIZE`` are not
        noticed, since their processes may have nothing to do with each other
    """
    if distributed == "off" or not dist.is_available():
        return Launch()
    local = int(os.environ.get("LOCAL_RANK", 0))
    if dist.is_initialized():
        return Launch(dist.get_rank(), dist.get_world_size(), local)
    if not dist.is_torchelastic_launched():
        return Launch()
    return Launch(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local)


def ranks_on_this_machine() -> int:
    """:return: Number of processes that torchrun has started on this machine; 1 without it"""
    is_launched = dist.is_available() and dist.is_torchelastic_launched()
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if is_launched else 1


def own_device(device: th.device | str, launch: Launch) -> th.device | str:
    """
    :param device: Device that the user has given
    :param launch: Place of this process
    :return: The same; ``"cuda"`` without an index becomes the GPU of this rank, if there are several ranks. It then is the
        current one as well, so that this process takes no memory of the others
    """
    if launch.size == 1 or str(device) != "cuda" or not th.cuda.is_available():
        return device
    index = launch.local_rank % th.cuda.device_count()
    th.cuda.set_device(index)
    return th.device("cuda", index)


def own_gpu(launch: Launch) -> str | None:
    """
    :param launch: Place of this process
    :return: Name of the GPU of this rank, which is the same for two ranks if and only if they share it; ``None`` if there is
        none for NCCL
    """
    if not th.cuda.is_available() or not dist.is_nccl_available():
        return None
    index = launch.local_rank % th.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # may be another one for each rank
    name = visible.split(",")[index].strip() if visible else str(index)
    return f"{os.environ.get('GROUP_RANK', 0)}/{name}"  # torchrun's number of the machine

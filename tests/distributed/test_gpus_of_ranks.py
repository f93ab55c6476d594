"""Which GPU a rank has, and whether the ranks exchange data with NCCL; GPUs are simulated."""

import threading

import pytest
import torch as th
import torch.distributed as dist

from sb3_ppo_ext.distributed import ranks
from sb3_ppo_ext.distributed.launch import Launch, own_device, own_gpu


@pytest.fixture
def n_gpus(monkeypatch):
    """A function that sets the number of GPUs."""

    def simulate(number):
        monkeypatch.setattr(th.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(th.cuda, "device_count", lambda: number)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("GROUP_RANK", raising=False)
    return simulate


def answers(gpus):
    """What each rank says, given the names of their GPUs."""
    store, found = dist.HashStore(), [None] * len(gpus)

    def ask(rank):
        found[rank] = ranks._have_own_gpus(store, rank, len(gpus), gpus[rank])

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(("number", "size", "expected"), [(2, 2, True), (1, 2, False), (2, 3, False), (0, 2, False)])
def test_all_ranks_choose_alike(number, size, expected, n_gpus):
    """NCCL connects the ranks if each has a GPU of its own; otherwise none of them takes it, and none waits for the others."""
    n_gpus(number)
    gpus = [own_gpu(Launch(rank, size, rank)) for rank in range(size)]
    assert answers(gpus) == [expected] * size


def test_gpus_that_each_rank_sees_alone(n_gpus, monkeypatch):
    """Launchers that show each rank one GPU, its own, have ranks with GPUs of their own, on several machines as well."""
    n_gpus(1)
    names = []
    for machine in ("0", "1"):
        monkeypatch.setenv("GROUP_RANK", machine)
        for local, visible in enumerate(("4", "5")):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            names.append(own_gpu(Launch(0, 4, local)))
    assert len(set(names)) == 4
    assert answers(names) == [True] * 4


def test_without_nccl(n_gpus, monkeypatch):
    """GPUs are of no use to the exchange without NCCL, as on Windows."""
    n_gpus(1)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert own_gpu(Launch(0, 2, 0)) is None


def test_the_gpu_of_a_rank_is_the_current_one(n_gpus, monkeypatch):
    """What has no index goes to the GPU of the rank, too; a single process leaves the current GPU alone."""
    n_gpus(2)
    chosen = []
    monkeypatch.setattr(th.cuda, "set_device", chosen.append)
    assert own_device("cuda", Launch(3, 4, 3)) == th.device("cuda", 1)
    assert chosen == [1]
    assert own_device("cuda", Launch()) == "cuda"
    assert own_device("cpu", Launch(3, 4, 3)) == "cpu"
    assert chosen == [1]

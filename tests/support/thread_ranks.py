"""Ranks that are threads of one process, to test what ranks exchange."""

import mmap
import threading

import numpy as np

from sb3_ppo_ext.distributed import _shared_sum
from sb3_ppo_ext.distributed.ranks import ProcessGroup
from sb3_ppo_ext.distributed.shared_sum import SharedSum

CAPACITY = 1 << 20


class ThreadRanks(ProcessGroup):
    """Ranks in threads, which exchange data through the memory that processes would share."""

    def __init__(self, index, size, memory):
        self.index, self.size, self.shared = index, size, None
        self.reduction = _shared_sum.Reduction(memory, index, size, CAPACITY)

    def share_means(self):
        """Let means be computed by the extension module, too, as where processes share memory."""
        self.shared = SharedSum(None, self.index, self.size)
        self.shared.reduction, self.shared.capacity = self.reduction, CAPACITY

    def sum(self, tensor):
        tensor = tensor.contiguous()
        self.reduction.sum(tensor.numpy(), 20.0)
        return tensor


def on_ranks(size, function):
    """Results of a function of the ranks, in the order of the ranks; the first error is raised."""
    memory = mmap.mmap(-1, _shared_sum.size_of(size, CAPACITY))
    results, errors = [None] * size, []

    def run(index):
        ranks = ThreadRanks(index, size, memory)
        try:
            results[index] = function(ranks)
        except BaseException as error:
            errors.append(error)
            ranks.reduction.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def parts_of(array, ranks, axis=0):
    """The part of an array that belongs to a rank."""
    return np.split(array, ranks.size, axis=axis)[ranks.index]

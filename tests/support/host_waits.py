"""Find operations for which the host waits for the device."""

from contextlib import contextmanager
from unittest.mock import patch

import torch as th
from torch.utils._python_dispatch import TorchDispatchMode

# Their results are numbers on the host, or tensors whose shape depends on what is on the device.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique2", "_unique2"}
METHODS = ("cpu", "numpy", "item", "tolist", "__bool__", "__float__", "__int__", "__array__")


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        assert name not in WAITING, name
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype == th.int64 for index in args[1]), "an index of bools"
        return func(*args, **(kwargs or {}))


def _refuse(*args, **kwargs):
    raise AssertionError("The host waits for the device.")


@contextmanager
def no_host_waits():
    """Operations of PyTorch for which a host would wait raise an ``AssertionError``, on a CPU as well."""
    patches = [patch.object(th.Tensor, name, _refuse) for name in METHODS]
    with _Refusing():
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()

"""
Let `torch.compile` build kernels for an H200 without one: Triton compiles to machine code, a driver that is pretended loads
it, and the kernels do nothing when they are launched, so that all numbers are rubbish. CUDA graphs are not captured; what
they would have captured, or the reason why not, is noted. Needs the package `triton`, and the pretended device.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from support.pretended_cuda import device
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Graph(NamedTuple):
    """
    A graph that was compiled, as `torch.compile` describes it before it captures the graph.

    :param reasons: Why it would not be captured by a CUDA graph; empty if it would
    :param mutated: Names of the inputs that it writes into
    :param devices: Types of its devices
    """

    reasons: list[str]
    mutated: list[str]
    devices: list[str]


#: All graphs of this process
graphs: list[Graph] = []


class _Utils:
    """What loads machine code, and says what the device can do."""

    def load_binary(self, name: str, kernel: bytes, shared: int, index: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, index: int) -> dict[str, int]:
        names = dict(max_shared_mem=232448, multiprocessor_count=132, warpSize=32, max_num_regs=65536)
        return names | dict(sm_clock_rate=1, mem_clock_rate=1, mem_bus_width=1)


class _Launcher:
    """Launches nothing."""

    launch_cooperative_grid = launch_pdl = False
    global_scratch_size = profile_scratch_size = 0
    global_scratch_align = profile_scratch_align = 1

    def __init__(self, source: Any, metadata: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Driver(DriverBase):
    """The driver of Triton for a device that is not there."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = _Utils(), _Launcher

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, index: int) -> None:
        pass

    def get_current_stream(self, index: int = 0) -> int:
        return 0

    def get_device_capability(self, index: int = 0) -> tuple[int, int]:
        return 9, 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda function, quantiles=None, **kwargs: [1.0] * len(quantiles or [1])

    def get_empty_cache_for_benchmark(self) -> None:
        return None

    def clear_cache(self, cache: Any) -> None:
        pass

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def install() -> None:
    """Let this process, which has the pretended device, compile for CUDA until it ends. It must not have compiled anything."""
    assert device.is_installed(), "the device comes first"
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        # What was compiled for a real GPU is left alone.
        os.environ[name] = tempfile.mkdtemp(prefix="pretended-cuda-")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch._dynamo.device_interface
    import torch._inductor.compile_fx
    import torch._inductor.config
    import torch._inductor.output_code
    import torch._inductor.runtime.benchmarking
    import torch.utils._triton
    import triton.backends
    import triton.runtime

    triton.runtime.driver.set_active(Driver())
    nvidia = triton.backends.backends["nvidia"]
    triton.backends.backends.clear()
    triton.backends.backends["nvidia"] = type(nvidia)(nvidia.compiler, Driver)
    vars(torch.utils._triton).update(has_triton=lambda *args, **kwargs: True, has_triton_package=lambda: True)
    for name in ("use_static_triton_launcher", "use_static_cuda_launcher", "strict_static_triton_launcher"):
        if hasattr(torch._inductor.config, name):
            setattr(torch._inductor.config, name, False)
    # Without it a part that cannot be captured is left out of the capture, here it is a reason why nothing is captured.
    torch._inductor.config.graph_partition = False
    vars(torch._C).update(_cuda_cudaCachingAllocator_is_enabled=lambda: True)
    vars(torch._C._dynamo.guards).update(_empty_strided_cuda=_empty_strided)
    torch._dynamo.device_interface.CudaInterface.get_raw_stream = staticmethod(lambda index: 0)
    torch._inductor.output_code.cudagraph_post_compile = _note
    torch._inductor.compile_fx.cudagraphify = lambda model, static_input_idxs=(), **kwargs: model
    for cls in vars(torch._inductor.runtime.benchmarking).values():
        for name in ("benchmark_gpu", "benchmark"):
            if isinstance(cls, type) and name in vars(cls):
                setattr(cls, name, lambda *args, **kwargs: 1.0)


def _empty_strided(size: Sequence[int], strides: Sequence[int], dtype: Any) -> Any:
    return torch.empty_strided(size, strides, dtype=dtype, device="cuda")


def _note(example_inputs: Any, compiled: Any, cudagraphs: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of the capture: what would be captured."""
    reasons = list(compiled.cudagraph_info.cudagraph_fail_reasons)
    graphs.append(Graph(reasons, sorted(compiled.mutated_inputs or ()), sorted(compiled.device_types)))
    if hasattr(cudagraphs, "value"):
        cudagraphs.value = False

"""Registry of the backends, one row for each."""

from __future__ import annotations

from typing import Literal, get_args

from sb3_ppo_ext.common.validation import check_choice
from sb3_ppo_ext.engines.engine import Engine, Setup
from sb3_ppo_ext.engines.native.engine import NativeEngine
from sb3_ppo_ext.engines.torch_engine import CompiledEngine, DeviceEngine, EagerEngine, FusedEngine

Backend = Literal["auto", "native", "device", "fused", "eager", "compile"]
ENGINES: dict[str, type[Engine]] = {
    "native": NativeEngine,
    "device": DeviceEngine,
    "fused": FusedEngine,
    "eager": EagerEngine,
    "compile": CompiledEngine,
}
# Backends that "auto" chooses from, the fastest first. Compilation takes long, so that "compile" must be requested.
AUTOMATIC = ("native", "device", "fused", "eager")

assert {"auto", *ENGINES} == set(get_args(Backend))


def choose_backend(backend: str, setup: Setup) -> tuple[str, dict[str, str]]:
    """
    :param backend: Name of a backend, or ``"auto"``
    :param setup: Policy and buffer to support
    :return: Name of the chosen backend, which is ``"eager"`` if the requested one does not support the setup, and the reasons
        why other backends were rejected, by name
    """
    check_choice("backend", backend, get_args(Backend))
    reasons: dict[str, str] = {}
    for name in AUTOMATIC if backend == "auto" else (backend,):
        reason = ENGINES[name].unsupported_reason(setup)
        if setup.has_amp and not ENGINES[name].supports_amp:
            reason = f"`amp_dtype` is set, and {name!r} computes only in float32"
        if reason is not None:
            reasons[name] = reason
        elif backend != "auto" or ENGINES[name].is_automatic(setup):
            return name, reasons
    return "eager", reasons


def may_keep_on_device(backend: str, setup: Setup) -> bool:
    """
    :param backend: Name of a backend, or ``"auto"``
    :param setup: Policy and buffer
    :return: Whether :func:`choose_backend` might return one that needs a rollout buffer in tensors
    """
    is_auto = backend == "auto"
    engines = [ENGINES[name] for name in (AUTOMATIC if is_auto else (backend, "eager"))]
    return any(each.keeps_rollouts_on_device(setup) and (not is_auto or each.is_automatic(setup)) for each in engines)

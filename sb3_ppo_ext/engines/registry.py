"""The backends: one row each."""

from __future__ import annotations

from typing import Literal, get_args

from sb3_ppo_ext.engines.compiled import CompiledEngine
from sb3_ppo_ext.engines.eager import EagerEngine
from sb3_ppo_ext.engines.engine import Engine, Setup
from sb3_ppo_ext.engines.fused import FusedEngine
from sb3_ppo_ext.engines.native.engine import NativeEngine

Backend = Literal["auto", "native", "fused", "eager", "compile"]
ENGINES: dict[str, type[Engine]] = {
    "native": NativeEngine,
    "fused": FusedEngine,
    "eager": EagerEngine,
    "compile": CompiledEngine,
}
# What "auto" chooses from, the fastest first: the compiler takes its time, and is for those who ask for it.
AUTOMATIC = ("native", "fused", "eager")

assert {"auto", *ENGINES} == set(get_args(Backend))


def choose_backend(backend: str, setup: Setup) -> tuple[str, dict[str, str]]:
    """
    :param backend: A name, or ``"auto"``
    :param setup: What is to be computed
    :return: The name of the backend that computes, which is ``"eager"`` where the one that was named does not support it, and
        why those that were considered before it do not
    """
    reasons: dict[str, str] = {}
    for name in AUTOMATIC if backend == "auto" else (backend,):
        reason = ENGINES[name].unsupported_reason(setup)
        if reason is None:
            return name, reasons
        reasons[name] = reason
    return "eager", reasons

"""Whether a training may be watched, or changed, by code that nobody here knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

# Callbacks of these packages read neither values nor log probabilities at a step, and change no parameters.
KNOWN_PACKAGES = ("stable_baselines3", "sb3_contrib", "rl_zoo3", "sb3_ppo_ext")


def is_user_class(cls: type) -> bool:
    """
    :param cls: A class
    :return: Whether it, or a parent, is neither SB3's, RL Zoo's, ours, nor Python's own
    """
    return any(parent.__module__.split(".")[0] not in (*KNOWN_PACKAGES, "abc", "builtins") for parent in cls.__mro__)


def runs_user_code(callback: BaseCallback) -> bool:
    """
    A callback may read anything at a step, by any means: ``self.locals`` in a helper, the rollout buffer by ``getattr``. So
    nobody tries to find out what it reads. All that counts is whether it is one of the known classes as it is, and so are the
    callbacks in it.

    :param callback: Of a training
    :return: Whether it calls code of others at a step
    """
    if is_user_class(type(callback)):
        return True
    return any(runs_user_code(part) if isinstance(part, BaseCallback) else True for part in _callables(callback))


def _callables(callback: BaseCallback) -> Iterator[Any]:
    """
    The callbacks that it calls, and functions: those that SB3 wraps, and methods that somebody has replaced.
    ``parent`` leads back.
    """
    for name, value in vars(callback).items():
        if name in ("parent", "model", "locals", "globals"):
            continue
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else [value]
        for part in parts:
            if isinstance(part, BaseCallback) or (callable(part) and not isinstance(part, type) and _is_function(part)):
                yield part


def _is_function(value: Any) -> bool:
    return hasattr(value, "__code__") or hasattr(value, "__func__") or hasattr(value, "func")

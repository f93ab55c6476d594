"""Detection of user code that may read or change the state of the training at each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

# Callbacks of these packages do not read values or log probabilities during a rollout, and do not change parameters.
KNOWN_PACKAGES = ("stable_baselines3", "sb3_contrib", "rl_zoo3", "sb3_ppo_ext")


def is_user_class(cls: type) -> bool:
    """
    :param cls: Class of a callback or model
    :return: Whether the class or a parent is from outside SB3, SB3-Contrib, the RL Zoo, this package and Python itself
    """
    return any(parent.__module__.split(".")[0] not in (*KNOWN_PACKAGES, "abc", "builtins") for parent in cls.__mro__)


def runs_user_code(callback: BaseCallback) -> bool:
    """
    Whether a callback runs user code. User code may read anything at each step and in any way, such as ``self.locals`` in a
    helper function or the rollout buffer with ``getattr``, so that no attempt is made to find out what it reads. A callback is
    trusted only if it is an unmodified instance of a known class, and so are all callbacks in it.

    :param callback: Callback of the training
    :return: Whether the callback calls user code at each step
    """
    if is_user_class(type(callback)):
        return True
    return any(runs_user_code(part) if isinstance(part, BaseCallback) else True for part in _callables(callback))


def _callables(callback: BaseCallback) -> Iterator[Any]:
    """
    Callbacks and functions that a callback may call: nested callbacks, functions that SB3 wraps, and methods replaced on the
    instance. ``parent`` is left out, since it refers back to the enclosing callback.
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

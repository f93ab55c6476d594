"""Detection of user code that may read or change the state of the training at each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.common.user_code import is_known_module, is_of_user


def is_user_class(cls: type) -> bool:
    """
    :param cls: Class of a callback or model
    :return: Whether the class or a parent is from outside SB3, SB3-Contrib, the RL Zoo, this package and Python itself
    """
    return any(not is_known_module(parent.__module__) for parent in cls.__mro__)


def runs_user_code(callback: BaseCallback) -> bool:
    """
    Whether a callback runs user code. User code may read anything at each step and in any way, such as ``self.locals`` in a
    helper function or the rollout buffer with ``getattr``, so that no attempt is made to find out what it reads. A callback is
    trusted only if it is an unmodified instance of a known class, and so are all callbacks in it.

    :param callback: Callback of the training
    :return: Whether the callback calls user code at each step
    """
    return _runs_user_code(callback, set())


def _runs_user_code(callback: object, seen: set[int]) -> bool:
    if id(callback) in seen:
        return False
    seen.add(id(callback))
    # Functions that SB3 wraps, replaced methods, and objects that merely behave like a callback
    if not isinstance(callback, BaseCallback) or is_user_class(type(callback)) or _has_replaced_methods(type(callback)):
        return True
    return any(_runs_user_code(part, seen) for part in _called(callback))


def _called(callback: BaseCallback) -> Iterator[Any]:
    """Everything that a callback may call: nested callbacks, functions, and other callable objects."""
    for name, value in vars(callback).items():
        if name in ("model", "locals", "globals"):
            continue
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else [value]
        yield from (part for part in parts if hasattr(part, "on_step") or (callable(part) and not isinstance(part, type)))


def is_empty(callback: BaseCallback) -> bool:
    """
    :param callback: Callback of the training
    :return: Whether it is what SB3 makes of no callback at all, so that nobody reads its ``locals``
    """
    if type(callback) is CallbackList:
        return all(map(is_empty, callback.callbacks))
    return type(callback) is ConvertCallback and callback.callback is None


def environments_of(callback: BaseCallback) -> list[VecEnv]:
    """
    :param callback: Callback of the training
    :return: Environments of its own, such as those of an ``EvalCallback``, and those of the callbacks in it
    """
    return _environments_of(callback, set())


def _environments_of(callback: BaseCallback, seen: set[int]) -> list[VecEnv]:
    if id(callback) in seen:
        return []
    seen.add(id(callback))
    own = [value for value in vars(callback).values() if isinstance(value, VecEnv)]
    nested = [part for part in _called(callback) if isinstance(part, BaseCallback)]
    return own + [env for part in nested for env in _environments_of(part, seen)]


def _has_replaced_methods(cls: type) -> bool:
    functions = (value for parent in cls.__mro__ for value in vars(parent).values() if isinstance(value, FunctionType))
    return any(map(is_of_user, functions))

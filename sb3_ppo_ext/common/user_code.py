"""Detection of code that users have put in the place of that of a library."""

from __future__ import annotations

import operator
import sys
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

# Packages whose code does what this package expects: for instance, their callbacks do not read values or log probabilities
# during a rollout, and do not change parameters.
_PACKAGES = ("stable_baselines3", "sb3_contrib", "rl_zoo3", "sb3_ppo_ext", "torch", "typing_extensions")
# Attributes of classes in which no function of a user was found
_examined: WeakKeyDictionary[type, tuple[Any, ...]] = WeakKeyDictionary()


def is_known_module(module: str) -> bool:
    """
    :param module: Name of a module
    :return: Whether it belongs to SB3, SB3-Contrib, the RL Zoo, PyTorch, this package or Python itself
    """
    package = module.split(".")[0]
    return package in _PACKAGES or package in sys.stdlib_module_names


def is_replaced(part: Any, name: str) -> bool:
    """
    :param part: Object
    :param name: Name of one of its methods
    :return: Whether the method is that of a user: replaced on the object or its class, or overridden in a class of their own
    """
    return name in vars(part) or _is_of_user(getattr(type(part), name, None))


def has_method_of(part: Any, name: str, *classes: type) -> bool:
    """
    :param part: Object
    :param name: Name of a method
    :param classes: Classes with this method
    :return: Whether the method of the object is that of one of the classes
    """
    return not is_replaced(part, name) and getattr(type(part), name) in [getattr(cls, name) for cls in classes]


def hidden_method(part: Any) -> str | None:
    """
    :param part: Object
    :return: Name of a method of its class that an attribute of the object hides, ``None`` if there is none
    """
    cls = type(part)
    return next((name for name, value in vars(part).items() if callable(value) and callable(getattr(cls, name, None))), None)


def replaced_method(*parts: Any) -> str | None:
    """
    :param parts: Objects
    :return: Class and name of a method that user code has replaced, on one of the objects or its class, or overridden;
        ``None`` if there is none
    """
    for part in parts:
        if (name := hidden_method(part)) is not None:
            return f"{type(part).__name__}.{name}"
    for cls in dict.fromkeys(parent for kind in dict.fromkeys(map(type, parts)) for parent in kind.__mro__):
        if (name := _function_of_user(cls)) is not None:
            return f"{cls.__name__}.{name}"
    return None


def _function_of_user(cls: type) -> str | None:
    attributes = tuple(vars(cls).values())
    examined = _examined.get(cls, ())
    if len(attributes) == len(examined) and all(map(operator.is_, attributes, examined)):
        return None
    for name, value in vars(cls).items():
        if isinstance(value, FunctionType) and _is_of_user(value):
            return name
    _examined[cls] = attributes
    return None


def _is_of_user(function: Any) -> bool:
    # A wrapper has the `__module__` of what it wraps, and the global variables of the module in which it was written.
    modules = (getattr(function, "__module__", None) or "", getattr(function, "__globals__", {}).get("__name__", ""))
    return not all(map(is_known_module, modules))

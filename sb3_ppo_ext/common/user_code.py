"""Detection of code that users have put in the place of that of a library."""

from __future__ import annotations

from collections.abc import Iterable

# Packages whose code does what this package expects: for instance, their callbacks do not read values or log probabilities
# during a rollout, and do not change parameters. Modules of users may have the names of others in the standard library.
_PACKAGES = {"stable_baselines3", "sb3_contrib", "rl_zoo3", "sb3_ppo_ext", "torch"}
_PACKAGES |= {"abc", "builtins", "contextlib", "typing", "typing_extensions"}


def is_known_module(module: str) -> bool:
    """
    :param module: Name of a module
    :return: Whether it belongs to SB3, SB3-Contrib, the RL Zoo, PyTorch, this package, or to what Python offers for their
        classes and decorators
    """
    return module.split(".")[0] in _PACKAGES


def is_replaced(part: object, name: str) -> bool:
    """
    :param part: Object
    :param name: Name of one of its methods
    :return: Whether the method is that of a user: replaced on the object or its class, or overridden in a class of their own
    """
    of_class = getattr(type(part), name, None)
    return name in vars(part) or of_class is None or is_of_user(of_class)


def has_method_of(part: object, name: str, *classes: type) -> bool:
    """
    :param part: Object
    :param name: Name of a method
    :param classes: Classes with this method
    :return: Whether the method of the object is that of one of the classes
    """
    return not is_replaced(part, name) and getattr(type(part), name) in [getattr(cls, name) for cls in classes]


def hidden_methods(part: object, names: Iterable[str]) -> list[str]:
    """
    :param part: Object
    :param names: Names of methods
    :return: Those that attributes of the object hide
    """
    return [name for name in names if name in vars(part)]


def replaced_method(names: Iterable[str], *parts: object) -> str | None:
    """
    :param names: Names of methods, which not all objects have
    :param parts: Objects
    :return: Class and name of the first of these methods that is a user's, see :func:`is_replaced`; ``None`` if none is
    """
    classes: set[type] = set()
    for part in parts:
        # Of a class that has been examined, an object may still hide methods.
        for name in hidden_methods(part, names) if type(part) in classes else names:
            if hasattr(type(part), name) and is_replaced(part, name):
                return f"{type(part).__name__}.{name}"
        classes.add(type(part))
    return None


def is_of_user(function: object) -> bool:
    """
    :param function: Function, or another object in the place of a method
    :return: Whether it is a user's, or a wrapper of or around such a function
    """
    while function is not None:
        # A wrapper has the `__module__` of what it wraps, and the global variables of the module in which it was written.
        modules = (getattr(function, "__module__", None) or "", getattr(function, "__globals__", {}).get("__name__", ""))
        if not all(map(is_known_module, modules)):
            return True
        function = getattr(function, "__wrapped__", None)
    return False

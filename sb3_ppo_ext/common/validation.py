"""Checks of arguments. Error messages name the argument, its value and the remedy."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn

import numpy as np
import torch as th
from gymnasium import spaces


class BadArgumentError(ValueError, AssertionError):
    """An argument is not valid. Also an ``AssertionError``, which SB3 raises for some of them."""


class UnknownOptionError(BadArgumentError, TypeError):
    """An option does not exist. Also a ``TypeError``, which Python raises for unknown keyword arguments."""


class UnsupportedSpaceError(BadArgumentError, NotImplementedError):
    """A space is not supported by PPO. Also a ``NotImplementedError``, which SB3 raises for some of them."""


def refuse(name: str, value: object, remedy: str) -> NoReturn:
    """
    :param name: Name of the argument
    :param value: Value that was given
    :param remedy: Description of what is wrong and what would be accepted, the end of the message
    :raises BadArgumentError: always
    """
    raise BadArgumentError(f"`{name}={value!r}` is not valid: {remedy}")


@contextmanager
def assertions_as_value_errors() -> Iterator[None]:
    """Re-raise SB3's assertions about arguments as errors that are a ``ValueError`` and an ``AssertionError``."""
    try:
        yield
    except ValueError:
        raise
    except AssertionError as error:
        raise BadArgumentError(str(error)) from error


def check_number(
    name: str,
    value: object,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    integer: bool = False,
    infinite: bool = False,
    open_high: bool = False,
) -> None:
    """
    :param name: Name of the argument
    :param value: Value of the argument, which must be a number in ``[low, high]``
    :param low: Smallest accepted value
    :param high: Largest accepted value
    :param open_low: Whether ``low`` itself is refused
    :param integer: Whether the value must be an integer
    :param infinite: Whether infinity is accepted
    :param open_high: Whether ``high`` itself is refused
    :raises BadArgumentError: if the value is not such a number
    """
    integers, kind = (int, np.integer), "an integer" if integer else "a number"
    # YAML reads 3e-4 as a string, and a Python bool is an int.
    if not isinstance(value, integers if integer else (*integers, float, np.floating)) or isinstance(value, bool):
        hint = (
            " (in YAML, write 0.0003 or `!!float 3e-4`: without the dot, 3e-4 is a string)" if isinstance(value, str) else ""
        )
        refuse(name, value, f"give {kind}{hint}")
    above = low < value if open_low else low <= value
    below = value < high if open_high else value <= high
    # NaN fails both comparisons.
    if not (above and below and (infinite or math.isfinite(value))):
        refuse(name, value, f"give {kind} {_interval(low, high, open_low, open_high)}")


def _interval(low: float, high: float, open_low: bool, open_high: bool) -> str:
    if math.isinf(low):
        return "that is finite"
    if open_high:
        return f"of at least {low:g} and less than {high:g}"
    if math.isinf(high):
        return f"{'greater than' if open_low else 'of at least'} {low:g}"
    return f"between {low:g} and {high:g}"


def check_type(name: str, value: object, kind: type | tuple[type, ...], remedy: str) -> None:
    """
    :param name: Name of the argument
    :param value: Value of the argument, which must be an instance of ``kind``
    :param kind: Accepted type or types
    :param remedy: Description of what would be accepted, the end of the message
    :raises BadArgumentError: if the value is of another type
    """
    if not isinstance(value, kind):
        refuse(name, value, remedy)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """
    :param name: Name of the argument
    :param value: Value of the argument, which must be one of ``choices``
    :param choices: Accepted strings
    :raises BadArgumentError: if the value is none of them
    """
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        words = [f'"{choice}"' for choice in choices]
        refuse(name, value, f"give {', '.join(words[:-1])} or {words[-1]}")


def check_known_options(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """
    :param given: Names of the options that were given
    :param known: Names of the options that exist
    :param where: Name of the class or argument that takes the options, for the message
    :raises UnknownOptionError: if one of them does not exist
    """
    known = set(known)
    for name in given:
        if name not in known:
            public = sorted(option for option in known if not option.startswith("_"))
            close = get_close_matches(name, public, n=1)
            remedy = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(public)}."
            raise UnknownOptionError(f"{where} has no option `{name}`: {remedy}")


def check_dictionary(name: str, value: object) -> None:
    """
    :param name: Name of the argument
    :param value: Value of the argument, which must be a mapping
    :raises BadArgumentError: if the value is not a mapping
    """
    check_type(name, value, Mapping, "give a dictionary, or None")


def check_kwargs(name: str, kwargs: Any, function: Callable[..., Any], given: Iterable[str]) -> None:
    """
    :param name: Name of the argument
    :param kwargs: Value of the argument, keyword arguments for ``function``
    :param function: Class or function that the keyword arguments are passed to
    :param given: Names of the arguments that ``function`` receives from elsewhere
    :raises BadArgumentError: if ``kwargs`` is not a mapping
    :raises UnknownOptionError: if ``function`` does not take one of the keyword arguments
    """
    check_dictionary(name, kwargs)
    keywords = keywords_of(function)
    if keywords is not None:
        check_known_options(kwargs, keywords - set(given), f"`{name}`")


def keywords_of(function: Callable[..., Any]) -> set[str] | None:
    """
    :param function: Function or class; classes of this package pass other keyword arguments on to their parents
    :return: Names of the keyword arguments that it takes, ``None`` if it may take any
    """
    parents = [cls for cls in getattr(function, "__mro__", ()) if "__init__" in vars(cls)]
    names: set[str] = set()
    for each in parents or [function]:
        parameters = inspect.signature(each).parameters.values()
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return names
        if each.__module__.split(".")[0] != "sb3_ppo_ext":
            return None
    return None


def check_device(device: th.device | str) -> None:
    """
    :param device: ``"auto"``, or an argument of ``torch.device``
    :raises BadArgumentError: if the device is not valid
    """
    try:
        th.device("cpu" if device == "auto" else device)
    except (RuntimeError, TypeError):
        refuse("device", device, 'give "auto", "cpu", "cuda" or "cuda:0"')


SUPPORTED_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def check_observation_space(space: spaces.Space) -> None:
    """
    :param space: Observation space
    :raises UnsupportedSpaceError: if no policy supports the space
    """
    parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    if not parts:
        raise UnsupportedSpaceError(f"The observation space {space} is empty: give it at least one key.")
    for key, part in parts.items():
        where = f"The observation space {space}" + (f", under the key {key!r}," if key else "")
        if not isinstance(part, SUPPORTED_SPACES):
            raise UnsupportedSpaceError(
                f"{where} has a {type(part).__name__}, which no policy can read: "
                "use Box, Discrete, MultiDiscrete, MultiBinary, or a flat Dict of these "
                "(`gymnasium.wrappers.FlattenObservation` flattens the others)."
            )
        if isinstance(part, spaces.Box) and part.shape == ():
            raise UnsupportedSpaceError(f"{where} has no dimension: give it the shape (1,).")
        if isinstance(part, spaces.MultiDiscrete) and part.nvec.ndim != 1:
            raise UnsupportedSpaceError(f"{where} has {part.nvec.ndim} dimensions: use a flat MultiDiscrete.")


def check_action_space(space: spaces.Space) -> None:
    """
    :param space: Action space
    :raises UnsupportedSpaceError: if no action distribution supports the space
    """
    if not isinstance(space, SUPPORTED_SPACES):
        raise UnsupportedSpaceError(
            f"The action space {space} is not supported: use Box, Discrete, MultiDiscrete or MultiBinary "
            "(a Dict or Tuple of actions can be flattened into one of these by an `ActionWrapper`)."
        )
    if isinstance(space, spaces.Box) and not np.all(np.isfinite([space.low, space.high])):
        raise UnsupportedSpaceError(
            f"The action space {space} has an infinite bound: declare finite ones, best of all [-1, 1], "
            "and scale the action inside the environment."
        )
    if isinstance(space, spaces.MultiBinary | spaces.MultiDiscrete) and len(space.shape) != 1:
        raise UnsupportedSpaceError(
            f"The action space {space} has {len(space.shape)} dimensions: "
            f"use a flat {type(space).__name__} and reshape the action inside the environment."
        )

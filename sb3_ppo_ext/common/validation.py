"""Checks of arguments. Error messages name the argument, its value and the remedy."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.common.type_aliases import Kwargs

# Numbers are computed with in float32, and arrays have sizes in int64.
LARGEST_NUMBER, LARGEST_INTEGER = float(np.finfo(np.float32).max), int(np.iinfo(np.int64).max)
# A larger layer fits into no memory, and deeper networks are made by nobody.
MAX_LAYER_SIZE, MAX_LAYERS = 10**9, 1000
# Longest description of a value in an error message
MAX_SHOWN = 300


class BadArgumentError(ValueError, AssertionError):
    """An argument is not valid. Also an ``AssertionError``, which SB3 raises for some of them."""


class UnknownOptionError(BadArgumentError, TypeError):
    """An option does not exist. Also a ``TypeError``, which Python raises for unknown keyword arguments."""


class UnknownEnvironmentError(
    BadArgumentError, gym.error.NameNotFound, gym.error.NamespaceNotFound, gym.error.VersionNotFound, gym.error.DeprecatedEnv
):
    """There is no environment with this id. Also each of the errors that Gymnasium raises for that."""


class TooLargeError(BadArgumentError, MemoryError):
    """Rollouts or networks do not fit into memory. Also a ``MemoryError``, which NumPy raises."""


class UnsupportedSpaceError(BadArgumentError, NotImplementedError):
    """A space is not supported by PPO. Also a ``NotImplementedError``, which SB3 raises for some of them."""


def refuse(name: str, value: object, remedy: str) -> NoReturn:
    """
    :param name: Name of the argument
    :param value: Value that was given
    :param remedy: Description of what is wrong and what would be accepted, the end of the message
    :raises BadArgumentError: always
    """
    raise BadArgumentError(f"`{name}={described(value)}` is not valid: {remedy}")


def described(value: object) -> str:
    """
    :param value: A value
    :return: Its ``repr``, shortened; its type if it has none, as integers of more than 4300 digits have none
    """
    try:
        text = repr(value)
    except Exception:  # the value of an argument may be of any class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


@contextmanager
def assertions_as_value_errors() -> Iterator[None]:
    """Re-raise SB3's assertions about arguments as errors that are a ``ValueError`` and an ``AssertionError``."""
    try:
        yield
    except ValueError:
        raise
    except AssertionError as error:
        raise BadArgumentError(str(error)) from error


@contextmanager
def unknown_environments_as_value_errors(env: object) -> Iterator[None]:
    """
    Re-raise Gymnasium's errors about an id.

    :param env: Argument that may be an id
    """
    try:
        yield
    except gym.error.Error as error:
        # Other subclasses are about what an environment needs. The class itself is for malformed ids.
        if isinstance(error, gym.error.UnregisteredEnv | gym.error.DeprecatedEnv) or type(error) is gym.error.Error:
            raise UnknownEnvironmentError(f"`env={described(env)}` is not valid: {error}") from error
        raise


@contextmanager
def memory_errors_as_value_errors(what: str) -> Iterator[None]:
    """
    Re-raise errors of NumPy and PyTorch that say that there is not enough memory.

    :param what: Description of what is made, the start of the message
    """
    try:
        yield
    except BadArgumentError:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:
        signs = ("allocate", "overflow", "too big", "Maximum allowed dimension")
        if isinstance(error, MemoryError) or any(sign in str(error) for sign in signs):
            raise TooLargeError(f"{what} does not fit into memory: {str(error).splitlines()[0]}") from error
        raise


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
    # A Python bool is an int.
    if not isinstance(value, integers if integer else (*integers, float, np.floating)) or isinstance(value, bool):
        refuse(name, value, f"give {kind}{hint_of_string(value)}")
    number = int(value) if isinstance(value, integers) else float(value)
    above = low < number if open_low else low <= number
    below = number < high if open_high else number <= high
    # NaN fails both comparisons.
    if not (above and below and (infinite or abs(number) != math.inf)):
        refuse(name, value, f"give {kind} {_interval(low, high, open_low, open_high)}")
    largest = LARGEST_INTEGER if integer else LARGEST_NUMBER
    # Where infinity is accepted, all large floats act like it. Larger integers cannot be converted to a float.
    if abs(number) > largest and not (infinite and isinstance(number, float)):
        refuse(name, value, f"it is too large; give {kind} up to {largest:.3g}")


def hint_of_string(value: object) -> str:
    """
    :param value: Value that is no number
    :return: How to write it, if it is a string that stands for one; the end of a message
    """
    if not isinstance(value, str):
        return ""
    if value == "None":
        return ", or None, which is written `null` in YAML"
    try:
        number = float(value)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return f" (in Python, {number} is `float('{number}')`, in YAML `.{number}`)"
    if "e" not in value.lower():
        return " (it is a string: leave out the quotes)"
    plain = np.format_float_positional(number, trim="-")
    return f" (in YAML, write {plain}: without a dot and a sign after the e, {value} is a string)"


def _interval(low: float, high: float, open_low: bool, open_high: bool) -> str:
    if math.isinf(low):
        return "that is finite"
    least, most = (f"{limit:.12g}" for limit in (low, high))
    if open_high:
        return f"of at least {least} and less than {most}"
    if math.isinf(high):
        return f"{'greater than' if open_low else 'of at least'} {least}"
    return f"between {least} and {most}"


def check_sizes(sizes: Kwargs) -> None:
    """
    :param sizes: Sizes of the layers of a network by name, and their number as ``n_layers``
    :raises BadArgumentError: if one of them is not an integer of at least 1, or is absurd
    """
    for name, size in sizes.items():
        check_number(name, size, 1, integer=True)
        if size > (largest := MAX_LAYERS if name == "n_layers" else MAX_LAYER_SIZE):
            refuse(name, size, f"it is too large; give an integer up to {largest}")


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


def check_known_options(
    given: Iterable[str], known: Iterable[str], where: str, place_of: Callable[[str], str | None] = lambda name: None
) -> None:
    """
    :param given: Names of the options that were given
    :param known: Names of the options that exist
    :param where: Name of the class or argument that takes the options, for the message
    :param place_of: Where an option of another place belongs, the end of the message; ``None`` for no such option
    :raises UnknownOptionError: if one of them does not exist
    """
    known = set(known)
    for name in given:
        if name not in known:
            public = sorted(option for option in known if not option.startswith("_"))
            close = [f"`{option}`" for option in get_close_matches(str(name), public, n=3)]
            there_are = f"there are {', '.join(public)}." if public else "it takes none."
            remedy = place_of(name) or (f"did you mean {' or '.join(close)}?" if close else there_are)
            raise UnknownOptionError(f"{where} has no option `{name}`: {remedy}")


def check_dictionary(name: str, value: object) -> None:
    """
    :param name: Name of the argument
    :param value: Value of the argument, which must be a mapping
    :raises BadArgumentError: if the value is not a mapping
    """
    check_type(name, value, Mapping, "give a dictionary, or None")


def check_kwargs(
    name: str,
    kwargs: Any,
    function: Callable[..., Any],
    given: Iterable[str],
    place_of: Callable[[str], str | None] = lambda name: None,
) -> None:
    """
    :param name: Name of the argument
    :param kwargs: Value of the argument, keyword arguments for ``function``
    :param function: Class or function that the keyword arguments are passed to
    :param given: Names of the arguments that ``function`` receives from elsewhere
    :param place_of: Where an option of another place belongs, see :func:`check_known_options`
    :raises BadArgumentError: if ``kwargs`` is not a mapping
    :raises UnknownOptionError: if ``function`` does not take one of the keyword arguments
    """
    check_dictionary(name, kwargs)
    keywords = keywords_of(function)
    if keywords is not None:
        check_known_options(kwargs, keywords - set(given), f"`{name}`", place_of)


def keywords_of(function: Callable[..., object]) -> set[str] | None:
    """
    :param function: Function or class; classes of this package pass other keyword arguments on to their parents
    :return: Names of the keyword arguments that it takes, ``None`` if it may take any
    """
    parents = [cls for cls in getattr(function, "__mro__", ()) if "__init__" in vars(cls)]
    names: set[str] = set()
    for each in parents or [function]:
        parameters = parameters_of(each).values()
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return names
        if each.__module__.split(".")[0] != "sb3_ppo_ext":
            return None
    return None


@functools.lru_cache
def parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """
    :param function: Function or class, whose signature takes long to find
    :return: Its parameters by name
    """
    return inspect.signature(function).parameters


def check_device(device: th.device | str) -> None:
    """
    :param device: ``"auto"``, or an argument of ``torch.device``. Without CUDA, SB3 uses the CPU instead of it
    :raises BadArgumentError: if the device is not valid, or cannot compute
    """
    names = 'give "auto", "cpu", "cuda" or "cuda:0"'
    try:
        made = th.device("cpu" if isinstance(device, str) and device == "auto" else device)
    except (RuntimeError, TypeError, ValueError):
        refuse("device", device, names)
    if made.type == "cuda" and not th.cuda.is_available():
        return
    try:
        th.ones(1, device=made).item()
    except Exception as error:  # each kind of device has its own errors
        refuse("device", device, f"it cannot compute here ({str(error).splitlines()[0]}); {names}")


def check_environment(env: object) -> None:
    """
    :param env: Environment that was given, already made if it was given as an id
    :raises BadArgumentError: if it is none
    """
    if isinstance(env, gym.vector.VectorEnv):
        remedy = "it is a vectorised environment of Gymnasium; give `sb3_ppo_ext.VectorEnvAdapter(env)`"
        refuse("env", env, remedy)
    # SB3 converts environments of the old Gym, whose class is of another module with the same name.
    of_gym = any(cls.__name__ == "Env" and cls.__module__.startswith("gym.") for cls in type(env).__mro__)
    if not isinstance(env, gym.Env | VecEnv) and not of_gym:
        if any(cls.__module__.split(".")[0] == "supersuit" for cls in type(env).__mro__):
            remedy = 'make it with `supersuit.concat_vec_envs_v1(..., base_class="stable_baselines3")`'
            refuse("env", env, f"it is no `VecEnv` of SB3; {remedy}")
        if isinstance(env, str):
            refuse(
                "env",
                env,
                "ids are for the constructor and `resume`; give the environment, `gymnasium.make(...)` or a `VecEnv`",
            )
        what = "it is a class; give an instance, " if isinstance(env, type) else "give an environment of Gymnasium, "
        refuse("env", env, f"{what}a `VecEnv`, or the id of a registered environment")


SUPPORTED_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def is_text(space: spaces.Space) -> bool:
    """
    :param space: Space
    :return: Whether it is one of strings: MiniGrid has a class of its own, of which only the samples tell
    """
    others = (*SUPPORTED_SPACES, spaces.Dict, spaces.Tuple, spaces.Sequence, spaces.Graph, spaces.OneOf)
    if isinstance(space, others):
        return False
    try:
        return isinstance(deepcopy(space).sample(), str)
    except Exception:  # a space may be of any class
        return False


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
            if is_text(part):
                raise UnsupportedSpaceError(
                    f"{where} has a {type(part).__name__}, which no policy can read: `sb3_ppo_ext.EncodeText(env)` turns "
                    "strings into numbers. In a Dict with images of fewer than 36 pixels, as MiniGrid's, put "
                    "`gymnasium.wrappers.FlattenObservation` around it."
                )
            raise UnsupportedSpaceError(
                f"{where} has a {type(part).__name__}, which no policy can read: "
                "use Box, Discrete, MultiDiscrete, MultiBinary, or a flat Dict of these "
                "(`gymnasium.wrappers.FlattenObservation` flattens the others)."
            )
        if isinstance(part, spaces.Box) and part.shape == ():
            raise UnsupportedSpaceError(f"{where} has no dimension: give it the shape (1,).")
        if isinstance(part, spaces.MultiDiscrete) and part.nvec.ndim != 1:
            raise UnsupportedSpaceError(f"{where} has {part.nvec.ndim} dimensions: use a flat MultiDiscrete.")
        _check_content(where, part, "TransformObservation")


def check_action_space(space: spaces.Space) -> None:
    """
    :param space: Action space
    :raises UnsupportedSpaceError: if no action distribution supports the space
    """
    _check_actions(f"The action space {space}", space)
    for where, part in _parts_of(f"The action space {space}", space):
        _check_actions(where, part)
        if isinstance(part, spaces.Box) and (part.shape == () or not np.issubdtype(part.dtype, np.floating)):
            remedy = "declare a Box of floats with at least one dimension, and round in the environment; or a MultiDiscrete."
            raise UnsupportedSpaceError(f"{where} is {part}: {remedy}")


def _parts_of(where: str, space: spaces.Space) -> Iterator[tuple[str, spaces.Space]]:
    """Parts of a ``Dict`` or ``Tuple``, also those of its parts, with their places."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
            inside = f"{where}, under {key!r}"
            yield inside, part
            yield from _parts_of(inside, part)


def _check_actions(where: str, space: spaces.Space) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        if not space.spaces:
            raise UnsupportedSpaceError(f"{where} is empty: give it at least one part.")
        return
    if not isinstance(space, SUPPORTED_SPACES):
        what = "is not supported" if where.endswith(str(space)) else f"is a {type(space).__name__}"
        raise UnsupportedSpaceError(
            f"{where} {what}: use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these."
        )
    if isinstance(space, spaces.Box) and not np.all(np.isfinite([space.low, space.high])):
        raise UnsupportedSpaceError(
            f"{where} has an infinite bound: declare finite ones, best of all [-1, 1], "
            "and scale the action inside the environment."
        )
    if isinstance(space, spaces.MultiBinary | spaces.MultiDiscrete) and len(space.shape) != 1:
        raise UnsupportedSpaceError(
            f"{where} has {len(space.shape)} dimensions: "
            f"use a flat {type(space).__name__} and reshape the action inside the environment."
        )
    _check_content(where, space, "TransformAction")


def _check_content(where: str, space: spaces.Space, wrapper: str) -> None:
    """Refuse spaces without any number, and integers that do not begin at 0, which SB3 would read as if they did."""
    if 0 in (space.shape or ()):
        raise UnsupportedSpaceError(f"{where} has no number in it (its shape is {space.shape}): leave it out, or give it one.")
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and np.any(space.start):
        raise UnsupportedSpaceError(
            f"{where} does not start at 0, which SB3 does not support: declare it from 0, and shift the values by "
            f"{space.start} inside the environment, or with `gymnasium.wrappers.{wrapper}`."
        )

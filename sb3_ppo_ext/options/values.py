"""Accepted values of options: each class checks a value, and lists in Markdown what it accepts."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch as th
from torch import nn

from sb3_ppo_ext.common.schedules import check_schedule, make_schedule
from sb3_ppo_ext.common.validation import check_choice, check_dictionary, check_number, check_type, hint_of_string, refuse
from sb3_ppo_ext.envs.time_limits import AUTO
from sb3_ppo_ext.update.extra_losses import EXTRA_LOSSES, check_extra_losses


def shown(value: object) -> str:
    """
    :param value: Value of an option
    :return: Value as Python code, with double quotes
    """
    return f'"{value}"' if isinstance(value, str) else repr(value)


class NotCodeError(ValueError):
    """A value cannot be written as a Python expression."""


def class_name(value: object) -> str:
    """
    :param value: Class of ``torch.nn`` or ``torch.optim``
    :return: Its name where ``nn`` and ``th`` are known
    :raises NotCodeError: if it is anything else
    """
    for module, named in {"nn": nn, "th.optim": th.optim}.items():
        name = getattr(value, "__name__", "")
        if vars(named).get(name) is value:
            return f"{module}.{name}"
    raise NotCodeError(repr(value))


class Accepted(ABC):
    """The values that an option accepts."""

    @abstractmethod
    def check(self, name: str, value: object) -> None:
        """
        :param name: Name of the option
        :param value: Value of the option
        :raises ValueError: if the value is not accepted
        """

    @abstractmethod
    def alternatives(self) -> tuple[str, ...]:
        """:return: Kinds of accepted values, in Markdown"""

    def all(self) -> tuple[object, ...]:
        """:return: Every accepted value if they can be listed, otherwise an empty tuple"""
        return ()


@dataclass(frozen=True)
class Number(Accepted):
    """
    Numbers in an interval.

    :param low: Lower end of the interval
    :param high: Upper end of the interval
    :param open_low: Whether ``low`` itself is refused
    :param open_high: Whether ``high`` itself is refused
    :param infinite: Whether infinity is accepted
    :param integer: Whether the number must be an integer
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    infinite: bool = False
    integer: bool = False

    def check(self, name: str, value: object) -> None:
        check_number(name, value, self.low, self.high, self.open_low, self.integer, self.infinite, self.open_high)

    def alternatives(self) -> tuple[str, ...]:
        kind = "integer" if self.integer else "number"
        if math.isfinite(self.high):
            ends = "(" if self.open_low else "[", ")" if self.open_high else "]"
            return (f"{kind} in {ends[0]}{self.low}, {self.high}{ends[1]}",)
        low = f" {'>' if self.open_low else '≥'} {self.low}" if math.isfinite(self.low) else ""
        return (f"{kind}{low}", *(['`float("inf")`'] if self.infinite else []))


@dataclass(frozen=True)
class NumberOrAuto(Number):
    """Numbers in an interval, and the string ``"auto"``."""

    def check(self, name: str, value: object) -> None:
        if isinstance(value, str) and value == AUTO:
            return
        if isinstance(value, str) and not hint_of_string(value):
            refuse(name, value, f'give a number, or "{AUTO}"')
        super().check(name, value)

    def alternatives(self) -> tuple[str, ...]:
        return (*super().alternatives(), f'`"{AUTO}"`')


@dataclass(frozen=True)
class Schedule(Accepted):
    """
    Numbers of at least 0, functions of the remaining progress, and strings such as ``"lin_0.001"``.

    :param positive: Whether the number 0 is refused
    :param infinite: Whether infinity is accepted
    """

    positive: bool = False
    infinite: bool = False

    def check(self, name: str, value: Any) -> None:
        make_schedule(name, value, self.positive, self.infinite)
        if callable(value):
            check_schedule(name, value, self.infinite)

    def alternatives(self) -> tuple[str, ...]:
        numbers = Number(0, open_low=self.positive, infinite=self.infinite).alternatives()
        return (*numbers, '`"lin_x"`', '`"hold_x"`', "function of the remaining progress")


@dataclass(frozen=True)
class Choice(Accepted):
    """
    Strings from a list.

    :param choices: Accepted strings
    """

    choices: tuple[str, ...]

    def check(self, name: str, value: object) -> None:
        check_choice(name, value, self.choices)

    def alternatives(self) -> tuple[str, ...]:
        return tuple(f"`{shown(choice)}`" for choice in self.choices)

    def all(self) -> tuple[str, ...]:
        return self.choices


@dataclass(frozen=True)
class Flag(Accepted):
    """
    True or False.

    :param as_sb3: Whether integers and ``None`` are accepted as well, as in SB3
    """

    as_sb3: bool = False

    def check(self, name: str, value: object) -> None:
        kinds = (bool, np.bool_, int, type(None)) if self.as_sb3 else (bool, np.bool_)
        check_type(name, value, kinds, "give True or False")

    def alternatives(self) -> tuple[str, ...]:
        return ("`True`", "`False`")

    def all(self) -> tuple[bool, ...]:
        return (True, False)


@dataclass(frozen=True)
class FlagOrKeys(Accepted):
    """True or False, or a list of keys of observations."""

    def check(self, name: str, value: object) -> None:
        remedy = "give True or False, or a list of keys of `Dict` observations"
        check_type(name, value, (bool, np.bool_, list, tuple), remedy)
        if isinstance(value, list | tuple) and not (value and all(isinstance(key, str) for key in value)):
            refuse(name, value, remedy)

    def alternatives(self) -> tuple[str, ...]:
        return ("`True`", "`False`", "list of keys")


@dataclass(frozen=True)
class Bounds(Accepted):
    """
    Pairs of a lower and an upper bound, both positive.

    :param remedy: Advice to the user in the error message
    """

    remedy: str

    def check(self, name: str, value: Any) -> None:
        check_type(name, value, (tuple, list), self.remedy)
        if len(value) != 2:
            refuse(name, value, self.remedy)
        check_number(f"{name}[0]", value[0], 0, open_low=True)
        check_number(f"{name}[1]", value[1], value[0])

    def alternatives(self) -> tuple[str, ...]:
        return ("pair of numbers, 0 < low ≤ high",)


@dataclass(frozen=True)
class Text(Accepted):
    """
    Strings.

    :param remedy: Advice to the user in the error message
    """

    remedy: str

    def check(self, name: str, value: object) -> None:
        check_type(name, value, str, self.remedy)

    def alternatives(self) -> tuple[str, ...]:
        return ("string",)


@dataclass(frozen=True)
class Dictionary(Accepted):
    """Dictionaries."""

    def check(self, name: str, value: object) -> None:
        check_dictionary(name, value)

    def alternatives(self) -> tuple[str, ...]:
        return ("dictionary",)


@dataclass(frozen=True)
class Losses(Accepted):
    """Losses of the policy, by name: coefficients, or dictionaries with ``coef`` and keyword arguments."""

    def check(self, name: str, value: object) -> None:
        check_extra_losses(name, value)

    def alternatives(self) -> tuple[str, ...]:
        return (f"dictionary with keys from {', '.join(f'`{shown(loss)}`' for loss in EXTRA_LOSSES)}",)


@dataclass(frozen=True)
class Optional(Accepted):
    """
    ``None``, or a value that another :class:`Accepted` accepts.

    :param accepted: Accepted values other than ``None``
    """

    accepted: Accepted

    def check(self, name: str, value: object) -> None:
        if value is not None:
            self.accepted.check(name, value)

    def alternatives(self) -> tuple[str, ...]:
        return (*self.accepted.alternatives(), "`None`")

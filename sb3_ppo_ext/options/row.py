"""Rows of the table of options, and the options that they make with the arguments of the constructor."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from sb3_ppo_ext.common.schedules import is_constant
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.options.values import Accepted, Choice, Flag, Optional, shown

if TYPE_CHECKING:
    from sb3_ppo_ext.options.constructor import ConfiguredPPO


@dataclass(frozen=True)
class When:
    """
    A condition on the settings of a model.

    :param text: Condition in Markdown, to follow "not with"
    :param holds: Function that returns whether a model meets it
    :param example: Options that meet it; empty if it depends on more than options
    """

    text: str
    holds: Callable[[ConfiguredPPO], bool]
    example: Mapping[str, object] = field(default_factory=dict)


def equals(name: str, value: object) -> When:
    """
    :param name: Name of an option
    :param value: Value of this option
    :return: Condition that the option has this value
    """
    return When(f"`{name}={shown(value)}`", lambda model: getattr(model, name) == value, {name: value})


def differs(name: str, value: object, example: object) -> When:
    """
    :param name: Name of an option
    :param value: Value of this option
    :param example: Another value
    :return: Condition that the option has another value than ``value``
    """
    return When(f"`{name}` other than `{shown(value)}`", lambda model: getattr(model, name) != value, {name: example})


def has_schedule(name: str) -> When:
    """
    :param name: Name of an option
    :return: Condition that the option is a schedule, not a number
    """

    def holds(model: ConfiguredPPO) -> bool:
        value = getattr(model, name)
        return value is not None and not is_constant(value)

    return When(f"a schedule as `{name}`", holds, {name: "lin_0.001"})


@dataclass(frozen=True)
class Conflict:
    """
    Something that an option cannot be combined with.

    :param when: Condition under which the option is refused if it is not at its default
    :param remedy: Advice to the user in the error message, a format string with the attributes of the model;
        ``None`` if the combination is refused elsewhere, where the policy is known
    """

    when: When
    remedy: str | None = None


@dataclass(frozen=True)
class Need:
    """
    Another option that an option needs to have an effect.

    :param name: Name of another option
    :param value: Value of the other option, ``None`` for any value but its default
    :param instead: Name of an option that will do as well, with any value but its default
    """

    name: str
    value: object = None
    instead: str | None = None

    def described(self) -> str:
        """:return: Needed option in Markdown"""
        needed = f"`{self.name}`" if self.value is None else f"`{self.name}={shown(self.value)}`"
        return needed if self.instead is None else f"{needed} or `{self.instead}`"


@dataclass(frozen=True)
class Change:
    """
    What happens when an option has been changed between two calls of ``learn``. By default it acts, because its value is read
    at each update.

    :param steps: Names of the methods of the model that set up what was made from the option, to be called again
    :param remedy: Advice to the user if the change is refused, ``None`` if it acts
    """

    steps: tuple[str, ...] = ()
    remedy: str | None = None


READ = Change()


@dataclass(frozen=True)
class Row:
    """
    What the constructor does not say of an option.

    :param group: Title of its section in the reference
    :param accepted: Accepted values; ``None`` to derive them from the type of the argument, a ``Literal`` or ``bool``
    :param example: Value other than the default; not needed where all accepted values can be listed
    :param needs: Other option that it needs to have an effect, ``None`` if there is none
    :param conflicts: Conditions that it cannot be combined with
    :param change: What happens when it has been changed between two calls of ``learn``
    :param attribute: Name of the attribute of the model, ``None`` for the name of the option
    """

    group: str
    accepted: Accepted | None = None
    example: object = None
    needs: Need | None = None
    conflicts: tuple[Conflict, ...] = ()
    change: Change = READ
    attribute: str | None = None


@dataclass(frozen=True, kw_only=True)
class Option(Row):
    """
    An option: its row in the table, and what the constructor says of it.

    :param name: Name of the argument of the constructor
    :param default: Default of this argument
    :param doc: First sentence of its ``:param`` line, in Markdown
    :param is_own: Whether it is one of PPOExt's, which are keyword-only, not one of SB3's PPO
    :param accepted: Accepted values
    :param examples: Values other than the default
    :param attribute: Name of the attribute of the model
    """

    name: str
    default: object
    doc: str
    is_own: bool
    accepted: Accepted
    examples: tuple[object, ...]
    attribute: str

    def check(self, model: ConfiguredPPO) -> None:
        """
        :param model: Model that has the option as an attribute
        :raises ValueError: if the value of the option is not accepted
        """
        self.accepted.check(self.name, getattr(model, self.attribute))

    def check_conflicts(self, model: ConfiguredPPO) -> None:
        """
        :param model: Model that has all options as attributes
        :raises ValueError: if the option is not at its default, and the model meets the condition of one of its conflicts
        """
        value = getattr(model, self.attribute)
        if not self.conflicts or value == self.default:
            return
        for conflict in self.conflicts:
            if conflict.remedy is not None and conflict.when.holds(model):
                refuse(self.name, value, conflict.remedy.format_map(_Attributes(model)))


class _Attributes(dict[str, Any]):
    """The attributes of an object as a dictionary."""

    def __init__(self, of: object):
        super().__init__()
        self.of = of

    def __missing__(self, name: str) -> object:
        return getattr(self.of, name)


def options_of(constructor: Callable[..., None], rows: Mapping[str, Row]) -> dict[str, Option]:
    """
    :param constructor: Constructor whose arguments are the options, with a ``:param`` line for each
    :param rows: Row of each option
    :return: Options in the order of the constructor
    """
    parameters, sentences = inspect.signature(constructor).parameters, _sentences(constructor)
    return {
        name: _option(parameter, sentences.get(name, ""), rows[name])  # `python -OO` has no docstrings
        for name, parameter in parameters.items()
        if name in rows or parameter.kind == parameter.KEYWORD_ONLY
    }


def _option(parameter: inspect.Parameter, doc: str, row: Row) -> Option:
    name, default, accepted = parameter.name, parameter.default, _accepted(parameter.annotation, row.accepted)
    examples = tuple(value for value in accepted.all() if value != default) if row.example is None else (row.example,)
    of_row = vars(row) | {"accepted": accepted, "attribute": row.attribute or name}
    return Option(
        name=name, default=default, doc=doc, is_own=parameter.kind == parameter.KEYWORD_ONLY, examples=examples, **of_row
    )


def _sentences(function: Callable[..., object]) -> dict[str, str]:
    """First sentence of each ``:param`` line, in Markdown."""
    lines = re.findall(r"^:param (\w+): (.*(?:\n +.*)*)", inspect.getdoc(function) or "", re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "`").split(". ")[0].removesuffix(".") for name, text in lines}


def _accepted(kind: object, accepted: Accepted | None) -> Accepted:
    if accepted is None:
        accepted = Flag() if kind is bool else Choice(get_args(kind))
    is_union = get_origin(kind) in (Union, UnionType)
    return Optional(accepted) if is_union and type(None) in get_args(kind) else accepted

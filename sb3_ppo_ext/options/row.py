"""Rows of the table of options, and how they are read from a dataclass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from sb3_ppo_ext.common.schedules import is_constant
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.options.values import Accepted, Choice, Flag, Optional, shown

T = TypeVar("T")


@dataclass(frozen=True)
class When:
    """
    A condition on the settings of a model.

    :param text: Condition in Markdown, to follow "not with"
    :param holds: Function that returns whether a model meets it
    :param example: Options that meet it; empty if it depends on more than options
    """

    text: str
    holds: Callable[[Any], bool]
    example: Mapping[str, Any] = field(default_factory=dict)


def equals(name: str, value: Any) -> When:
    """
    :param name: Name of an option
    :param value: Value of this option
    :return: Condition that the option has this value
    """
    return When(f"`{name}={shown(value)}`", lambda model: getattr(model, name) == value, {name: value})


def differs(name: str, value: Any, example: Any) -> When:
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

    def holds(model: Any) -> bool:
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
    """

    name: str
    value: Any = None

    def described(self) -> str:
        """:return: Needed option in Markdown"""
        return f"`{self.name}`" if self.value is None else f"`{self.name}={shown(self.value)}`"


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
class Option:
    """
    One row of the table.

    :param name: Name of the argument of the constructor
    :param default: Default of this argument
    :param accepted: Accepted values
    :param group: Title of its section in the reference
    :param doc: One sentence in Markdown; the ``:param`` line of the constructor starts with it
    :param examples: Values other than the default
    :param needs: Other option that it needs to have an effect, ``None`` if there is none
    :param conflicts: Conditions that it cannot be combined with
    :param change: What happens when it has been changed between two calls of ``learn``
    :param attribute: Name of the attribute of the model
    """

    name: str
    default: Any
    accepted: Accepted
    group: str
    doc: str
    examples: tuple[Any, ...]
    needs: Need | None
    conflicts: tuple[Conflict, ...]
    change: Change
    attribute: str

    def check(self, model: Any) -> None:
        """
        :param model: Model that has the option as an attribute
        :raises ValueError: if the value of the option is not accepted
        """
        self.accepted.check(self.name, getattr(model, self.attribute))

    def check_conflicts(self, model: Any) -> None:
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

    def __init__(self, of: Any):
        super().__init__()
        self.of = of

    def __missing__(self, name: str) -> Any:
        return getattr(self.of, name)


def option(
    default: T,
    doc: str,
    *,
    group: str,
    accepted: Accepted | None = None,
    example: Any = None,
    needs: Need | None = None,
    conflicts: tuple[Conflict, ...] = (),
    change: Change = READ,
    attribute: str | None = None,
) -> T:
    """
    Make a field of a dataclass a row of the table. The parameters are those of :class:`Option`.

    :param accepted: Accepted values; ``None`` to derive them from the type of the field, a ``Literal`` or ``bool``
    :param example: Value other than the default; not needed where all accepted values can be listed
    :param attribute: Name of the attribute of the model; ``None`` for the name of the field
    """
    metadata = dict(accepted=accepted, group=group, doc=doc, example=example)
    metadata |= dict(needs=needs, conflicts=conflicts, change=change, attribute=attribute)
    return field(default=default, metadata=metadata)


def rows_of(table: type) -> dict[str, Option]:
    """
    :param table: Dataclass with fields made by :func:`option`
    :return: Rows of the table, by name
    """
    types, rows = get_type_hints(table), {}
    for each in fields(table):
        metadata = dict(each.metadata)
        accepted = _accepted(types[each.name], metadata.pop("accepted"))
        example = metadata.pop("example")
        examples = tuple(value for value in accepted.all() if value != each.default) if example is None else (example,)
        metadata["attribute"] = metadata["attribute"] or each.name
        rows[each.name] = Option(each.name, each.default, accepted, examples=examples, **metadata)
    return rows


def _accepted(kind: Any, accepted: Accepted | None) -> Accepted:
    if accepted is None:
        accepted = Flag() if kind is bool else Choice(get_args(kind))
    is_union = get_origin(kind) in (Union, UnionType)
    return Optional(accepted) if is_union and type(None) in get_args(kind) else accepted

"""The table of all options for ``docs/options_reference.md``: ``python -m sb3_ppo_ext.options.reference > FILE``."""

from collections.abc import Iterable

from sb3_ppo_ext.options.row import Option
from sb3_ppo_ext.options.table import ALL_OPTIONS, OWN_OPTIONS, PPO_OPTIONS
from sb3_ppo_ext.options.values import shown

INTRODUCTION = """\
# Reference of the options

All options of `PPOExt`, with the same names in Python, in YAML files, in `-params` and in `load`. [Options](options.md)
explains them and says when to use which. Values that are not accepted, and options that exclude each other, raise a
`ValueError`.

A function of the remaining progress gets a number that decreases from 1 to 0 during the training; `"lin_x"`, such as
`"lin_0.001"`, decreases linearly from x to 0, and `"hold_x"` does so in the second half of the training. "Needs" names what an
option needs to have an effect, "not with" what it cannot be combined with. The parameters of SB3's PPO come last; those that
are not listed, such as `device`, are as in SB3.

An attribute of the model with the name of an option can be set between two calls of `learn` and acts in the next one. For
{fixed} this raises a `ValueError`.

*Generated from `sb3_ppo_ext/options/table.py` by* `python -m sb3_ppo_ext.options.reference > docs/options_reference.md`
"""
HEADINGS = ("option", "accepted values", "default", "meaning", "needs / not with")


def reference() -> str:
    """:return: Text of ``docs/options_reference.md``"""
    own_groups = dict.fromkeys(row.group for row in OWN_OPTIONS.values())
    own = [_section(group, (row for row in OWN_OPTIONS.values() if row.group == group)) for group in own_groups]
    fixed = [f"`{name}`" for name, row in ALL_OPTIONS.items() if row.change.remedy is not None]
    introduction = INTRODUCTION.format(fixed=f"{', '.join(fixed[:-1])} and {fixed[-1]}")
    (sb3_group,) = {row.group for row in PPO_OPTIONS.values()}
    sb3 = _section(sb3_group, PPO_OPTIONS.values())
    return "\n".join([introduction, *own, sb3])


def _section(title: str, rows: Iterable[Option]) -> str:
    lines = [_line(HEADINGS), "|---" * len(HEADINGS) + "|", *(_line(_cells(row)) for row in rows)]
    return "\n".join([f"## {title}", "", *lines, ""])


def _line(cells: Iterable[str]) -> str:
    # An unescaped bar would end the cell.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cells(row: Option) -> tuple[str, ...]:
    name, values, default = f"`{row.name}`", ", ".join(row.accepted.alternatives()), f"`{shown(row.default)}`"
    return name, values, default, row.doc, _relations(row)


def _relations(row: Option) -> str:
    needs = [f"needs {row.needs.described()}"] if row.needs is not None else []
    needed = {row.needs.name} if row.needs is not None else set()
    # A conflict with the needed option itself is obvious.
    others = [conflict.when.text for conflict in row.conflicts if not needed & conflict.when.example.keys()]
    conflicts = ", ".join(others)
    return "; ".join(needs + ([f"not with {conflicts}"] if conflicts else []))


def needed_by(row: Option) -> dict[str, object]:
    """
    :param row: Row of an option
    :return: Name and value of the other option that it needs to have an effect; empty if it needs none
    """
    if row.needs is None:
        return {}
    other = ALL_OPTIONS[row.needs.name]
    value = other.examples[0] if row.needs.value is None else row.needs.value
    return {} if value == other.default else {other.name: value}


if __name__ == "__main__":
    print(reference(), end="")

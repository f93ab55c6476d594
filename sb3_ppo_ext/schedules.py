"""Numbers, callables and strings such as ``"lin_0.001"``, turned into schedules of the remaining progress."""

import math
from typing import TypeAlias

from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import FloatSchedule, LinearSchedule

from sb3_ppo_ext.validation import check_number, refuse

ScheduleLike: TypeAlias = float | str | Schedule


def make_schedule(name: str, value: ScheduleLike, positive: bool = False, infinite: bool = False) -> FloatSchedule:
    """
    :param name: The argument that it is for
    :param value: A number; a callable of the remaining progress, which goes from 1 to 0;
        or ``"lin_x"``, which goes linearly from x to 0
    :param positive: Whether 0 is refused
    :param infinite: Whether infinity is accepted
    :return: The schedule, which can be pickled if ``value`` can
    :raises ValueError: if the string does not parse, or the number is negative
    """
    if callable(value):
        return FloatSchedule(value)
    if isinstance(value, str):
        return FloatSchedule(LinearSchedule(_initial_value(name, value, positive), 0.0, 1.0))
    check_number(name, value, 0, open_low=positive, infinite=infinite)
    return FloatSchedule(float(value))  # SB3 does not take NumPy's float32


def _initial_value(name: str, text: str, positive: bool) -> float:
    prefix, _, number = text.partition("_")
    try:
        initial_value = float(number)
    except ValueError:
        initial_value = math.nan
    if prefix != "lin" or not math.isfinite(initial_value):
        remedy = 'give a number, a callable, or "lin_" and the initial value, such as "lin_0.001"'
        # YAML reads 3e-4 as a string.
        refuse(name, text, f"{remedy} (in YAML, 3e-4 needs a dot, 3.0e-4, or it is a string)")
    check_number(name, initial_value, 0, open_low=positive)
    return initial_value

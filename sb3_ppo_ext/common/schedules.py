"""Numbers, callables and strings such as ``"lin_0.001"``, turned into schedules; what follows the KL divergence instead."""

import math
from typing import Any, Literal, TypeAlias

from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule

from sb3_ppo_ext.common.validation import check_number, refuse

ScheduleLike: TypeAlias = float | str | Schedule
LrDecay: TypeAlias = Literal["constant", "linear", "cosine"]


def make_schedule(name: str, value: ScheduleLike, positive: bool = False, infinite: bool = False) -> FloatSchedule:
    """
    :param name: The argument that it is for
    :param value: A number; a callable of the remaining progress, which goes from 1 to 0;
        or ``"lin_x"``, which goes linearly from x to 0 and stays there
    :param positive: Whether 0 is refused
    :param infinite: Whether infinity is accepted
    :return: The schedule, which can be pickled if ``value`` can
    :raises ValueError: if the string does not parse, or the number is negative
    """
    if callable(value):
        return FloatSchedule(value)
    if isinstance(value, str):
        return FloatSchedule(LinearToZero(_initial_value(name, value, positive)))
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


def value_of(schedule: ScheduleLike, progress_remaining: float) -> float:
    """
    :param schedule: A number or a schedule
    :param progress_remaining: From 1 to 0
    :return: Its value now
    """
    return schedule(progress_remaining) if callable(schedule) else float(schedule)


def is_constant(value: ScheduleLike) -> bool:
    """
    :param value: A number, or what may be a schedule
    :return: Whether it is known not to depend on the progress
    """
    if isinstance(value, FloatSchedule):
        return is_constant(value.value_schedule)
    return isinstance(value, ConstantSchedule) or not (callable(value) or isinstance(value, str))


class LinearToZero:
    """
    Linear in the remaining progress, and never negative: the last rollout may end past the end of the training, where the
    Zoo's schedule is below 0, and an update with a negative learning rate unlearns what was learned.

    :param initial_value: At the start
    """

    def __init__(self, initial_value: float):
        self.initial_value = initial_value

    def __call__(self, progress_remaining: float) -> float:
        return max(progress_remaining, 0.0) * self.initial_value

    def __repr__(self) -> str:
        return f"LinearToZero({self.initial_value})"


class DecaySchedule:
    """
    A schedule, times a warm-up from 0 and a decay, both over the progress of the training.

    During the first ``warmup`` of the training the factor grows linearly to 1; over the rest, of which a part ``y`` is done,
    it is ``m + (1 - m) (1 - y)`` (linear) or ``m + (1 - m) (1 + cos(pi y)) / 2`` (cosine).

    :param schedule: What is multiplied
    :param decay: ``"constant"``, ``"linear"`` or ``"cosine"``
    :param min_fraction: m, what is left at the end, in [0, 1]
    :param warmup: As a fraction of the training, in [0, 1)
    """

    def __init__(self, schedule: Schedule, decay: LrDecay, min_fraction: float, warmup: float):
        self.schedule, self.decay, self.min_fraction, self.warmup = schedule, decay, min_fraction, warmup

    def __call__(self, progress_remaining: float) -> float:
        return self.schedule(progress_remaining) * self._factor(progress_remaining)

    def _factor(self, remaining: float) -> float:
        if 1.0 - remaining < self.warmup:
            return (1.0 - remaining) / self.warmup
        # The last rollout may end past the end.
        remaining = max(remaining / (1.0 - self.warmup), 0.0)
        left = {"constant": 1.0, "linear": remaining, "cosine": (1.0 - math.cos(math.pi * remaining)) / 2}[self.decay]
        return self.min_fraction + (1.0 - self.min_fraction) * left

    def __repr__(self) -> str:
        return f"DecaySchedule({self.schedule}, {self.decay!r}, min_fraction={self.min_fraction}, warmup={self.warmup})"


class KLAdaptive:
    """
    A positive number that follows the KL divergence of the updates: multiplied by ``factor`` after an update whose KL was
    more than ``tolerance * target``, divided by it after one whose KL was less than ``target / tolerance`` (but not 0).

    It is a schedule as well, for which the progress does not matter.

    Papers: https://arxiv.org/abs/1707.06347, section 4 (a coefficient: factor 2, tolerance 1.5);
    https://arxiv.org/abs/2109.11978 (a learning rate: factor 1 / 1.5, tolerance 2)

    :param value: At the start
    :param target: The wanted KL, in nats
    :param factor: More than 1 if a larger value lowers the KL, less than 1 if it raises it
    :param tolerance: More than 1
    :param bounds: The least and the largest value
    """

    def __init__(self, value: float, target: float, factor: float, tolerance: float, bounds: tuple[float, float]):
        self.target, self.factor, self.tolerance, self.bounds = target, factor, tolerance, bounds
        self.initial = self.value = self._within_bounds(value)

    def __call__(self, progress_remaining: float) -> float:
        return self.value

    def update(self, kl: float) -> None:
        """
        :param kl: Of an update; NaN changes nothing
        """
        if kl > self.tolerance * self.target:
            self.value = self._within_bounds(self.value * self.factor)
        elif 0.0 < kl < self.target / self.tolerance:
            self.value = self._within_bounds(self.value / self.factor)

    def _within_bounds(self, value: float) -> float:
        low, high = self.bounds
        return min(max(value, low), high)

    def state_dict(self) -> dict[str, Any]:
        """:return: What was learned, and from where"""
        return {"initial": self.initial, "value": self.value}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """
        :param state: From :meth:`state_dict`; ignored if it started elsewhere, for then the user has chosen a new start
        :param strict: Not used; SB3 passes it
        """
        if state["initial"] == self.initial:
            self.value = self._within_bounds(state["value"])

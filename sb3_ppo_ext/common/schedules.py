"""Schedules from numbers, callables and strings such as ``"lin_0.001"``, and coefficients that adapt to the KL divergence."""

import math
from typing import Any, Literal, TypeAlias

import numpy as np
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule

from sb3_ppo_ext.common.type_aliases import StateDict
from sb3_ppo_ext.common.validation import BadArgumentError, check_number, described, hint_of_string, refuse

ScheduleLike: TypeAlias = float | str | Schedule
LrDecay: TypeAlias = Literal["constant", "linear", "cosine"]
AdaptiveLrRule: TypeAlias = Literal["threshold", "proportional"]
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def make_schedule(name: str, value: ScheduleLike, positive: bool = False, infinite: bool = False) -> FloatSchedule:
    """
    :param name: Name of the argument, for error messages
    :param value: Number; callable of the remaining progress, which goes from 1 to 0; ``"lin_x"`` for a linear decay from
        x to 0, which then stays at 0; or ``"hold_x"``, which begins to decay after half of the training
    :param positive: Whether 0 is refused
    :param infinite: Whether infinity is accepted
    :return: Schedule, which can be pickled if ``value`` can
    :raises ValueError: if the string cannot be parsed, or the number is negative
    """
    if callable(value):
        return FloatSchedule(value)
    if isinstance(value, str):
        return FloatSchedule(_from_string(name, value, positive))
    check_number(name, value, 0, open_low=positive, infinite=infinite)
    return FloatSchedule(float(value))  # SB3 does not accept NumPy's float32


def check_schedule(name: str, schedule: Schedule, infinite: bool = False) -> None:
    """
    Check that a function is a schedule, by its value at the start of the training.

    :param name: Name of the argument, for error messages
    :param schedule: Callable of the remaining progress
    :param infinite: Whether infinity is accepted
    :raises ValueError: if the function cannot be called, or returns something other than a number of at least 0
    """
    remedy = "give a function of the remaining progress (from 1 to 0) that returns a number of at least 0"
    try:
        returned = schedule(1.0)
        value = math.nan if isinstance(returned, str | bytes) else float(returned)
    except (NameError, AttributeError):
        return  # It may read the model, which does not exist yet.
    except Exception as error:
        remedy = f"it raises {type(error).__name__} ({error}); {remedy}"
        raise BadArgumentError(f"`{name}={described(schedule)}` is not valid: {remedy}") from error
    if not (value >= 0 and (infinite or math.isfinite(value))):
        refuse(name, schedule, f"it returns {described(returned)} at the start of the training; {remedy}")


def _from_string(name: str, text: str, positive: bool) -> "LinearToZero":
    prefix, _, number = text.partition("_")
    try:
        initial_value = float(number)
    except ValueError:
        initial_value = math.nan
    if prefix not in STRINGS or not math.isfinite(initial_value):
        remedy = 'give a number, a callable, or a string such as "lin_0.001" or "hold_0.001"'
        refuse(name, text, remedy + hint_of_string(text))
    check_number(name, initial_value, 0, open_low=positive)
    return STRINGS[prefix](initial_value)


def value_of(schedule: ScheduleLike, progress_remaining: float) -> float:
    """
    :param schedule: Number or schedule
    :param progress_remaining: Remaining progress of the training, from 1 to 0
    :return: Current value of the schedule
    """
    return float(schedule(progress_remaining) if callable(schedule) else schedule)


def in_float32_range(value: float) -> float:
    """
    :param value: Number of at least 0, also an integer of any size
    :return: The same number as a float, infinity if it is beyond the range of float32: PyTorch refuses such numbers as bounds
        and coefficients of tensors
    """
    return math.inf if value > _LARGEST_FLOAT32 else float(value)


def is_constant(value: ScheduleLike) -> bool:
    """
    :param value: Number or schedule
    :return: Whether the value is known to be independent of the progress
    """
    if isinstance(value, FloatSchedule):
        return is_constant(value.value_schedule)
    return isinstance(value, ConstantSchedule) or not (callable(value) or isinstance(value, str))


class LinearToZero:
    """
    Linear decay to 0 that is never negative. The last rollout may end after ``total_timesteps``, where the remaining progress
    and the Zoo's linear schedule are negative, and an update with a negative learning rate undoes what was learned.

    :param initial_value: Value at the start of the training
    """

    prefix = "lin"

    def __init__(self, initial_value: float):
        self.initial_value = initial_value

    def __call__(self, progress_remaining: float) -> float:
        return max(progress_remaining, 0.0) * self.initial_value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.initial_value})"


class HoldThenLinearToZero(LinearToZero):
    """
    A constant in the first half of the training, and a linear decay to 0 in the second, which is never negative.

    Paper: https://arxiv.org/abs/2405.18392 (a constant learning rate with a cooldown)

    :param initial_value: Value in the first half of the training
    """

    prefix = "hold"

    def __call__(self, progress_remaining: float) -> float:
        return super().__call__(min(2 * progress_remaining, 1.0))


STRINGS = {schedule.prefix: schedule for schedule in (LinearToZero, HoldThenLinearToZero)}


def as_in_yaml(value: Any) -> Any:
    """
    :param value: Value of an option
    :return: The number or string, such as ``"lin_0.001"``, that stands for a schedule in a YAML file; other values unchanged
    """
    if isinstance(value, FloatSchedule):
        return as_in_yaml(value.value_schedule)
    if isinstance(value, ConstantSchedule):
        return value.val
    if isinstance(value, LinearToZero):
        return f"{value.prefix}_{value.initial_value}"
    # The Zoo's class is known by its name, since the Zoo need not be installed.
    return f"lin_{value.initial_value}" if type(value).__name__ == "SimpleLinearSchedule" else value


class DecaySchedule:
    """
    A schedule multiplied by a linear warm-up and a decay.

    With ``w`` the length of the warm-up and ``r`` that of a rollout, both as fractions of the training, the warm-up takes
    ``k = ceil(w / r)`` updates, and its factor in update i is ``i / (k + 1)`` until it reaches 1. Updates follow rollouts, so
    that each warm-up acts on the first update, however short it is. In terms of the completed fraction of the training, the
    factor is ``min(1, completed / (r (k + 1)))``, which is ``min(1, completed / w)`` for small rollouts.

    With ``y`` the completed fraction of the training after the length w, the factor of the decay is ``m + (1 - m) (1 - y)``
    (linear) or ``m + (1 - m) (1 + cos(pi y)) / 2`` (cosine).

    :param schedule: Schedule that is multiplied
    :param decay: Shape of the decay: ``"constant"`` (none), ``"linear"`` or ``"cosine"``
    :param min_fraction: m, the factor at the end of the training, in [0, 1]
    :param warmup: w, the length of the warm-up as a fraction of the training, in [0, 1)
    :param rollout: r, the length of a rollout as a fraction of the training; ``learn`` sets it
    """

    rollout = 0.0

    def __init__(self, schedule: Schedule, decay: LrDecay, min_fraction: float, warmup: float, rollout: float = 0.0):
        self.schedule, self.decay, self.min_fraction, self.warmup = schedule, decay, min_fraction, warmup
        self.rollout = rollout

    def __call__(self, progress_remaining: float) -> float:
        return (
            self.schedule(progress_remaining)
            * self._warmup_factor(progress_remaining)
            * self._decay_factor(progress_remaining)
        )

    def _warmup_factor(self, remaining: float) -> float:
        if self.warmup == 0:
            return 1.0
        end = self.warmup
        if self.rollout > 0:
            # Rounding must not add an update.
            end = self.rollout * (math.ceil(self.warmup / self.rollout - 1e-9) + 1)
        return min((1.0 - remaining) / end, 1.0)

    def _decay_factor(self, remaining: float) -> float:
        # The remaining progress is negative if the last rollout ends after `total_timesteps`.
        remaining = min(max(remaining / (1.0 - self.warmup), 0.0), 1.0)
        left = {"constant": 1.0, "linear": remaining, "cosine": (1.0 - math.cos(math.pi * remaining)) / 2}[self.decay]
        return self.min_fraction + (1.0 - self.min_fraction) * left

    def __repr__(self) -> str:
        return f"DecaySchedule({self.schedule}, {self.decay!r}, min_fraction={self.min_fraction}, warmup={self.warmup})"


class KLAdaptive:
    """
    A positive number that adapts to the KL divergence of the updates: it is multiplied by ``factor`` after an update with a
    KL above ``tolerance * target``, and divided by ``factor`` after one with a KL below ``target / tolerance`` (but not 0).
    Without a tolerance, each update changes it in proportion to ``sqrt(KL / target)`` or its inverse, by ``factor`` at most:
    the KL divergence of a small update grows with the square of its size.

    It can be called like a schedule, and ignores the progress. The target may depend on it.

    Papers: https://arxiv.org/abs/1707.06347, section 4 (a coefficient: factor 2, tolerance 1.5);
    https://arxiv.org/abs/2109.11978 (a learning rate: factor 1 / 1.5, tolerance 2)

    :param value: Initial value
    :param target: Target KL divergence, in nats: a number or a schedule
    :param factor: Factor of each change, or of the largest one: more than 1 if a larger value lowers the KL, less than 1 if
        it raises the KL
    :param tolerance: Ratio to the target up to which the KL changes nothing, more than 1; ``None`` for changes in proportion
    :param bounds: Smallest and largest value
    """

    def __init__(
        self, value: float, target: ScheduleLike, factor: float, tolerance: float | None, bounds: tuple[float, float]
    ):
        self.target, self.factor, self.tolerance, self.bounds = target, factor, tolerance, bounds
        self.initial = self.value = self._within_bounds(value)

    def __call__(self, progress_remaining: float) -> float:
        return self.value

    def update(self, kl: float, progress_remaining: float = 1.0) -> None:
        """
        :param kl: KL divergence of an update, in nats; NaN changes nothing
        :param progress_remaining: Remaining progress of the training, from 1 to 0
        """
        target = value_of(self.target, progress_remaining)
        if kl > 0.0:
            value = self._in_proportion(kl, target) if self.tolerance is None else self._in_steps(kl, target, self.tolerance)
            self.value = self._within_bounds(value)

    def _in_steps(self, kl: float, target: float, tolerance: float) -> float:
        if kl > tolerance * target:
            return self.value * self.factor
        return self.value / self.factor if kl < target / tolerance else self.value

    def _in_proportion(self, kl: float, target: float) -> float:
        excess = math.sqrt(kl / target) if target > 0 else math.inf
        low, high = sorted((self.factor, 1 / self.factor))
        change = min(max(excess, low), high)
        return self.value * change if self.factor > 1 else self.value / change

    def _within_bounds(self, value: float) -> float:
        low, high = self.bounds
        return min(max(value, low), high)

    def state_dict(self) -> StateDict:
        """:return: Current and initial value"""
        return {"initial": self.initial, "value": self.value}

    def load_state_dict(self, state: StateDict, strict: bool = True) -> None:
        """
        :param state: State from :meth:`state_dict`; ignored if its initial value differs, since the user has then chosen a
            new one
        :param strict: Unused, for compatibility with ``th.nn.Module``
        """
        if state["initial"] == self.initial:
            self.value = self._within_bounds(state["value"])

"""Which action distribution goes with which action space and with which other keywords of a policy."""

import warnings
from typing import get_args

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_ppo_ext.common.hybrid_actions import boxes_of, is_hybrid
from sb3_ppo_ext.common.validation import check_choice, check_number, check_type, refuse
from sb3_ppo_ext.distributions.base import DeterministicAction
from sb3_ppo_ext.distributions.registry import ACTION_DISTS, DEFAULT, DistributionFamily

# A dimension of the action space that is wider than this is probably not meant to be explored from end to end.
WIDE, WIDER_THAN_OTHERS = 50.0, 10.0


def check_action_distribution(
    action_dist: str,
    deterministic_action: str,
    mean_tanh: bool,
    learn_std: bool,
    action_space: spaces.Space | None,
    use_sde: bool,
    log_std_init: float,
) -> None:
    """
    Check the keywords of a policy that describe its action distribution.

    :param action_dist: Name of the action distribution
    :param deterministic_action: Deterministic action of the Beta distribution
    :param mean_tanh: Whether tanh bounds the mean
    :param learn_std: Whether the standard deviation is learned
    :param action_space: Action space, ``None`` if it is not known yet
    :param use_sde: Whether generalized State-Dependent Exploration (gSDE) is used
    :param log_std_init: Initial logarithm of the standard deviation
    :raises ValueError: if a value is not valid, or the values exclude each other
    """
    check_choice("action_dist", action_dist, ACTION_DISTS)
    check_choice("deterministic_action", deterministic_action, get_args(DeterministicAction))
    family = ACTION_DISTS[action_dist]
    values = {"action_dist": action_dist, "mean_tanh": mean_tanh, "learn_std": learn_std}
    defaults = {"action_dist": DEFAULT, "mean_tanh": False, "learn_std": True}
    for name, default in defaults.items():
        if isinstance(default, bool):
            check_type(name, values[name], (bool, np.bool_, int), "give True or False")
        if values[name] != default:
            _check_goes_with(name, values[name], default, action_space, use_sde)
    if use_sde:
        check_exploration(use_sde, action_space)
    for space in boxes_of(action_space):
        if family.is_bounded:
            # The vectors of hybrid actions are in float32.
            _check_bounds("action_dist", action_dist, space, np.float32 if is_hybrid(action_space) else np.float64)
        if mean_tanh:
            _check_bounds("mean_tanh", mean_tanh, space, np.float32)
    _check_family(family, deterministic_action, mean_tanh, learn_std, action_space, log_std_init)


def check_exploration(use_sde: bool, action_space: spaces.Space | None) -> None:
    """
    Refuse gSDE for hybrid actions.

    :param use_sde: Value of the option
    :param action_space: Action space, ``None`` if it is not known yet
    :raises ValueError: if it is a ``Dict`` or ``Tuple``
    """
    if is_hybrid(action_space):
        refuse("use_sde", use_sde, f"it is for an action space that is a Box, not for parts of {action_space}; give False")


def _check_goes_with(name: str, value: object, default: object, action_space: spaces.Space | None, use_sde: bool) -> None:
    """Checks for every option that changes SB3's Gaussian."""
    if isinstance(default, bool):
        check_type(name, value, (bool, np.bool_), "give True or False")
    if action_space is not None and not boxes_of(action_space):
        what = "has no Box" if is_hybrid(action_space) else "is not a Box"
        refuse(name, value, f"{action_space} {what}; leave it at {default!r}")
    if use_sde:
        remedy = f"gSDE has an action distribution of its own; give `use_sde=False`, or leave {name} at {default!r}"
        refuse(name, value, remedy)


def _check_bounds(name: str, value: object, space: spaces.Box, dtype: type = np.float64) -> None:
    with np.errstate(over="ignore"):
        bounds: np.ndarray = np.array([space.low, space.high]).astype(dtype)
    if not np.isfinite(bounds).all():
        remedy = "declare finite ones, and scale the action in the environment"
        refuse(name, value, f"{space} has an infinite bound in {dtype.__name__}; {remedy}")


def _check_family(
    family: DistributionFamily,
    deterministic_action: str,
    mean_tanh: bool,
    learn_std: bool,
    action_space: spaces.Space | None,
    log_std_init: float,
) -> None:
    """Checks that depend on the action distribution."""
    name, choices = family.name, family.deterministic_actions
    if family.is_bounded:
        for space in boxes_of(action_space):
            if not np.issubdtype(space.dtype, np.floating):
                remedy = f"{space} has integers; declare a Box of floats, and round in the environment"
                refuse("action_dist", name, remedy)
        if mean_tanh:
            refuse("mean_tanh", mean_tanh, f'it is for `action_dist="gaussian"`; {name!r} is bounded already, leave it out')
    if not family.has_log_std and not learn_std:
        refuse("learn_std", learn_std, f'`action_dist="{name}"` has no standard deviation of its own; leave it out')
    # A tensor may have one number for each action.
    for value in log_std_init.flatten().tolist() if isinstance(log_std_init, th.Tensor) else [log_std_init]:
        check_number("log_std_init", value, *family.log_std_range)
    if deterministic_action not in choices:
        remedy = f'`action_dist="{name}"` does not support it; give {" or ".join(repr(choice) for choice in choices)}'
        refuse("deterministic_action", deterministic_action, remedy)


def check_within_bounds(actions: np.ndarray, space: spaces.Box) -> None:
    """
    Refuse actions that are out of bounds by more than rounding: a thousandth of the width.

    :param actions: Actions, shape ``(n, *space.shape)``
    :param space: Their space
    :raises ValueError: if an action is out of bounds, or NaN
    """
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    slack = (high / 1e3 - low / 1e3) + 1e-6
    # NaN fails the comparisons.
    if not ((low - slack <= actions) & (actions <= high + slack)).all():
        refuse("actions", f"{actions.min():g} to {actions.max():g}", f"give actions within the bounds of {space}")


def warn_if_wide(space: spaces.Box) -> None:
    """
    Warn of a dimension that a bounded action distribution would explore from end to end, probably in vain.

    :param space: Action space
    """
    # Half the width, because the full width can overflow
    halves = (space.high.astype(np.float64) / 2 - space.low.astype(np.float64) / 2).flatten()
    usual = np.median(halves[halves > 0]) if halves.any() else 0.0
    wide = np.flatnonzero((halves > WIDE / 2) | ((halves > 1) & (halves / WIDER_THAN_OTHERS > usual)))
    if len(wide) > 0:
        index = wide[0]
        bounds = f"{space.low.flat[index]:g} to {space.high.flat[index]:g}"
        warnings.warn(
            f"The action space {space} is very wide in its dimension {index} (from {bounds}), and a bounded action "
            "distribution starts by exploring all of it: better declare [-1, 1], and scale the action inside the environment.",
            stacklevel=2,
        )

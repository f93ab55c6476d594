"""
Losses that evaluate the policy at further observations, for the option ``auxiliary_losses``: the registry, and how the value
of the option becomes losses.

To add one, write a subclass of :class:`~sb3_ppo_ext.update.extra_loss.ExtraLoss` and add a row to :data:`EXTRA_LOSSES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext.common.validation import check_dictionary, check_known_options, check_number, refuse
from sb3_ppo_ext.distributions import family_of
from sb3_ppo_ext.update.extra_loss import ExtraLoss, log_name
from sb3_ppo_ext.update.mirror import MirrorAugmentation, MirrorLoss
from sb3_ppo_ext.update.smoothness import SpatialSmoothness, TemporalSmoothness

OPTION = "auxiliary_losses"
EXTRA_LOSSES: dict[str, type[ExtraLoss]] = {
    "mirror": MirrorLoss,
    "mirror_augmentation": MirrorAugmentation,
    "caps_temporal": TemporalSmoothness,
    "caps_spatial": SpatialSmoothness,
}
# Names of the losses in the log, under ``train/``
LOGGED_LOSSES = tuple(map(log_name, EXTRA_LOSSES))


def check_extra_losses(name: str, value: Any) -> None:
    """
    Check what can be checked without a policy.

    :param name: Name of the option
    :param value: Value of the option: coefficients, or dictionaries with ``coef`` and keyword arguments, by name of the loss
    :raises ValueError: if a name or a value is not valid
    """
    check_dictionary(name, value)
    check_known_options(value, EXTRA_LOSSES, f"`{name}`")
    for key, given in value.items():
        where, loss, entry = f"{name}[{key!r}]", EXTRA_LOSSES[key], _entry(given)
        check_known_options(entry, {"coef", *loss.keywords}, f"`{where}`")
        if missing := [each for each in ("coef", *loss.keywords) if each not in entry]:
            refuse(where, given, f"it lacks {' and '.join(f'`{each}`' for each in missing)}; {loss.remedy}")
        check_number(f"{where}['coef']", entry["coef"], 0)
        loss.check(where, {each: entry[each] for each in loss.keywords})


def active_extra_losses(value: Mapping[str, object] | None) -> dict[str, type[ExtraLoss]]:
    """
    :param value: Value of the option, which has been checked
    :return: Classes of the losses whose coefficient is not 0, by name
    """
    return {name: EXTRA_LOSSES[name] for name, given in (value or {}).items() if _entry(given)["coef"] != 0}


def reads_next(value: Mapping[str, object] | None) -> bool:
    """
    :param value: Value of the option, valid or not
    :return: Whether one of the losses reads the observations that follow the samples
    """
    names = value if isinstance(value, Mapping) else ()
    return any(name in EXTRA_LOSSES and EXTRA_LOSSES[name].reads_next for name in names)


def make_extra_losses(
    value: Mapping[str, Any] | None, policy: ActorCriticPolicy, normalizer: VecNormalize | None = None
) -> dict[str, ExtraLoss]:
    """
    :param value: Value of the option, which has been checked
    :param policy: Policy that is updated
    :param normalizer: ``VecNormalize`` that has normalised the observations of the policy, ``None`` if there is none
    :return: Losses whose coefficient is not 0, by name
    :raises ValueError: if a loss does not fit the policy or its spaces
    """
    made = {}
    for name, loss in active_extra_losses(value).items():
        entry, where = _entry((value or {})[name]), f"{OPTION}[{name!r}]"
        family = family_of(policy.action_dist)
        if family is None:
            remedy = f"{type(policy.action_dist).__name__} has no deterministic action with a gradient; leave the loss out"
            refuse(where, entry, remedy)
        keywords = {each: entry[each] for each in loss.keywords}
        made[name] = loss.make(where, entry["coef"], keywords, policy, normalizer)
    return made


def _entry(given: object) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {"coef": given}

"""``normalize`` of an entry of RL Zoo as options of the model."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from gymnasium import spaces

from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import check_type, refuse

# Keyword arguments of `VecNormalize`, with the options of the model that have the same meaning
SAME = {"clip_obs": "clip_obs", "clip_reward": "clip_reward", "norm_reward": "normalize_reward"}
KNOWN = (*SAME, "norm_obs", "norm_obs_keys", "gamma")


def options_of(normalize: object, gamma: float, space: spaces.Space, is_normalized: Callable[[spaces.Space], bool]) -> Kwargs:
    """
    :param normalize: Value of the entry: true, false, or a dictionary, or code of one, of arguments of ``VecNormalize``
    :param gamma: Discount factor of the model
    :param space: Observation space
    :param is_normalized: Whether such observations are normalised, unless the entry says which
    :return: Options of the model
    :raises ValueError: if it is something else, or the model's normalisation has no such setting
    """
    given = _keywords(normalize)
    if given is None:
        return {}
    for name in given.keys() - set(KNOWN):
        refuse("normalize", normalize, f"{name!r} is none of {', '.join(KNOWN)}")
    if given.get("gamma", gamma) != gamma:
        refuse("normalize", normalize, f"its discount factor is that of the model, gamma={gamma}; leave it out")
    options = {SAME[name]: given[name] for name in SAME if name in given}
    return {"normalize_obs": _observations(given, space, is_normalized), "normalize_reward": True, **options}


def _observations(given: Kwargs, space: spaces.Space, is_normalized: Callable[[spaces.Space], bool]) -> Any:
    if not given.get("norm_obs", True):
        return False
    if given.get("norm_obs_keys") is not None:
        return list(given["norm_obs_keys"])
    if not isinstance(space, spaces.Dict):
        return is_normalized(space)
    return [key for key, part in space.spaces.items() if is_normalized(part)] or False


def _keywords(normalize: Any) -> Kwargs | None:
    """Keyword arguments of ``VecNormalize``, ``None`` for no normalisation."""
    if normalize is None or isinstance(normalize, bool):
        return {} if normalize else None
    check_type("normalize", normalize, (dict, str), "give True, False, or keyword arguments of `VecNormalize`")
    if isinstance(normalize, dict):
        return dict(normalize)
    try:
        call: Any = ast.parse(normalize.strip(), mode="eval").body
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "dict" and not call.args:
            return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return dict(ast.literal_eval(normalize))
    except (ValueError, SyntaxError, TypeError):
        refuse("normalize", normalize, 'it is no dictionary; give one such as "dict(norm_reward=False)"')

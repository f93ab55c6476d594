"""The options of a model, as a user would write them."""

import inspect
import itertools
import math
from collections.abc import Mapping
from typing import Any

from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecMonitor, VecNormalize, VecTransposeImage

from sb3_ppo_ext.common.schedules import as_in_yaml
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import described
from sb3_ppo_ext.options.values import NotCodeError, class_name, shown
from sb3_ppo_ext.ppo_ext import PPOExt

# What says where a model is computed or logged, and what it is made of after its set-up
_LEFT_OUT = {"self", "policy", "env", "device", "verbose", "tensorboard_log", "stats_window_size", "_init_setup_model"}
# Packages whose policies have names
_PACKAGES = ("sb3_ppo_ext", "stable_baselines3", "sb3_contrib")


def options_of(model: PPOExt) -> Kwargs:
    """
    :param model: Model
    :return: Its options that differ from their defaults; schedules are numbers or strings where these exist
    """
    parameters = inspect.signature(type(model)).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name not in _LEFT_OUT}
    values = {name: as_in_yaml(getattr(model, name)) for name in defaults if hasattr(model, name)}
    return {name: value for name, value in values.items() if not _is_default(value, defaults[name])}


def environment_code(
    env_id: str, n_envs: int, seed: int | None, env_kwargs: Mapping[str, object], normalization: VecNormalize | None
) -> str:
    """
    :param env_id: Id of the environment
    :param n_envs: Number of environments
    :param seed: Seed of the training
    :param env_kwargs: Keyword arguments of the environment
    :param normalization: Normalisation of observations and rewards, if there is one
    :return: Python code that makes the environments of a training run
    """
    seed_given = "" if seed is None else f", seed={seed}"
    kwargs_given = f", env_kwargs={as_code(env_kwargs)}" if env_kwargs else ""
    code = f"make_vec_env({shown(env_id)}, n_envs={n_envs}{seed_given}{kwargs_given})"
    if normalization is None:
        return code
    parameters = inspect.signature(VecNormalize).parameters
    values = {name: getattr(normalization, name) for name in parameters if name not in ("venv", "training")}
    changed = [f", {name}={as_code(value)}" for name, value in values.items() if value != parameters[name].default]
    return f"VecNormalize({code}{''.join(changed)})"


def policy_name(model: PPOExt) -> str:
    """
    :param model: Model
    :return: Name of its policy, for the first argument of ``PPOExt``
    """
    names = {policy: name for name, policy in reversed(model.policy_aliases.items())}
    return next((names[kind] for kind in model.policy_class.__mro__ if kind in names), model.policy_class.__name__)


def omitted_by_code(model: PPOExt) -> list[str]:
    """
    :param model: Model
    :return: A policy class of the user's, and wrappers, which :func:`policy_name` and :func:`environment_code` do not name
    """
    aliases = set(model.policy_aliases.values())
    classes = itertools.takewhile(lambda kind: kind not in aliases, model.policy_class.__mro__)
    own = next((kind.__qualname__ for kind in classes if kind.__module__.partition(".")[0] not in _PACKAGES), None)
    return [*([] if own is None else [f"policy: {own}"]), *(f"wrapper: {name}" for name in _wrappers_of(model.get_env()))]


def _wrappers_of(env: VecEnv | None) -> list[str]:
    """Names of wrappers, the inner ones first, without those that PPOExt adds and that of the normalisation."""
    vectorised = []
    innermost = env
    while isinstance(innermost, VecEnvWrapper):
        if not isinstance(innermost, VecNormalize | VecTransposeImage | VecMonitor):
            vectorised.append(type(innermost).__name__)
        innermost = innermost.venv
    try:
        (spec,) = env.get_attr("spec", indices=[0])  # type: ignore[union-attr]
        return [each.name for each in spec.additional_wrappers if each.name != "Monitor"] + vectorised[::-1]
    except (AttributeError, NotImplementedError, TypeError):  # not made by Gymnasium
        return vectorised[::-1]


def as_code(value: object) -> str:
    """
    :param value: Value of an option
    :return: Value as Python code where ``nn`` and ``th`` are known
    :raises NotCodeError: if it is or contains a function, an object, or a class that is not PyTorch's
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{shown(key)}: {as_code(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_code, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(as_code, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    code = shown(value)
    return class_name(value) if code.startswith("<") else code


def as_text(value: object) -> str:
    """
    :param value: Value of an option
    :return: Value as Python code, or the name or a short form of what has no code
    """
    try:
        return as_code(value)
    except NotCodeError:
        return str(getattr(value, "__qualname__", "")) or described(value)


def _is_default(value: Any, default: Any) -> bool:
    # What has been loaded has lists in place of tuples.
    if default is None:
        # After the set-up, these are the usual class, or an empty dictionary.
        is_usual_class = isinstance(value, type) and value.__module__.partition(".")[0] in ("stable_baselines3", "sb3_ppo_ext")
        return value is None or value == {} or is_usual_class
    return bool((tuple(value) if isinstance(default, tuple) else value) == default)

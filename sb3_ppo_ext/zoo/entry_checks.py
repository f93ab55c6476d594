"""Checks of an entry of a YAML file, before the Zoo reads it: mistakes are errors of one line that name the key."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext.common.schedules import make_schedule
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import (
    BadArgumentError,
    check_known_options,
    check_kwargs,
    check_number,
    check_type,
    refuse,
)
from sb3_ppo_ext.options.constructor import option_names
from sb3_ppo_ext.options.places import place_of
from sb3_ppo_ext.ppo_ext import PPOExt

if TYPE_CHECKING:
    from rl_zoo3.exp_manager import ExperimentManager

# Keys of an entry that are not arguments of the algorithm
OF_THE_ZOO = {
    *("callback", "env_kwargs", "env_wrapper", "frame_stack", "monitor_kwargs", "n_envs"),
    *("n_timesteps", "normalize", "staggered_start", "vec_env_wrapper"),
}
# Arguments of the algorithm that the Zoo gives by itself, from the command line
OF_THE_COMMAND = {"env", "seed", "device", "verbose", "tensorboard_log"}
# Schedules that the Zoo makes, with any prefix in place of "lin"
OF_ZOO_SCHEDULES = ("learning_rate", "clip_range", "clip_range_vf")


class CommandError(BadArgumentError, SystemExit):
    """
    A mistake in what was given to a command. Nothing catches it there: as a ``SystemExit``, it ends the command with its
    message, without the traceback.

    :param message: Message
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.code = f"Error: {message}"


@contextmanager
def one_line_errors(verbose: int = 1) -> Iterator[None]:
    """
    Let mistakes in arguments end a command with their message.

    :param verbose: Verbosity of the command, from 2 on with the traceback
    """
    try:
        yield
    except BadArgumentError as error:
        if verbose >= 2:
            raise
        raise CommandError(str(error)) from error


@contextmanager
def unreadable_files_as_value_errors(config: str) -> Iterator[None]:
    """
    Re-raise errors of the Zoo and of PyYAML about a file of hyperparameters.

    :param config: Path of the file, or name of the module
    """
    import yaml

    try:
        yield
    except BadArgumentError:
        raise
    except (OSError, ImportError, SyntaxError, LookupError, NameError, AttributeError, TypeError, ValueError) as error:
        raise BadArgumentError(f"`--conf-file {config}`: {_reason(error)}") from error
    except yaml.YAMLError as error:
        raise BadArgumentError(f"`--conf-file {config}`: it is not YAML ({' '.join(str(error).split())})") from error


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, AttributeError | TypeError):
        return "each entry has to be a mapping of names to values; look for a missing indentation"
    return str(error) if type(error) is ValueError else f"it cannot be read ({type(error).__name__}: {error})"


def check_entry(experiment: ExperimentManager, entry: Kwargs) -> None:
    """
    :param experiment: Experiment that has read its hyperparameters
    :param entry: These hyperparameters
    :raises ValueError: if a key is missing or not known, or a value is not valid
    """
    _check_names(experiment, entry)
    check_number("n_timesteps", entry["n_timesteps"], 1)
    check_number("n_envs", entry.get("n_envs", 1), 1, integer=True)
    if entry.get("frame_stack") is not None:
        check_number("frame_stack", entry["frame_stack"], 1, integer=True)
    for key in OF_ZOO_SCHEDULES:
        if isinstance(entry.get(key), str):
            make_schedule(key, entry[key])
    _check_dictionaries(entry)
    policy = entry["policy"]
    check_type("policy", policy, (str, type), "give the name of a policy, such as MlpPolicy, or its class")
    class_of("policy", policy)
    for key in ("env_wrapper", "vec_env_wrapper", "callback"):
        if entry.get(key) is not None:
            _check_classes(key, entry[key])


def check_readable(entry: Mapping[str, object]) -> None:
    """
    :param entry: Hyperparameters of a run, which RL Zoo saves in its folder
    :raises ValueError: if a value could not be read again, so that nothing could enjoy, resume or share the run
    """
    import yaml

    for key, value in entry.items():
        try:
            yaml.unsafe_load(yaml.dump(value))
        except Exception as error:
            remedy = (
                "RL Zoo cannot read it again from the folder of the run; give a function or class of a module that can be "
            )
            example = ", or for a schedule a string such as 'lin_0.001'" if key in OF_ZOO_SCHEDULES else ""
            raise BadArgumentError(f"`{key}={value!r}` is not valid: {remedy}imported{example}") from error


def _check_names(experiment: ExperimentManager, entry: Mapping[str, object]) -> None:
    """Check that all keys are known, and that none is missing."""
    algorithm = sys.modules["rl_zoo3.utils"].ALGOS[experiment.algo]
    if issubclass(algorithm, PPOExt):
        if given := sorted(OF_THE_COMMAND & entry.keys()):
            option = f"--{given[0].replace('_', '-')}"
            refuse(given[0], entry[given[0]], f"RL Zoo gives it to the model itself; give `{option}` on the command line")
        check_known_options(entry, option_names(algorithm) | OF_THE_ZOO, algorithm.__name__, place_of)
    for key, example in (("n_timesteps", "100000"), ("policy", "MlpPolicy")):
        if key not in entry:
            raise BadArgumentError(
                f"The entry of {experiment.env_name.gym_id} has no `{key}`: add it, such as `{key}: {example}`."
            )


def _check_dictionaries(entry: Mapping[str, object]) -> None:
    """Check what is a dictionary, or a string with the Python code of one."""
    normalize = _evaluated("normalize", entry.get("normalize", False))
    if isinstance(normalize, Mapping) or isinstance(entry.get("normalize"), str):
        check_kwargs("normalize", normalize, VecNormalize, ("venv",))
    else:
        check_type("normalize", normalize, (bool, type(None)), "give true, false, or keyword arguments of `VecNormalize`")
    monitor_kwargs = _evaluated("monitor_kwargs", entry.get("monitor_kwargs"))
    if monitor_kwargs is not None:
        check_kwargs("monitor_kwargs", monitor_kwargs, Monitor, ("env", "filename"))
    for key in ("policy_kwargs", "env_kwargs"):
        if (value := _evaluated(key, entry.get(key)) if key == "policy_kwargs" else entry.get(key)) is not None:
            check_type(key, value, Mapping, "give a dictionary")


def _evaluated(key: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return eval(value, dict(vars(sys.modules["rl_zoo3.exp_manager"])))
    except Exception as error:
        remedy = f"it is no Python code that the Zoo can evaluate ({type(error).__name__}: {error})"
        raise BadArgumentError(f"`{key}={value!r}` is not valid: {remedy}; give a dictionary, such as dict(...)") from error


def _check_classes(key: str, value: object) -> None:
    """
    Check the names of classes, each of which may be the only key of a dictionary, whose value has the keyword arguments. Files
    in Python may have the classes of wrappers themselves, and callbacks that are made already.
    """
    of_python: type = BaseCallback if key == "callback" else type
    for each in value if isinstance(value, list) else [value]:
        name: Any = each
        kwargs: Kwargs = {}
        check_type(key, each, (str, Mapping, of_python), "give the full name of a class, or a list of such names")
        if isinstance(each, Mapping):
            if len(each) != 1 or not isinstance(next(iter(each.values())), Mapping):
                refuse(key, each, "give one class with its keyword arguments; in YAML, these are indented by four more spaces")
            name, kwargs = next(iter(each.items()))
            check_type(key, name, (str, of_python), "give the full name of a class")
        if isinstance(name, BaseCallback):
            continue
        made = _import(key, name) if isinstance(name, str) else name
        if isinstance(made, type):
            check_kwargs(f"{key}: {name}", kwargs, made, ("env", "venv"))
        _check_required(key, name, made, kwargs)


def _check_required(key: str, name: object, made: Callable[..., object], kwargs: Kwargs) -> None:
    """Check that nothing but the environment is missing."""
    parameters = inspect.signature(made).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [each for each in required[key != "callback" :] if each not in kwargs]
    if missing:
        refuse(key, name, f"it needs `{missing[0]}`; give its keyword arguments, such as `{name}: {{{missing[0]}: ...}}`")


def class_of(key: str, value: object) -> object:
    """:return: The class that a full name such as ``"package.module.Class"`` names; any other value as it is"""
    return _import(key, value) if isinstance(value, str) and "." in value else value


def _import(key: str, name: str) -> Callable[..., object]:
    module, _, attribute = name.rpartition(".")
    try:
        made: Callable[..., object] = getattr(importlib.import_module(module), attribute)
        if not callable(made):
            raise TypeError(f"{name} is a {type(made).__name__}")
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        remedy = f"it cannot be imported ({error}); give the full name of a class, such as package.module.Class"
        raise BadArgumentError(f"`{key}={name!r}` is not valid: {remedy}") from error
    return made

"""Registration of ``ppo_ext`` as an algorithm of RL Zoo: the extensions of the Zoo's modules."""

import builtins
import functools
import importlib
import importlib.util
import keyword
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.envs.rnd_reward import without_rewards_of_rnd
from sb3_ppo_ext.ppo_ext import PPOExt
from sb3_ppo_ext.zoo.entry_checks import CommandError
from sb3_ppo_ext.zoo.envpool_option import take_envpool_option
from sb3_ppo_ext.zoo.experiment import METHODS
from sb3_ppo_ext.zoo.resuming import NAMES
from sb3_ppo_ext.zoo.tuning import convert_ppo_ext_params, sample_ppo_ext_params

if TYPE_CHECKING:
    from rl_zoo3.exp_manager import ExperimentManager

# Words of YAML in Python
OF_YAML = {"true": "True", "false": "False", "null": "None"}


def register() -> None:
    """
    Make ``ppo_ext`` an algorithm of RL Zoo in this process. Calling it again changes nothing.

    :raises ImportError: if RL Zoo is not installed
    """
    if importlib.util.find_spec("rl_zoo3") is None:
        raise ImportError("RL Zoo is not installed: `pip install 'sb3-ppo-ext[zoo]'`")
    for name in EXTENSIONS:
        extend(importlib.import_module(name))


def extend(module: ModuleType) -> None:
    """
    :param module: One of the Zoo's modules named in ``EXTENSIONS``, to which ``ppo_ext`` is added
    """
    EXTENSIONS[module.__name__](module)


def _add_algorithm(utils: Any) -> None:
    # It registers the environments of gymnax, without importing JAX. All scripts import this module of the Zoo.
    importlib.import_module("sb3_ppo_ext.envs.tensors.gymnax_ids")
    if set(NAMES) & set(sys.argv):
        take_envpool_option()
    for name in NAMES:
        utils.ALGOS.setdefault(name, PPOExt)
    if not hasattr(utils.create_test_env, "for_ppo_ext"):
        utils.create_test_env = _without_rewards_of_rnd(utils.create_test_env)
    _explain_values(utils.StoreDict)


def _add_tuning(hyperparams_opt: ModuleType) -> None:
    for name in NAMES:
        hyperparams_opt.HYPERPARAMS_SAMPLER.setdefault(name, sample_ppo_ext_params)
        # `--trial-id` needs the converter.
        hyperparams_opt.HYPERPARAMS_CONVERTER.setdefault(name, convert_ppo_ext_params)


def _add_experiment(exp_manager: ModuleType) -> None:
    """Replace methods. The class stays the same object: scripts of the Zoo and subclasses refer to it, and it is pickled."""
    for name, ours in METHODS.items():
        theirs = getattr(exp_manager.ExperimentManager, name)
        if not hasattr(theirs, "for_ppo_ext"):
            setattr(exp_manager.ExperimentManager, name, _for_ppo_ext(ours, theirs))


def _explain_values(store_dict: Any) -> None:
    """
    Let a word in ``-params`` and the like need no quotes in a command of ``ppo_ext``, and let another value that is no Python
    code end it with one line.
    """
    theirs = store_dict.__call__
    if hasattr(theirs, "for_ppo_ext"):
        return

    @functools.wraps(theirs)
    def call(
        self: Any, parser: ArgumentParser, namespace: Namespace, values: list[str], option_string: str | None = None
    ) -> None:
        if not set(NAMES) & set(sys.argv):
            return theirs(self, parser, namespace, values, option_string)
        values = [_with_quotes(value, vars(sys.modules["rl_zoo3.utils"])) for value in values]
        try:
            theirs(self, parser, namespace, values, option_string)
        except (NameError, SyntaxError) as error:
            part = str(getattr(error, "name", None) or getattr(error, "text", None) or "")
            name, _, code = next((value for value in values if part in value), values[0]).partition(":")
            quoted = f"""a string needs quotes that the shell passes on: {option_string} "{name}:'{code}'\""""
            raise CommandError(f"`{name}:{code}` is no Python code ({error}); {quoted}") from error

    call.for_ppo_ext = True  # type: ignore[attr-defined]  # replaced only once
    store_dict.__call__ = call


def _with_quotes(value: str, known: dict[str, object]) -> str:
    """``name:code``, where a word that Python does not know, such as ``auto`` or ``lin_0.001``, becomes a string."""
    name, colon, code = value.partition(":")
    if not re.fullmatch(r"[A-Za-z][\w.]*|(lin|hold)_[\d.]+e[+-]?\d+", code) or keyword.iskeyword(code):
        return value
    first = code.partition(".")[0]
    if first in known or isinstance(getattr(builtins, first, None), type):  # `max` and `compile` are words.
        return value
    return f"{name}{colon}{OF_YAML.get(code, repr(code))}"


EXTENSIONS = {
    "rl_zoo3.utils": _add_algorithm,
    "rl_zoo3.hyperparams_opt": _add_tuning,
    "rl_zoo3.exp_manager": _add_experiment,
}


def _without_rewards_of_rnd(create_test_env: Callable[..., VecEnv]) -> Callable[..., VecEnv]:
    """The same function, whose environments have no intrinsic rewards."""

    @functools.wraps(create_test_env)
    def create(*args: object, **kwargs: object) -> VecEnv:
        return without_rewards_of_rnd(create_test_env(*args, **kwargs))

    create.for_ppo_ext = True  # type: ignore[attr-defined]  # replaced only once
    return create


def _for_ppo_ext(ours: Callable[..., object], theirs: Callable[..., object]) -> Callable[..., object]:
    """A method that calls ours for ``ppo_ext``, with the Zoo's as its first argument, and the Zoo's for other algorithms."""

    @functools.wraps(theirs)
    def method(self: "ExperimentManager", *args: object, **kwargs: object) -> object:
        if self.algo in NAMES:
            return ours(functools.partial(theirs, self), self, *args, **kwargs)
        return theirs(self, *args, **kwargs)

    method.for_ppo_ext = True  # type: ignore[attr-defined]  # replaced only once
    return method

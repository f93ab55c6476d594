"""State of the training environments, and the check that a restored environment goes on as the saved one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_ppo_ext.checkpoints.generators import generators_kept
from sb3_ppo_ext.checkpoints.object_state import Key, ObjectState, copied_by_pickling, is_ez_pickle, stateful_objects

# Number of steps that are checked, over all environments
MAX_CHECKED = 1000
# Wrappers whose copies would write files or open windows
WITH_OUTPUT = ("RecordVideo", "VecVideoRecorder", "HumanRendering")


class Step(NamedTuple):
    """
    A step of all environments.

    :param actions: Actions as the environments got them
    :param outcome: Observations, rewards and ends of episodes
    """

    actions: np.ndarray
    outcome: tuple[Any, np.ndarray, np.ndarray]


def state_of(env: VecEnv) -> bytes:
    """
    :param env: Environments of a training
    :return: Their state, as far as it can be had
    """
    return ObjectState(stateful_objects(env)).read()


def essentials(target: Any, key: Key, attributes: dict[str, Any]) -> dict[str, Any]:
    """A selection of what lasts over a reset: generators, and the statistics of ``VecNormalize``."""
    if isinstance(target, VecNormalize):
        return attributes
    kept = {"_np_random", "_np_random_seed"} if isinstance(target, gym.Env | gym.vector.VectorEnv) else set()
    return {name: value for name, value in attributes.items() if name in kept}


def reason_not_to_restore(env: VecEnv, state: bytes, steps: list[Step]) -> str | None:
    """
    Restore the state in copies of the environments that have another past, and repeat the steps that followed it.

    :param env: Environments of a training
    :param state: Earlier state of them
    :param steps: Steps that followed
    :return: Reason why the environments do not go on from the state as they did, as part of a sentence; ``None`` if they do
    """
    if (output := _output_of(env)) is not None:
        return f"{output} would show or record the check"
    with generators_kept():
        try:
            other = _copied(env)
        except Exception as error:  # objects raise errors of any type
            return f"they cannot be copied ({type(error).__name__}: {error})"
        try:
            return _difference(other, state, steps)
        except Exception as error:
            return f"copies of them fail ({type(error).__name__}: {error})"
        finally:
            with contextlib.suppress(Exception):
                other.close()


def _output_of(env: VecEnv) -> str | None:
    for each in stateful_objects(env):
        if type(each).__name__ in WITH_OUTPUT:
            return type(each).__name__
        if getattr(each, "render_mode", None) == "human":
            return '`render_mode="human"`'
    return None


def _difference(env: VecEnv, state: bytes, steps: list[Step]) -> str | None:
    env.seed(2**31 - 1)
    env.reset()
    for step in reversed(steps[:3]):  # copied, since an environment may write into its actions
        env.step(step.actions.copy())
    ObjectState(stateful_objects(env)).write(state)
    for number, step in enumerate(steps):
        outcome = env.step(step.actions.copy())
        for index, name in enumerate(("observations", "rewards", "ends")):
            if not all(np.array_equal(*pair) for pair in _pairs(outcome[index], step.outcome[index])):
                return f"the {name} of copies of them are different after {number + 1} steps"
    return None


def _pairs(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(one, dict):
        yield from ((one[key], other[key]) for key in one)
    else:
        yield one, other


def _copied(env: VecEnv) -> VecEnv:
    """A copy of environments and wrappers that writes no files; environments of the type ``EzPickle`` are made anew."""
    targets = stateful_objects(env)
    state = ObjectState(targets)
    opaque = [{} if _is_made_anew(target) else _opaque(target, state) for target in targets]
    copies = [copy.deepcopy(target) if _is_made_anew(target) else object.__new__(type(target)) for target in targets]
    for copied, attributes in zip(copies, opaque, strict=True):
        vars(copied).update(attributes)
    ObjectState(copies).write(state.read())
    return copies[0]


def _is_made_anew(target: Any) -> bool:
    return isinstance(target, gym.Env) and not isinstance(target, gym.Wrapper) and is_ez_pickle(target)


def _opaque(target: Any, state: ObjectState) -> dict[str, Any]:
    """Copies of the attributes that are not part of the state."""
    transparent = state.transparent(target)
    # The description of the class that some wrappers of vectorized environments keep
    described = {"class_attributes"} & vars(target).keys()
    opaque = sorted(vars(target).keys() - transparent - described)
    return {name: getattr(target, name) for name in described} | {
        name: _copied_part(getattr(target, name), f"{type(target).__name__}.{name}") for name in opaque
    }


def _copied_part(value: Any, name: str) -> Any:
    if isinstance(value, ResultsWriter):
        return None  # it would write to the same file
    if isinstance(value, list | tuple):
        return type(value)(_copied_part(part, name) for part in value)
    if isinstance(value, dict):
        return {key: _copied_part(part, name) for key, part in value.items()}
    if callable(value):
        return value
    try:
        return copied_by_pickling(value)
    except Exception as error:
        raise ValueError(f"`{name}`") from error

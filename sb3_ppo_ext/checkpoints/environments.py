"""State of the training environments, and the check that a restored environment continues as the saved one."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.monitor import Monitor, ResultsWriter
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_ppo_ext.checkpoints.generators import generator_states, generators_kept, set_generator_states
from sb3_ppo_ext.checkpoints.object_state import (
    STATEFUL,
    Key,
    ObjectState,
    attributes_of,
    classes_of,
    is_ez_pickle,
    stateful_objects,
)
from sb3_ppo_ext.common.guards import find_normalizers
from sb3_ppo_ext.distributed.statistics import FixedMeanStd, fixed_statistics, set_statistics
from sb3_ppo_ext.envs.rnd_reward import RNDReward
from sb3_ppo_ext.envs.tensors.jax_vec_env import JaxVecEnv

# Number of steps that are checked, over all environments
MAX_CHECKED = 1000
# Wrappers whose copies would write files or open windows
WITH_OUTPUT = ("RecordVideo", "VecVideoRecorder", "HumanRendering")


# Attributes of environments and wrappers that last over a reset, by their type and the name of their type
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, th.Generator)
STATISTICS = "RunningMeanStd"


class Step(NamedTuple):
    """
    A step of all environments.

    :param actions: Actions as the environments got them
    :param outcome: Observations, rewards and ends of episodes
    :param generators: States of the global generators before the step; ``None`` if it does not use them
    :param statistics: In a distributed training, statistics of the normalisers after the step, which depend on other ranks
    """

    actions: np.ndarray
    outcome: tuple[object, np.ndarray, np.ndarray]
    generators: dict[str, object] | None = None
    statistics: list[FixedMeanStd] | None = None


class FirstSteps:
    """
    The steps with which the environments of a training are checked.

    :param model: Model in training
    """

    def __init__(self, model: Any):
        self.model, self.env = model, model.env
        self.state: bytes | None = None
        self.steps: list[Step] = []
        self.num_timesteps = model.num_timesteps
        self.has_gap = False
        self.read_generators()

    @property
    def is_full(self) -> bool:
        """Whether there are enough steps."""
        return len(self.steps) * self.env.num_envs >= MAX_CHECKED

    def read_generators(self) -> None:
        """Called right before a step: the policy and updates use the global generators, too."""
        if not self.is_full:
            self.generators = generator_states()

    def add(self, local_variables: dict[str, Any]) -> None:
        """
        :param local_variables: Those of the rollout after a step
        """
        if self.is_full:
            return
        self.has_gap |= self.model.num_timesteps != self.num_timesteps + self.env.num_envs * self.model.ranks.size
        self.num_timesteps = self.model.num_timesteps
        if self.state is None:  # after the first step, so that it is in the middle of an episode
            self.state = state_of(self.env, self.model)
        else:
            outcome = tuple(local_variables[name] for name in ("new_obs", "rewards", "dones"))
            # Not `clipped_actions`, which an environment may have changed in place
            actions = self.model._actions_for_env(self.model._within_bounds(local_variables["samples"]))
            self.steps.append(copy.deepcopy(Step(actions, outcome, self.generators)))
            if self.model.ranks.are_several:
                statistics = fixed_statistics(find_normalizers(self.env))
                self.steps[-1] = self.steps[-1]._replace(statistics=statistics)
        self.read_generators()  # A user's own `collect_rollouts` does not do so before the step.

    @property
    def can_be_checked(self) -> bool:
        """Whether a step followed the state."""
        return bool(self.steps) or self.has_gap

    def reason_not_to_restore(self) -> str | None:
        """
        :return: Reason why the environments cannot continue from a saved state, as part of a sentence; ``None`` if they can
        """
        if type(self.env) is JaxVecEnv:  # Pure functions; a whole rollout may be complete before its first step is seen here.
            pickled = _object_state(stateful_objects(self.env), self.model).transparent(self.env)
            return None if "_state" in pickled else "`JaxVecEnv._state` cannot be pickled"
        if self.has_gap:
            return "they cannot be checked by a `TrainingCheckpoint` that is not called at each step"
        assert self.state is not None
        return reason_not_to_restore(self.env, self.state, self.steps, self.model)


def state_of(env: VecEnv, model: object = None) -> bytes:
    """
    :param env: Environments of a training run
    :param model: Model of the training, to which they may refer
    :return: Their state, as far as it can be had
    """
    return _object_state(stateful_objects(env), model).read()


def _object_state(targets: list[Any], model: Any) -> ObjectState:
    return ObjectState(targets, classes_of(targets), model=model)


def essentials(target: object, key: Key, attributes: dict[str, object]) -> dict[str, object]:
    """A selection of what lasts over a reset: generators, and running statistics such as those of ``VecNormalize``."""
    if isinstance(target, VecNormalize | RNDReward):
        # What they wrap may be something else than before.
        return {name: value for name, value in attributes.items() if name not in ("venv", "class_attributes")}
    kinds = {name: type(value) for name, value in attributes.items() if isinstance(target, STATEFUL)}
    lasting = {name for name, kind in kinds.items() if issubclass(kind, GENERATORS) or kind.__name__ == STATISTICS}
    return {name: attributes[name] for name in lasting | ({"_np_random_seed"} & attributes.keys())}


def reason_not_to_restore(env: VecEnv, state: bytes, steps: list[Step], model: Any = None) -> str | None:
    """
    Restore the state in copies of the environments that have another past, and repeat the steps that followed it.

    :param env: Environments of a training run
    :param state: Earlier state of them
    :param steps: Steps that followed
    :param model: Model of the training, to which they may refer
    :return: Reason why the environments do not continue from the state as they did, as part of a sentence; ``None`` if they do
    """
    if (output := _output_of(env)) is not None:
        return f"{output} would show or record the check"
    for each in stateful_objects(env):
        if vars(each).get("processes"):  # not that of what a wrapper wraps
            return f"`{type(each).__name__}.processes` cannot be copied"
    with generators_kept(), _classes_kept(classes_of(stateful_objects(env))):
        try:
            other = _copied(env, model)
        except Exception as error:  # objects raise errors of any type
            return f"they cannot be copied ({type(error).__name__}: {error})"
        try:
            return _difference(other, state, steps, model)
        except Exception as error:
            return f"copies of them fail ({type(error).__name__}: {error})"
        finally:
            with contextlib.suppress(Exception):
                other.close()


@contextlib.contextmanager
def _classes_kept(classes: list[type]) -> Iterator[None]:
    """Give classes the attributes that they had before: copies of environments share them with the originals."""
    before = [(cls, attributes_of(cls)) for cls in classes]
    try:
        yield
    finally:
        for cls, attributes in before:
            for name, value in attributes.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)


def _output_of(env: VecEnv) -> str | None:
    for each in stateful_objects(env):
        if type(each).__name__ in WITH_OUTPUT:
            return type(each).__name__
        if getattr(each, "render_mode", None) == "human":
            return '`render_mode="human"`'
    return None


def _difference(env: VecEnv, state: bytes, steps: list[Step], model: object) -> str | None:
    for each in stateful_objects(env):
        if isinstance(each, Monitor):
            each.allow_early_resets = True
    env.seed(2**31 - 1)
    env.reset()
    for step in reversed(steps[:3]):  # copied, since an environment may write into its actions
        # Where invalid actions are masked, environments may refuse those of other states.
        with contextlib.suppress(Exception):
            env.step(step.actions.copy())
    _object_state(stateful_objects(env), model).write(state)
    for number, step in enumerate(steps):
        if step.generators is not None:
            set_generator_states(step.generators)
        if step.statistics is not None:
            set_statistics(find_normalizers(env), step.statistics)
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


def _copied(env: VecEnv, model: Any) -> VecEnv:
    """A copy of environments and wrappers that writes no files; environments of the type ``EzPickle`` are made anew."""
    targets = stateful_objects(env)
    originals = _object_state(targets, model)
    targets_copied = [copy.deepcopy(each) if _is_made_anew(each) else object.__new__(type(each)) for each in targets]
    copies = _object_state(targets_copied, model)
    for target, copied in zip(targets, targets_copied, strict=True):
        if not _is_made_anew(target):
            vars(copied).update(_opaque_copied(target, originals, copies))
    copies.write(originals.read())
    return targets_copied[0]


def _is_made_anew(target: object) -> bool:
    return isinstance(target, gym.Env) and not isinstance(target, gym.Wrapper) and is_ez_pickle(target)


def _opaque_copied(target: object, originals: ObjectState, copies: ObjectState) -> dict[str, Any]:
    """Copies of the attributes that are not part of the state."""
    transparent = originals.transparent(target)
    # The description of the class that some wrappers of vectorized environments keep, and what a class names
    shared = ({"class_attributes"} | getattr(type(target), "shared_by_copies", set())) & vars(target).keys()
    opaque = {name: _without_writers(getattr(target, name)) for name in sorted(vars(target).keys() - transparent - shared)}
    try:
        copied: Any = originals.copied(opaque, copies)
        return {name: getattr(target, name) for name in shared} | copied
    except Exception:
        for name, value in opaque.items():
            try:
                originals.copied(value, copies)
            except Exception as error:
                raise ValueError(f"`{type(target).__name__}.{name}`") from error
        raise


def _without_writers(value: Any) -> Any:
    """Instead of an object that would write to the same file, ``None``."""
    if isinstance(value, ResultsWriter):
        return None
    if type(value) in (list, tuple):
        return type(value)(map(_without_writers, value))
    return {key: _without_writers(part) for key, part in value.items()} if isinstance(value, dict) else value

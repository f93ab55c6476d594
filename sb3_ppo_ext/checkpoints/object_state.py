"""
State of the objects that a script creates anew before its training continues: environments, their wrappers, and callbacks.

These objects are not pickled themselves: many environments pickle only the arguments of their constructor (``EzPickle``), and
others hold files or windows. Their attributes are, and are set on the objects that the script has created.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import cloudpickle
import gymnasium as gym
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.checkpoints.simulators import Simulator, simulator_of
from sb3_ppo_ext.common.user_code import is_known_module

# Number of a group of objects, class of an object, and its number among the objects of this class in the group
Key: TypeAlias = tuple[int, str, int]
Attributes: TypeAlias = dict[Key, dict[str, object]]
# Selects the attributes to save from an object, its key and its attributes
Selection: TypeAlias = Callable[[object, Key, dict[str, object]], dict[str, object]]

# Objects whose attributes are saved one by one
STATEFUL = (gym.Env, gym.vector.VectorEnv, VecEnv, BaseCallback)
# Attributes of callbacks that the training sets
OF_TRAINING = {"model", "locals", "globals", "parent"}


def stateful_objects(*roots: object) -> list[Any]:
    """
    :param roots: Environments or callbacks
    :return: These and all environments, wrappers and callbacks that they hold, each once, in an order that depends only
        on the structure
    """
    found: dict[int, object] = {}

    def visit(value: object) -> None:
        if isinstance(value, STATEFUL) and id(value) not in found:
            found[id(value)] = value
            for attribute in attributes_of(value).values():
                for part in _parts(attribute):
                    visit(part)

    for root in roots:
        visit(root)
    return list(found.values())


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, Mapping) else (value,)


def classes_of(targets: list[object]) -> list[type]:
    """
    :param targets: Objects, as :func:`stateful_objects` returns them
    :return: Their classes and parents that users have written, each once. Objects may share state in their attributes
    """
    classes = {cls: None for target in targets for cls in type(target).__mro__}
    # Classes of the others have no attributes that a training run changes.
    return [cls for cls in classes if not is_known_module(cls.__module__) and cls.__module__.split(".")[0] != "gymnasium"]


def attributes_of(target: object) -> dict[str, object]:
    """
    :param target: Environment, wrapper, callback, or a class
    :return: Attributes that belong to it, not to the training; those of a class that hold data
    """
    if isinstance(target, type):
        return {name: value for name, value in vars(target).items() if name[:2] != "__" and not _is_code(value)}
    if not isinstance(target, BaseCallback):
        return vars(target)
    left_out = OF_TRAINING | getattr(type(target), "not_saved", set())
    return {name: value for name, value in vars(target).items() if name not in left_out}


def _is_code(value: object) -> bool:
    return callable(value) or hasattr(value, "__get__")


def all_attributes(target: object, key: Key, attributes: dict[str, object]) -> dict[str, object]:
    """A :data:`Selection` of everything."""
    return attributes


class ObjectState:
    """
    Reads and writes the state of some objects. What they share stays shared.

    :param groups: Objects, as :func:`stateful_objects` returns them, and classes. The objects of one group are found again
        whatever the others are
    :param model: Model of the training, which is not part of the state; ``None`` if the objects do not refer to it
    """

    def __init__(self, *groups: list[Any], model: OnPolicyAlgorithm | None = None):
        self.targets: dict[Key, object] = {}
        numbers: Counter[tuple[int, str]] = Counter()
        for number, target in ((number, target) for number, group in enumerate(groups) for target in group):
            cls = target if isinstance(target, type) else type(target)
            name = f"{cls.__module__}.{cls.__qualname__}"
            self.targets[number, name, numbers[number, name]] = target
            numbers[number, name] += 1
        self.named: dict[object, object] = {
            ("object", key): target for key, target in self.targets.items() if not isinstance(target, type)
        }
        if model is not None:
            self.named |= {("model", name): part for name, part in _parts_of_model(model)}

    def read(self, select: Selection = all_attributes) -> bytes:
        """
        :param select: Attributes to read
        :return: State of the objects; attributes that cannot be pickled, such as open files, are left out
        """
        attributes = {key: select(target, key, attributes_of(target)) for key, target in self.targets.items()}
        simulators = _simulators(attributes)
        names = {id(value): name for name, value in self.named.items()}
        names |= {id(attributes[key][name]): ("own", (key, name)) for key, name in simulators}
        try:
            pickled = _pickled(attributes, names)
        except Exception:  # objects raise errors of any type
            pickled = _pickled(_without_opaque(attributes, names), names)
        contents = {place: simulator.read() for place, simulator in simulators.items()}
        return pickle.dumps((contents, pickled), protocol=5)

    def write(self, state: bytes, select: Selection = all_attributes) -> None:
        """
        :param state: State of objects. What belongs to objects that do not exist is left out
        :param select: Attributes to write
        :raises ValueError: if the state cannot be set
        """
        contents, pickled = pickle.loads(state)
        for key, saved in _unpickled(pickled, self._find).items():
            if key in self.targets:
                _set_attributes(self.targets[key], select(self.targets[key], key, saved))
        for (key, name), content in contents.items():
            if key in self.targets and (simulator := _selected_simulator(select, self.targets[key], key, name)) is not None:
                simulator.write(content)

    def transparent(self, target: object) -> set[str]:
        """
        :param target: One of the objects
        :return: Names of its attributes that can be pickled, without simulators
        """
        names = {id(value): name for name, value in self.named.items()}
        attributes = {name: value for name, value in attributes_of(target).items() if simulator_of(value) is None}
        return set(_each_pickled(attributes, names)[1])

    def check(self, saved: Iterable[Key]) -> None:
        """
        :param saved: Keys of the objects at a checkpoint
        :raises ValueError: if they are those of other objects
        """
        if set(saved) != self.targets.keys():
            raise ValueError(f"they are {_listed(self.targets)} now, and were {_listed(saved)} at the checkpoint")

    def copied(self, value: object, copies: ObjectState) -> object:
        """
        :param value: A value. Functions are copied with the variables that they have enclosed
        :param copies: Copies of the objects
        :return: Copy of the value, which shares no connection or state with it, and refers to the copies of the objects
        :raises Exception: if it cannot be copied
        """
        return _unpickled(_pickled(value, {id(each): name for name, each in self.named.items()}, _Copier), copies._find)

    def _find(self, name: Any) -> object:
        if name[0] != "own":
            return self.named.get(name)
        key, attribute = name[1]
        return getattr(self.targets.get(key), attribute, None)


def _parts_of_model(model: OnPolicyAlgorithm) -> Iterator[tuple[str, object]]:
    """Parts that other objects may refer to, and that are never replaced by what is unpickled."""
    yield "", model
    for name in ("rollout_buffer", "logger", "ep_info_buffer", "ep_success_buffer"):
        yield name, getattr(model, name)
    yield "policy.optimizer", model.policy.optimizer
    yield from ((f"policy.{name}", part) for name, part in model.policy.named_parameters())
    yield from ((f"policy.{name}", part) for name, part in model.policy.named_modules())


def _set_attributes(target: object, attributes: dict[str, object]) -> None:
    if isinstance(target, type):
        for name, value in attributes.items():
            setattr(target, name, value)
    else:
        vars(target).update(attributes)  # objects may define `__setattr__`


def _listed(keys: Iterable[Key]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for _, name, _ in keys}))


def _selected_simulator(select: Selection, target: object, key: Key, name: str) -> Simulator | None:
    value = getattr(target, name)
    return simulator_of(value) if name in select(target, key, {name: value}) else None


def _simulators(attributes: Attributes) -> dict[tuple[Key, str], Simulator]:
    """Simulators among the attributes, by the key of the object and the name of the attribute."""
    found = {(key, name): simulator_of(value) for key, each in attributes.items() for name, value in each.items()}
    return {place: simulator for place, simulator in found.items() if simulator is not None}


def is_ez_pickle(value: object) -> bool:
    """
    :param value: An object
    :return: Whether it pickles the arguments of its constructor instead of its state, as ``EzPickle`` of Gym and Gymnasium
    """
    return any(cls.__name__ == "EzPickle" for cls in type(value).__mro__)


class _Named:
    """Pickles some objects by their names, and refuses those that would lose their state without an error."""

    names: dict[int, object]

    def persistent_id(self, obj: object) -> object:
        return self.names.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if is_ez_pickle(obj):
            raise pickle.PicklingError(f"{type(obj).__name__} would forget its state")
        if type(obj).__module__.split(".")[0] == "multiprocessing":
            raise pickle.PicklingError(f"a copy of {type(obj).__name__} would use, and close, the same connection")
        if isinstance(obj, io.TextIOWrapper):  # which cloudpickle would read to its end
            raise pickle.PicklingError("a copy of a file would use it, too")
        return NotImplemented


class _Pickler(_Named, pickle.Pickler):
    """For files: functions and classes that cannot be imported are refused, as they may be others tomorrow."""


class _Copier(_Named, cloudpickle.Pickler):
    """For copies in this process: functions with the variables that they have enclosed, too."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        return cloudpickle.Pickler.reducer_override(self, obj) if reduced is NotImplemented else reduced


class _Unpickler(pickle.Unpickler):
    find: Callable[[object], object]

    def persistent_load(self, name: object) -> object:
        return self.find(name)


def _pickled(value: object, names: dict[int, object], cls: Any = _Pickler) -> bytes:
    file = io.BytesIO()
    pickler = cls(file, protocol=5)
    pickler.names = names
    pickler.dump(value)
    return file.getvalue()


def _unpickled(pickled: bytes, find: Callable[[object], object]) -> Any:
    unpickler = _Unpickler(io.BytesIO(pickled))
    unpickler.find = find
    return unpickler.load()


def _without_opaque(attributes: Attributes, names: dict[int, object]) -> Attributes:
    """The attributes that can be pickled."""
    return {key: _each_pickled(each, names)[0] for key, each in attributes.items()}


def _each_pickled(attributes: dict[str, object], names: dict[int, object]) -> tuple[dict[str, object], dict[str, bytes]]:
    """Those attributes that can be pickled, and what each is pickled as."""
    pickled: dict[str, bytes] = {}
    for name, value in attributes.items():
        with contextlib.suppress(Exception):
            pickled[name] = _pickled(value, names)
    return {name: attributes[name] for name in pickled}, pickled


class Changes:
    """
    The attributes of callbacks and classes that change after the start of the training. The others are arguments and code of
    the script, which may be different when the training continues.

    :param state: All objects at the start of the training
    :param earlier: Changes of an earlier training with the same callbacks, which continue to count; ``None`` for none
    """

    def __init__(self, state: ObjectState, earlier: Changes | None = None):
        self.names = {id(value): name for name, value in state.named.items()}
        self.targets = {key: target for key, target in state.targets.items() if isinstance(target, BaseCallback | type)}
        known = {} if earlier is None else {id(target): earlier.before[key] for key, target in earlier.targets.items()}
        self.before: dict[Key, dict[str, bytes]] = {
            key: known[id(target)] if id(target) in known else _each_pickled(attributes_of(target), self.names)[1]
            for key, target in self.targets.items()
        }

    # A method, because a callback with a callable attribute counts as one that calls code of the user.
    def select(self, target: object, key: Key, attributes: dict[str, object]) -> dict[str, object]:
        """A :data:`Selection` of these attributes, and of all attributes of other objects."""
        if key not in self.before:
            return attributes
        transparent, now = _each_pickled(attributes, self.names)
        return {name: transparent[name] for name, pickled in now.items() if self.before[key].get(name) != pickled}

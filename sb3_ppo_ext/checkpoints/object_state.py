"""
State of the objects that a script creates anew before its training goes on: environments, their wrappers, and callbacks.

These objects are not pickled themselves: many environments pickle the arguments of their constructor alone (``EzPickle``), and
others hold files or windows. Their attributes are, and are set on the objects that the script has created.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import gymnasium as gym
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.checkpoints.simulators import Simulator, simulator_of

# Class of an object, and its number among the objects of this class
Key: TypeAlias = tuple[str, int]
Attributes: TypeAlias = dict[Key, dict[str, Any]]
# Selects the attributes to save from an object, its key and its attributes
Selection: TypeAlias = Callable[[Any, Key, dict[str, Any]], dict[str, Any]]

# Objects whose attributes are saved one by one
STATEFUL = (gym.Env, gym.vector.VectorEnv, VecEnv, BaseCallback)
# Attributes of callbacks that the training sets
OF_TRAINING = {"model", "locals", "globals", "parent"}
# Parts of the model that these objects may refer to
OF_MODEL = ("policy", "rollout_buffer", "logger")


def stateful_objects(*roots: Any) -> list[Any]:
    """
    :param roots: Environments or callbacks
    :return: These and all environments, wrappers and callbacks that they hold, each once, in an order that depends on the
        structure alone
    """
    found: dict[int, Any] = {}

    def visit(value: Any) -> None:
        if isinstance(value, STATEFUL) and id(value) not in found:
            found[id(value)] = value
            for attribute in attributes_of(value).values():
                for part in _parts(attribute):
                    visit(part)

    for root in roots:
        visit(root)
    return list(found.values())


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, Mapping) else (value,)


def attributes_of(target: Any) -> dict[str, Any]:
    """
    :param target: Environment, wrapper or callback
    :return: Attributes that belong to it, not to the training
    """
    if not isinstance(target, BaseCallback):
        return vars(target)
    left_out = OF_TRAINING | getattr(type(target), "not_saved", set())
    return {name: value for name, value in vars(target).items() if name not in left_out}


def all_attributes(target: Any, key: Key, attributes: dict[str, Any]) -> dict[str, Any]:
    """A :data:`Selection` of everything."""
    return attributes


class ObjectState:
    """
    Reads and writes the state of some objects.

    :param targets: Objects, as :func:`stateful_objects` returns them
    :param model: Model of the training, which is not part of the state; ``None`` if the objects do not refer to it
    """

    def __init__(self, targets: list[Any], model: Any = None):
        self.targets: dict[Key, Any] = {}
        numbers: Counter[str] = Counter()
        for target in targets:
            name = f"{type(target).__module__}.{type(target).__qualname__}"
            self.targets[name, numbers[name]] = target
            numbers[name] += 1
        self.named: dict[Any, Any] = {("object", key): target for key, target in self.targets.items()}
        if model is not None:
            self.named["model"] = model
            self.named |= {("model", name): getattr(model, name) for name in OF_MODEL if hasattr(model, name)}

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
        return pickle.dumps((list(self.targets), contents, pickled), protocol=5)

    def write(self, state: bytes) -> None:
        """
        :param state: State of objects. What belongs to objects that do not exist is left out
        :raises ValueError: if the state cannot be set
        """
        _, contents, pickled = pickle.loads(state)
        for (key, name), content in contents.items():
            if key in self.targets:
                simulator_of(getattr(self.targets[key], name)).write(content)  # type: ignore[union-attr]
        unpickler = _Unpickler(io.BytesIO(pickled))
        unpickler.find = self._find
        for key, saved in unpickler.load().items():
            if key in self.targets:
                vars(self.targets[key]).update(saved)

    def transparent(self, target: Any) -> set[str]:
        """
        :param target: One of the objects
        :return: Names of its attributes that can be pickled, without simulators
        """
        names = {id(value): name for name, value in self.named.items()}
        attributes = {name: value for name, value in attributes_of(target).items() if simulator_of(value) is None}
        return set(_each_pickled(attributes, names)[1])

    def check(self, state: bytes) -> None:
        """
        :param state: State of objects
        :raises ValueError: if it is that of other objects
        """
        saved = pickle.loads(state)[0]
        if set(saved) != self.targets.keys():
            raise ValueError(f"they are {_listed(self.targets)} now, and were {_listed(saved)} at the checkpoint")

    def _find(self, name: Any) -> Any:
        if name[0] != "own":
            return self.named.get(name)
        key, attribute = name[1]
        return getattr(self.targets.get(key), attribute, None)


def _listed(keys: Iterable[Key]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name, _ in keys}))


def _simulators(attributes: Attributes) -> dict[tuple[Key, str], Simulator]:
    """Simulators among the attributes, by the key of the object and the name of the attribute."""
    found = {(key, name): simulator_of(value) for key, each in attributes.items() for name, value in each.items()}
    return {place: simulator for place, simulator in found.items() if simulator is not None}


def is_ez_pickle(value: Any) -> bool:
    """
    :param value: Any object
    :return: Whether it pickles the arguments of its constructor instead of its state, as ``EzPickle`` of Gym and Gymnasium
    """
    return any(cls.__name__ == "EzPickle" for cls in type(value).__mro__)


class _Pickler(pickle.Pickler):
    names: dict[int, Any]

    def persistent_id(self, obj: Any) -> Any:
        return self.names.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if is_ez_pickle(obj):
            raise pickle.PicklingError(f"{type(obj).__name__} would forget its state")
        if type(obj).__module__.split(".")[0] == "multiprocessing":
            raise pickle.PicklingError(f"a copy of {type(obj).__name__} would use, and close, the same connection")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    find: Callable[[Any], Any]

    def persistent_load(self, name: Any) -> Any:
        return self.find(name)


def _pickled(value: Any, names: dict[int, Any]) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=5)
    pickler.names = names
    pickler.dump(value)
    return file.getvalue()


def copied_by_pickling(value: Any) -> Any:
    """
    :param value: Any object
    :return: A copy that shares no connection or state with it
    :raises Exception: if it cannot be pickled
    """
    return pickle.loads(_pickled(value, {}))


def _without_opaque(attributes: Attributes, names: dict[int, Any]) -> Attributes:
    """The attributes that can be pickled."""
    return {key: _each_pickled(each, names)[0] for key, each in attributes.items()}


def _each_pickled(attributes: dict[str, Any], names: dict[int, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Those attributes that can be pickled, and what each is pickled as."""
    pickled: dict[str, bytes] = {}
    for name, value in attributes.items():
        with contextlib.suppress(Exception):
            pickled[name] = _pickled(value, names)
    return {name: attributes[name] for name in pickled}, pickled


class Changes:
    """
    The attributes of callbacks that change after the start of the training. The others are arguments of the script, which may
    be different when the training goes on.

    :param state: Callbacks, and the environments that they hold, at the start of the training
    """

    def __init__(self, state: ObjectState):
        self.names = {id(value): name for name, value in state.named.items()}
        callbacks = {key: target for key, target in state.targets.items() if isinstance(target, BaseCallback)}
        self.before = {key: _each_pickled(attributes_of(target), self.names)[1] for key, target in callbacks.items()}

    # A method, because a callback with a callable attribute counts as one that calls code of the user.
    def select(self, target: Any, key: Key, attributes: dict[str, Any]) -> dict[str, Any]:
        """A :data:`Selection` of these attributes, and of all attributes of other objects."""
        if key not in self.before:
            return attributes
        transparent, now = _each_pickled(attributes, self.names)
        return {name: transparent[name] for name, pickled in now.items() if self.before[key].get(name) != pickled}

"""
Attributes of models as JSON, so that they can be read without unpickling, which would execute code of the file.

Numbers, strings, ``None`` and lists are themselves, everything else is a dictionary with one key, which names the kind.
Classes are named, and only those listed here are known.
"""

import base64
import importlib
import pathlib
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces

# Classes that may be named, by the module that makes them public
_CLASSES: dict[str, tuple[str, ...]] = {
    "sb3_ppo_ext": (
        "MlpPolicy",
        "CnnPolicy",
        "MultiInputPolicy",
        "MlpTransformerPolicy",
        "CnnTransformerPolicy",
        "MultiInputTransformerPolicy",
        "MlpLstmPolicy",
        "CnnLstmPolicy",
        "MultiInputLstmPolicy",
        "TransformerExtractor",
    ),
    "stable_baselines3.common.policies": ("ActorCriticPolicy", "ActorCriticCnnPolicy", "MultiInputActorCriticPolicy"),
    "stable_baselines3.common.torch_layers": ("FlattenExtractor", "NatureCNN", "CombinedExtractor"),
    "stable_baselines3.common.buffers": ("RolloutBuffer", "DictRolloutBuffer"),
    "stable_baselines3.common.sb2_compat.rmsprop_tf_like": ("RMSpropTFLike",),
    "torch.nn": (*th.nn.modules.activation.__all__, "Identity"),
    "torch.optim": tuple(name for name, value in vars(th.optim).items() if isinstance(value, type)),
}
# Classes of objects that are saved with their attributes, without calling their constructor
_SCHEDULES: dict[str, tuple[str, ...]] = {
    "sb3_ppo_ext": ("LinearToZero", "HoldThenLinearToZero", "DecaySchedule", "KLAdaptive"),
    "stable_baselines3.common.utils": ("FloatSchedule", "ConstantSchedule", "LinearSchedule"),
    "rl_zoo3.utils": ("SimpleLinearSchedule",),
}


class NotPlainError(ValueError):
    """
    A value has no plain form.

    :param culprit: Full name of the class or function that is not known
    """

    def __init__(self, culprit: str):
        super().__init__(f"{culprit} is not known")
        self.culprit = culprit


def python_numbers(value: Any) -> Any:
    """
    Replace NumPy's numbers by Python's, which JSON and PyTorch's reader of state dictionaries know, and the lists and
    dictionaries of OmegaConf (Hydra) by Python's.

    :param value: A value
    :return: The value with its numbers and containers replaced, also inside lists, tuples and dictionaries, which are then
        new; the same object if there are none
    """
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return float(value) if isinstance(value, np.floating) else value.item()
    if type(value).__module__.startswith("omegaconf.") and isinstance(value, Mapping | Sequence):
        return python_numbers(dict(value) if isinstance(value, Mapping) else list(value))
    if type(value) in (list, tuple):
        parts = type(value)(python_numbers(part) for part in value)
        return parts if any(new is not old for new, old in zip(parts, value, strict=True)) else value
    if type(value) is dict:
        items = {name: python_numbers(part) for name, part in value.items()}
        return items if any(items[name] is not part for name, part in value.items()) else value
    return value


def to_plain(value: Any) -> Any:
    """
    :param value: Attribute of a model
    :return: The value for ``json.dumps``
    :raises NotPlainError: if a part of the value is of a class that is not known
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_plain(part) for part in value]
    if isinstance(value, type):
        return {"class": _name(value, _CLASSES)}
    for name, kind in _KINDS.items():
        if type(value) in kind.types:
            return {name: kind.to_plain(value)}
    return {"schedule": [_name(type(value), _SCHEDULES, value), to_plain(dict(vars(value)))]}


def to_plain_or_culprit(value: object) -> object:
    """
    :param value: Attribute of a model
    :return: Result of :func:`to_plain`, or the name of the class that is not known, which :func:`from_plain` refuses
    """
    try:
        return to_plain(value)
    except NotPlainError as error:
        return {"unknown": error.culprit}


def from_plain(plain: Any) -> Any:
    """
    :param plain: Result of :func:`to_plain`
    :return: The value
    :raises NotPlainError: if it names a class that is not known
    :raises Exception: of any type, if it is not such a result; but nothing of it is executed
    """
    if isinstance(plain, list):
        return [from_plain(part) for part in plain]
    if not isinstance(plain, dict):
        return plain
    ((name, content),) = plain.items()
    if name == "unknown":
        raise NotPlainError(content)
    if name == "class":
        return _find(content, _CLASSES)
    if name == "schedule":
        schedule = object.__new__(_find(content[0], _SCHEDULES))
        vars(schedule).update(from_plain(content[1]))
        return schedule
    return _KINDS[name].from_plain(content)


def _name(known: type, public: dict[str, tuple[str, ...]], value: object = None) -> str:
    for module, names in public.items():
        if known.__name__ in names and getattr(sys.modules.get(module), known.__name__, None) is known:
            return f"{module}.{known.__name__}"
    named = value if hasattr(value, "__qualname__") else known  # a function has a name of its own
    raise NotPlainError(f"{named.__module__}.{named.__qualname__}")


def _find(name: str, public: dict[str, tuple[str, ...]]) -> Any:
    module, _, class_name = name.rpartition(".")
    if class_name not in public.get(module, ()):
        raise NotPlainError(name)
    return getattr(importlib.import_module(module), class_name)


class _Kind(NamedTuple):
    types: tuple[type, ...]
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


def _pairs(dictionary: Any) -> list[Any]:
    return [[to_plain(key), to_plain(value)] for key, value in dictionary.items()]


def _dictionary(pairs: Any) -> dict[Any, Any]:
    return {from_plain(key): from_plain(value) for key, value in pairs}


def _array_to_plain(array: np.ndarray) -> list[object]:
    if array.dtype.hasobject:
        raise NotPlainError("numpy.ndarray of objects")
    return [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _array(content: Any) -> np.ndarray:
    dtype, shape, encoded = content
    if np.dtype(dtype).hasobject:
        raise NotPlainError("numpy.ndarray of objects")
    return np.frombuffer(base64.b64decode(encoded), np.dtype(dtype)).reshape(shape).copy()


def _with_dtype(make: Any, *args: Any, dtype: str, **kwargs: Any) -> Any:
    """A discrete space; Gymnasium before 1.1 has no argument for the dtype of some."""
    return make(*args, **kwargs) if np.dtype(dtype) == np.int64 else make(*args, dtype=np.dtype(dtype).type, **kwargs)


def _bounds(*names: str) -> Callable[[Any], Any]:
    return lambda space: [*(_array_to_plain(getattr(space, name)) for name in names), space.dtype.str]


_KINDS = {
    "tuple": _Kind((tuple,), lambda value: to_plain(list(value)), lambda content: tuple(from_plain(content))),
    "dict": _Kind((dict,), _pairs, _dictionary),
    "OrderedDict": _Kind((OrderedDict,), _pairs, lambda content: OrderedDict(_dictionary(content))),
    "deque": _Kind(
        (deque,),
        lambda value: [to_plain(list(value)), value.maxlen],
        lambda content: deque(from_plain(content[0]), maxlen=content[1]),
    ),
    "array": _Kind((np.ndarray,), _array_to_plain, _array),
    "scalar": _Kind(
        tuple(set(np.sctypeDict.values())),
        lambda value: _array_to_plain(np.asarray(value)),
        lambda content: _array(content)[()],
    ),
    "device": _Kind((th.device,), str, th.device),
    "path": _Kind((pathlib.PosixPath, pathlib.WindowsPath), str, pathlib.Path),
    "Box": _Kind(
        (spaces.Box,),
        _bounds("low", "high"),
        lambda content: spaces.Box(_array(content[0]), _array(content[1]), dtype=np.dtype(content[2]).type),
    ),
    "Discrete": _Kind(
        (spaces.Discrete,),
        lambda space: [int(space.n), int(space.start), space.dtype.str],
        lambda content: _with_dtype(spaces.Discrete, content[0], start=content[1], dtype=content[2]),
    ),
    "MultiDiscrete": _Kind(
        (spaces.MultiDiscrete,),
        _bounds("nvec", "start"),
        lambda content: _with_dtype(spaces.MultiDiscrete, _array(content[0]), start=_array(content[1]), dtype=content[2]),
    ),
    "MultiBinary": _Kind(
        (spaces.MultiBinary,),
        lambda space: list(space.n) if isinstance(space.n, tuple) else space.n,
        lambda content: spaces.MultiBinary(content),
    ),
    "Tuple": _Kind(
        (spaces.Tuple,),
        lambda space: [to_plain(part) for part in space.spaces],
        lambda content: spaces.Tuple([from_plain(part) for part in content]),
    ),
    "Dict": _Kind(
        (spaces.Dict,), lambda space: _pairs(space.spaces), lambda content: spaces.Dict(OrderedDict(_dictionary(content)))
    ),
}

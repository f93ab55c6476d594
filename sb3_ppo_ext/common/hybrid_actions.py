"""
Hybrid actions: ``Dict`` and ``Tuple`` action spaces. Policies and rollout buffers have them as vectors, environments as
dictionaries and tuples; they are converted only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_ppo_ext.common.guards import check_actions
from sb3_ppo_ext.common.observations import dtype_of
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.validation import refuse


class FlatActionSpace(spaces.Box):
    """
    Vectors for the actions of a ``Dict`` or ``Tuple`` space, in float32: first the numbers of all ``Box`` parts, then those of
    all ``Discrete`` and ``MultiDiscrete`` parts, and last those of all ``MultiBinary`` parts, within each kind in the order of
    the space. Such vectors are what a policy samples and what a rollout buffer stores.

    :param structure: Action space of the environment, whose parts may be nested
    """

    def __init__(self, structure: spaces.Space):
        self.structure = structure
        self.parts = list(parts_of(structure))
        self._frame = _frame_of(structure)
        #: Number of columns of the ``Box`` parts, numbers of values of the categorical columns, number of binary columns
        self.n_continuous = sum(size_of(part) for part in self.parts if isinstance(part, spaces.Box))
        self.n_values = [n for part in self.parts for n in _values_of(part)]
        self.n_binary = sum(size_of(part) for part in self.parts if isinstance(part, spaces.MultiBinary))
        self.columns = self._columns()
        low, high = (np.zeros(self.n_continuous + len(self.n_values) + self.n_binary, np.float32) for _ in range(2))
        with np.errstate(over="ignore"):
            for part, columns in zip(self.parts, self.columns, strict=True):
                low[columns], high[columns] = _bounds_of(part)
        super().__init__(low, high, dtype=np.float32)
        self.kinds = self._kinds()

    def _columns(self) -> list[slice]:
        """Columns of each part."""
        ends = [0, self.n_continuous, self.n_continuous + len(self.n_values)]
        columns = []
        for part in self.parts:
            kind = 0 if isinstance(part, spaces.Box) else 2 if isinstance(part, spaces.MultiBinary) else 1
            columns.append(slice(ends[kind], ends[kind] + size_of(part)))
            ends[kind] = columns[-1].stop
        return columns

    def _kinds(self) -> list[tuple[spaces.Space, EllipsisType | tuple[EllipsisType, slice]]]:
        ends = self.n_continuous, self.n_continuous + len(self.n_values)
        kinds: list[tuple[spaces.Space, slice]] = []
        if self.n_continuous:
            kinds.append((spaces.Box(self.low[: ends[0]], self.high[: ends[0]]), slice(0, ends[0])))
        if self.n_values:
            kinds.append((spaces.MultiDiscrete(self.n_values), slice(*ends)))
        if self.n_binary:
            kinds.append((spaces.MultiBinary(self.n_binary), slice(ends[1], None)))
        return [(kind, (..., columns)) for kind, columns in kinds]

    def structured(self, vectors: np.ndarray) -> Arrays:
        """
        :param vectors: Vectors within the bounds, shape ``(n, n_columns)``, or a single one, shape ``(n_columns,)``
        :return: List of n actions as environments take them, with the shapes and dtypes of their spaces, or a single action
        :raises NonFinitePolicyError: if a number is not finite
        """
        check_actions(vectors)
        rows = np.atleast_2d(vectors)
        arrays = [_array_of(part, rows[:, columns]) for part, columns in zip(self.parts, self.columns, strict=True)]
        actions = [_assembled(self._frame, iter(each)) for each in zip(*arrays, strict=True)]
        return actions if vectors.ndim == 2 else actions[0]

    def batched(self, vectors: th.Tensor) -> Arrays:
        """
        :param vectors: Vectors within the bounds, shape ``(n, n_columns)``
        :return: Actions as environments that step in tensors take them: a dictionary or tuple of tensors, each of shape
            ``(n, *part_shape)``, float32 for float64
        """
        pairs = zip(self.parts, self.columns, strict=True)
        return _assembled(self._frame, (_tensor_of(part, vectors[:, columns]) for part, columns in pairs))

    def flattened(self, actions: Arrays) -> np.ndarray:
        """
        Inverse of :meth:`structured` and :meth:`batched`.

        :param actions: List of n actions, or a dictionary or tuple of arrays, each of shape ``(n, *part_shape)``
        :return: Vectors, shape ``(n, n_columns)``
        :raises ValueError: if they are not actions of the space; numbers of ``Box`` parts may be out of bounds
        """
        try:
            arrays = self._arrays_of(actions)
            vectors = np.empty((len(arrays[0]), *self.shape), np.float32)
            for array, columns in zip(arrays, self.columns, strict=True):
                vectors[:, columns] = array.reshape(len(vectors), columns.stop - columns.start)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            remedy = f"give a list of actions of {self.structure}, or the same with arrays of several as its parts"
            refuse("actions", actions, f"{remedy} ({type(error).__name__}: {error})")
        of_integers = slice(self.n_continuous, None)
        numbers, largest = vectors[:, of_integers], self.high[of_integers]
        # NaN fails the comparisons.
        if not ((numbers >= 0) & (numbers <= largest) & (numbers == np.round(numbers))).all():
            refuse("actions", actions, f"give actions of {self.structure}")
        return vectors

    def _arrays_of(self, actions: object) -> list[np.ndarray]:
        """One array for each part, shape ``(n, ...)``."""
        if not isinstance(actions, list):
            return [_on_host(part) for part in disassembled(self.structure, actions)]
        rows = [list(disassembled(self.structure, action)) for action in actions]
        return [np.stack([_on_host(number) for number in column]) for column in zip(*rows, strict=True)]

    def __repr__(self) -> str:
        return f"FlatActionSpace({self.structure})"

    def seed(self, seed: Any = None) -> Any:
        """
        :param seed: Seed of this space and of the one of the environment
        :return: Seeds of the space of the environment
        """
        super().seed(seed if isinstance(seed, int) else None)
        return self.structure.seed(seed)


def is_hybrid(space: spaces.Space | None) -> bool:
    """
    :param space: Action space, or the vectors for one
    :return: Whether it is a ``Dict`` or a ``Tuple``
    """
    return isinstance(space, spaces.Dict | spaces.Tuple | FlatActionSpace)


def sample_space(space: spaces.Space) -> spaces.Space:
    """
    :param space: Action space of an environment
    :return: Space of what a policy samples: the vectors of a ``Dict`` or ``Tuple``; other spaces are returned unchanged
    """
    return FlatActionSpace(space) if is_hybrid(space) and not isinstance(space, FlatActionSpace) else space


def parts_of(space: spaces.Space | None) -> Iterator[Any]:
    """
    :param space: Action space
    :return: Parts of a ``Dict`` or ``Tuple`` that are neither; any other space itself
    """
    if isinstance(space, FlatActionSpace):
        space = space.structure
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            yield from parts_of(part)
    elif space is not None:
        yield space


def boxes_of(space: spaces.Space | None) -> list[spaces.Box]:
    """
    :param space: Action space
    :return: Its parts that are a ``Box``; the space itself if it is one
    """
    return [part for part in parts_of(space) if isinstance(part, spaces.Box)]


def kinds_of(space: spaces.Space) -> list[tuple[spaces.Space, EllipsisType | tuple[EllipsisType, slice]]]:
    """
    :param space: Space of what a policy samples
    :return: For vectors of hybrid actions up to three spaces, a ``Box``, a ``MultiDiscrete`` and a ``MultiBinary``, each with
        the index of its columns; for any other space itself, with the index of everything
    """
    return space.kinds if isinstance(space, FlatActionSpace) else [(space, ...)]


def size_of(part: spaces.Space) -> int:
    """
    :param part: ``Box``, ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``
    :return: Number of columns of its actions in a vector
    """
    return int(np.prod(part.shape or ()))


def _frame_of(space: spaces.Space) -> object:
    """
    Keys of a ``Dict``, or ``None`` for a ``Tuple``, and the frames of its parts; ``None`` for a part. At each step, this is
    faster to read than the space.
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return None
    keys = tuple(space.spaces) if isinstance(space, spaces.Dict) else None
    return keys, [_frame_of(part) for part in (space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces)]


def _assembled(frame: Any, values: Iterator[Any]) -> Any:
    """Values in dictionaries and tuples, in the order of :func:`parts_of`."""
    keys, frames = frame
    parts = [next(values) if each is None else _assembled(each, values) for each in frames]
    return tuple(parts) if keys is None else dict(zip(keys, parts, strict=True))


def disassembled(space: spaces.Space, action: Arrays) -> Iterator[Any]:
    """
    :param space: Action space
    :param action: Values in dictionaries and tuples, as the space says
    :return: Values of the parts of the space
    :raises ValueError: if dictionaries or tuples have other keys or lengths
    """
    if isinstance(space, spaces.Dict):
        if set(action) != set(space.spaces):
            raise ValueError(f"the keys are not {list(space.spaces)}")
        for key, part in space.spaces.items():
            yield from disassembled(part, action[key])
    elif isinstance(space, spaces.Tuple):
        for part, value in zip(space.spaces, action, strict=True):
            yield from disassembled(part, value)
    else:
        yield action


def map_parts(function: Callable[[Any], Any], action: Arrays) -> Any:
    """
    :param function: Function of one part
    :param action: Values in dictionaries and tuples
    :return: What the function returns for each value, in the same dictionaries and tuples
    """
    if isinstance(action, dict):
        return {key: map_parts(function, value) for key, value in action.items()}
    if isinstance(action, tuple):
        return tuple([map_parts(function, value) for value in action])
    return function(action)


def structured(space: spaces.Space, actions: np.ndarray) -> Arrays:
    """
    :param space: Space of what a policy samples
    :param actions: Actions within the bounds, of one environment or of several
    :return: :meth:`FlatActionSpace.structured` of vectors; other actions are returned unchanged
    """
    return space.structured(actions) if isinstance(space, FlatActionSpace) else actions


def split_boxes(space: spaces.Space, values: Arrays) -> tuple[Arrays, Arrays]:
    """
    :param space: Space of what a policy samples
    :param values: Array or tensor of shape ``(..., *action_shape)``
    :return: Columns of the ``Box`` parts, and the other ones; ``None`` for these where there can be none
    """
    if not isinstance(space, FlatActionSpace):
        return values, None
    return values[..., : space.n_continuous], values[..., space.n_continuous :]


def joined(boxes: Any, others: Any) -> Arrays:
    """
    Inverse of :func:`split_boxes`.

    :param boxes: Columns of the ``Box`` parts
    :param others: The other ones, ``None`` for none
    :return: Both together
    """
    if others is None:
        return boxes
    if isinstance(boxes, th.Tensor):
        return th.cat([boxes, others], dim=-1)
    return np.concatenate([boxes, others], axis=-1)


def _values_of(part: object) -> list[int]:
    """Number of values of each categorical column. Python's integers, since NumPy's cannot be compiled."""
    if isinstance(part, spaces.Discrete):
        return [int(part.n)]
    return [int(n) for n in part.nvec] if isinstance(part, spaces.MultiDiscrete) else []


def _bounds_of(part: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(part, spaces.Box):
        return part.low.flatten(), part.high.flatten()
    return 0, 1 if isinstance(part, spaces.MultiBinary) else np.array(_values_of(part)) - 1


def _array_of(part: Any, columns: np.ndarray) -> np.ndarray:
    array = columns.reshape(len(columns), *part.shape).astype(part.dtype)
    # Rounding to another dtype can step over a bound.
    return np.clip(array, part.low, part.high) if isinstance(part, spaces.Box) else array


def _tensor_of(part: Any, columns: th.Tensor) -> th.Tensor:
    return columns.reshape(len(columns), *part.shape).to(dtype_of(part))


def _on_host(value: np.ndarray | th.Tensor) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, th.Tensor) else np.asarray(value)

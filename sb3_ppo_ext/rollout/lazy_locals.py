"""Local variables of a rollout for callbacks, with arrays that are copied from a device when a callback reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EventCallback

from sb3_ppo_ext.common.observations import map_observations


class Later:
    """
    A value that is made when it is read for the first time.

    :param make: Function that makes it
    """

    def __init__(self, make: Callable[[], Any]):
        self.make = make
        self.made: list[Any] = []

    def get(self) -> Any:
        """:return: The value"""
        if not self.made:
            self.made.append(self.make())
        return self.made[0]


class LaterArrays(Later):
    """
    NumPy arrays of tensors, made when they are read.

    :param source: Tensors of the training, a single one or a dictionary
    """

    def __init__(self, source: Any):
        super().__init__(lambda: map_observations(_as_array, source))
        self.source = source

    def tensors(self) -> Any:
        """:return: The tensors, or new ones if callbacks have read the arrays, and may have written into them"""
        return map_observations(_as_tensor, self.source, self.made[0]) if self.made else self.source


def copied_later(tensors: Any) -> Later:
    """
    :param tensors: Tensors in the memory of a rollout, which the next one overwrites, a single one or a dictionary
    :return: Copies of them, made when they are read
    """
    return Later(lambda: map_observations(th.clone, tensors))


class LazyLocals(dict[str, Any]):
    """A dictionary that makes values of type :class:`Later` when they are read."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return value.get() if isinstance(value, Later) else value

    def get(self, key: str, default: Any = None) -> Any:
        """
        :param key: Name of a variable
        :param default: Result if there is no such variable
        :return: Value of the variable
        """
        return self[key] if key in self else default  # noqa: SIM401 - it is this very method

    def __iter__(self) -> Iterator[str]:
        # Without a method of its own, `dict(self)` and `update` would copy the values as they are.
        return super().__iter__()

    def pop(self, key: str, *default: object) -> Any:
        """
        :param key: Name of a variable, which is removed
        :param default: Result if there is no such variable
        :return: Value of the variable
        """
        value = super().pop(key, *default)
        return value.get() if isinstance(value, Later) else value

    def values(self) -> Any:
        """:return: All values"""
        return [self[key] for key in self]

    def items(self) -> Any:
        """:return: All names and values"""
        return [(key, self[key]) for key in self]

    def copy(self) -> dict[str, Any]:
        """:return: Copy with the values of this moment"""
        return dict(self.items())

    def update(self, *args: Any, **kwargs: Any) -> None:
        """
        :param args: Dictionary of new values; those of another one of this class are not made yet
        :param kwargs: New values by name
        """
        for other in args:
            super().update(dict.items(other) if isinstance(other, LazyLocals) else other)
        if kwargs:
            super().update(kwargs)


def keep_lazily(callback: BaseCallback) -> None:
    """
    Let a callback, and those within it, keep local variables that are not made yet. With a plain dictionary, as a training
    loop of the user's gives to ``on_training_start``, each step would copy everything to the host.

    :param callback: Callback of the training
    """
    _keep_lazily(callback, {})


def _keep_lazily(callback: object, made: dict[int, tuple[LazyLocals, dict[str, object]]]) -> None:
    """The same, given what the dictionaries have become, since several callbacks may share one."""
    if not isinstance(callback, BaseCallback):
        return
    held = callback.locals
    if not isinstance(held, LazyLocals):
        callback.locals = made.setdefault(id(held), (LazyLocals(held), held))[0]
    inner = callback.callbacks if isinstance(callback, CallbackList) else []
    for part in [*inner, callback.callback] if isinstance(callback, EventCallback) else inner:
        _keep_lazily(part, made)


def _as_array(tensor: th.Tensor) -> np.ndarray:
    return np.array(tensor.detach().cpu().numpy())  # the next step overwrites the tensor


def _as_tensor(tensor: th.Tensor, array: np.ndarray) -> th.Tensor:
    return th.as_tensor(array).reshape(tensor.shape).to(tensor)

"""Simulators that keep the state of an environment outside Python, and whose objects cannot be replaced by pickled ones."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from typing import Any

import numpy as np


class Simulator(ABC):
    """
    Access to the state of an object of a simulator.

    :param target: The object
    """

    def __init__(self, target: Any):
        self.target = target

    def read(self) -> bytes:
        """:return: The whole state"""
        return pickle.dumps(self.target)

    @abstractmethod
    def write(self, state: bytes) -> None:
        """
        :param state: State to set, in place: other objects may refer to the same memory
        :raises ValueError: if it is that of another model
        """


class _MujocoData(Simulator):
    """``MjData``: positions, velocities, and everything derived from them. ``MjModel`` is part of the pickled data."""

    def write(self, state: bytes) -> None:
        import mujoco

        mujoco.mj_copyData(self.target, self.target.model, pickle.loads(state))


class _MujocoModel(Simulator):
    """``MjModel``, whose parameters an environment may randomise."""

    def write(self, state: bytes) -> None:
        if state == self.read():
            return
        source = pickle.loads(state)
        for mine, saved in ((self.target, source), (self.target.opt, source.opt)):
            _copy_values(mine, saved)
        if state != self.read():
            raise ValueError("the model of the simulator is another one")


def _copy_values(target: object, source: object) -> None:
    for name in dir(target):
        value = None if name.startswith("_") else getattr(target, name)
        if isinstance(value, np.ndarray) and value.flags.writeable:
            value[...] = getattr(source, name)
        elif isinstance(value, float):
            setattr(target, name, getattr(source, name))


class _Atari(Simulator):
    """``ALEInterface`` of the Arcade Learning Environment."""

    def read(self) -> bytes:
        return pickle.dumps(self.target.cloneState(include_rng=True))

    def write(self, state: bytes) -> None:
        self.target.restoreState(pickle.loads(state))


# By the package and the name of a class, so that none of these packages is imported
SIMULATORS: dict[tuple[str, str], type[Simulator]] = {
    ("mujoco", "MjData"): _MujocoData,
    ("mujoco", "MjModel"): _MujocoModel,
    ("ale_py", "ALEInterface"): _Atari,
}


def simulator_of(value: object) -> Simulator | None:
    """
    :param value: Attribute of an environment
    :return: Access to its state if it is an object of a simulator, else ``None``
    """
    kind = SIMULATORS.get((type(value).__module__.split(".")[0], type(value).__name__))
    return None if kind is None else kind(value)

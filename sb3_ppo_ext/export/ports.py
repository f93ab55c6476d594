"""Inputs and outputs of an exported actor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch as th
from gymnasium import spaces

Role = Literal["observation", "episode_start", "last_reward", "state", "normal_noise", "uniform_noise", "action"]
# Roles of random numbers, by the kind of :class:`~sb3_ppo_ext.distributions.head.Noise`
ROLES: dict[str, Role] = {"normal": "normal_noise", "uniform": "uniform_noise"}


@dataclass(frozen=True)
class Port:
    """
    An input or output of an exported actor.

    :param name: Name
    :param role: What it is: a part of the observation, of the state or of the action; whether an episode begins; the reward of
        the last step; random numbers from a normal distribution, or from a uniform one on (0, 1)
    :param shape: Shape without the dimension of the batch
    :param dtype: Name of NumPy's dtype
    :param batch_dim: Dimension of the batch
    :param bounds: Smallest and largest actions in a ``Box``, ``None`` for anything else
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str = "float32"
    batch_dim: int = 0
    bounds: tuple[np.ndarray, np.ndarray] | None = field(default=None, compare=False)

    def batch_shape(self, n: int) -> tuple[int, ...]:
        """
        :param n: Size of the batch
        :return: Shape of a batch
        """
        return (*self.shape[: self.batch_dim], n, *self.shape[self.batch_dim :])

    def zeros(self, n: int) -> np.ndarray:
        """
        :param n: Size of the batch
        :return: Batch of zeros
        """
        return np.zeros(self.batch_shape(n), self.dtype)

    def noise(self, n: int, generator: np.random.Generator) -> np.ndarray:
        """
        :param n: Size of the batch
        :param generator: Generator of random numbers
        :return: Random numbers for an input of noise
        """
        if self.role == "normal_noise":
            return generator.standard_normal(self.batch_shape(n), np.float32)
        # From the open interval: the logarithms of both ends are needed.
        return generator.uniform(1e-7, 1 - 1e-7, self.batch_shape(n)).astype(np.float32)

    def described(self) -> dict[str, object]:
        """:return: Description for the metadata of the file"""
        shape: list[object] = [int(size) for size in self.shape]
        shape.insert(self.batch_dim, "batch")
        return {"name": self.name, "role": self.role, "shape": shape, "dtype": self.dtype}


def to_tensors(arrays: list[np.ndarray]) -> tuple[th.Tensor, ...]:
    """
    :param arrays: Arrays
    :return: Tensors with the same memory
    """
    return tuple(th.from_numpy(np.ascontiguousarray(array)) for array in arrays)


def described_space(space: spaces.Space) -> dict[str, object]:
    """
    :param space: Observation space or action space
    :return: Its kind and numbers, which JSON can represent
    """
    kind = {"kind": type(space).__name__}
    if isinstance(space, spaces.Dict):
        return {**kind, "parts": {key: described_space(part) for key, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {**kind, "parts": [described_space(part) for part in space.spaces]}
    own: dict[str, object] = {**kind, "shape": list(space.shape or ()), "dtype": str(np.dtype(space.dtype))}
    if isinstance(space, spaces.Box):
        # JSON has no infinity; images have too many numbers.
        for name, bound in (("low", space.low), ("high", space.high)):
            numbers = np.unique(bound)
            own[name] = [str(number) for number in (numbers if len(numbers) == 1 else bound.flatten())]
    if isinstance(space, spaces.Discrete):
        own["n"] = int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        own["nvec"] = [int(n) for n in space.nvec]
    return own

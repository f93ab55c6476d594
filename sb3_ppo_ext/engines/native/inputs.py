"""From observations to what a network reads, in NumPy: what SB3's ``preprocess_obs`` and ``Flatten`` make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space

from sb3_ppo_ext.common.guards import EnvironmentDataError
from sb3_ppo_ext.common.namespaces import namespace
from sb3_ppo_ext.common.type_aliases import Arrays


class Inputs:
    """
    Makes vectors of observations, bit for bit as PyTorch does. It can be pickled.

    :param space: Observation space of the policy
    :param keys: Keys of the parts that are read, in order; ``None`` if observations are no dictionaries
    :param normalize_images: Whether images are divided by 255
    """

    def __init__(self, space: Any, keys: Sequence[str] | None, normalize_images: bool):
        self.keys = keys
        parts = [space] if keys is None else [space[key] for key in keys]
        self.flatten = [_flattener(part, normalize_images) for part in parts]
        #: Whether they are nothing but the numbers of one part
        self.are_numbers = self.flatten == [_numbers]

    def __call__(self, observations: Arrays) -> np.ndarray:
        """
        :param observations: Batch of observations, as returned by the environments or stored in the buffer
        :return: Features, float32 of shape ``(n, n_features)``
        :raises EnvironmentDataError: if a discrete observation is none of its space
        """
        if self.keys is None:
            return self.flatten[0](observations)
        parts = [flatten(observations[key]) for key, flatten in zip(self.keys, self.flatten, strict=True)]
        return parts[0] if len(parts) == 1 else namespace(parts[0]).concatenate(parts, axis=1)


def _flattener(space: Any, normalize_images: bool) -> Callable[[np.ndarray], np.ndarray]:
    if isinstance(space, spaces.Discrete):
        return partial(_one_hot, sizes=[int(space.n)])
    if isinstance(space, spaces.MultiDiscrete):
        return partial(_one_hot, sizes=[int(n) for n in space.nvec])
    return _pixels if normalize_images and is_image_space(space) else _numbers


def _numbers(part: np.ndarray) -> np.ndarray:
    numbers = np.ascontiguousarray(part, np.float32) if isinstance(part, np.ndarray) else part.astype(np.float32)
    return numbers.reshape(len(part), -1)


def _pixels(part: np.ndarray) -> np.ndarray:
    pixels: np.ndarray = _numbers(part) / np.float32(255)  # not in place: the numbers may be those of the buffer
    return pixels


def _one_hot(part: np.ndarray, sizes: list[int]) -> np.ndarray:
    columns = part.reshape(len(part), len(sizes))
    if not isinstance(part, np.ndarray):  # of JAX, which cannot say that a number is wrong
        xp = namespace(part)
        ones = [columns[:, i : i + 1] == xp.arange(n) for i, n in enumerate(sizes)]
        return xp.concatenate(ones, axis=1).astype(np.float32)
    values = columns.astype(np.int64)
    wrong = (values < 0) | (values >= sizes)
    if wrong.any():
        first = columns[wrong.any(axis=1)][0]
        raise EnvironmentDataError(f"Discrete observations must be from 0 to less than {sizes}, not {first}.")
    rows = np.zeros((len(part), sum(sizes)), np.float32)
    np.put_along_axis(rows, values + np.cumsum([0, *sizes[:-1]]), 1, axis=1)
    return rows

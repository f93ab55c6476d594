"""Observations that may be dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces


def map_observations(function: Callable[..., Any], *observations: Any) -> Any:
    """
    :param function: Of arrays
    :param observations: Arrays, or dictionaries of arrays with the same keys
    :return: Its result, or a dictionary of them
    """
    if isinstance(observations[0], Mapping):
        return {key: function(*(parts[key] for parts in observations)) for key in observations[0]}
    return function(*observations)


def in_channels_last(images: Any) -> Any:
    """
    :param images: A batch of them, or something else
    :return: On the CPU, the same in the layout in which convolutions are faster
    """
    if not isinstance(images, th.Tensor) or images.ndim != 4 or images.device.type != "cpu":
        return images
    return images.contiguous(memory_format=th.channels_last)


def stack(observations: Sequence[Any]) -> Any:
    """
    :param observations: Single ones
    :return: A batch of them
    """
    return map_observations(lambda *parts: np.stack(parts), *observations)


def in_float32(space: spaces.Space) -> spaces.Space:
    """
    :param space: An observation space
    :return: The same in float32 where it is float64: as the policy reads the observations, and half as large
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: in_float32(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(-np.inf, np.inf, space.shape, np.float32)
    return space

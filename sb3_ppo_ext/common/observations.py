"""Helpers for observations, which may be arrays or dictionaries of arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn

from sb3_ppo_ext.common.type_aliases import Arrays


def map_observations(function: Callable[..., Any], *observations: Arrays) -> Arrays:
    """
    Apply a function to observations, key by key if they are dictionaries.

    :param function: Function of one or more arrays
    :param observations: Arrays, or dictionaries of arrays with the same keys
    :return: Result of the function, or a dictionary with its results for each key
    """
    if isinstance(observations[0], Mapping):
        return {key: function(*(parts[key] for parts in observations)) for key in observations[0]}
    return function(*observations)


def observations_at(observations: Arrays, index: int | slice) -> Arrays:
    """
    :param observations: Array, or dictionary of arrays
    :param index: Index or slice of the first dimension
    :return: Observations at this index
    """
    return map_observations(lambda part: part[index], observations)


def takes_channels_last(*extractors: nn.Module) -> bool:
    """
    :param extractors: Features extractors
    :return: Whether all are SB3's, which take images in any memory format; ``view`` in those of users does not
    """
    parts = [p for e in extractors for p in (e.extractors.values() if type(e) is CombinedExtractor else (e,))]
    return all(type(part) in (NatureCNN, FlattenExtractor, nn.Flatten) for part in parts)


def in_channels_last(images: object) -> object:
    """
    Convert images to the channels-last memory format, which makes convolutions faster on the CPU.

    :param images: Batch of images, shape ``(batch_size, channels, height, width)``; anything else is returned unchanged
    :return: The same images, in channels-last format if they are on the CPU
    """
    if not isinstance(images, th.Tensor) or images.ndim != 4 or images.device.type != "cpu":
        return images
    return images.contiguous(memory_format=th.channels_last)


def images_in_channels_last(observations: PyTorchObs) -> PyTorchObs:
    """
    :param observations: Tensor or dictionary of tensors
    :return: The same, with images as :func:`in_channels_last` returns them
    """
    return map_observations(in_channels_last, observations)


def stack(observations: Sequence[np.ndarray | dict[str, np.ndarray]]) -> Arrays:
    """
    :param observations: Observations of single environments
    :return: Batch of these observations, with a new first dimension
    """
    return map_observations(lambda *parts: np.stack(parts), *observations)


def in_float32(space: spaces.Space, normalized: Collection[str] = ()) -> spaces.Space:
    """
    :param space: Observation space
    :param normalized: Keys of the parts that ``VecNormalize`` normalises, ``""`` for observations that are no dictionaries
    :return: The same space with float32, the precision in which the policy reads observations, instead of float64 and, in
        parts that are normalised, of any other type
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: in_float32(part, [""] if key in normalized else []) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Box) and (space.dtype == np.float64 or "" in normalized):
        return spaces.Box(-np.inf, np.inf, space.shape, np.float32)
    return space


def dtype_of(space: spaces.Space) -> th.dtype:
    """
    :param space: Space that is not a ``Dict``
    :return: Dtype of its tensors: that of the space, float32 instead of float64, and int64 for a ``Discrete``
    """
    dtype = th.from_numpy(np.empty(0, space.dtype)).dtype
    return th.float32 if dtype == th.float64 else dtype

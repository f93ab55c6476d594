"""Tensors of a space: their dtypes, their checks, and functions of all tensors of an observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_ppo_ext.common.observations import dtype_of
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.validation import check_type, refuse


def map_tensors(observations: object, function: Callable[..., Any], *others: Any) -> Arrays:
    """
    :param observations: Tensor or array, or a dictionary of them
    :param function: Function of one tensor, and of one of each of ``others``
    :param others: Objects like ``observations``
    :return: What the function returns, in a dictionary if ``observations`` is one
    """
    if isinstance(observations, dict):
        return {key: function(part, *(other[key] for other in others)) for key, part in observations.items()}
    return function(observations, *others)


def as_gymnasium(space: Any) -> spaces.Space | None:
    """
    :param space: Space of Gymnasium, or of a simulator with classes of its own that are called ``Box``, ``Discrete`` and
        ``Dict``, such as gymnax, craftax and mjlab
    :return: The space as one of Gymnasium, with floats in float32; ``None`` if it is of another kind
    """
    if isinstance(space, spaces.Space):
        return space
    kind = type(space).__name__
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "Box":
        shape = tuple(space.shape)
        low, high = (np.broadcast_to(np.asarray(bound, np.float32), shape) for bound in (space.low, space.high))
        return spaces.Box(low.copy(), high.copy(), dtype=np.float32)
    if kind == "Dict" and isinstance(getattr(space, "spaces", None), Mapping):
        parts: dict[str, Any] = {key: as_gymnasium(part) for key, part in space.spaces.items()}
        return None if None in parts.values() else spaces.Dict(parts)
    return None


def in_dtype_of(space: spaces.Space, tensor: th.Tensor, name: str = "observations") -> th.Tensor:
    """
    :param space: Space of one row, no ``Dict``
    :param tensor: Tensor
    :param name: Name of the tensor
    :return: The tensor in the dtype of the space
    :raises ValueError: if it has floats and the space has integers, which would lose the decimals
    """
    dtype = dtype_of(space)
    if tensor.dtype.is_floating_point and not dtype.is_floating_point:
        remedy = f"the space has {dtype}, which would cut off the decimals; declare it with floats, or return integers"
        refuse(f"{name}.dtype", tensor.dtype, remedy)
    return tensor.to(dtype)


def check_tensor(name: str, tensor: Any, shape: tuple[int, ...], dtype: th.dtype, device: th.device) -> None:
    """
    :param name: Name of the tensor
    :param tensor: Tensor
    :param shape: Shape that it must have
    :param dtype: Dtype that it must have
    :param device: Device that it must be on
    :raises ValueError: if it is no tensor, or has another shape, dtype or device
    """
    check_type(name, tensor, th.Tensor, "give a `torch.Tensor`")
    if tuple(tensor.shape) != shape:
        refuse(f"{name}.shape", tuple(tensor.shape), f"give {shape}, one row for each environment")
    if tensor.dtype != dtype:
        refuse(f"{name}.dtype", tensor.dtype, f"give {dtype}, that of the space")
    if not _is_same_device(tensor.device, device):
        refuse(f"{name}.device", str(tensor.device), f'give "{device}", that of the environment')


def _is_same_device(one: th.device, other: th.device) -> bool:
    # "cuda" is any of the devices, as the current one may change.
    return one.type == other.type and (None in (one.index, other.index) or one.index == other.index)


def check_tensors(name: str, tensors: Arrays, space: spaces.Space, num_envs: int, device: th.device) -> None:
    """
    :param name: Name of the tensors
    :param tensors: Tensor, or a dictionary or tuple of tensors if the space is a ``Dict`` or ``Tuple``
    :param space: Space of one row
    :param num_envs: Number of rows
    :param device: Device that they must be on
    :raises ValueError: if they do not fit the space
    """
    if isinstance(space, spaces.Tuple):
        check_type(name, tensors, tuple, f"give a tuple of {len(space.spaces)}, as in the space")
        if len(tensors) != len(space.spaces):
            refuse(f"len({name})", len(tensors), f"give {len(space.spaces)}, as in the space")
        for index, part in enumerate(space.spaces):
            check_tensors(f"{name}[{index}]", tensors[index], part, num_envs, device)
        return None
    if not isinstance(space, spaces.Dict):
        return check_tensor(name, tensors, (num_envs, *(space.shape or ())), dtype_of(space), device)
    check_type(name, tensors, dict, f"give a dictionary with the keys {list(space.spaces)}, those of the space")
    if set(tensors) != set(space.spaces):
        refuse(f"{name}.keys()", list(tensors), f"give {list(space.spaces)}, those of the space")
    for key, part in space.spaces.items():
        check_tensors(f"{name}[{key!r}]", tensors[key], part, num_envs, device)

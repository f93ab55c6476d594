"""Bounds of spaces."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_ppo_ext.common.namespaces import namespace


def bounds_on_device(low: np.ndarray, high: np.ndarray, device: th.device) -> tuple[th.Tensor, th.Tensor]:
    """
    :param low: Lower bounds
    :param high: Upper bounds, of the same shape
    :param device: Device of the tensors
    :return: Both in float32, of the same shape. They are copied to the device once, and must not be modified
    """
    as_bytes = (np.asarray(bound, np.float32).tobytes() for bound in (low, high))
    if device.type == "cuda" and device.index is None:
        device = th.device("cuda", th.cuda.current_device())  # which another one may become later
    return _copied(*as_bytes, low.shape, device)


def clipped(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """
    :param actions: Actions, shape ``(n, *action_shape)``
    :param low: Lower bounds, shape ``action_shape``, or that of the actions, for which it takes a third as long
    :param high: Upper bounds, of the same shape
    :return: What ``np.clip`` returns, in a third of its time
    """
    if len(actions) == 1:
        # NumPy takes longest for shapes that differ.
        low, high = low.reshape(actions.shape), high.reshape(actions.shape)
    xp = namespace(actions)
    within: np.ndarray = xp.minimum(xp.maximum(actions, low), high)
    return within


def middle_and_half(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """
    :param space: Space of actions
    :return: What is subtracted from a flattened action, and what it is then divided by, so that it lies in [-1, 1] where there
        are bounds; 0 and 1 elsewhere. Float64, shape ``(n_actions,)``
    """
    low, high = (bound.flatten().astype(np.float64) for bound in (space.low, space.high))
    bounded = np.isfinite(low) & np.isfinite(high) & (low < high)
    middle, half = np.where(bounded, [(low / 2 + high / 2), (high / 2 - low / 2)], [[0.0], [1.0]])
    return middle, half


@lru_cache(maxsize=16)
def _copied(low: bytes, high: bytes, shape: tuple[int, ...], device: th.device) -> tuple[th.Tensor, th.Tensor]:
    first, second = (th.from_numpy(np.frombuffer(bound, np.float32).reshape(shape).copy()) for bound in (low, high))
    return first.to(device), second.to(device)

"""From the samples of a policy to actions that an environment may write into."""

from collections.abc import Callable

import numpy as np
from gymnasium import spaces

from sb3_ppo_ext.common.bounds import clipped
from sb3_ppo_ext.common.guards import check_actions
from sb3_ppo_ext.common.hybrid_actions import joined, split_boxes, structured
from sb3_ppo_ext.common.namespaces import in_double
from sb3_ppo_ext.common.type_aliases import Arrays


def actions_at(
    latents: np.ndarray, position: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """
    :param latents: Latents of a bounded distribution, shape ``(n, *action_shape)``
    :param position: Its function :meth:`BoundedDistribution.position`
    :param low: Lower bounds of the actions in float64, shape ``action_shape``, or that of the latents
    :param high: Upper bounds of the actions, of the same shape
    :return: Actions within the bounds, float64, shape ``(n, *action_shape)``
    """
    positions = position(in_double(latents))
    # Not low + position * (high - low), which can overflow. Rounding can step over a bound.
    return clipped(low * (1 - positions) + high * positions, low, high)


def actions_of_latents(
    samples: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    position: Callable[[np.ndarray], np.ndarray],
    space: spaces.Box,
) -> np.ndarray:
    """
    :param samples: Samples of a bounded distribution, shape ``(n, *action_shape)``
    :param low: Lower bounds of the space in float64, or of each sample
    :param high: Upper bounds, likewise
    :param position: Function :meth:`BoundedDistribution.position` of the distribution
    :param space: Space of the samples
    :return: Actions within the bounds and of their dtype, shape ``(n, *action_shape)``
    :raises ValueError: if a latent is not finite
    """
    if isinstance(samples, np.ndarray):
        check_actions(samples)
    latents, others = split_boxes(space, samples)
    low, high = (split_boxes(space, bound)[0] for bound in (low, high))
    actions = actions_at(latents, position, low, high).astype(space.low.dtype)
    return joined(actions, others)


def in_float64(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """:return: Lower and upper bounds of a space in float64"""
    return space.low.astype(np.float64), space.high.astype(np.float64)


def unsquashed(samples: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """As SB3's ``unscale_action``."""
    actions: np.ndarray = low + (0.5 * (samples + 1.0) * (high - low))
    return actions


class WithinBounds:
    """
    Turns samples of a policy into actions within the bounds. It keeps the bounds of a whole batch, since NumPy takes longest
    for shapes that differ.

    :param low: Lower bounds, shape ``action_shape``
    :param high: Upper bounds, shape ``action_shape``
    :param function: Function of samples, lower and upper bounds of each, which returns new arrays
    """

    def __init__(
        self, low: np.ndarray, high: np.ndarray, function: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    ):
        self.bounds, self.function = (low, high), function
        self.low, self.high = low[np.newaxis], high[np.newaxis]

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """
        :param samples: Samples, shape ``(n, *action_shape)``
        :return: Actions, of the same shape
        """
        if len(samples) != len(self.low):
            self.low, self.high = (np.stack([bound] * len(samples)) for bound in self.bounds)
        return self.function(samples, self.low, self.high)


class ActionsForEnv:
    """
    Turns samples of a policy into actions that an environment may write into. It can be pickled.

    :param space: Space of the samples
    :param within_bounds: Function from samples to new arrays within the bounds
    """

    def __init__(self, space: spaces.Space, within_bounds: Callable[[np.ndarray], np.ndarray]):
        self.space, self.within_bounds = space, within_bounds

    def __call__(self, samples: np.ndarray) -> Arrays:
        """
        :param samples: Samples, shape ``(n, *action_shape)``
        :return: Action for each environment
        """
        return structured(self.space, self.within_bounds(samples))

"""Masks of invalid actions in spaces and observations: which actions can be masked, and where the mask is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.validation import refuse

# Keys of an observation to which a mask is added: an observation that is no dictionary, and the mask
OBSERVATION, ACTION_MASK = "observation", "action_mask"
MASKABLE = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
# Method of an environment that returns its mask, as for sb3-contrib's MaskablePPO
METHOD = "action_masks"


def choices_of(action_space: spaces.Space) -> list[int]:
    """
    :param action_space: Action space
    :return: Number of choices of each action: one action of a ``Discrete`` space, one of each dimension of others, two choices
        for binary ones. A mask has one number for each choice of each action
    :raises TypeError: if its actions cannot be masked
    """
    if isinstance(action_space, spaces.Discrete):
        return [int(action_space.n)]
    if isinstance(action_space, spaces.MultiDiscrete):
        return [int(n) for n in action_space.nvec]
    if isinstance(action_space, spaces.MultiBinary):
        return [2] * int(np.prod(action_space.shape))
    raise TypeError(f"{action_space} has no actions that could be masked")


def with_mask(observation_space: spaces.Space, action_space: spaces.Space) -> spaces.Dict:
    """
    :param observation_space: Observation space
    :param action_space: Action space
    :return: The observation space with a mask of the actions, under the key :data:`ACTION_MASK`
    :raises ValueError: if it has a part under this key already
    """
    is_dict = isinstance(observation_space, spaces.Dict)
    parts = dict(observation_space.spaces) if is_dict else {OBSERVATION: observation_space}  # type: ignore[attr-defined]
    if ACTION_MASK in parts:
        remedy = (
            f"the observations have the key {ACTION_MASK!r} already; give `action_mask_key={ACTION_MASK!r}` if it is a mask"
        )
        refuse("action_masking", True, remedy)
    return spaces.Dict({**parts, ACTION_MASK: spaces.MultiBinary(sum(choices_of(action_space)))})


def without_mask(observation_space: Any, key: str) -> spaces.Space:
    """
    :param observation_space: Space of observations with a mask
    :param key: Key of the mask
    :return: Space of what actor and critic read
    """
    parts = {name: part for name, part in observation_space.spaces.items() if name != key}
    return parts[OBSERVATION] if parts.keys() == {OBSERVATION} else spaces.Dict(parts)


def add_mask(observations: object, masks: np.ndarray | th.Tensor) -> dict[str, Arrays]:
    """
    :param observations: Observations, an array or a dictionary of arrays
    :param masks: Masks of the actions
    :return: Observations of the space that :func:`with_mask` returns
    """
    parts = observations if isinstance(observations, dict) else {OBSERVATION: observations}
    return {**parts, ACTION_MASK: masks}


def parts_without_mask(observations: dict[str, Arrays], key: str) -> Arrays:
    """
    :param observations: Observations with a mask
    :param key: Key of the mask
    :return: What actor and critic read, as in :func:`without_mask`
    """
    if len(observations) == 2 and OBSERVATION in observations and key != OBSERVATION:
        return observations[OBSERVATION]
    return {name: part for name, part in observations.items() if name != key}

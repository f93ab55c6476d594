"""Masks of invalid actions while a rollout is collected: where they come from, and whether they can be used."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper

from sb3_ppo_ext.common.action_masks import ACTION_MASK, METHOD, add_mask, choices_of, parts_without_mask
from sb3_ppo_ext.common.guards import EnvironmentDataError
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.validation import refuse


class ActionMasks:
    """
    Adds the masks of the environments to observations, and checks masks.

    :param action_space: Action space of a single environment
    :param key: Key of the masks in the observations, ``None`` if the environments have a method ``action_masks``
    :param n_envs: Number of environments
    :param read: Function that returns their masks, which is called if ``key`` is None
    :param first: Index of the first environment, for messages
    """

    def __init__(
        self,
        action_space: spaces.Space,
        key: str | None,
        n_envs: int,
        read: Callable[[], list[object]],
        first: int = 0,
    ):
        self.n_envs, self.key, self.first = n_envs, key or ACTION_MASK, first
        self.choices = choices_of(action_space)
        self.n_choices = sum(self.choices)
        # First choice of each action
        self.firsts = np.cumsum([0, *self.choices[:-1]])
        # Masks of the last step, shape (n_envs, n_choices)
        self.masks: Arrays = None
        self.read = read if key is None else None

    def seen(self, observations: Arrays, step: int, num_timesteps: int) -> Arrays:
        """
        :param observations: Observations of all environments, as they returned them
        :param step: Step of the rollout
        :param num_timesteps: Number of timesteps trained so far, for messages
        :return: Observations with masks, as the policy reads them
        :raises EnvironmentDataError: if a mask has another shape, or leaves no choice for an action
        """
        masks = observations[self.key] if self.read is None else self._read(step, num_timesteps)
        self.masks = flat = masks.reshape(self.n_envs, self.n_choices)
        # Quick checks, because they run at every step
        if not (flat.all() or np.maximum.reduceat(flat, self.firsts, axis=1).all()):
            refuse_empty(flat, self.choices, step, num_timesteps, self.first)
        return observations if self.read is None else add_mask(observations, flat)

    def with_last(self, observations: object) -> Arrays:
        """
        :param observations: Observations of all environments, in the place of those of the last :meth:`seen`
        :return: These observations with the masks of that call, if the masks are not in the observations
        """
        return observations if self.read is None else add_mask(observations, self.masks)

    def further_locals(self, obs_tensor: Arrays) -> dict[str, object]:
        """
        :param obs_tensor: Observations with masks, on the device; ``None`` if no user code can read them
        :return: Variables that callbacks find in their ``locals``, with the names of MaskablePPO
        """
        if self.read is not None and obs_tensor is not None:
            obs_tensor = parts_without_mask(obs_tensor, ACTION_MASK)
        return {"action_masks": self.masks, "obs_tensor": obs_tensor}

    def _read(self, step: int, num_timesteps: int) -> np.ndarray:
        assert self.read is not None
        masks = self.read()
        try:
            array: np.ndarray = np.array(masks, bool)  # copied, since an environment may write into its mask
        except (TypeError, ValueError):
            array = np.zeros(0, bool)
        if array.size != self.n_envs * self.n_choices or len(array) != self.n_envs:
            self._refuse_shape(masks, step, num_timesteps)
        return array

    def _refuse_shape(self, masks: list[object], step: int, num_timesteps: int) -> NoReturn:
        sizes = [np.array(mask, object).size for mask in masks]
        index = next((i for i, size in enumerate(sizes) if size != self.n_choices), 0)
        raise EnvironmentDataError(
            f"Environment {self.first + index}: the mask of the actions must have {self.n_choices} numbers, one for each "
            f"choice, not {reprlib.repr(masks[index])}, {_at(step, num_timesteps)}"
        )


def refuse_empty(masks: np.ndarray, choices: list[int], step: int, num_timesteps: int, first: int = 0) -> NoReturn:
    """
    :param masks: Masks of which one leaves no choice for an action, shape ``(n_envs, n_choices)``
    :param choices: Number of choices of each action
    :param step: Step of the rollout
    :param num_timesteps: Number of timesteps trained so far
    :param first: Index of the first environment
    :raises EnvironmentDataError: always
    """
    is_empty = [not part.any() for mask in masks for part in np.split(mask, np.cumsum(choices)[:-1])]
    index, action = divmod(is_empty.index(True), len(choices))
    which = "all actions are" if len(choices) == 1 else f"all choices of action {action} are"
    raise EnvironmentDataError(
        f"Environment {first + index}: {which} masked {_at(step, num_timesteps)} Leave at least one valid; "
        "where nothing can be done, end the episode."
    )


def leave_choices(masks: th.Tensor, choices: list[int]) -> th.Tensor:
    """
    :param masks: Masks, shape ``(..., n_choices)``
    :param choices: Number of choices of each action
    :return: Whether every mask leaves a choice for each action, a scalar
    """
    return th.stack([part.any(dim=-1).all() for part in (masks != 0).split(choices, dim=-1)]).all()


def _at(step: int, num_timesteps: int) -> str:
    return f"at step {step} of the rollout, after {num_timesteps} timesteps. Nothing was learned from this rollout."


def reader(env: VecEnv) -> Callable[[], list[Any]]:
    """
    :param env: Environments with a method ``action_masks``
    :return: Function that returns the masks of all environments
    """
    base = env
    while isinstance(base, VecEnvWrapper) and type(base).env_method is VecEnvWrapper.env_method:
        base = base.venv
    if isinstance(base, DummyVecEnv) and type(base).env_method is DummyVecEnv.env_method:
        # What `env_method` calls, without looking for it in the wrappers of each environment at each step
        methods = [each.get_wrapper_attr(METHOD) for each in base.envs]
        return lambda: [method() for method in methods]
    return lambda: env.env_method(METHOD)


def check_masks(env: VecEnv) -> None:
    """
    :param env: Environments
    :raises ValueError: if they have no masks
    """
    if not env.has_attr(METHOD):
        remedy = (
            f"the environment has no method `{METHOD}`: give it one, wrap it in sb3-contrib's `ActionMasker`, or let its "
            "observations be dictionaries with the mask, and give `action_mask_key`"
        )
        refuse("action_masking", True, remedy)

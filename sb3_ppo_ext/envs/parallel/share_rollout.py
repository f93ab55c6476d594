"""A rollout of the environments of one process, which act and step without waiting for those of others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
from gymnasium import spaces

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.type_aliases import Arrays, Info, JaxTree


class MaskSource(NamedTuple):
    """
    Where masks of invalid actions come from.

    :param action_space: Action space
    :param key: Key of the masks in the observations, ``None`` if the environments have a method ``action_masks``
    :param num_timesteps: Number of timesteps trained before the rollout, for messages
    :param n_per_step: Number of timesteps of a step, for messages
    """

    action_space: spaces.Space
    key: str | None
    num_timesteps: int
    n_per_step: int


class JaxActor(NamedTuple):
    """
    What chooses the actions of a rollout.

    :param act: Function of the parameters, the noise of a step and the observations of all copies; returns samples, actions
        within the bounds, and whether the outputs of the policy and the samples are finite
    :param key: Equal for two actors whose functions compute the same
    :param parameters: Parameters
    :param noise: Noise, a sequence of arrays whose first dimension is over environments
    :param n_held: Number of steps in which each element of the noise is used
    """

    act: Callable[..., JaxTree]
    key: Hashable
    parameters: JaxTree
    noise: np.ndarray
    n_held: int


class ShareActor(Protocol):
    """Chooses the actions of some of the environments for a whole rollout. It can be pickled."""

    def act(self, observations: Arrays, step: int) -> tuple[np.ndarray, Arrays] | None:
        """
        Choose the actions of a step.

        :param observations: Observations of these environments, with masks if there are any, shape ``(n_envs, *obs_shape)``
        :param step: Step of the rollout
        :return: Samples of the policy, as the rollout buffer stores them, and an action within the bounds for each
            environment, which it may write into; ``None`` if the outputs of the policy are not finite
        """

    def in_jax(self) -> JaxActor | None:
        """:return: The same for a rollout that JAX compiles, up to rounding; ``None`` if there is no such thing"""
        return None


@dataclass
class ShareRollout:
    """
    What some of the environments returned in the steps of a rollout.

    :param observations: Observations before each step and after the last one, in arrays of shape
        ``(n_steps + 1, n_envs, *obs_shape)``
    :param samples: Samples of the policy, shape ``(n_steps, n_envs, *action_shape)``
    :param rewards: Rewards, shape ``(n_steps, n_envs)``
    :param dones: Ends of episodes, shape ``(n_steps, n_envs)``
    :param infos: For each step, infos by the index of the environment: those of ends of episodes and with statistics of
        episodes, and all of the last step
    :param reset_infos: Infos of the last reset of each environment
    :param masks: Masks of the actions in each step, shape ``(n_steps, n_envs, n_choices)``; ``None`` for none
    :param plain_info: Info of an environment of which there is nothing to say
    """

    observations: Arrays
    samples: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    infos: dict[int, dict[int, Info]]
    reset_infos: list[Info]
    masks: np.ndarray | None = None
    plain_info: Info = field(default_factory=lambda: {"TimeLimit.truncated": False})

    @property
    def n_steps(self) -> int:
        """Number of steps: fewer than asked for if the last observations, rewards or outputs of the policy are not finite."""
        return len(self.rewards)

    def first(self, n_steps: int) -> ShareRollout:
        """
        :param n_steps: Number of steps
        :return: The first steps of the rollout
        """
        if n_steps == self.n_steps:
            return self
        arrays = {name: getattr(self, name)[:n_steps] for name in ("samples", "rewards", "dones")}
        infos = {step: infos for step, infos in self.infos.items() if step < n_steps}
        observations = map_observations(lambda part: part[: n_steps + 1], self.observations)
        masks = None if self.masks is None else self.masks[:n_steps]
        return replace(self, observations=observations, infos=infos, masks=masks, **arrays)


def joined(parts: Sequence[ShareRollout], firsts: Sequence[int]) -> ShareRollout:
    """
    :param parts: Rollouts of consecutive environments
    :param firsts: Index of the first environment of each
    :return: Rollout of all environments, as long as the shortest of them
    """
    n_steps = min(part.n_steps for part in parts)
    parts = [part.first(n_steps) for part in parts]
    # Of no steps, the shape of the samples is not known.
    axis = 1 if n_steps else 0

    def together(*arrays: np.ndarray) -> np.ndarray:
        return np.concatenate(arrays, axis)

    observations = map_observations(lambda *each: np.concatenate(each, 1), *(part.observations for part in parts))
    samples, rewards, dones = (together(*(getattr(part, name) for part in parts)) for name in ("samples", "rewards", "dones"))
    masks = None if parts[0].masks is None else together(*(part.masks for part in parts if part.masks is not None))
    infos: dict[int, dict[int, dict[str, object]]] = {}
    for part, first in zip(parts, firsts, strict=True):
        for step, of_step in part.infos.items():
            infos.setdefault(step, {}).update({first + index: info for index, info in of_step.items()})
    reset_infos = [info for part in parts for info in part.reset_infos]
    return ShareRollout(observations, samples, rewards, dones, infos, reset_infos, masks)

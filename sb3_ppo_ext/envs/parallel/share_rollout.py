"""A rollout of the environments of one process, which act and step without waiting for those of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class ShareActor(Protocol):
    """Chooses the actions of some of the environments for a whole rollout. It can be pickled."""

    def act(self, observations: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray] | None:
        """
        Choose the actions of a step.

        :param observations: Observations of these environments, shape ``(n_envs, *obs_shape)``
        :param step: Step of the rollout
        :return: Samples of the policy, as the rollout buffer stores them, and actions within the bounds, which environments
            may write into; ``None`` if the outputs of the policy are not finite
        """


@dataclass
class ShareRollout:
    """
    What some of the environments returned in the steps of a rollout.

    :param observations: Observations before each step and after the last one, shape ``(n_steps + 1, n_envs, *obs_shape)``
    :param samples: Samples of the policy, shape ``(n_steps, n_envs, *action_shape)``
    :param rewards: Rewards, shape ``(n_steps, n_envs)``
    :param dones: Ends of episodes, shape ``(n_steps, n_envs)``
    :param infos: For each step, infos by the index of the environment: those of ends of episodes and with statistics of
        episodes, and all of the last step
    :param reset_infos: Infos of the last reset of each environment
    """

    observations: np.ndarray
    samples: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    infos: dict[int, dict[int, dict[str, object]]]
    reset_infos: list[dict[str, object]]

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
        arrays = (self.samples[:n_steps], self.rewards[:n_steps], self.dones[:n_steps])
        infos = {step: infos for step, infos in self.infos.items() if step < n_steps}
        return ShareRollout(self.observations[: n_steps + 1], *arrays, infos, self.reset_infos)


def joined(parts: Sequence[ShareRollout], firsts: Sequence[int]) -> ShareRollout:
    """
    :param parts: Rollouts of consecutive environments
    :param firsts: Index of the first environment of each
    :return: Rollout of all environments, as long as the shortest of them
    """
    n_steps = min(part.n_steps for part in parts)
    parts = [part.first(n_steps) for part in parts]
    names = ("observations", "samples", "rewards", "dones")
    # Of no steps, the shape of the samples is not known.
    axis = 1 if n_steps else 0
    observations, samples, rewards, dones = (np.concatenate([getattr(part, name) for part in parts], axis) for name in names)
    infos: dict[int, dict[int, dict[str, object]]] = {}
    for part, first in zip(parts, firsts, strict=True):
        for step, of_step in part.infos.items():
            infos.setdefault(step, {}).update({first + index: info for index, info in of_step.items()})
    return ShareRollout(observations, samples, rewards, dones, infos, [info for part in parts for info in part.reset_infos])

"""What history-based policies have in common: their rollout buffer returns observations with their history."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.policies.actor_critic import ActionDistributionMixin


class HistoryPolicy(ActionDistributionMixin):
    """
    An actor-critic policy for partially observable tasks (POMDPs). Its ``evaluate_actions``, ``get_distribution`` and
    ``predict_values`` take what its :class:`HistoryBuffer` returns as observations.
    """

    # Classes of the rollout buffer for arrays and for dictionaries
    buffer_classes: ClassVar[tuple[Any, Any]]

    def make_buffer(self, *args: Any, **kwargs: Any) -> HistoryBuffer:
        """
        :param args: Positional arguments of SB3's ``RolloutBuffer``
        :param kwargs: Keyword arguments of SB3's ``RolloutBuffer``
        :return: Rollout buffer that keeps what the policy has to remember
        """
        for_arrays, for_dictionaries = self.buffer_classes
        make = for_dictionaries if isinstance(self.observation_space, spaces.Dict) else for_arrays
        buffer: HistoryBuffer = make(*args, **kwargs, **self.buffer_kwargs)
        return buffer

    @property
    @abstractmethod
    def buffer_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the rollout buffer that depend on the policy."""

    def _within_bounds(self, actions: np.ndarray) -> np.ndarray:
        """
        Unscale or clip samples as SB3's ``predict`` does.

        :param actions: Samples of the policy, shape ``(n_envs, *action_shape)``
        :return: Actions within the bounds of the action space, the same shape
        """
        space = self.action_space
        if not isinstance(space, spaces.Box):
            return actions
        return self.unscale_action(actions) if self.squash_output else np.clip(actions, space.low, space.high)


def episode_starts_of(episode_start: Any, n_envs: int) -> np.ndarray:
    """
    :param episode_start: Argument of ``predict``, ``None`` if no episode has begun
    :param n_envs: Number of environments
    :return: Whether each of them has begun an episode, shape ``(n_envs,)``
    :raises ValueError: if there is not one for each environment
    """
    starts = np.zeros(n_envs) if episode_start is None else np.asarray(episode_start)
    if starts.size != n_envs:
        refuse("episode_start", episode_start, f"give one for each of {n_envs} environments")
    return starts.reshape(n_envs)


class HistoryBuffer(RolloutBuffer):
    """A rollout buffer that keeps what a history-based policy has to remember, also from one rollout to the next."""

    # Arrays whose dimensions of steps and environments are merged when the rollout is full
    flattened: ClassVar[tuple[str, ...]] = ("actions", "values", "log_probs", "advantages", "returns")
    # Whether observations are stored in float32 on all engines, as the policy reads them
    keeps_float32: ClassVar[bool]

    @property
    def n_evaluated(self) -> int:
        """Number of successive samples, in whole sequences, that are best evaluated at once; 1 if all are equally good."""
        return 1

    @abstractmethod
    def draws(self, step_size: int) -> Iterator[np.ndarray]:
        """
        :param step_size: Number of samples in one step of the optimiser
        :return: Indices of the samples of each step in one epoch, in the flattened rollout (``env * n_steps + step``)
        """

    @abstractmethod
    def sequences_after(
        self, steps: np.ndarray, environments: np.ndarray, observations: PyTorchObs, starts: np.ndarray
    ) -> Any:
        """
        :param steps: Indices of steps in the rollout, shape ``(n,)``
        :param environments: Index of the environment of each step, shape ``(n,)``
        :param observations: Observations that follow these steps, on the device, shape ``(n, *obs_shape)``
        :param starts: Whether each observation begins an episode, shape ``(n,)``
        :return: Inputs of the policy for these observations
        """

    @abstractmethod
    def memory(self) -> list[Any]:
        """:return: Copy of what the next rollout needs of this one"""

    @abstractmethod
    def set_memory(self, memory: list[Any]) -> None:
        """
        :param memory: What the next rollout needs of the last one, from :meth:`memory`
        """

"""What history-based policies have in common: the rollout buffer keeps what they remember, as further columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.policies.actor_critic import ActionDistributionMixin

# Actions, values and log probabilities
Output = tuple[th.Tensor, th.Tensor, th.Tensor]


class RolloutRows(NamedTuple):
    """
    Columns of a rollout buffer that a memory reads.

    :param n_steps: Number of steps of a rollout
    :param n_envs: Number of environments
    :param observations: Observations, with the steps before the rollout, shape ``(n_before + n_steps, n_envs, *obs_shape)``
    :param starts: 1 where an episode starts, else 0, shape ``(n_before + n_steps, n_envs)``
    :param device: Device of the policy, where the inputs of the policy go; the columns may lie elsewhere
    """

    n_steps: int
    n_envs: int
    observations: PyTorchObs
    starts: th.Tensor
    device: th.device

    @property
    def storage(self) -> th.device:
        """Device of the columns."""
        return self.starts.device


class Stepper(ABC):
    """Evaluates a history-based policy step by step while a rollout is collected."""

    @abstractmethod
    def __call__(self, policy: nn.Module, observations: object, starts: object, step: int) -> Output:
        """
        :param policy: Current policy
        :param observations: Observations of the step on the device, which are also in the buffer
        :param starts: Whether each of them starts an episode, shape ``(n_envs,)``
        :param step: Step of the rollout
        :return: Actions, values and log probabilities, as ``forward`` of SB3's policies returns them
        """

    def further_locals(self) -> dict[str, object]:
        """:return: Further variables that callbacks find in their ``locals``, by name"""
        return {}


class RolloutMemory(ABC):
    """
    What a rollout buffer keeps for a history-based policy, also from one rollout to the next, and the inputs of the policy
    that are made from it.
    """

    # Number of steps before the rollout whose observations are kept
    n_before = 0
    # Whether observations are stored in float32 on all engines, as the policy reads them
    keeps_float32: ClassVar[bool] = True
    # Whether actions in float64 stay so
    keeps_float64: ClassVar[bool] = False
    # Whether the inputs are planned on the host, so that it needs the indices of the samples
    plans_on_host: ClassVar[bool] = False
    rows: RolloutRows

    def allocate(self, rows: RolloutRows) -> None:
        """
        :param rows: Columns of the buffer
        """
        self.rows = rows

    @abstractmethod
    def kept(self) -> list[tuple[PyTorchObs | None, int]]:
        """:return: Tensors of which the next rollout needs the last rows, and how many of them; ``None`` for missing ones"""

    def keep_last(self, pos: int) -> None:
        """
        Move the last rows before the next rollout.

        :param pos: Number of steps of the rollout
        """
        for rows, n in self.kept():
            if rows is not None:
                map_observations(lambda part, n=n: part[:n].copy_(part[pos : pos + n].clone()), rows)

    def read(self, pos: int) -> list[Any]:
        """
        :param pos: Number of steps of the rollout
        :return: Copy, in NumPy, of what the next rollout needs
        """

        def on_host(part: th.Tensor, n: int) -> np.ndarray:
            return np.array(part[pos : pos + n].cpu().numpy())

        return [
            None if rows is None else map_observations(lambda part, n=n: on_host(part, n), rows) for rows, n in self.kept()
        ]

    def write(self, remembered: list[object]) -> None:
        """
        :param remembered: What the next rollout needs, from :meth:`read`
        """
        for (rows, n), given in zip(self.kept(), remembered, strict=True):
            if rows is not None:
                map_observations(
                    lambda part, values, n=n: part[:n].copy_(th.as_tensor(values, device=part.device)), rows, given
                )

    # While a rollout is collected

    @abstractmethod
    def stepper(self, is_watched: bool) -> Stepper:
        """
        :param is_watched: Whether user code may change parameters in ways that torch does not track
        :return: What evaluates the policy in the next rollout
        """

    def observe(self, step: int) -> None:  # noqa: B027
        """
        :param step: Step of the rollout whose observations have been stored
        """

    def note_outcome(self, policy: nn.Module, step: int, actions: object, rewards: object) -> None:  # noqa: B027
        """
        :param policy: Policy that has acted
        :param step: Step of the rollout
        :param actions: Actions as the environments got them, tensors or arrays, shape ``(n_envs, *action_shape)``
        :param rewards: Rewards of the environments, before truncated episodes are bootstrapped, shape ``(n_envs,)``
        """

    def note_episodes(self, starts: np.ndarray, dones: np.ndarray, num_timesteps: int) -> None:  # noqa: B027
        """
        :param starts: Whether each step of the rollout began an episode, shape ``(n_steps, n_envs)``
        :param dones: Whether the last step ended an episode, shape ``(n_envs,)``
        :param num_timesteps: Number of timesteps trained before the rollout, for messages
        """

    def continue_from(self, before: RolloutMemory) -> None:  # noqa: B027
        """
        :param before: Memory of the buffer that this one replaces, whose rows have been written already
        """

    # Inputs of the policy

    @abstractmethod
    def draws(self, step_size: int, batch_size: int) -> tuple[Iterator[th.Tensor], int]:
        """
        :param step_size: Number of samples in one step of the optimiser
        :param batch_size: Number of samples in each of its minibatches
        :return: Indices of the samples of each step in one epoch, ``env * n_steps + step``, and the length of the blocks of
            successive steps in them
        """

    @abstractmethod
    def inputs(self, indices: th.Tensor, length: int) -> Any:
        """
        :param indices: Indices of samples, in blocks of successive steps of one environment
        :param length: Length of the blocks
        :return: Inputs of the policy for these samples
        """

    @abstractmethod
    def after(self, rows: th.Tensor, observations: PyTorchObs, starts: th.Tensor) -> Any:
        """
        :param rows: Positions of steps in the flattened rollout, ``step * n_envs + environment``, shape ``(n,)``
        :param observations: Observations that follow these steps, on the device, shape ``(n, *obs_shape)``
        :param starts: Whether each of them starts an episode, shape ``(n,)``
        :return: Inputs of the policy for these observations
        """


class HistoryPolicy(ActionDistributionMixin):
    """
    An actor-critic policy for partially observable tasks (POMDPs). Its ``evaluate_actions``, ``get_distribution`` and
    ``predict_values`` take the inputs that its :class:`RolloutMemory` makes.
    """

    #: Methods of SB3's policies that are not called where this one acts
    UNCALLED: ClassVar[tuple[str, ...]] = ("extract_features", "_predict", "get_distribution")

    @abstractmethod
    def make_memory(self) -> RolloutMemory:
        """:return: What a rollout buffer keeps for this policy"""

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


def episode_starts_of(episode_start: object, n_envs: int) -> np.ndarray:
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


def permutation(n: int, device: th.device) -> th.Tensor:
    """
    :param n: Number of samples
    :param device: Device of the samples
    :return: The numbers from 0 to ``n - 1`` in random order: on the CPU the one that SB3 draws from NumPy's generator, on
        other devices from their generators, so that nothing is copied to them
    """
    if device.type == "cpu":
        return th.from_numpy(np.random.permutation(n))
    return th.randperm(n, device=device)

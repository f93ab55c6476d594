"""Memory of a recurrent policy: the states of its networks before each step of the rollout and after the last one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.memory.history import Output, RolloutMemory, RolloutRows, Stepper
from sb3_ppo_ext.memory.recurrence import RecurrentSequences, RecurrentStates, together


class StateMemory(RolloutMemory):
    """
    Keeps the states of recurrent networks, and makes :class:`~sb3_ppo_ext.memory.recurrence.RecurrentSequences`. A sequence
    ends where its episode ends, where the rollout of its environment ends, or where the samples are not successive.

    :param state_shape: Numbers of networks (actor, and critic if it has its own), of states of each (hidden state, and cell
        state of an LSTM), of layers, and of hidden units
    """

    keeps_float32 = False  # as RecurrentPPO, on the engines that do as SB3
    keeps_float64 = True
    plans_on_host = True

    def __init__(self, state_shape: tuple[int, int, int, int]):
        self.state_shape = state_shape
        # Starts of episodes on the host, `None` if they are still to be read
        self._starts: np.ndarray | None = None
        # Step of the rollout, and the states before it that user code has got to see
        self._shown: tuple[int, RecurrentStates] | None = None

    def allocate(self, rows: RolloutRows) -> None:
        super().allocate(rows)
        *before, n_units = self.state_shape
        # Before each step and after the last one, shape (n_steps + 1, n_networks, n_states, n_layers, n_envs, n_units)
        self.states = th.zeros((rows.n_steps + 1, *before, rows.n_envs, n_units), device=rows.device)

    def kept(self) -> list[tuple[PyTorchObs | None, int]]:
        """:return: States, of which the last ones are those before the next rollout"""
        self._starts = None
        self._take_back()
        return [(self.states, 1)]

    def states_at(self, step: int) -> RecurrentStates:
        """
        :param step: Index of a step of the rollout
        :return: Copies of the states of all environments before this step
        """
        self._take_back()
        networks = [tuple(part.clone() for part in network) for network in self.states[step]]
        return RecurrentStates(networks[0], networks[-1])

    def show_states(self, step: int) -> RecurrentStates:
        """
        :param step: Index of the step of the rollout that comes next
        :return: States of all environments before this step, for user code, which may change them in place until then
        """
        if self._shown is None or self._shown[0] != step:
            self._shown = step, self.states_at(step)
        return self._shown[1]

    def _take_back(self) -> None:
        """Keep the states that were shown, which user code may have changed in place."""
        if self._shown is not None:
            (step, states), self._shown = self._shown, None
            self.keep_states(step, states)

    def keep_states(self, step: int, states: RecurrentStates) -> None:
        """
        :param step: Index of the step of the rollout that follows these states
        :param states: States of all environments
        """
        self._take_back()
        for row, state in zip(self.states[step], states, strict=False):  # the critic may have no states of its own
            for kept, part in zip(row, state, strict=True):
                kept.copy_(part)

    def set_states(self, step: int, states: RecurrentStates) -> None:
        """
        :param step: Index of the step of the rollout that follows these states
        :param states: States of all environments, from user code
        :raises ValueError: if they have other shapes
        """
        own = [part.shape for state in self.show_states(step) for part in state]
        given = [part.shape for state in states for part in state]
        if own != given:
            refuse("_last_lstm_states", given, f"give states of the shapes {own}")
        self._shown = None
        self.keep_states(step, states)

    def observe(self, step: int) -> None:
        self._starts = None

    def stepper(self, is_watched: bool) -> Stepper:
        return RecurrentSteps(self)

    # Sequences for the policy

    def draws(self, step_size: int, batch_size: int) -> tuple[Iterator[th.Tensor], int]:
        """
        Draw the minibatches of one epoch as RecurrentPPO does: the samples of all environments, one environment after the
        other, rotated by a random number. Sequences may end anywhere, and are found in them later.
        """
        n_samples = self.rows.n_steps * self.rows.n_envs
        indices = np.roll(np.arange(n_samples), -np.random.randint(n_samples))
        return iter(th.from_numpy(indices).split(step_size)), 1

    def inputs(self, indices: th.Tensor, length: int) -> RecurrentSequences:
        rows, on_host = self.rows, indices.cpu().numpy()
        environments, steps = np.divmod(on_host, rows.n_steps)
        starts = self._starts_on_host()[steps, environments]
        begins = np.flatnonzero(np.r_[True, (np.diff(on_host) != 1) | (steps[1:] == 0) | (starts[1:] > 0)])
        indices_of = (steps * rows.n_envs + environments, steps[begins], environments[begins])
        at, first_steps, of = together(rows.device, *indices_of)
        at = at.to(rows.storage)
        return RecurrentSequences(
            map_observations(lambda part: part.flatten(0, 1)[at].to(rows.device), rows.observations),
            np.diff(np.r_[begins, len(on_host)]),
            rows.starts.to(rows.device)[first_steps, of],
            self._states_of(first_steps, of),
        )

    def after(self, rows: th.Tensor, observations: PyTorchObs, starts: th.Tensor) -> RecurrentSequences:
        """:return: Sequences of one step each"""
        n_envs, device = self.rows.n_envs, self.rows.device
        states = self._states_of((rows // n_envs + 1).to(device), (rows % n_envs).to(device))
        return RecurrentSequences(observations, np.ones(len(rows), np.int64), starts.to(device).float(), states)

    def _starts_on_host(self) -> np.ndarray:
        if self._starts is None:
            self._starts = self.rows.starts.cpu().numpy()
        return self._starts

    def _states_of(self, steps: th.Tensor, environments: th.Tensor) -> RecurrentStates:
        self._take_back()
        # Shape (n, n_networks, n_states, n_layers, n_units)
        found = self.states[steps, :, :, :, environments]
        networks = [tuple(network) for network in found.movedim(0, -2).contiguous()]
        return RecurrentStates(networks[0], networks[-1])


class RecurrentSteps(Stepper):
    """
    Passes the states of a recurrent policy from step to step, and keeps them.

    :param memory: Memory with the states before the first step
    """

    def __init__(self, memory: StateMemory):
        self.memory = memory
        self.states = memory.states_at(0)
        self.starts: th.Tensor | None = None

    def __call__(self, policy: nn.Module, observations: object, starts: object, step: int) -> Output:
        self.starts = th.as_tensor(starts).to(self.memory.rows.device, th.float32)
        actions, values, log_probs, self.states = policy(observations, self.states, self.starts)
        self.memory.keep_states(step + 1, self.states)
        return actions, values, log_probs

    def further_locals(self) -> dict[str, object]:
        """:return: States after the step and starts of episodes, with the names of RecurrentPPO"""
        return {"lstm_states": self.states, "episode_starts": self.starts}

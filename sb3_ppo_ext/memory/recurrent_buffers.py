"""Rollout buffers for recurrent policies: they keep the states of the networks before each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.type_aliases import PyTorchObs, RolloutBufferSamples

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.memory.history import HistoryBuffer
from sb3_ppo_ext.memory.recurrence import RecurrentSequences, RecurrentStates, State


class RecurrentBufferMixin(HistoryBuffer):
    """
    A rollout buffer that also keeps the states of recurrent networks before each step and after the last one, and returns
    :class:`~sb3_ppo_ext.memory.recurrence.RecurrentSequences` as observations. A sequence ends where its episode ends, where
    the rollout of its environment ends, or where the samples are not successive.

    :param args: Positional arguments of ``RolloutBuffer``
    :param state_shape: Numbers of networks (actor, and critic if it has its own), of states of each (hidden state, and cell
        state of an LSTM), of layers, and of hidden units
    :param kwargs: Keyword arguments of ``RolloutBuffer``
    """

    flattened = ("observations", *HistoryBuffer.flattened)
    keeps_float32 = False
    # Step of the rollout, and the states before it that user code has got to see
    _shown: tuple[int, RecurrentStates] | None = None

    def __init__(self, *args: Any, state_shape: tuple[int, int, int, int], **kwargs: Any):
        self.state_shape = state_shape
        # States before each step and after the last one, shape (n_steps + 1, n_networks, n_states, n_layers, n_envs, n_units)
        self.states: Any = None
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        """Clear the rollout. The states after its last step are those before the first step of the next one."""
        if self.states is None:
            *before, n_units = self.state_shape
            self.states = np.zeros((self.buffer_size + 1, *before, self.n_envs, n_units), np.float32)
        else:
            self.set_memory(self.memory())
        super().reset()

    @property
    def n_evaluated(self) -> int:
        """Number of steps of an environment, which are evaluated from the states at the begin of the rollout."""
        return self.buffer_size

    def memory(self) -> list[Any]:
        """:return: Copy of the states after the last step"""
        self._take_back()
        return [self.states[self.pos].copy()]

    def set_memory(self, memory: list[Any]) -> None:
        """
        :param memory: States before the first step, from :meth:`memory`
        """
        self._shown = None
        (self.states[0],) = memory

    def keep_states(self, step: int, states: RecurrentStates) -> None:
        """
        :param step: Index of the step of the rollout that follows these states
        :param states: States of all environments
        """
        self._take_back()
        for row, state in zip(self.states[step], states, strict=False):  # the critic may have no states of its own
            for kept, part in zip(row, state, strict=True):
                kept[:] = part.cpu().numpy()

    def states_before(self, step: int) -> RecurrentStates:
        """
        :param step: Index of a step of the rollout
        :return: States of all environments before this step, on the device
        """
        self._take_back()
        return self._on_device(self.states[step])

    @property
    def last_states(self) -> RecurrentStates:
        """
        States of all environments after the last step, on the device. They may be assigned, or changed in place before the
        next step.
        """
        if self._shown is None or self._shown[0] != self.pos:
            self._shown = self.pos, self.states_before(self.pos)
        return self._shown[1]

    @last_states.setter
    def last_states(self, states: RecurrentStates) -> None:
        own = [part.shape for state in self.last_states for part in state]
        given = [part.shape for state in states for part in state]
        if own != given:
            refuse("_last_lstm_states", given, f"give states of the shapes {own}")
        self._shown = None
        self.keep_states(self.pos, states)

    def _take_back(self) -> None:
        """Keep the states that were shown, which user code may have changed in place."""
        if self._shown is not None:
            (step, states), self._shown = self._shown, None
            self.keep_states(step, states)

    def _on_device(self, states: np.ndarray) -> RecurrentStates:
        """States of shape ``(n_networks, n_states, n_layers, n, n_units)`` as tensors."""
        networks: list[State] = [tuple(self.to_torch(part) for part in network) for network in states]
        return RecurrentStates(networks[0], networks[-1])

    def _states_of(self, steps: np.ndarray, environments: np.ndarray) -> RecurrentStates:
        self._take_back()
        states = np.moveaxis(self.states[steps, ..., environments, :], 0, -2)
        return self._on_device(np.ascontiguousarray(states))

    # Sequences for the policy

    def draws(self, step_size: int) -> Iterator[np.ndarray]:
        """
        Draw the minibatches of one epoch as RecurrentPPO does: the samples of all environments, one environment after the
        other, rotated by a random number.

        :param step_size: Number of samples in one step of the optimiser
        :return: Indices of the samples of each step
        """
        n_samples = self.buffer_size * self.n_envs
        indices = np.roll(np.arange(n_samples), -np.random.randint(n_samples))
        return (indices[start : start + step_size] for start in range(0, n_samples, step_size))

    def sequences_of(self, indices: np.ndarray) -> RecurrentSequences:
        """
        :param indices: Indices of samples in the flattened rollout, ``env * buffer_size + step``, shape ``(n_samples,)``
        :return: Sequences with these samples, in this order
        """
        environments, steps = np.divmod(indices, self.buffer_size)
        starts = self.episode_starts[steps, environments]
        begins = np.flatnonzero(np.r_[True, (np.diff(indices) != 1) | (steps[1:] == 0) | (starts[1:] > 0)])
        return RecurrentSequences(
            map_observations(lambda part: self.to_torch(part[indices], copy=False), self.observations),
            np.diff(np.r_[begins, len(indices)]),
            self.to_torch(starts[begins]),
            self._states_of(steps[begins], environments[begins]),
        )

    def sequences_after(
        self, steps: np.ndarray, environments: np.ndarray, observations: PyTorchObs, starts: np.ndarray
    ) -> RecurrentSequences:
        """
        :param steps: Indices of steps in the rollout, shape ``(n,)``
        :param environments: Index of the environment of each step, shape ``(n,)``
        :param observations: Observations that follow these steps, on the device, shape ``(n, *obs_shape)``
        :param starts: Whether each observation begins an episode, shape ``(n,)``
        :return: Sequences of one step each
        """
        states = self._states_of(steps + 1, environments)
        return RecurrentSequences(observations, np.ones(len(steps), np.int64), self.to_torch(starts).float(), states)

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> RolloutBufferSamples:
        actions = self.actions[batch_inds]
        if actions.dtype != np.float64:  # which RecurrentPPO computes with
            actions = actions.astype(np.float32, copy=False)
        return RolloutBufferSamples(
            self.sequences_of(batch_inds),  # type: ignore[arg-type]
            self.to_torch(actions, copy=False),
            *(
                self.to_torch(array[batch_inds].flatten())
                for array in (self.values, self.log_probs, self.advantages, self.returns)
            ),
        )


class RecurrentRolloutBuffer(RecurrentBufferMixin, RolloutBuffer):
    """See :class:`RecurrentBufferMixin`."""


class RecurrentDictRolloutBuffer(RecurrentBufferMixin, DictRolloutBuffer):  # type: ignore[misc]
    """See :class:`RecurrentBufferMixin`."""

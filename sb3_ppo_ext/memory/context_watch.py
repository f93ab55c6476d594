"""A warning about episodes that are longer than what a history-based policy sees."""

from __future__ import annotations

import warnings

import numpy as np


class ContextWatch:
    """
    Measures the episodes of successive rollouts, and warns once if any are longer than the context of the policy. A context of
    one step is a policy without memory, for which there is no warning.

    :param context_length: Number of observations that the policy sees, including the current one
    :param n_envs: Number of environments
    """

    def __init__(self, context_length: int, n_envs: int):
        self.context_length = context_length
        self.has_warned = context_length == 1
        # Number of steps of the current episodes
        self.ages = np.zeros(n_envs, np.int64)

    def note(self, starts: np.ndarray, dones: np.ndarray, num_timesteps: int) -> None:
        """
        :param starts: Whether each step of the rollout began an episode, shape ``(n_steps, n_envs)``
        :param dones: Whether the last step ended an episode, shape ``(n_envs,)``
        :param num_timesteps: Number of timesteps trained before the rollout, for the message
        """
        if self.has_warned:
            return
        lengths = self._finished(starts.astype(bool), np.asarray(dones, bool))
        n_longer = np.count_nonzero(lengths > self.context_length)
        if n_longer > 0:
            self.has_warned = True
            warnings.warn(
                f"In the rollout after {num_timesteps} timesteps, {n_longer} of {len(lengths)} finished episodes were longer "
                f"than context_length={self.context_length}, the longest one {lengths.max()} steps: the policy does not see "
                "what came before. If it has to remember that, give a larger `context_length` in `policy_kwargs`, or train an "
                "LSTM (`MlpLstmPolicy`). Otherwise ignore this warning, which is not repeated.",
                UserWarning,
                stacklevel=2,
            )

    def _finished(self, starts: np.ndarray, dones: np.ndarray) -> np.ndarray:
        """Lengths of the episodes that ended in the rollout, shape ``(n_finished,)``."""
        steps = np.arange(len(starts))[:, np.newaxis]
        first = np.maximum.accumulate(np.where(starts, steps, -self.ages), axis=0)
        lengths = steps - first + 1
        self.ages = lengths[-1]
        return lengths[np.concatenate([starts[1:], dones[np.newaxis]])]

"""What a policy with a memory knows while a rollout is collected."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.memory.sequences import SequenceBufferMixin
from sb3_ppo_ext.memory.transformer import Cache


class RolloutMemory:
    """
    Evaluates a policy with a memory step by step. Each step is computed once, unless the parameters change in the middle of
    the rollout: then the steps that the policy can still see are computed again.

    :param policy: With a transformer
    :param buffer: Into which the rollout goes
    """

    def __init__(self, policy: Any, buffer: SequenceBufferMixin):
        self.policy, self.buffer = policy, buffer
        self.parameters, self.version = list(policy.parameters()), -1

    def act(self, observations: PyTorchObs, starts: np.ndarray, step: int) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        :param observations: On the device of the policy, shape ``(n_envs, *obs_shape)``
        :param starts: Whether they begin an episode, shape ``(n_envs,)``
        :param step: Of the rollout
        :return: Actions, values and log probabilities, as ``forward`` of SB3's policies
        """
        version = sum(parameter._version for parameter in self.parameters)
        if version != self.version:
            self.version = version
            self._begin(step)
        self.buffer.keep_observations(step, map_observations(lambda part: part.cpu().numpy(), observations), starts)
        return self.policy.act(self.buffer.sequences_at(step), self.caches)

    def keep_outcome(self, actions: np.ndarray, rewards: np.ndarray, step: int) -> None:
        """
        :param actions: As the environments got them, shape ``(n_envs, *action_shape)``
        :param rewards: What they gave for them, shape ``(n_envs,)``
        :param step: Of the rollout
        """
        encoded = self.policy.encode_actions(actions) if self.policy.use_last_action else None
        self.buffer.keep_outcome(step, encoded, rewards)

    def _begin(self, step: int) -> None:
        buffer, transformers = self.buffer, self.policy.transformers()
        capacity = buffer.n_before + buffer.buffer_size - step
        self.caches = [Cache(transformer, buffer.n_envs, capacity) for _, transformer in transformers]
        if buffer.n_before == 0:
            return
        inputs: list[list[th.Tensor]] = [[] for _ in transformers]
        episodes = []
        for sequences in buffer.sequences_before(step):
            episodes.append(sequences.episodes)
            for parts, (extractor, _) in zip(inputs, transformers, strict=True):
                parts.append(self.policy.inputs(sequences, extractor))
        for parts, (_, transformer), cache in zip(inputs, transformers, self.caches, strict=True):
            transformer(th.cat(parts), th.cat(episodes), cache)

"""
From the outputs of a policy's output layer to samples, as functions of the outputs and of given random numbers, so that they
can be part of a graph.
"""

from __future__ import annotations

import copy
from typing import Any, Literal, NamedTuple

import torch as th
from torch import nn


class Noise(NamedTuple):
    """
    Random numbers of a sample.

    :param name: Name
    :param kind: Their distribution: standard normal, or uniform on (0, 1)
    :param shape: Shape without the dimension of the batch
    """

    name: str
    kind: Literal["normal", "uniform"]
    shape: tuple[int, ...]


class Head(nn.Module):
    """
    Samples of an action distribution.

    :param distribution: Action distribution of the policy
    :param log_std: Parameter ``log_std`` of the policy, ``None`` if it has none
    :param n_latents: Number of inputs of the output layer
    """

    log_std: th.Tensor

    def __init__(self, distribution: Any, log_std: th.Tensor | None = None, n_latents: int = 0):
        super().__init__()
        # A copy: what is computed here must not stay in the policy.
        self.distribution = copy.copy(distribution)
        self.n_latents = n_latents
        if log_std is not None:
            self.register_buffer("log_std", log_std.detach().clone())

    def noise(self) -> list[Noise]:
        """:return: Random numbers of one sample"""
        raise NotImplementedError

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        """
        :param outputs: Outputs of the output layer, shape ``(batch_size, n_outputs)``
        :return: Deterministic samples, as the rollout buffer stores samples, shape ``(batch_size, n_actions)``
        """
        raise NotImplementedError

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        """
        :param outputs: Outputs of the output layer, shape ``(batch_size, n_outputs)``
        :param latents: Inputs of the output layer, shape ``(batch_size, n_latents)``
        :param noise: Random numbers for :meth:`noise`
        :return: Samples, shape ``(batch_size, n_actions)``
        """
        raise NotImplementedError

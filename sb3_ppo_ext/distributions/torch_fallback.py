"""Fallback for action distributions without a NumPy implementation of their own: it calls PyTorch."""

import numpy as np
import torch as th
from stable_baselines3.common.distributions import Distribution
from torch import nn

from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.distributions.base import NumpyDistribution, Sampler
from sb3_ppo_ext.distributions.colored_noise import sampling_with


class TorchFallback(NumpyDistribution):
    """
    NumPy interface of any action distribution of SB3 or of this package, with gradients by autograd.

    :param distribution: Action distribution of the policy
    :param log_std: Parameter ``log_std`` of the policy, ``None`` if it has none
    :param transform: Module that the policy applies to the outputs of its output layer, ``None`` if there is none
    """

    def __init__(self, distribution: Distribution, log_std: nn.Parameter | None, transform: nn.Module | None = None):
        super().__init__(distribution, log_std)
        self.action_dist, self.transform = distribution, transform

    def sampler(self) -> Sampler | None:
        return None

    def with_normal(self, noise: Arrays, normal: np.ndarray) -> np.ndarray:
        return normal

    def sample(self, outputs: np.ndarray, noise: Arrays) -> np.ndarray:
        if (sampler := self.sampler()) is not None:
            return sampler(outputs, noise)
        normal = None if noise is None else th.from_numpy(noise)
        with th.no_grad(), sampling_with(self, normal):
            return self.make(th.from_numpy(outputs)).sample().numpy()

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        self.outputs = th.from_numpy(outputs).requires_grad_()
        self.made = self.make(self.outputs)
        self.log_probs = self.made.log_prob(th.from_numpy(actions))
        return self.log_probs.detach().numpy()

    def make(self, outputs: th.Tensor, log_std: th.Tensor | None = None) -> Distribution:
        return super().make(outputs if self.transform is None else self.transform(outputs), log_std)

    def _gradients(self, d_log_prob: np.ndarray, ent_coef: float) -> tuple[np.ndarray, np.ndarray | None]:
        loss = self.log_probs @ th.from_numpy(d_log_prob)
        if ent_coef != 0:
            entropies = self.made.entropy()
            assert entropies is not None
            loss = loss - ent_coef * entropies.mean()
        if self.log_std is None or not self.log_std.requires_grad:
            (d_outputs,) = th.autograd.grad(loss, [self.outputs])
            return d_outputs.numpy(), None
        d_outputs, d_log_std = th.autograd.grad(loss, [self.outputs, self.log_std])
        return d_outputs.numpy(), d_log_std.numpy()

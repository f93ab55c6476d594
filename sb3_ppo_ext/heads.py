"""
What the last layer of a policy says about the action: densities, samples and gradients in NumPy for SB3's Gaussian and
categorical distributions, where PyTorch would spend most of its time on calls; any other distribution goes through PyTorch.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution, Distribution
from torch import nn

from sb3_ppo_ext.distributions import BoundedDistribution

LOG_2_PI = math.log(2 * math.pi)


class Head(ABC):
    """
    :param distribution: SB3's, of the policy
    :param log_std: The policy's parameter of this name, if its distribution has one
    """

    def __init__(self, distribution: Distribution, log_std: nn.Parameter | None):
        self.distribution = distribution
        self.log_std = log_std
        # The gradient of the parameter, where there is one
        self.d_log_std = None if log_std is None else np.zeros(log_std.shape, log_std.detach().numpy().dtype)

    @abstractmethod
    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> Any:
        """
        :param n_steps: Of a rollout
        :param n_envs: Environments
        :param n_outputs: Of the last layer
        :return: Random numbers for each step, what :meth:`sample` takes
        """

    @abstractmethod
    def sample(self, outputs: np.ndarray, noise: Any) -> np.ndarray:
        """
        :param outputs: Of the last layer, shape ``(n_envs, n_outputs)``
        :param noise: Of one step
        :return: What the buffer keeps of the actions, shape ``(n_envs, action_dim)``, or ``(n_envs,)`` if it is discrete
        """

    @abstractmethod
    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """
        :param outputs: Shape ``(batch_size, n_outputs)``
        :param actions: As in the buffer, shape ``(batch_size, action_dim)``
        :return: Shape ``(batch_size,)``
        """

    @abstractmethod
    def entropy_loss(self) -> float:
        """
        :return: SB3's, for what :meth:`log_prob` was last called with
        """

    def law(self) -> th.Tensor | None:
        """
        :return: The parameters of a bounded distribution, for what :meth:`log_prob` was last called with
        """
        return None

    @abstractmethod
    def gradient(self, d_log_prob: np.ndarray, ent_coef: float) -> np.ndarray:
        """
        Of a loss which depends on the log probabilities that :meth:`log_prob` returned last, plus ``ent_coef`` times the
        entropy loss. That for ``log_std`` is written to :attr:`d_log_std`.

        :param d_log_prob: Derivatives of the loss, shape ``(batch_size,)``
        :param ent_coef: Coefficient
        :return: The gradient of the outputs, shape ``(batch_size, n_outputs)``
        """


class GaussianHead(Head):
    """Independent Gaussians around the outputs."""

    d_log_std: np.ndarray

    def __init__(self, distribution: Distribution, log_std: nn.Parameter):
        super().__init__(distribution, log_std)
        self.log_stds = log_std.detach().numpy()
        self.halves = np.full(len(self.log_stds), -0.5, np.float32)

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> np.ndarray:
        noise = th.randn(n_steps, n_envs, n_outputs).numpy()
        noise *= np.exp(self.log_stds)
        return noise

    def sample(self, outputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return outputs + noise

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        self.inverse_std = np.exp(-self.log_stds)
        self.z = (actions - outputs) * self.inverse_std
        self.squares = self.z * self.z
        return self.squares @ self.halves - np.float32(self.log_stds.sum() + 0.5 * len(self.log_stds) * LOG_2_PI)

    def entropy_loss(self) -> float:
        return -float(self.log_stds.sum()) - len(self.log_stds) * (0.5 + 0.5 * LOG_2_PI)

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float) -> np.ndarray:
        self.d_log_std[:] = d_log_prob @ self.squares - (d_log_prob.sum() + ent_coef)
        return d_log_prob[:, np.newaxis] * self.z * self.inverse_std


class CategoricalHead(Head):
    """One of several actions, by its logit."""

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> np.ndarray:
        # The largest of logits with Gumbel noise is a sample.
        return -th.empty(n_steps, n_envs, n_outputs).exponential_().log_().numpy()

    def sample(self, outputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return (outputs + noise).argmax(axis=1)

    # Arrays of shape (n_actions, batch_size): NumPy is fast along the first dimension, and slow along a short last one.

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        logits = outputs.T.copy()
        logits -= np.maximum.reduce(logits)
        self.probabilities = np.exp(logits)
        sums = np.add.reduce(self.probabilities)
        self.probabilities /= sums
        self.log_probabilities = np.subtract(logits, np.log(sums), out=logits)
        self.taken = (actions[:, 0].astype(np.int64), np.arange(len(actions)))
        return self.log_probabilities[self.taken]

    def entropy_loss(self) -> float:
        return float(np.vdot(self.probabilities, self.log_probabilities)) / self.probabilities.shape[1]

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float) -> np.ndarray:
        gradient = self.probabilities * -d_log_prob
        gradient[self.taken] += d_log_prob
        if ent_coef != 0:
            weighted = self.probabilities * self.log_probabilities
            weighted -= self.probabilities * np.add.reduce(weighted)
            gradient += weighted * np.float32(ent_coef / weighted.shape[1])
        return np.ascontiguousarray(gradient.T)


class TorchHead(Head):
    """
    Any distribution of SB3's and ours.

    :param transform: What is applied to the outputs before, if anything
    """

    def __init__(self, distribution: Distribution, log_std: nn.Parameter | None, transform: nn.Module | None = None):
        super().__init__(distribution, log_std)
        self.transform = transform

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> list[None]:
        return [None] * n_steps

    def sample(self, outputs: np.ndarray, noise: None) -> np.ndarray:
        with th.no_grad():
            return self.make(th.from_numpy(outputs)).sample().numpy()

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        self.outputs = th.from_numpy(outputs).requires_grad_()
        self.made = self.make(self.outputs)
        self.log_probs = self.made.log_prob(th.from_numpy(actions))
        self.entropies = self.made.entropy()
        return self.log_probs.detach().numpy()

    def make(self, outputs: th.Tensor) -> Distribution:
        """
        :param outputs: Of the last layer, shape ``(batch_size, n_outputs)``
        :return: The distribution
        """
        if self.transform is not None:
            outputs = self.transform(outputs)
        own = () if self.log_std is None else (self.log_std,)
        return self.distribution.proba_distribution(outputs, *own)

    def law(self) -> th.Tensor | None:
        return self.made.parameters().detach() if isinstance(self.made, BoundedDistribution) else None

    def entropy_loss(self) -> float:
        entropies = -self.log_probs if self.entropies is None else self.entropies
        return -entropies.mean().item()

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float) -> np.ndarray:
        loss = self.log_probs @ th.from_numpy(d_log_prob)
        if ent_coef != 0:
            loss = loss - ent_coef * (-self.log_probs if self.entropies is None else self.entropies).mean()
        of = [self.outputs] if self.log_std is None or not self.log_std.requires_grad else [self.outputs, self.log_std]
        gradients = th.autograd.grad(loss, of)
        if self.d_log_std is not None and len(of) > 1:
            self.d_log_std[:] = gradients[1]
        return gradients[0].numpy()


def make_head(distribution: Distribution, log_std: nn.Parameter | None, transform: nn.Module | None = None) -> Head:
    """
    :param distribution: SB3's, of the policy
    :param log_std: The policy's parameter of this name, if its distribution has one
    :param transform: What is applied to the outputs of the last layer before, if anything
    :return: The fastest that there is
    """
    if transform is None and type(distribution) is DiagGaussianDistribution and log_std is not None:
        return GaussianHead(distribution, log_std)
    if transform is None and type(distribution) is CategoricalDistribution:
        return CategoricalHead(distribution, log_std)
    return TorchHead(distribution, log_std, transform)

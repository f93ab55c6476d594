"""
What the last layer of a policy says about the action: densities, samples and gradients in NumPy for the usual distributions,
where PyTorch would spend most of its time on calls; any other one goes through PyTorch.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution, Distribution
from torch import nn

from sb3_ppo_ext.distributions import (
    EDGE,
    LOG_STD_RANGE,
    BoundedBetaDistribution,
    BoundedDistribution,
    TanhGaussianDistribution,
)

LOG_2, LOG_2_PI = math.log(2), math.log(2 * math.pi)


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

    def pack(self) -> None:  # noqa: B027  # there may be none
        """Take over the value of the parameter, after it has changed."""

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
    def entropies(self, outputs: np.ndarray, log_stds: np.ndarray | None) -> np.ndarray:
        """
        :param outputs: Shape ``(n, n_outputs)``
        :param log_stds: Values of ``log_std`` for each of them, shape ``(n, action_dim)``
        :return: In nats, shape ``(n,)``
        """

    def laws(self, outputs: np.ndarray, log_stds: np.ndarray | None) -> th.Tensor | None:
        """
        :param outputs: Shape ``(n, n_outputs)``
        :param log_stds: Values of ``log_std`` for each of them, shape ``(n, action_dim)``
        :return: The parameters of bounded distributions, ``None`` for others
        """
        if not isinstance(self.distribution, BoundedDistribution):
            return None
        with th.no_grad():
            return self._made(outputs, log_stds).parameters()

    def _made(self, outputs: np.ndarray, log_stds: np.ndarray | None) -> Any:
        own = () if log_stds is None else (th.from_numpy(log_stds),)
        return self.distribution.proba_distribution(th.from_numpy(outputs), *own)

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
        self.parameter = log_std.detach().numpy()
        self.halves = np.full(len(self.parameter), -0.5, np.float32)
        self.pack()

    def pack(self) -> None:
        self.log_stds = self.parameter.copy()

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

    def entropies(self, outputs: np.ndarray, log_stds: np.ndarray | None) -> np.ndarray:
        assert log_stds is not None
        return np.add.reduce(log_stds + np.float32(0.5 + 0.5 * LOG_2_PI), axis=1)

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float) -> np.ndarray:
        self.d_log_std[:] = d_log_prob @ self.squares - (d_log_prob.sum() + ent_coef)
        return d_log_prob[:, np.newaxis] * self.z * self.inverse_std


class TanhGaussianHead(GaussianHead):
    """Gaussians around the outputs, whose tanh is the action."""

    distribution: TanhGaussianDistribution

    def pack(self) -> None:
        self.log_stds = np.clip(self.parameter, *LOG_STD_RANGE)

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        self.outputs = outputs
        size = np.abs(actions)
        log_derivatives = (LOG_2 - size - np.log1p(np.exp(-2 * size))) @ (-4 * self.halves)
        return super().log_prob(outputs, actions) - log_derivatives

    def entropies(self, outputs: np.ndarray, log_stds: np.ndarray | None) -> np.ndarray:
        with th.no_grad():
            return self._made(outputs, log_stds).entropy().numpy()

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float) -> np.ndarray:
        gradient = super().gradient(d_log_prob, 0.0)
        if ent_coef != 0:
            outputs = th.from_numpy(self.outputs).requires_grad_()
            log_std = th.from_numpy(self.log_stds).requires_grad_()
            entropy_loss = -self.distribution.proba_distribution(outputs, log_std).entropy().mean()
            of_outputs, of_log_std = th.autograd.grad(ent_coef * entropy_loss, [outputs, log_std])
            gradient += of_outputs.numpy()
            self.d_log_std += of_log_std.numpy()
        # Beyond the range only what leads back into it counts.
        outwards = (self.parameter < LOG_STD_RANGE[0]) & (self.d_log_std > 0)
        outwards |= (self.parameter > LOG_STD_RANGE[1]) & (self.d_log_std < 0)
        self.d_log_std[outwards] = 0.0
        return gradient


class BetaHead(Head):
    """Beta distributions, see ``BoundedBetaDistribution``: of their log densities only the digamma function is PyTorch's."""

    distribution: BoundedBetaDistribution

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> list[None]:
        return [None] * n_steps

    def _excess(self, outputs: np.ndarray) -> np.ndarray:
        """What exceeds 1 of alpha and beta, shape ``(n, 2, action_dim)``; what its derivatives need is kept."""
        self.outputs = outputs.astype(np.float64).reshape(len(outputs), 2, -1)
        self.softplus = np.logaddexp(0.0, self.outputs)
        self.shrink = 1 / (1 + self.softplus.sum(axis=1, keepdims=True) / self.distribution.max_concentration)
        self.excess = self.softplus * self.shrink
        return self.excess

    def sample(self, outputs: np.ndarray, noise: None) -> np.ndarray:
        alpha, beta = 1 + self._excess(outputs).transpose(1, 0, 2)
        return np.clip(np.random.beta(alpha, beta), EDGE, 1 - EDGE).astype(np.float32)

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        x = np.clip(actions.astype(np.float64), EDGE, 1 - EDGE)
        self.logs = np.stack([np.log(x), np.log1p(-x)], axis=1)
        excess = self._excess(outputs)
        # alpha and beta, and their sum
        self.arguments = th.from_numpy(np.concatenate([1 + excess, 2 + excess.sum(axis=1, keepdims=True)], axis=1))
        log_gammas = th.lgamma(self.arguments).numpy()
        density = (excess * self.logs - log_gammas[:, :2]).sum(axis=1) + log_gammas[:, 2] - LOG_2
        return density.sum(axis=1).astype(outputs.dtype)

    def entropies(self, outputs: np.ndarray, log_stds: np.ndarray | None) -> np.ndarray:
        with th.no_grad():
            return self._made(outputs, None).entropy().numpy()

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float) -> np.ndarray:
        digammas = th.digamma(self.arguments).numpy()
        of_excess = (self.logs - digammas[:, :2] + digammas[:, 2:]) * d_log_prob[:, np.newaxis, np.newaxis]
        if ent_coef != 0:
            trigammas = th.polygamma(1, self.arguments).numpy()
            sums = self.excess.sum(axis=1, keepdims=True) * trigammas[:, 2:]
            of_excess -= (sums - self.excess * trigammas[:, :2]) * (ent_coef / len(of_excess))
        # The excess is s / (1 + (s_alpha + s_beta) / c), where s is the softplus of the output.
        common = (of_excess * self.excess).sum(axis=1, keepdims=True) / self.distribution.max_concentration
        of_softplus = self.shrink * (of_excess - common)
        # Its derivative, the logistic function
        of_outputs = of_softplus * np.exp(self.outputs - self.softplus)
        return of_outputs.reshape(len(of_outputs), -1).astype(d_log_prob.dtype)


class CategoricalHead(Head):
    """One of several actions, by its logit."""

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> np.ndarray:
        # The largest of logits with Gumbel noise is a sample.
        return -th.empty(n_steps, n_envs, n_outputs).exponential_().log_().numpy()

    def sample(self, outputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return (outputs + noise).argmax(axis=1)

    # Arrays of shape (n_actions, batch_size): NumPy is fast along the first dimension, and slow along a short last one.

    def _probabilities(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = outputs.T.copy()
        logits -= np.maximum.reduce(logits)
        probabilities = np.exp(logits)
        sums = np.add.reduce(probabilities)
        probabilities /= sums
        return probabilities, np.subtract(logits, np.log(sums), out=logits)

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        self.probabilities, self.log_probabilities = self._probabilities(outputs)
        self.taken = (actions[:, 0].astype(np.int64), np.arange(len(actions)))
        return self.log_probabilities[self.taken]

    def entropies(self, outputs: np.ndarray, log_stds: np.ndarray | None) -> np.ndarray:
        probabilities, log_probabilities = self._probabilities(outputs)
        return -np.add.reduce(probabilities * log_probabilities)

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

    def _made(self, outputs: np.ndarray, log_stds: np.ndarray | None) -> Any:
        transformed = outputs if self.transform is None else self.transform(th.from_numpy(outputs)).numpy()
        return super()._made(transformed, log_stds)

    def entropies(self, outputs: np.ndarray, log_stds: np.ndarray | None) -> np.ndarray:
        with th.no_grad():
            entropies: Any = self._made(outputs, log_stds).entropy()
            return entropies.numpy()

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float) -> np.ndarray:
        loss = self.log_probs @ th.from_numpy(d_log_prob)
        if ent_coef != 0:
            entropies: Any = self.made.entropy()
            loss = loss - ent_coef * entropies.mean()
        of = [self.outputs] if self.log_std is None or not self.log_std.requires_grad else [self.outputs, self.log_std]
        gradients = th.autograd.grad(loss, of)
        if self.d_log_std is not None and len(of) > 1:
            self.d_log_std[:] = gradients[1]
        return gradients[0].numpy()


OF_GAUSSIANS: dict[type[Distribution], type[GaussianHead]] = {
    DiagGaussianDistribution: GaussianHead,
    TanhGaussianDistribution: TanhGaussianHead,
}
OTHERS: dict[type[Distribution], type[Head]] = {
    CategoricalDistribution: CategoricalHead,
    BoundedBetaDistribution: BetaHead,
}


def make_head(distribution: Distribution, log_std: nn.Parameter | None, transform: nn.Module | None = None) -> Head:
    """
    :param distribution: SB3's, of the policy
    :param log_std: The policy's parameter of this name, if its distribution has one
    :param transform: What is applied to the outputs of the last layer before, if anything
    :return: The fastest that there is
    """
    if transform is not None:
        return TorchHead(distribution, log_std, transform)
    if log_std is not None and type(distribution) in OF_GAUSSIANS:
        return OF_GAUSSIANS[type(distribution)](distribution, log_std)
    return OTHERS.get(type(distribution), TorchHead)(distribution, log_std)

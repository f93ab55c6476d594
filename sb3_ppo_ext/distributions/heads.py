"""
What the last layer of a policy says about the action: densities, samples and gradients in NumPy for the usual distributions,
where PyTorch would spend most of its time on calls; any other one goes through PyTorch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    StateDependentNoiseDistribution,
)
from torch import nn

from sb3_ppo_ext.distributions.torch_distributions import (
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

    # Whether the outputs are to be followed, in the same rows, by the latents that the last layer makes them of
    needs_latents = False

    def __init__(self, distribution: Distribution, log_std: nn.Parameter | None):
        self.distribution = distribution
        self.log_std = log_std
        # Its value and its gradient, where there is one
        self.parameter: Any = None if log_std is None else log_std.detach().numpy()
        self.d_log_std: Any = None if log_std is None else np.zeros_like(self.parameter)

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

    def described(self, outputs: np.ndarray) -> np.ndarray:
        """
        :param outputs: Those whose log probabilities were asked for last, shape ``(batch_size, n_outputs)``
        :return: What :meth:`entropies` and :meth:`laws` need of their distributions when the parameters have changed, one row
            for each
        """
        if self.log_std is None:
            return outputs
        described = np.empty((len(outputs), 2 * outputs.shape[1]), outputs.dtype)
        described[:, : outputs.shape[1]] = outputs
        described[:, outputs.shape[1] :] = self.parameter
        return described

    def entropies(self, described: np.ndarray) -> np.ndarray:
        """
        :param described: What :meth:`described` returned, any number of rows
        :return: In nats, shape ``(n,)``
        """
        with th.no_grad():
            entropies: Any = self._restored(described).entropy()
            return entropies.numpy()

    def parameters(self, described: np.ndarray) -> th.Tensor | None:
        """
        :param described: What :meth:`described` returned, any number of rows
        :return: The parameters of bounded distributions, ``None`` for others
        """
        if not isinstance(self.distribution, BoundedDistribution):
            return None
        with th.no_grad():
            return self._restored(described).parameters()

    def _restored(self, described: np.ndarray) -> Any:
        rows = th.from_numpy(described)
        return self.make(rows) if self.log_std is None else self.make(*rows.chunk(2, dim=1))

    def make(self, outputs: th.Tensor, log_std: th.Tensor | None = None) -> Distribution:
        """
        :param outputs: Of the last layer, shape ``(batch_size, n_outputs)``
        :param log_std: Instead of the parameter's value
        :return: The distribution
        """
        own = () if self.log_std is None else (self.log_std if log_std is None else log_std,)
        return self.distribution.proba_distribution(outputs, *own)

    @abstractmethod
    def gradient(self, d_log_prob: np.ndarray, ent_coef: float, accumulate: bool = False) -> np.ndarray:
        """
        Of a loss which depends on the log probabilities that :meth:`log_prob` returned last, plus ``ent_coef`` times the
        entropy loss. That for ``log_std`` is written to :attr:`d_log_std`.

        :param d_log_prob: Derivatives of the loss, shape ``(batch_size,)``
        :param ent_coef: Coefficient
        :return: The gradient of the outputs, shape ``(batch_size, n_outputs)``
        """


class GaussianHead(Head):
    """Independent Gaussians around the outputs."""

    def __init__(self, distribution: Distribution, log_std: nn.Parameter):
        super().__init__(distribution, log_std)
        self.halves = np.full(len(self.parameter), -0.5, np.float32)
        self.pack()

    def pack(self) -> None:
        self.log_stds = self.parameter.copy()

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> np.ndarray:
        return th.randn(n_steps, n_envs, n_outputs).numpy()

    def sample(self, outputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return outputs + noise * np.exp(self.log_stds)

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        self.inverse_std = np.exp(-self.log_stds)
        self.z = (actions - outputs) * self.inverse_std
        self.squares = self.z * self.z
        return self.squares @ self.halves - np.float32(self.log_stds.sum() + 0.5 * len(self.log_stds) * LOG_2_PI)

    def entropies(self, described: np.ndarray) -> np.ndarray:
        log_stds = described[:, len(self.log_stds) :]
        return np.add.reduce(log_stds + np.float32(0.5 + 0.5 * LOG_2_PI), axis=1)

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float, accumulate: bool = False) -> np.ndarray:
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

    def entropies(self, described: np.ndarray) -> np.ndarray:
        return Head.entropies(self, described)

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float, accumulate: bool = False) -> np.ndarray:
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


class StateDependentHead(Head):
    """
    gSDE: Gaussians around the first outputs. The others are the latents: the noise is a linear function of them, whose
    coefficients the distribution keeps until SB3 draws new ones. No gradient goes through them.
    """

    distribution: StateDependentNoiseDistribution
    needs_latents = True

    def __init__(self, distribution: StateDependentNoiseDistribution, log_std: nn.Parameter):
        super().__init__(distribution, log_std)
        self.n_actions = distribution.action_dim
        self.halves = np.full(self.n_actions, 0.5, np.float32)
        self.pack()

    def pack(self) -> None:
        # See `get_std`: the standard deviations of the coefficients, and their derivatives by the parameter
        self.stds = self.slopes = np.exp(self.parameter)
        if self.distribution.use_expln:
            positive, shifted = self.parameter > 0, 1 + self.distribution.epsilon + np.maximum(self.parameter, 0)
            self.stds = np.where(positive, 1 + np.log(shifted), self.stds)
            self.slopes = np.where(positive, 1 / shifted, self.slopes)
        # Without `full_std` there is one for all actions.
        self.coefficient_variances = np.repeat(np.square(self.stds), self.n_actions // self.stds.shape[1], axis=1)

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> list[None]:
        return [None] * n_steps

    def sample(self, outputs: np.ndarray, noise: None) -> np.ndarray:
        means, latents = self._split(outputs)
        with th.no_grad():
            actions = means + self.distribution.get_noise(th.from_numpy(latents)).numpy()
        return actions if self.distribution.bijector is None else np.tanh(actions)

    def make(self, outputs: th.Tensor, log_std: th.Tensor | None = None) -> Distribution:
        means, latents = self._split(outputs)
        own: Any = self.log_std if log_std is None else log_std
        return self.distribution.proba_distribution(means, own, latents)

    def _split(self, outputs: Any) -> tuple[Any, Any]:
        return outputs[:, : self.n_actions], outputs[:, self.n_actions :]

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        bijector = self.distribution.bijector
        log_derivatives: Any = 0.0
        if bijector is not None:
            unsquashed = bijector.inverse(th.from_numpy(actions))
            actions, log_derivatives = unsquashed.numpy(), bijector.log_prob_correction(unsquashed).sum(dim=1).numpy()
        means, latents = self._split(outputs)
        self.squares = np.square(latents)
        self.variances = self.squares @ self.coefficient_variances + self.distribution.epsilon
        self.errors = actions - means
        self.z_squares = np.square(self.errors) / self.variances
        log_stds, constant = np.log(self.variances) @ self.halves, 0.5 * self.n_actions * LOG_2_PI
        log_prob = -(self.z_squares @ self.halves) - log_stds - constant - log_derivatives
        # That of a squashed action has no closed form; SB3 estimates it from the action that was taken.
        self.last_entropies = -log_prob if bijector is not None else log_stds + (constant + 0.5 * self.n_actions)
        return log_prob

    def described(self, outputs: np.ndarray) -> np.ndarray:
        return self.last_entropies[:, np.newaxis]

    def entropies(self, described: np.ndarray) -> np.ndarray:
        return described[:, 0]

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float, accumulate: bool = False) -> np.ndarray:
        d_entropy = -ent_coef / len(d_log_prob)
        if self.distribution.bijector is not None:
            d_log_prob, d_entropy = d_log_prob - d_entropy, 0.0
        of_each = d_log_prob[:, np.newaxis]
        d_variances = (of_each * (self.z_squares - 1) + d_entropy) / (2 * self.variances)
        of_coefficients = self.squares.T @ d_variances
        if not self.distribution.full_std:
            of_coefficients = of_coefficients.sum(axis=1, keepdims=True)
        self.d_log_std[:] = of_coefficients * (2 * self.stds * self.slopes)
        return of_each * self.errors / self.variances


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

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float, accumulate: bool = False) -> np.ndarray:
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

    def entropies(self, described: np.ndarray) -> np.ndarray:
        probabilities, log_probabilities = self._probabilities(described)
        return -np.add.reduce(probabilities * log_probabilities)

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float, accumulate: bool = False) -> np.ndarray:
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

    def make(self, outputs: th.Tensor, log_std: th.Tensor | None = None) -> Distribution:
        return super().make(outputs if self.transform is None else self.transform(outputs), log_std)

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float, accumulate: bool = False) -> np.ndarray:
        loss = self.log_probs @ th.from_numpy(d_log_prob)
        if ent_coef != 0:
            entropies: Any = self.made.entropy()
            loss = loss - ent_coef * entropies.mean()
        of = [self.outputs] if self.log_std is None or not self.log_std.requires_grad else [self.outputs, self.log_std]
        gradients = th.autograd.grad(loss, of)
        if self.d_log_std is not None and len(of) > 1:
            self.d_log_std[:] = gradients[1]
        return gradients[0].numpy()


OF_GAUSSIANS: dict[type[Distribution], Callable[[Any, nn.Parameter], Head]] = {
    DiagGaussianDistribution: GaussianHead,
    TanhGaussianDistribution: TanhGaussianHead,
    StateDependentNoiseDistribution: StateDependentHead,
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

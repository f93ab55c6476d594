"""Beta distributions of the position of the action between its bounds (``action_dist="beta"``)."""

import copy
import math
from functools import partial
from typing import TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.distributions import sum_independent_dims
from torch import nn
from torch.distributions import Beta
from torch.nn import functional as F

from sb3_ppo_ext.common.namespaces import in_double, namespace
from sb3_ppo_ext.distributions.base import (
    EDGE,
    LOG_2,
    MAX_STATISTICS,
    NEAR,
    BoundedDistribution,
    DeterministicAction,
    NumpyDistribution,
    Sampler,
    at_least_float32,
)
from sb3_ppo_ext.distributions.head import Head, Noise

SelfBoundedBeta = TypeVar("SelfBoundedBeta", bound="BoundedBetaDistribution")

DETERMINISTIC_ACTIONS: tuple[DeterministicAction, ...] = ("mean", "mode")
# Initial bias of the output layer: alpha = beta = 1.31, with an entropy 0.02 nat below that of the uniform distribution
BETA_BIAS = -1.0
# Rounds of rejection sampling with random numbers that are given: each accepts with a probability of at least 0.95.
ROUNDS = 8


class BoundedBetaDistribution(BoundedDistribution):
    """
    Beta distributions of the position of the action between its bounds, which is the latent. Both parameters are at least 1,
    so that there is a single mode. Computations are in float64: in float32, the KL divergence of two concentrated
    distributions that are close to each other is off by many per cent.

    Papers: https://proceedings.mlr.press/v70/chou17a.html, https://arxiv.org/abs/2111.02202

    :param action_dim: Dimension of the action space
    :param deterministic_action: Action that ``get_actions(deterministic=True)`` returns, ``"mean"`` or ``"mode"``
    :param max_concentration: Upper limit of ``alpha + beta - 2``; 1000 leaves a standard deviation of 1.6 % of the width
    :raises ValueError: if ``deterministic_action`` is something else
    """

    latent_range = (0.0, 1.0)

    def __init__(self, action_dim: int, deterministic_action: DeterministicAction = "mean", max_concentration: float = 1000.0):
        if deterministic_action not in DETERMINISTIC_ACTIONS:
            raise ValueError(f'`deterministic_action={deterministic_action!r}` is not valid: give "mean" or "mode"')
        super().__init__(action_dim, deterministic_action)
        self.max_concentration = max_concentration

    def proba_distribution_net(self, latent_dim: int) -> nn.Linear:
        """
        :param latent_dim: Size of the last layer of the policy network (before the output layer)
        :return: Output layer, which computes the input of :meth:`proba_distribution`; initially the distributions are nearly
            uniform
        """
        layer = nn.Linear(latent_dim, 2 * self.action_dim)
        nn.init.constant_(layer.bias, BETA_BIAS)
        return layer

    def proba_distribution(self: SelfBoundedBeta, outputs: th.Tensor) -> SelfBoundedBeta:
        """
        ``alpha = 1 + softplus(output)``, and beta likewise. Where their sum becomes large, ``alpha - 1`` and ``beta - 1``
        are scaled down: smoothly, so that there is a gradient, and in proportion, so that the mode stays the same.

        :param outputs: Outputs of the output layer, first those for alpha, shape ``(batch_size, 2 * action_dim)``
        :return: The distribution itself
        """
        return self.of_excess(F.softplus(outputs.double()), at_least_float32(outputs).dtype)

    def of_excess(self: SelfBoundedBeta, excess: th.Tensor, dtype: th.dtype) -> SelfBoundedBeta:
        """
        :param excess: ``alpha - 1`` and ``beta - 1`` before their sum is limited, float64, shape
            ``(batch_size, 2 * action_dim)``
        :param dtype: Dtype of samples, log probabilities and entropies
        :return: The distribution itself
        """
        self.dtype = dtype
        alpha, beta = excess.chunk(2, dim=1)
        excess = excess / (1 + (alpha + beta) / self.max_concentration).repeat(1, 2)
        self.alpha, self.beta = (1 + excess).chunk(2, dim=1)
        # Kept, because alpha - 1 would lose small values to rounding.
        self._excess = excess.chunk(2, dim=1)
        return self

    @property
    def distribution(self) -> Beta:  # type: ignore[override]
        """PyTorch's distribution of the latent, created on access."""
        return Beta(self.alpha, self.beta, validate_args=False)

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        """
        :param actions: Latents x, from 0 to 1, shape ``(batch_size, action_dim)``
        :return: Log probabilities of the actions, shape ``(batch_size,)``
        """
        x = actions.double().clamp(EDGE, 1 - EDGE)
        alpha, beta = self._excess
        log_density = alpha * x.log() + beta * (-x).log1p() - _log_beta(self.alpha, self.beta) - math.log(2)
        return sum_independent_dims(log_density).to(self.dtype)

    def entropy(self) -> th.Tensor:
        """
        :return: Entropies, shape ``(batch_size,)``
        """
        alpha, beta = self._excess
        of_both = (alpha + beta) * th.digamma(self.alpha + self.beta)
        each = alpha * th.digamma(self.alpha) + beta * th.digamma(self.beta)
        entropy = _log_beta(self.alpha, self.beta) + of_both - each + math.log(2)
        return sum_independent_dims(entropy).to(self.dtype)

    def sample(self) -> th.Tensor:
        # The clamped and rounded sample is stored, and later evaluated.
        x = self.distribution.rsample().clamp(EDGE, 1 - EDGE)
        # The sampler does not propagate NaN.
        return th.where((self.alpha + self.beta).isnan(), th.nan, x).to(self.dtype)

    def mean(self) -> th.Tensor:
        """
        :return: Means of the latents, shape ``(batch_size, action_dim)``
        """
        return (self.alpha / (self.alpha + self.beta)).to(self.dtype)

    def mode(self) -> th.Tensor:
        """
        :return: Modes of the latents, shape ``(batch_size, action_dim)``; 0.5 where the distribution is uniform
        """
        alpha, beta = self._excess
        both = alpha + beta
        # Softplus underflows to 0 for very negative outputs.
        return th.where(both > 0, alpha / both, 0.5).to(self.dtype)

    def get_actions(self, deterministic: bool = False) -> th.Tensor:
        """
        :param deterministic: Whether to return the mean (the mode with ``deterministic_action="mode"``) instead of a sample
        :return: Latents, shape ``(batch_size, action_dim)``
        """
        if not deterministic:
            return self.sample()
        return self.mode() if self.deterministic_action == "mode" else self.mean()

    @staticmethod
    def position(latents: np.ndarray) -> np.ndarray:
        return latents

    @staticmethod
    def position_of_tensor(latents: th.Tensor) -> th.Tensor:
        return latents

    @staticmethod
    def latents(position: np.ndarray) -> np.ndarray:
        return np.clip(position, EDGE, 1 - EDGE)

    def parameters(self) -> th.Tensor:
        """
        :return: Alpha and beta, shape ``(batch_size, 2 * action_dim)``, float64
        """
        return th.cat([self.alpha, self.beta], dim=1)

    @staticmethod
    def statistics(parameters: th.Tensor) -> dict[str, float]:
        # Only some distributions, because the mass takes 32 evaluations of the density.
        parameters = parameters[:: math.ceil(len(parameters) / MAX_STATISTICS)].double().cpu()
        alpha, beta = parameters.chunk(2, dim=1)
        mass = _beta_mass_below(NEAR, alpha, beta) + _beta_mass_below(NEAR, beta, alpha)
        return {"mass_near_bounds": mass.mean().item(), "concentration": (alpha + beta).mean().item()}


def location(distribution: BoundedBetaDistribution) -> th.Tensor:
    """
    :param distribution: Beta distribution
    :return: Mean actions in units of the bounds, from -1 to 1, shape ``(batch_size, action_dim)``
    """
    return 2 * distribution.mean() - 1


def kl_divergence(old: th.Tensor, new: BoundedBetaDistribution) -> th.Tensor:
    """
    :param old: ``parameters`` of a Beta distribution, shape ``(batch_size, 2 * action_dim)``
    :param new: Beta distribution for the same observations
    :return: KL(old || new) in nats, shape ``(batch_size,)``
    """
    alpha, beta = old.double().chunk(2, dim=1)
    d_alpha, d_beta = alpha - new.alpha, beta - new.beta
    expected = d_alpha * th.digamma(alpha) + d_beta * th.digamma(beta) - (d_alpha + d_beta) * th.digamma(alpha + beta)
    divergences = _log_beta(new.alpha, new.beta) - _log_beta(alpha, beta) + expected
    return divergences.sum(dim=1).to(new.dtype)


class NumpyBeta(NumpyDistribution):
    """
    NumPy implementation of :class:`BoundedBetaDistribution`. PyTorch computes only the gamma function and its derivatives.
    """

    distribution: BoundedBetaDistribution

    def _excess(self, outputs: np.ndarray) -> np.ndarray:
        """Alpha - 1 and beta - 1, shape ``(n, 2, action_dim)``. Intermediate results are kept for the derivatives."""
        self.outputs = outputs.astype(np.float64).reshape(len(outputs), 2, -1)
        self.softplus, self.shrink = _softplus_and_shrink(self.outputs, self.distribution.max_concentration)
        self.excess = self.softplus * self.shrink
        return self.excess

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> np.ndarray:
        normal = th.randn(2, n_steps, n_envs, 2, n_outputs // 2, ROUNDS)
        # What the logarithm of a uniform number has to stay below, without the part that depends on the parameters
        normal[1] = th.rand(normal.shape[1:]).log_() - 0.5 * normal[0].square()
        return normal.movedim(0, 2).contiguous().numpy()

    def sampler(self) -> Sampler:
        return partial(sample_beta, max_concentration=self.distribution.max_concentration)

    def compiled(self) -> tuple[str, tuple[int, ...]]:
        return "beta", (2,) * self.distribution.action_dim

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        x = np.clip(actions.astype(np.float64), EDGE, 1 - EDGE)
        self.logs = np.stack([np.log(x), np.log1p(-x)], axis=1)
        excess = self._excess(outputs)
        # alpha and beta, and their sum
        self.arguments = th.from_numpy(np.concatenate([1 + excess, 2 + excess.sum(axis=1, keepdims=True)], axis=1))
        log_gammas = th.lgamma(self.arguments).numpy()
        density = (excess * self.logs - log_gammas[:, :2]).sum(axis=1) + log_gammas[:, 2] - LOG_2
        return density.sum(axis=1).astype(outputs.dtype)

    def _gradients(self, d_log_prob: np.ndarray, ent_coef: float) -> tuple[np.ndarray, None]:
        digammas = th.digamma(self.arguments).numpy()
        of_excess = (self.logs - digammas[:, :2] + digammas[:, 2:]) * d_log_prob[:, np.newaxis, np.newaxis]
        if ent_coef != 0:
            trigammas = th.polygamma(1, self.arguments).numpy()
            sums = self.excess.sum(axis=1, keepdims=True) * trigammas[:, 2:]
            of_excess -= (sums - self.excess * trigammas[:, :2]) * (ent_coef / len(of_excess))
        # The excess is s / (1 + (s_alpha + s_beta) / c), where s is the softplus of the output.
        common = (of_excess * self.excess).sum(axis=1, keepdims=True) / self.distribution.max_concentration
        of_softplus = self.shrink * (of_excess - common)
        # The derivative of softplus is the logistic function.
        of_outputs = of_softplus * np.exp(self.outputs - self.softplus)
        return of_outputs.reshape(len(of_outputs), -1).astype(d_log_prob.dtype), None


def _softplus_and_shrink(outputs: np.ndarray, max_concentration: float) -> tuple[np.ndarray, np.ndarray]:
    """The factors of alpha - 1 and beta - 1, for outputs of shape ``(n, 2, action_dim)``."""
    softplus = namespace(outputs).logaddexp(0.0, outputs)
    return softplus, 1 / (1 + softplus.sum(axis=1, keepdims=True) / max_concentration)


def sample_beta(outputs: np.ndarray, noise: np.ndarray, max_concentration: float) -> np.ndarray:
    """
    Quotients of two gamma-distributed numbers, by rejection sampling (Marsaglia and Tsang,
    https://doi.org/10.1145/358407.358414) with a fixed number of rounds. With a probability below 1e-10, none accepts, and the
    proposal of the first is taken.

    :param outputs: Outputs of the output layer, shape ``(n, 2 * action_dim)``
    :param noise: Standard normal x and log u - x^2 / 2 with a uniform u, shape ``(n, 2, 2, action_dim, ROUNDS)``
    :param max_concentration: Upper limit of ``alpha + beta - 2``
    :return: Samples, shape ``(n, action_dim)``
    """
    xp, outputs = namespace(outputs), in_double(outputs)
    softplus, shrink = _softplus_and_shrink(outputs.reshape(len(outputs), 2, -1), max_concentration)
    d = (softplus * shrink + 2 / 3)[..., np.newaxis]
    root = 1 + noise[:, 0] / xp.sqrt(9 * d)
    # The least has so low a logarithm that it is never accepted.
    v = xp.maximum(root * root * root, xp.finfo(d.dtype).tiny)
    accepted = (noise[:, 1] < d * (1 - v + xp.log(v))).reshape(-1, ROUNDS)
    gammas = (d * v).reshape(-1, ROUNDS)[xp.arange(len(accepted)), accepted.argmax(axis=1)]
    alpha, beta = gammas.reshape(d.shape[:-1]).transpose(1, 0, 2)
    samples: np.ndarray = xp.clip(alpha / (alpha + beta), EDGE, 1 - EDGE).astype(np.float32)
    return samples


def _log_beta(alpha: th.Tensor, beta: th.Tensor) -> th.Tensor:
    return th.lgamma(alpha) + th.lgamma(beta) - th.lgamma(alpha + beta)


def _beta_mass_below(end: float, alpha: th.Tensor, beta: th.Tensor) -> th.Tensor:
    """
    Probability of [0, end] for a small end, by Gauss-Legendre quadrature, because PyTorch has no incomplete beta function. The
    substitution ``x = end * t^2`` smooths the power of x at 0.
    """
    nodes, weights = (th.from_numpy(values) for values in np.polynomial.legendre.leggauss(16))
    t = (nodes + 1) / 2
    x = (end * t.square())[:, None, None]
    density = th.exp((alpha - 1) * x.log() + (beta - 1) * (-x).log1p() - _log_beta(alpha, beta))
    return end * th.einsum("i,ijk->jk", weights * t, density)


class BetaHead(Head):
    """
    Beta, from two gamma distributions with shapes of at least 1. Rejection sampling, https://doi.org/10.1145/358407.358414
    (Marsaglia and Tsang), with a fixed number of rounds: with a probability below 1e-10, none accepts, and the proposal of the
    last one is taken.
    """

    def _distribution(self, outputs: th.Tensor) -> BoundedBetaDistribution:
        # ONNX Runtime has no softplus in float64. A copy, since nothing of the graph must stay in the distribution.
        return copy.copy(self.distribution).of_excess(F.softplus(outputs).double(), th.float32)

    def noise(self) -> list[Noise]:
        shape = (2, self.distribution.action_dim, ROUNDS)
        return [Noise("noise", "normal", shape), Noise("uniform", "uniform", shape)]

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        distribution = self._distribution(outputs)
        return distribution.mode() if distribution.deterministic_action == "mode" else distribution.mean()

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        distribution = self._distribution(outputs)
        shapes = th.stack([distribution.alpha, distribution.beta], dim=1).unsqueeze(-1)
        normal, uniform = (each.double() for each in noise)
        d = shapes - 1 / 3
        v = (1 + normal / (9 * d).sqrt()) ** 3
        positive = v.clamp(min=1e-300)
        accepted = (v > 0) & (uniform.log() < 0.5 * normal**2 + d * (1 - v + positive.log()))
        # The first round that accepts, or the last one
        rounds = th.arange(ROUNDS, 0, -1, dtype=th.float64)
        chosen = (accepted * rounds + (rounds == 1) * 0.5).argmax(dim=-1, keepdim=True)
        gammas = (d * positive).gather(-1, chosen).squeeze(-1)
        position = gammas[:, 0] / (gammas[:, 0] + gammas[:, 1])
        return position.clamp(EDGE, 1 - EDGE).float()

"""
Action distributions that respect the bounds of a ``Box``, and what the losses need to know of SB3's own.

The two bounded ones stand on their own: they are SB3's ``Distribution``, for any code that works with these. What they
sample and evaluate is a *latent*, shape ``(batch_size, action_dim)``, which the parameters of the policy have no part in:
``position`` turns it into where the action lies between its bounds. Densities and entropies are those of the action in units
of the bounds (-1 at ``low``, 1 at ``high``), in nats, whatever the bounds are.
"""

import math
from abc import abstractmethod
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    StateDependentNoiseDistribution,
    sum_independent_dims,
)
from torch import nn
from torch.distributions import Bernoulli, Beta, Categorical, Normal
from torch.distributions import kl_divergence as torch_kl_divergence
from torch.nn import functional as F

SelfTanhGaussian = TypeVar("SelfTanhGaussian", bound="TanhGaussianDistribution")
SelfBoundedBeta = TypeVar("SelfBoundedBeta", bound="BoundedBetaDistribution")

# How near to a bound a Beta sample may be, as a share of the width: there, its logarithms would be infinite.
EDGE = 1e-6
# Of the squashed Gaussian, before the squashing: from a point to all the mass at the bounds
LOG_STD_RANGE = (-5.0, 2.0)
# What "near the bounds" means in the statistics, as a share of the width
NEAR = 0.01
# How many distributions the statistics are made of, out of any number
MAX_STATISTICS = 2048
# Where the head of a Beta starts: alpha = beta = 1.31, with an entropy of 0.02 nat below that of the uniform distribution
BETA_BIAS = -1.0
_GAUSSIAN = (DiagGaussianDistribution, StateDependentNoiseDistribution)
# log cosh(u) + log 2 is |u| smoothed by a logistic distribution, which is nearly this mixture of Gaussians: the weights and
# standard deviations give it to 9e-7 for all u (least squares, reweighted towards the largest error).
_LOGISTIC_WEIGHTS = (0.06414671, 0.1583854, 0.34971161, 0.41469906, 0.01305722)
_LOGISTIC_VARIANCES = tuple(std**2 for std in (0.46235241, 1.29235961, 0.65422092, 0.92111073, 1.80819375))


class BoundedDistribution(Distribution):
    """
    A distribution on a box.

    :param action_dim: Dimension of the action space
    """

    def __init__(self, action_dim: int):
        super().__init__()
        self.action_dim = action_dim

    @staticmethod
    @abstractmethod
    def position(latents: np.ndarray) -> np.ndarray:
        """
        :param latents: Samples, any shape
        :return: Where the actions lie between their bounds, from 0 (``low``) to 1 (``high``)
        """

    @staticmethod
    @abstractmethod
    def latents(position: np.ndarray) -> np.ndarray:
        """
        The inverse of :meth:`position`, but for actions closer than a millionth to a bound: for these, it is that of the
        nearest one.

        :param position: From 0 to 1, any shape
        :return: What stands for these actions in :meth:`log_prob`
        """

    @abstractmethod
    def parameters(self) -> th.Tensor:
        """
        :return: The numbers that define the distribution, shape ``(batch_size, 2 * action_dim)``
        """

    @staticmethod
    @abstractmethod
    def statistics(parameters: th.Tensor) -> dict[str, float]:
        """
        :param parameters: Of the distributions for many observations, as :meth:`parameters` returns them
        :return: What is worth logging: among it ``mass_near_bounds``, the share of the probability within 1 % of a bound
        """

    def actions_from_params(self, *args: Any, deterministic: bool = False) -> th.Tensor:
        return self.proba_distribution(*args).get_actions(deterministic)

    def log_prob_from_params(self, *args: Any) -> tuple[th.Tensor, th.Tensor]:
        latents = self.actions_from_params(*args)
        return latents, self.log_prob(latents)


class TanhGaussianDistribution(BoundedDistribution):
    """
    ``tanh(u)`` with u from a Gaussian, whose standard deviation does not depend on the observation. The latent is u, for
    the action itself would not tell it at the bounds: its density is exact however far out it is.

    Paper: https://arxiv.org/abs/1801.01290, appendix C

    :param action_dim: Dimension of the action space
    """

    distribution: Normal

    def proba_distribution_net(self, latent_dim: int, log_std_init: float = 0.0) -> tuple[nn.Module, nn.Parameter]:
        """
        :param latent_dim: Size of what the policy's network puts out
        :param log_std_init: Where the logarithm of the standard deviation starts
        :return: The layer that gives the means of u, and the logarithms of the standard deviations
        """
        return nn.Linear(latent_dim, self.action_dim), nn.Parameter(th.full((self.action_dim,), float(log_std_init)))

    def proba_distribution(self: SelfTanhGaussian, mean_actions: th.Tensor, log_std: th.Tensor) -> SelfTanhGaussian:
        """
        :param mean_actions: Means of u, shape ``(batch_size, action_dim)``
        :param log_std: Logarithms of its standard deviations, which count within ``LOG_STD_RANGE``
        :return: self
        """
        mean, log_std = _at_least_float32(mean_actions), clamp(_at_least_float32(log_std), *LOG_STD_RANGE)
        self.distribution = Normal(mean, log_std.exp().expand_as(mean), validate_args=False)
        return self

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        """
        :param actions: Latents u
        :return: Shape ``(batch_size,)``
        """
        return sum_independent_dims(self.distribution.log_prob(actions) - log_tanh_derivative(actions))

    def entropy(self) -> th.Tensor:
        """
        ``H(u) + E[log |d tanh(u) / du|]``, the expectation in closed form for a mixture of Gaussians that equals the
        logarithm to a millionth, at any mean and standard deviation.

        :return: Shape ``(batch_size,)``, with the gradient of the true entropy
        """
        normal = self.distribution
        weights, variances = _logistic_mixture(normal.mean.dtype, normal.mean.device)
        smoothed = _mean_of_absolute(normal.mean.unsqueeze(-1), (normal.variance.unsqueeze(-1) + variances).sqrt())
        # Not a matrix product, which autocast would make in half precision
        expected_log_cosh = (smoothed * weights).sum(dim=-1) - math.log(2)
        return sum_independent_dims(normal.entropy() - 2 * expected_log_cosh)

    def sample(self) -> th.Tensor:
        return self.distribution.rsample()

    def mode(self) -> th.Tensor:
        """
        :return: The u whose image is the median of the action, shape ``(batch_size, action_dim)``: the mean of u
        """
        return self.distribution.mean

    @staticmethod
    def position(latents: np.ndarray) -> np.ndarray:
        return (np.tanh(latents) + 1) / 2

    @staticmethod
    def latents(position: np.ndarray) -> np.ndarray:
        return np.arctanh(2 * np.clip(position, EDGE, 1 - EDGE) - 1)

    def parameters(self) -> th.Tensor:
        return th.cat([self.distribution.mean, self.distribution.stddev], dim=1)

    @staticmethod
    def statistics(parameters: th.Tensor) -> dict[str, float]:
        mean, std = parameters[:: math.ceil(len(parameters) / MAX_STATISTICS)].double().chunk(2, dim=1)
        near = math.atanh(1 - 2 * NEAR)
        mass = th.special.ndtr((-near - mean) / std) + th.special.ndtr((mean - near) / std)
        return {"mass_near_bounds": mass.mean().item(), "std": std.mean().item()}


class BoundedBetaDistribution(BoundedDistribution):
    """
    Beta distributions of where the action lies between its bounds, which is the latent. Both parameters are at least 1, so
    that there is one mode. The numbers are computed in float64: in float32 the KL divergence of two that are concentrated and
    close is off by many per cent.

    Papers: https://proceedings.mlr.press/v70/chou17a.html, https://arxiv.org/abs/2111.02202

    :param action_dim: Dimension of the action space
    :param deterministic_action: ``"mean"`` or ``"mode"``
    :param max_concentration: What ``alpha + beta - 2`` stays below; 1000 leaves a standard deviation of 1.6 % of the width
    :raises ValueError: if ``deterministic_action`` is something else
    """

    def __init__(self, action_dim: int, deterministic_action: str = "mean", max_concentration: float = 1000.0):
        super().__init__(action_dim)
        if deterministic_action not in ("mean", "mode"):
            raise ValueError(f'`deterministic_action={deterministic_action!r}` is not valid: give "mean" or "mode"')
        self.deterministic_action = deterministic_action
        self.max_concentration = max_concentration

    def proba_distribution_net(self, latent_dim: int) -> nn.Linear:
        """
        :param latent_dim: Size of what the policy's network puts out
        :return: The layer that gives what :meth:`proba_distribution` takes; at first nearly uniform distributions
        """
        head = nn.Linear(latent_dim, 2 * self.action_dim)
        nn.init.constant_(head.bias, BETA_BIAS)
        return head

    def proba_distribution(self: SelfBoundedBeta, head: th.Tensor) -> SelfBoundedBeta:
        """
        ``alpha = 1 + softplus(head)``, and so beta, both drawn back where their sum becomes large: smoothly, so that there
        is a gradient, and in proportion, so that the mode stays.

        :param head: Shape ``(batch_size, 2 * action_dim)``, first those of alpha
        :return: self
        """
        self.dtype = _at_least_float32(head).dtype
        excess = F.softplus(head.double())
        alpha, beta = excess.chunk(2, dim=1)
        excess = excess / (1 + (alpha + beta) / self.max_concentration).repeat(1, 2)
        self.alpha, self.beta = (1 + excess).chunk(2, dim=1)
        # alpha - 1 would lose what is small.
        self._excess = excess.chunk(2, dim=1)
        return self

    @property
    def distribution(self) -> Beta:  # type: ignore[override]
        """Torch's, of the latent, made when it is asked for."""
        return Beta(self.alpha, self.beta, validate_args=False)

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        """
        :param actions: Latents x, from 0 to 1
        :return: Shape ``(batch_size,)``
        """
        x = actions.double().clamp(EDGE, 1 - EDGE)
        alpha, beta = self._excess
        log_density = alpha * x.log() + beta * (-x).log1p() - _log_beta(self.alpha, self.beta) - math.log(2)
        return sum_independent_dims(log_density).to(self.dtype)

    def entropy(self) -> th.Tensor:
        """
        :return: Shape ``(batch_size,)``
        """
        alpha, beta = self._excess
        of_both = (alpha + beta) * th.digamma(self.alpha + self.beta)
        each = alpha * th.digamma(self.alpha) + beta * th.digamma(self.beta)
        entropy = _log_beta(self.alpha, self.beta) + of_both - each + math.log(2)
        return sum_independent_dims(entropy).to(self.dtype)

    def sample(self) -> th.Tensor:
        # What is rounded and clamped here is what is stored, and evaluated later on.
        x = self.distribution.rsample().clamp(EDGE, 1 - EDGE)
        # The sampler hides NaN.
        return th.where((self.alpha + self.beta).isnan(), th.nan, x).to(self.dtype)

    def mean(self) -> th.Tensor:
        """
        :return: Shape ``(batch_size, action_dim)``
        """
        return (self.alpha / (self.alpha + self.beta)).to(self.dtype)

    def mode(self) -> th.Tensor:
        """
        :return: Shape ``(batch_size, action_dim)``; the middle if the distribution is uniform
        """
        alpha, beta = self._excess
        both = alpha + beta
        # Softplus underflows to 0 somewhere.
        return th.where(both > 0, alpha / both, 0.5).to(self.dtype)

    def get_actions(self, deterministic: bool = False) -> th.Tensor:
        """
        :param deterministic: Whether to return the mean, or with ``deterministic_action="mode"`` the mode, not a sample
        :return: Latents
        """
        if not deterministic:
            return self.sample()
        return self.mode() if self.deterministic_action == "mode" else self.mean()

    @staticmethod
    def position(latents: np.ndarray) -> np.ndarray:
        return latents

    @staticmethod
    def latents(position: np.ndarray) -> np.ndarray:
        return np.clip(position, EDGE, 1 - EDGE)

    def parameters(self) -> th.Tensor:
        return th.cat([self.alpha, self.beta], dim=1)

    @staticmethod
    def statistics(parameters: th.Tensor) -> dict[str, float]:
        # The mass takes 32 evaluations of the density.
        parameters = parameters[:: math.ceil(len(parameters) / MAX_STATISTICS)].double().cpu()
        alpha, beta = parameters.chunk(2, dim=1)
        mass = _beta_mass_below(NEAR, alpha, beta) + _beta_mass_below(NEAR, beta, alpha)
        return {"mass_near_bounds": mass.mean().item(), "concentration": (alpha + beta).mean().item()}


def clamp(values: th.Tensor, low: float, high: float) -> th.Tensor:
    """
    ``values.clamp(low, high)`` for what is optimised: outside the range the gradient still leads back, where that of the
    usual clamp is 0 for good; it does not lead further out.

    :param values: Any shape
    :param low: Lower bound
    :param high: Upper bound
    :return: Within the bounds
    """
    return _Clamp.apply(values, low, high)


class _Clamp(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: th.Tensor, low: float, high: float) -> th.Tensor:
        ctx.save_for_backward(values)
        ctx.bounds = low, high
        return values.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: th.Tensor) -> Any:
        (values,), (low, high), (gradient,) = ctx.saved_tensors, ctx.bounds, gradients
        # A step goes against the gradient.
        outwards = ((values < low) & (gradient > 0)) | ((values > high) & (gradient < 0))
        return gradient.masked_fill(outwards, 0.0), None, None


def log_tanh_derivative(u: th.Tensor) -> th.Tensor:
    """
    ``log |d tanh(u) / du| = 2 (log 2 - u - softplus(-2 u))``, exact however large u is, where ``log(1 - tanh(u)^2)`` is not.

    :param u: Any shape
    :return: The same shape
    """
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


@cache
def _logistic_mixture(dtype: th.dtype, device: th.device) -> tuple[th.Tensor, th.Tensor]:
    """Weights and variances. Kept, for making them anew would have a GPU wait for the host."""
    with th.inference_mode(False):  # Tensors of that mode could not be used for training later on.
        weights, variances = (th.tensor(v, dtype=dtype, device=device) for v in (_LOGISTIC_WEIGHTS, _LOGISTIC_VARIANCES))
    return weights, variances


def _mean_of_absolute(mean: th.Tensor, std: th.Tensor) -> th.Tensor:
    """E[|u|] of a Gaussian."""
    z = mean / (math.sqrt(2) * std)
    return mean * th.erf(z) + math.sqrt(2 / math.pi) * std * th.exp(-z.square())


def _log_beta(alpha: th.Tensor, beta: th.Tensor) -> th.Tensor:
    return th.lgamma(alpha) + th.lgamma(beta) - th.lgamma(alpha + beta)


def _beta_mass_below(end: float, alpha: th.Tensor, beta: th.Tensor) -> th.Tensor:
    """
    The probability of [0, end], for a small end: torch has no incomplete Beta function. By Gauss-Legendre quadrature of
    ``x = end * t^2``, which smooths the power of x at 0.
    """
    nodes, weights = (th.from_numpy(values) for values in np.polynomial.legendre.leggauss(16))
    t = (nodes + 1) / 2
    x = (end * t.square())[:, None, None]
    density = th.exp((alpha - 1) * x.log() + (beta - 1) * (-x).log1p() - _log_beta(alpha, beta))
    return end * th.einsum("i,ijk->jk", weights * t, density)


def _at_least_float32(values: th.Tensor) -> th.Tensor:
    """Under autocast the networks put out half precision."""
    return values if values.dtype == th.float64 else values.float()


# What the losses need to know of a distribution, family by family


def parameters(distribution: Distribution) -> th.Tensor | None:
    """
    :param distribution: For a batch of observations
    :return: The numbers that define it, shape ``(batch_size, n)``: logits, means and standard deviations, or alpha and beta;
        ``None`` if the family has no KL divergence in closed form
    """
    if isinstance(distribution, BoundedDistribution):
        return distribution.parameters()
    if isinstance(distribution, MultiCategoricalDistribution):
        return th.cat([part.logits for part in distribution.distribution], dim=1)
    if isinstance(distribution, CategoricalDistribution | BernoulliDistribution):
        return distribution.distribution.logits
    if isinstance(distribution, _GAUSSIAN):
        return th.cat([distribution.distribution.mean, distribution.distribution.stddev], dim=1)
    return None


def kl_divergence(old: th.Tensor, new: Any) -> th.Tensor:
    """
    KL(old || new), exact and differentiable in the new one. That of a squashed Gaussian is the Gaussian's, for the Jacobian
    cancels.

    :param old: The :func:`parameters` of a distribution of the same family, shape ``(batch_size, n)``
    :param new: SB3's distribution, or one of this module, for the same observations
    :return: Shape ``(batch_size,)``, in nats
    """
    if isinstance(new, BoundedBetaDistribution):
        return _kl_of_betas(old, new).sum(dim=1).to(new.dtype)
    if isinstance(new, MultiCategoricalDistribution):
        parts = zip(old.split(new.action_dims, dim=1), new.distribution, strict=True)
        divergences = [torch_kl_divergence(Categorical(logits=logits, validate_args=False), part) for logits, part in parts]
        return th.stack(divergences).sum(dim=0)
    if isinstance(new, CategoricalDistribution):
        return torch_kl_divergence(Categorical(logits=old, validate_args=False), new.distribution)
    if isinstance(new, BernoulliDistribution):
        return torch_kl_divergence(Bernoulli(logits=old, validate_args=False), new.distribution).sum(dim=1)
    mean, std = old.chunk(2, dim=1)
    return torch_kl_divergence(Normal(mean, std, validate_args=False), new.distribution).sum(dim=1)


def _kl_of_betas(old: th.Tensor, new: BoundedBetaDistribution) -> th.Tensor:
    alpha, beta = old.double().chunk(2, dim=1)
    d_alpha, d_beta = alpha - new.alpha, beta - new.beta
    expected = d_alpha * th.digamma(alpha) + d_beta * th.digamma(beta) - (d_alpha + d_beta) * th.digamma(alpha + beta)
    return _log_beta(new.alpha, new.beta) - _log_beta(alpha, beta) + expected


def unsquashed_mean(distribution: Any) -> th.Tensor:
    """
    :param distribution: A Gaussian
    :return: Its mean, before any squashing, shape ``(batch_size, action_dim)``
    """
    return distribution.distribution.mean

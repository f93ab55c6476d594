"""
Tanh-squashed Gaussian (``action_dist="squashed_gaussian"``). Its KL divergence is that of the Gaussian, because the Jacobian
cancels.
"""

import math
from functools import cache
from typing import TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.distributions import sum_independent_dims
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

from sb3_ppo_ext.common.namespaces import namespace
from sb3_ppo_ext.distributions.base import (
    EDGE,
    LOG_2,
    MAX_STATISTICS,
    NEAR,
    BoundedDistribution,
    NumpyDistribution,
    at_least_float32,
    clamp,
)
from sb3_ppo_ext.distributions.gaussian import GaussianHead, NumpyGaussian, kl_divergence, parameters, unsquashed_mean

__all__ = ["LOG_STD_RANGE", "NumpySquashedGaussian", "TanhGaussianDistribution"]
__all__ += ["kl_divergence", "log_tanh_derivative", "parameters", "unsquashed_mean"]

SelfTanhGaussian = TypeVar("SelfTanhGaussian", bound="TanhGaussianDistribution")

# Range of the logarithm of the standard deviation before squashing: from almost a point to almost all mass at the bounds
LOG_STD_RANGE = (-5.0, 2.0)
# log cosh(u) + log 2 is |u| smoothed by a logistic distribution, which this mixture of Gaussians approximates: with these
# weights and standard deviations to 9e-7 for all u (least squares, reweighted towards the largest error).
_LOGISTIC_WEIGHTS = (0.06414671, 0.1583854, 0.34971161, 0.41469906, 0.01305722)
_LOGISTIC_VARIANCES = tuple(std**2 for std in (0.46235241, 1.29235961, 0.65422092, 0.92111073, 1.80819375))


class TanhGaussianDistribution(BoundedDistribution):
    """
    ``tanh(u)`` with u from a Gaussian; its standard deviation does not depend on the observation. The latent is u, because
    rounding makes it impossible to recover u from an action at the bounds: its density is exact however far out it is.

    Paper: https://arxiv.org/abs/1801.01290, appendix C

    :param action_dim: Dimension of the action space
    :param deterministic_action: ``"mean"``, the tanh of the mean of u
    """

    distribution: Normal

    def proba_distribution_net(self, latent_dim: int, log_std_init: float = 0.0) -> tuple[nn.Module, nn.Parameter]:
        """
        :param latent_dim: Size of the last layer of the policy network (before the output layer)
        :param log_std_init: Initial value of the logarithms of the standard deviations
        :return: Output layer for the means of u, and parameter with the logarithms of the standard deviations, shape
            ``(action_dim,)``
        """
        return nn.Linear(latent_dim, self.action_dim), nn.Parameter(th.full((self.action_dim,), float(log_std_init)))

    def proba_distribution(self: SelfTanhGaussian, mean_actions: th.Tensor, log_std: th.Tensor) -> SelfTanhGaussian:
        """
        :param mean_actions: Means of u, shape ``(batch_size, action_dim)``
        :param log_std: Logarithms of the standard deviations of u, clamped to ``LOG_STD_RANGE``, shape ``(action_dim,)``
        :return: The distribution itself
        """
        mean, log_std = at_least_float32(mean_actions), clamp(at_least_float32(log_std), *LOG_STD_RANGE)
        self.distribution = Normal(mean, log_std.exp().expand_as(mean), validate_args=False)
        return self

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        """
        :param actions: Latents u, shape ``(batch_size, action_dim)``
        :return: Log probabilities of the actions tanh(u), shape ``(batch_size,)``
        """
        return sum_independent_dims(self.distribution.log_prob(actions) - log_tanh_derivative(actions))

    def entropy(self) -> th.Tensor:
        """
        ``H(u) + E[log |d tanh(u) / du|]``. The expectation has a closed form for a mixture of Gaussians, which approximates
        the logarithm to a millionth, at any mean and standard deviation.

        :return: Entropies, shape ``(batch_size,)``, with the gradient of the true entropy
        """
        normal = self.distribution
        weights, variances = _logistic_mixture(normal.mean.dtype, normal.mean.device)
        smoothed = _mean_of_absolute(normal.mean.unsqueeze(-1), (normal.variance.unsqueeze(-1) + variances).sqrt())
        # Not a matrix product, which autocast would compute in half precision
        expected_log_cosh = (smoothed * weights).sum(dim=-1) - math.log(2)
        return sum_independent_dims(normal.entropy() - 2 * expected_log_cosh)

    def sample(self) -> th.Tensor:
        return self.distribution.rsample()

    def mode(self) -> th.Tensor:
        """
        :return: Means of u, which are the latents of the median actions, shape ``(batch_size, action_dim)``
        """
        return self.distribution.mean

    @staticmethod
    def position(latents: np.ndarray) -> np.ndarray:
        position: np.ndarray = (namespace(latents).tanh(latents) + 1) / 2
        return position

    @staticmethod
    def position_of_tensor(latents: th.Tensor) -> th.Tensor:
        return (th.tanh(latents) + 1) / 2

    @staticmethod
    def latents(position: np.ndarray) -> np.ndarray:
        return np.arctanh(2 * np.clip(position, EDGE, 1 - EDGE) - 1)

    def parameters(self) -> th.Tensor:
        return parameters(self)

    @staticmethod
    def statistics(parameters: th.Tensor) -> dict[str, float]:
        mean, std = parameters[:: math.ceil(len(parameters) / MAX_STATISTICS)].cpu().double().chunk(2, dim=1)
        near = math.atanh(1 - 2 * NEAR)
        mass = th.special.ndtr((-near - mean) / std) + th.special.ndtr((mean - near) / std)
        return {"mass_near_bounds": mass.mean().item(), "std": std.mean().item()}


def location(distribution: TanhGaussianDistribution) -> th.Tensor:
    """
    :param distribution: Squashed Gaussian
    :return: Deterministic actions in units of the bounds, tanh of the means of u, shape ``(batch_size, action_dim)``
    """
    return th.tanh(distribution.distribution.mean)


class NumpySquashedGaussian(NumpyGaussian):
    """NumPy implementation of :class:`TanhGaussianDistribution`. The outputs are the means of u."""

    distribution: TanhGaussianDistribution

    def pack(self) -> None:
        self.log_stds = np.clip(self.parameter, *LOG_STD_RANGE)

    def compiled(self) -> tuple[str, tuple[int, ...]]:
        return "squashed_gaussian", (1,) * len(self.parameter)

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        self.outputs = outputs
        size = np.abs(actions)
        log_derivatives = (LOG_2 - size - np.log1p(np.exp(-2 * size))) @ (-4 * self.halves)
        return super().log_prob(outputs, actions) - log_derivatives

    def entropies(self, described: np.ndarray) -> np.ndarray:
        return NumpyDistribution.entropies(self, described)

    def _gradients(self, d_log_prob: np.ndarray, ent_coef: float) -> tuple[np.ndarray, np.ndarray]:
        d_outputs, d_log_std = super()._gradients(d_log_prob, 0.0)
        if ent_coef != 0:
            outputs = th.from_numpy(self.outputs).requires_grad_()
            log_std = th.from_numpy(self.log_stds).requires_grad_()
            entropy_loss = -self.distribution.proba_distribution(outputs, log_std).entropy().mean()
            of_outputs, of_log_std = th.autograd.grad(ent_coef * entropy_loss, [outputs, log_std])
            d_outputs += of_outputs.numpy()
            d_log_std += of_log_std.numpy()
        # Like `clamp`: outside the range only a gradient that leads back into it is kept.
        outwards = (self.parameter < LOG_STD_RANGE[0]) & (d_log_std > 0)
        outwards |= (self.parameter > LOG_STD_RANGE[1]) & (d_log_std < 0)
        d_log_std[outwards] = 0.0
        return d_outputs, d_log_std


def log_tanh_derivative(u: th.Tensor) -> th.Tensor:
    """
    ``log |d tanh(u) / du| = 2 (log 2 - u - softplus(-2 u))``, exact however large u is, unlike ``log(1 - tanh(u)^2)``.

    :param u: Values, any shape
    :return: Logarithms of the derivatives, the same shape
    """
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


@cache
def _logistic_mixture(dtype: th.dtype, device: th.device) -> tuple[th.Tensor, th.Tensor]:
    """Weights and variances of the mixture. Cached, because creating them anew would make a GPU wait for the host."""
    with th.inference_mode(False):  # Inference tensors could not be used for training later.
        weights, variances = (th.tensor(v, dtype=dtype, device=device) for v in (_LOGISTIC_WEIGHTS, _LOGISTIC_VARIANCES))
    return weights, variances


def _mean_of_absolute(mean: th.Tensor, std: th.Tensor) -> th.Tensor:
    """E[|u|] of a Gaussian."""
    z = mean / (math.sqrt(2) * std)
    return mean * th.erf(z) + math.sqrt(2 / math.pi) * std * th.exp(-z.square())


class SquashedGaussianHead(GaussianHead):
    """Gaussian before the tanh, with a clamped standard deviation."""

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        return outputs + self.log_std.clamp(*LOG_STD_RANGE).exp() * noise[0]

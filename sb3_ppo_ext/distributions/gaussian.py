"""SB3's Gaussian with independent dimensions (``DiagGaussianDistribution``)."""

from operator import add
from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.distributions import DiagGaussianDistribution, Distribution
from torch import nn
from torch.distributions import Normal
from torch.distributions import kl_divergence as torch_kl_divergence

from sb3_ppo_ext.distributions.base import LOG_2_PI, NumpyDistribution, Sampler
from sb3_ppo_ext.distributions.head import Head, Noise

SelfGaussian = TypeVar("SelfGaussian", bound="GaussianOnDevice")


def unsquashed_mean(distribution: Any) -> th.Tensor:
    """
    :param distribution: Gaussian, squashed or not
    :return: Mean before any squashing, shape ``(batch_size, action_dim)``
    """
    return distribution.distribution.mean


def parameters(distribution: Any) -> th.Tensor:
    """
    :param distribution: Gaussian, squashed or not
    :return: Means and standard deviations before any squashing, shape ``(batch_size, 2 * action_dim)``
    """
    return th.cat([distribution.distribution.mean, distribution.distribution.stddev], dim=1)


def kl_divergence(old: th.Tensor, new: DiagGaussianDistribution) -> th.Tensor:
    """
    KL(old || new). Squashing does not change it, because the Jacobian cancels.

    :param old: :func:`parameters` of a Gaussian, shape ``(batch_size, 2 * action_dim)``
    :param new: Gaussian for the same observations
    :return: KL divergences in nats, shape ``(batch_size,)``
    """
    mean, std = old.chunk(2, dim=1)
    return torch_kl_divergence(Normal(mean, std, validate_args=False), new.distribution).sum(dim=1)


class NumpyGaussian(NumpyDistribution):
    """NumPy implementation of SB3's ``DiagGaussianDistribution``. The outputs are the means."""

    def __init__(self, distribution: Distribution, log_std: nn.Parameter):
        super().__init__(distribution, log_std)
        self.halves = np.full(len(self.parameter), -0.5, np.float32)
        self.pack()

    def pack(self) -> None:
        self.log_stds = self.parameter.copy()

    def has_spread(self) -> bool:
        return bool((np.exp(self.log_stds) > 0).all())

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> np.ndarray:
        return th.randn(n_steps, n_envs, n_outputs).numpy()

    def with_normal(self, noise: object, normal: np.ndarray) -> np.ndarray:
        return normal

    def scaled(self, noise: np.ndarray) -> np.ndarray:
        return noise * np.exp(self.log_stds)

    def sampler(self) -> Sampler:
        return add

    def compiled(self) -> tuple[str, tuple[int, ...]] | None:
        return "gaussian", (1,) * len(self.parameter)

    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        self.inverse_std = np.exp(-self.log_stds)
        self.z = (actions - outputs) * self.inverse_std
        self.squares = self.z * self.z
        return self.squares @ self.halves - np.float32(np.add.reduce(self.log_stds) + 0.5 * len(self.log_stds) * LOG_2_PI)

    def entropies(self, described: np.ndarray) -> np.ndarray:
        log_stds = described[:, len(self.log_stds) :]
        return np.add.reduce(log_stds + np.float32(0.5 + 0.5 * LOG_2_PI), axis=1)

    def _gradients(self, d_log_prob: np.ndarray, ent_coef: float) -> tuple[np.ndarray, np.ndarray]:
        # d log p / d log std = z^2 - 1, d entropy / d log std = 1, d log p / d mean = z / std
        d_log_std = d_log_prob @ self.squares - (np.add.reduce(d_log_prob) + ent_coef)
        return d_log_prob[:, np.newaxis] * self.z * self.inverse_std, d_log_std


class GaussianOnDevice(DiagGaussianDistribution):
    """SB3's Gaussian, without validation."""

    def proba_distribution(self: SelfGaussian, mean_actions: th.Tensor, log_std: th.Tensor) -> SelfGaussian:
        std = th.ones_like(mean_actions) * log_std.exp()
        self.distribution = Normal(mean_actions, std, validate_args=False)
        return self


class GaussianHead(Head):
    """Gaussian with a standard deviation that does not depend on the observation."""

    def noise(self) -> list[Noise]:
        return [Noise("noise", "normal", (len(self.log_std),))]

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        return outputs

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        return outputs + self.log_std.exp() * noise[0]

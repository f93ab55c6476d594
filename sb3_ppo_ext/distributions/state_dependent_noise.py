"""
SB3's generalized State-Dependent Exploration, gSDE (``StateDependentNoiseDistribution``, ``use_sde=True``). Its density,
parameters and KL divergence are those of a Gaussian with a standard deviation that depends on the observation.

Paper: https://arxiv.org/abs/2005.05719
"""

from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.distributions import Distribution, StateDependentNoiseDistribution
from torch import nn
from torch.distributions import Normal

from sb3_ppo_ext.common.namespaces import namespace
from sb3_ppo_ext.distributions.base import LOG_2_PI, NumpyDistribution, Sampler
from sb3_ppo_ext.distributions.gaussian import kl_divergence, parameters, unsquashed_mean
from sb3_ppo_ext.distributions.head import Head, Noise

__all__ = ["NumpyStateDependentNoise", "kl_divergence", "parameters", "unsquashed_mean"]


SelfStateDependentNoise = TypeVar("SelfStateDependentNoise", bound="StateDependentNoiseOnDevice")


def location(distribution: StateDependentNoiseDistribution) -> th.Tensor:
    """
    :param distribution: Distribution of gSDE
    :return: Deterministic actions, shape ``(batch_size, action_dim)``: the means, or their tanh with ``squash_output``
    """
    mean = unsquashed_mean(distribution)
    return mean if distribution.bijector is None else distribution.bijector.forward(mean)


class NumpyStateDependentNoise(NumpyDistribution):
    """
    NumPy implementation of SB3's ``StateDependentNoiseDistribution``. The first outputs are the means, the others the latent
    features. The noise is a linear function of these features; the distribution keeps its coefficients until SB3 draws new
    ones. No gradient goes through these features.
    """

    distribution: StateDependentNoiseDistribution
    needs_latents = True

    def __init__(self, distribution: StateDependentNoiseDistribution, log_std: nn.Parameter):
        super().__init__(distribution, log_std)
        self.n_actions = distribution.action_dim
        self.halves = np.full(self.n_actions, 0.5, np.float32)
        self.pack()

    @classmethod
    def why_not(cls, distribution: Any) -> str | None:
        if distribution.learn_features or type(distribution) is not StateDependentNoiseDistribution:
            return "the policy has gSDE of another kind than that of SB3's policies"
        return None

    def pack(self) -> None:
        # See `get_std`: the standard deviations of the coefficients, and their derivatives with respect to the parameter
        self.stds = self.slopes = np.exp(self.parameter)
        if self.distribution.use_expln:
            positive, shifted = self.parameter > 0, 1 + self.distribution.epsilon + np.maximum(self.parameter, 0)
            self.stds = np.where(positive, 1 + np.log(shifted), self.stds)
            self.slopes = np.where(positive, 1 / shifted, self.slopes)
        # Without `full_std`, all actions share the standard deviations.
        self.coefficient_variances = np.repeat(np.square(self.stds), self.n_actions // self.stds.shape[1], axis=1)

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> "CurrentCoefficients":
        return CurrentCoefficients(self.distribution, n_envs)

    def sampler(self) -> Sampler:
        return partial(explore, n_actions=self.n_actions, is_squashed=self.distribution.bijector is not None)

    def compiled(self) -> tuple[str, tuple[int, ...]] | None:
        return None if self.distribution.bijector is not None else ("state_dependent_noise", (1,) * self.n_actions)

    def make(self, outputs: th.Tensor, log_std: Any = None) -> Distribution:
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
        # The entropy of a squashed action has no closed form; SB3 estimates it from the action that was taken.
        self.last_entropies = -log_prob if bijector is not None else log_stds + (constant + 0.5 * self.n_actions)
        return log_prob

    def described(self, outputs: np.ndarray) -> np.ndarray:
        return self.last_entropies[:, np.newaxis]

    def entropies(self, described: np.ndarray) -> np.ndarray:
        return described[:, 0]

    def _gradients(self, d_log_prob: np.ndarray, ent_coef: float) -> tuple[np.ndarray, np.ndarray]:
        d_entropy = -ent_coef / len(d_log_prob)
        if self.distribution.bijector is not None:
            d_log_prob, d_entropy = d_log_prob - d_entropy, 0.0
        of_each = d_log_prob[:, np.newaxis]
        d_variances = (of_each * (self.z_squares - 1) + d_entropy) / (2 * self.variances)
        of_coefficients = self.squares.T @ d_variances
        if not self.distribution.full_std:
            of_coefficients = of_coefficients.sum(axis=1, keepdims=True)
        return of_each * self.errors / self.variances, of_coefficients * (2 * self.stds * self.slopes)


class CurrentCoefficients:
    """
    The noise of gSDE: the coefficients that SB3 has drawn last, whatever the step.

    :param distribution: Action distribution of the policy, which keeps them
    :param n_envs: Number of environments
    """

    def __init__(self, distribution: StateDependentNoiseDistribution, n_envs: int):
        self.distribution, self.n_envs = distribution, n_envs

    def __getitem__(self, step: int) -> np.ndarray:
        """
        :param step: Not used
        :return: Coefficients for each environment, shape ``(n_envs, n_latents, n_actions)``
        """
        own = self.distribution.exploration_matrices
        if self.n_envs == 1 or len(own) != self.n_envs:  # as in SB3's `get_noise`
            own = self.distribution.exploration_mat.expand(self.n_envs, -1, -1)
        return own.detach().numpy()


def explore(outputs: np.ndarray, noise: np.ndarray, n_actions: int, is_squashed: bool) -> np.ndarray:
    """
    :param outputs: Means and latent features, shape ``(n, n_actions + n_latents)``
    :param noise: Coefficients of the noise, shape ``(n, n_latents, n_actions)``
    :param n_actions: Number of actions
    :param is_squashed: Whether actions are squashed by tanh
    :return: Samples, shape ``(n, n_actions)``
    """
    xp = namespace(outputs)
    actions: np.ndarray = outputs[:, :n_actions] + xp.matmul(outputs[:, np.newaxis, n_actions:], noise)[:, 0]
    return xp.tanh(actions) if is_squashed else actions


class StateDependentNoiseOnDevice(StateDependentNoiseDistribution):
    """SB3's generalized State-Dependent Exploration (gSDE), without validation."""

    def sample_weights(self, log_std: th.Tensor, batch_size: int = 1) -> None:
        std = self.get_std(log_std)
        self.weights_dist = Normal(th.zeros_like(std), std, validate_args=False)
        self.exploration_mat = self.weights_dist.rsample()
        self.exploration_matrices = self.weights_dist.rsample((batch_size,))

    def proba_distribution(
        self: SelfStateDependentNoise, mean_actions: th.Tensor, log_std: th.Tensor, latent_sde: th.Tensor
    ) -> SelfStateDependentNoise:
        self._latent_sde = latent_sde if self.learn_features else latent_sde.detach()
        variance = th.mm(self._latent_sde**2, self.get_std(log_std) ** 2)
        self.distribution = Normal(mean_actions, th.sqrt(variance + self.epsilon), validate_args=False)
        return self


class StateDependentNoiseHead(Head):
    """gSDE: the noise is a matrix, multiplied with the inputs of the output layer. It may stay the same for several steps."""

    std: th.Tensor

    def __init__(self, distribution: StateDependentNoiseDistribution, log_std: Any = None, n_latents: int = 0):
        super().__init__(distribution, log_std, n_latents)
        self.register_buffer("std", distribution.get_std(log_std).detach().clone())

    def noise(self) -> list[Noise]:
        return [Noise("noise", "normal", (self.n_latents, self.distribution.action_dim))]

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        return outputs if self.distribution.bijector is None else th.tanh(outputs)

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        added = th.bmm(latents.unsqueeze(1), self.std * noise[0]).squeeze(1)
        return self.deterministic(outputs + added)

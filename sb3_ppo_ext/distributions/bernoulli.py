"""SB3's distribution over the actions of a ``MultiBinary`` space (``BernoulliDistribution``)."""

from typing import TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.distributions import BernoulliDistribution
from torch.distributions import Bernoulli
from torch.nn.functional import softplus

from sb3_ppo_ext.distributions.base import Sampler
from sb3_ppo_ext.distributions.head import Head, Noise
from sb3_ppo_ext.distributions.torch_fallback import TorchFallback

SelfBernoulli = TypeVar("SelfBernoulli", bound="BernoulliOnDevice")


def parameters(distribution: BernoulliDistribution) -> th.Tensor:
    """
    :param distribution: Bernoulli distribution
    :return: Logits of a 1, shape ``(batch_size, action_dim)``
    """
    return distribution.distribution.logits


def location(distribution: BernoulliDistribution) -> th.Tensor:
    """
    :param distribution: Bernoulli distribution
    :return: Probabilities of a 1 minus those of a 0, shape ``(batch_size, action_dim)``
    """
    return 2 * distribution.distribution.probs - 1


def kl_divergence(old: th.Tensor, new: BernoulliDistribution) -> th.Tensor:
    """
    :param old: :func:`parameters` of a Bernoulli distribution, shape ``(batch_size, action_dim)``
    :param new: Bernoulli distribution for the same observations
    :return: KL(old || new) in nats, shape ``(batch_size,)``
    """
    logits: th.Tensor = new.distribution.logits
    # PyTorch's function has an indexed assignment, which no CUDA graph can capture.
    of_ones = th.sigmoid(old) * (softplus(-logits) - softplus(-old))
    of_zeros = th.sigmoid(-old) * (softplus(logits) - softplus(old))
    return (of_ones + of_zeros).sum(dim=1)


def positive(outputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """
    :param outputs: Logits of a 1, shape ``(n, action_dim)``
    :param noise: Logistic noise, the same shape
    :return: Samples, shape ``(n, action_dim)``
    """
    return (outputs + noise > 0).astype(np.float32)


class NumpyBernoulli(TorchFallback):
    """Samples of SB3's ``BernoulliDistribution`` in NumPy. The outputs are the logits."""

    distribution: BernoulliDistribution

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> np.ndarray:
        noise: np.ndarray = th.rand(n_steps, n_envs, n_outputs).logit_().numpy()
        return noise

    def sampler(self) -> Sampler:
        return positive

    def compiled(self) -> tuple[str, tuple[int, ...]]:
        return "bernoulli", (1,) * int(self.distribution.action_dims)


class BernoulliOnDevice(BernoulliDistribution):
    """SB3's Bernoulli distribution, without validation."""

    def proba_distribution(self: SelfBernoulli, action_logits: th.Tensor) -> SelfBernoulli:
        self.distribution = Bernoulli(logits=action_logits, validate_args=False)
        return self

    def sample(self) -> th.Tensor:
        probs = self.distribution.probs.detach()
        # CUDA cannot be used any more after it was asked for samples with a probability of NaN.
        return th.where(probs.isnan(), probs, th.bernoulli(probs.nan_to_num(0.0)))


class BernoulliHead(Head):
    """Independent choices between 0 and 1."""

    def noise(self) -> list[Noise]:
        return [Noise("uniform", "uniform", (int(self.distribution.action_dims),))]

    def deterministic(self, outputs: th.Tensor) -> th.Tensor:
        return th.round(th.sigmoid(outputs))

    def sample(self, outputs: th.Tensor, latents: th.Tensor, noise: list[th.Tensor]) -> th.Tensor:
        return (noise[0] < th.sigmoid(outputs)).to(outputs.dtype)

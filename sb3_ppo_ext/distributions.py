"""What the losses need to know of SB3's action distributions, family by family."""

from typing import Any

import torch as th
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    StateDependentNoiseDistribution,
)
from torch.distributions import Bernoulli, Categorical, Normal
from torch.distributions import kl_divergence as torch_kl_divergence

_GAUSSIAN = (DiagGaussianDistribution, StateDependentNoiseDistribution)


def parameters(distribution: Distribution) -> th.Tensor | None:
    """
    :param distribution: For a batch of observations
    :return: The numbers that define it, shape ``(batch_size, n)``: logits, or means and standard deviations; ``None`` if
        the family has no KL divergence in closed form
    """
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
    :param new: SB3's distribution for the same observations
    :return: Shape ``(batch_size,)``, in nats
    """
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


def unsquashed_mean(distribution: Any) -> th.Tensor:
    """
    :param distribution: A Gaussian
    :return: Its mean, before any squashing, shape ``(batch_size, action_dim)``
    """
    return distribution.distribution.mean

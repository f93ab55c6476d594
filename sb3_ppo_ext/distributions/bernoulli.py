"""SB3's distribution over the actions of a ``MultiBinary`` space (``BernoulliDistribution``)."""

from typing import Any

import torch as th
from torch.distributions import Bernoulli
from torch.distributions import kl_divergence as torch_kl_divergence


def parameters(distribution: Any) -> th.Tensor:
    """
    :param distribution: Bernoulli distribution
    :return: Logits of a 1, shape ``(batch_size, action_dim)``
    """
    return distribution.distribution.logits


def location(distribution: Any) -> th.Tensor:
    """
    :param distribution: Bernoulli distribution
    :return: Probabilities of a 1 minus those of a 0, shape ``(batch_size, action_dim)``
    """
    return 2 * distribution.distribution.probs - 1


def kl_divergence(old: th.Tensor, new: Any) -> th.Tensor:
    """
    :param old: :func:`parameters` of a Bernoulli distribution, shape ``(batch_size, action_dim)``
    :param new: Bernoulli distribution for the same observations
    :return: KL(old || new) in nats, shape ``(batch_size,)``
    """
    return torch_kl_divergence(Bernoulli(logits=old, validate_args=False), new.distribution).sum(dim=1)

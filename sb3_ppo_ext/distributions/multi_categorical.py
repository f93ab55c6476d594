"""
SB3's distribution over the actions of a ``MultiDiscrete`` space (``MultiCategoricalDistribution``): one categorical
distribution for each dimension.
"""

from typing import Any

import torch as th

from sb3_ppo_ext.distributions.categorical import divergence


def parameters(distribution: Any) -> th.Tensor:
    """
    :param distribution: Multi-categorical distribution
    :return: Normalised logits, dimension after dimension, shape ``(batch_size, sum(action_dims))``
    """
    return th.cat([part.logits for part in distribution.distribution], dim=1)


def location(distribution: Any) -> th.Tensor:
    """
    :param distribution: Multi-categorical distribution
    :return: Probabilities, dimension after dimension, shape ``(batch_size, sum(action_dims))``
    """
    return th.cat([part.probs for part in distribution.distribution], dim=1)


def kl_divergence(old: th.Tensor, new: Any) -> th.Tensor:
    """
    :param old: :func:`parameters` of a multi-categorical distribution, shape ``(batch_size, sum(action_dims))``
    :param new: Multi-categorical distribution for the same observations
    :return: KL(old || new) in nats, shape ``(batch_size,)``
    """
    parts = zip(old.split(new.action_dims, dim=1), new.distribution, strict=True)
    return th.stack([divergence(logits, part) for logits, part in parts]).sum(dim=0)

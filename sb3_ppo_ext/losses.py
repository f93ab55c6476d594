"""
The terms of PPO's loss: pure functions of tensors of shape ``(batch_size,)``, each a scalar to minimise.

The order of the operations is SB3's, to the bit.
"""

import torch as th
from torch.nn import functional as F


def clipped_surrogate_loss(advantages: th.Tensor, ratio: th.Tensor, clip_range: float) -> th.Tensor:
    """
    ``-mean(min(r A, clip(r, 1 - c, 1 + c) A))``

    Paper: https://arxiv.org/abs/1707.06347

    :param advantages: A, normalised or not
    :param ratio: r, probability under the current policy over that under the policy which collected
    :param clip_range: c, at least 0
    :return: Scalar
    """
    unclipped = advantages * ratio
    clipped = advantages * th.clamp(ratio, 1 - clip_range, 1 + clip_range)
    return -th.min(unclipped, clipped).mean()


def value_loss(values: th.Tensor, old_values: th.Tensor, returns: th.Tensor, clip_range_vf: float | None = None) -> th.Tensor:
    """
    ``mean((R - V)^2)``, where V moves at most ``clip_range_vf`` away from the old value if that is given.

    :param values: V, by the current critic
    :param old_values: By the critic which collected
    :param returns: R, the TD(lambda) targets
    :param clip_range_vf: In units of the reward, ``None`` for no clipping
    :return: Scalar
    """
    if clip_range_vf is not None:
        values = old_values + th.clamp(values - old_values, -clip_range_vf, clip_range_vf)
    return F.mse_loss(returns, values)


def entropy_loss(entropy: th.Tensor | None, log_prob: th.Tensor) -> th.Tensor:
    """
    ``-mean(entropy)``

    :param entropy: In nats, ``None`` if the distribution has no closed form
    :param log_prob: Of the actions taken, which then stands for the entropy: ``-log_prob``
    :return: Scalar
    """
    return -th.mean(-log_prob if entropy is None else entropy)


def approximate_kl(ratio: th.Tensor, log_ratio: th.Tensor) -> th.Tensor:
    """
    ``mean((r - 1) - log r)``, an unbiased and never negative estimate of KL(old || new), without gradient.

    Source: http://joschu.net/blog/kl-approx.html

    :param ratio: r
    :param log_ratio: log r
    :return: Scalar, in nats
    """
    with th.no_grad():
        return th.mean((ratio - 1) - log_ratio)


def clip_fraction(ratio: th.Tensor, clip_range: float) -> th.Tensor:
    """
    :param ratio: Probability ratio
    :param clip_range: As for :func:`clipped_surrogate_loss`
    :return: Scalar, the share of samples whose ratio lies outside the range, without gradient
    """
    with th.no_grad():
        return th.mean((th.abs(ratio - 1) > clip_range).float())

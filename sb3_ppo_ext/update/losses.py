"""
The terms of PPO's loss: pure functions of tensors of shape ``(batch_size,)``, each a scalar to minimise.

Without options the order of the operations is SB3's, to the bit. Where there are ``weights``, they multiply each sample's
share of the mean; ``None`` stands for equal ones.
"""

import torch as th
from torch.nn import functional as F

# The least range of SPO, which divides by it
SPO_MIN_RANGE = 1e-3


def clipped_surrogate_loss(
    advantages: th.Tensor,
    ratio: th.Tensor,
    clip_range: float,
    dual_clip: float | None = None,
    weights: th.Tensor | None = None,
) -> th.Tensor:
    """
    ``-mean(min(r A, clip(r, 1 - c, 1 + c) A))``; with ``dual_clip`` d, where A < 0, ``-mean(max(min(...), d A))``.

    Papers: https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/1912.09729 (dual clip)

    :param advantages: A, normalised or not
    :param ratio: r, probability under the current policy over that under the policy which collected
    :param clip_range: c, at least 0
    :param dual_clip: d, more than 1: bounds what an action that was bad, and has become much more likely, can cost
    :param weights: Importance weights with mean 1
    :return: Scalar
    """
    unclipped = advantages * ratio
    clipped = advantages * th.clamp(ratio, 1 - clip_range, 1 + clip_range)
    objective = th.min(unclipped, clipped)
    if dual_clip is not None:
        objective = th.where(advantages < 0, th.max(objective, dual_clip * advantages), objective)
    return -_mean(objective, weights)


def spo_loss(
    advantages: th.Tensor, ratio: th.Tensor, clip_range: float | th.Tensor, weights: th.Tensor | None = None
) -> th.Tensor:
    """
    Simple Policy Optimization: ``-mean(r A - |A| (r - 1)^2 / (2 c))``, whose maximum lies at ``r = 1 + sign(A) c``. Unlike
    the clipped surrogate it pulls a ratio back that has gone past it.

    Paper: https://arxiv.org/abs/2401.16025

    :param advantages: A
    :param ratio: r
    :param clip_range: c, which counts as at least 0.001, for a schedule ends at 0
    :param weights: Importance weights with mean 1
    :return: Scalar
    """
    clip_range = th.as_tensor(clip_range, dtype=advantages.dtype).clamp(min=SPO_MIN_RANGE)
    penalty = advantages.abs() / (2 * clip_range) * (ratio - 1).square()
    return -_mean(ratio * advantages - penalty, weights)


def value_loss(
    values: th.Tensor,
    old_values: th.Tensor,
    returns: th.Tensor,
    clip_range_vf: float | None = None,
    mode: str = "clip",
    weights: th.Tensor | None = None,
) -> th.Tensor:
    """
    ``mean((R - V)^2)``. If ``clip_range_vf`` is given, V' moves at most so far away from the old value, and the loss is
    ``mean((R - V')^2)`` in mode ``"clip"`` (SB3), ``mean(max((R - V)^2, (R - V')^2))`` in mode ``"max"`` (OpenAI's PPO2).

    :param values: V, by the current critic
    :param old_values: By the critic which collected
    :param returns: R, the TD(lambda) targets
    :param clip_range_vf: In units of the reward, ``None`` for no clipping
    :param mode: ``"clip"`` has no gradient where V has left the range, ``"max"`` has one where V is the worse of the two
    :param weights: Importance weights with mean 1
    :return: Scalar
    """
    clipped = values
    if clip_range_vf is not None:
        clipped = old_values + th.clamp(values - old_values, -clip_range_vf, clip_range_vf)
        if mode == "max":
            return _mean(th.max((returns - values).square(), (returns - clipped).square()), weights)
    if weights is None:
        return F.mse_loss(returns, clipped)
    return _mean((returns - clipped).square(), weights)


def entropy_loss(entropy: th.Tensor | None, log_prob: th.Tensor) -> th.Tensor:
    """
    ``-mean(entropy)``

    :param entropy: In nats, ``None`` if the distribution has no closed form
    :param log_prob: Of the actions taken, which then stands for the entropy: ``-log_prob``
    :return: Scalar
    """
    return -th.mean(-log_prob if entropy is None else entropy)


def bounds_loss(mean_actions: th.Tensor, low: th.Tensor, high: th.Tensor, limit: float) -> th.Tensor:
    """
    ``mean(sum(relu(|z| - b)^2))``, where z is the mean action in units of the bounds: -1 at ``low`` and 1 at ``high``.

    It keeps the mean of a Gaussian that is clipped from wandering off to where the clipping takes the gradient away.

    :param mean_actions: Shape ``(batch_size, action_dim)``
    :param low: Shape ``(action_dim,)``; a dimension with an infinite bound, or with no width, does not count
    :param high: Shape ``(action_dim,)``
    :param limit: b, at least 0, in units of the bounds
    :return: Scalar
    """
    middle, half = (high + low) / 2, (high - low) / 2
    counts = th.isfinite(half) & (half > 0)
    # With an infinite half, z and its gradient are 0.
    middle, half = th.where(counts, middle, 0.0), th.where(counts, half, th.inf)
    z = (mean_actions - middle) / half
    return th.relu(z.abs() - limit).square().sum(dim=1).mean()


def approximate_kl(ratio: th.Tensor, log_ratio: th.Tensor) -> th.Tensor:
    """
    ``mean((r - 1) - log r)``, an unbiased and never negative estimate of KL(old || new).

    Source: http://joschu.net/blog/kl-approx.html

    :param ratio: r
    :param log_ratio: log r
    :return: Scalar, in nats
    """
    return th.mean((ratio - 1) - log_ratio)


def clip_fraction(ratio: th.Tensor, clip_range: float) -> th.Tensor:
    """
    :param ratio: Probability ratio
    :param clip_range: As for :func:`clipped_surrogate_loss`
    :return: Scalar, the share of samples whose ratio lies outside the range
    """
    return th.mean((th.abs(ratio - 1) > clip_range).float())


def _mean(values: th.Tensor, weights: th.Tensor | None) -> th.Tensor:
    return values.mean() if weights is None else (weights * values).mean()

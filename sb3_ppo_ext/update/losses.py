"""
The losses of PPO, as pure functions of tensors of shape ``(batch_size,)``. Each is defined only here.

Each loss that an engine differentiates analytically is followed by its slope, in NumPy; one test compares every slope with
autograd. With the default options, the operations and their order are those of SB3, so that results are equal bit for bit.

To add a surrogate, write an objective and its slope and add a row to :data:`SURROGATES`. To add a penalty, write a
function for its value and add a row to :data:`PENALTIES`; every engine computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch as th
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from torch.nn import functional as F

from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributions import kl_divergence, parameters, unsquashed_mean

SurrogateName = Literal["clip", "spo"]
VfClipMode = Literal["clip", "max"]
# A number, or a 0-dimensional tensor if the loss is compiled: a number would be recompiled whenever it changes.
Coefficient: TypeAlias = float | th.Tensor
# Values and derivatives of each sample, shape (batch_size,): see `Surrogate` and `value_slope`
Slopes: TypeAlias = tuple[np.ndarray, np.ndarray]

# Smallest clip range of SPO, which divides by it
SPO_MIN_RANGE = 1e-3


@dataclass(frozen=True)
class LossConfig:
    """
    Options of the loss in one update. The defaults are SB3's.

    :param clip_range: Clip range c of the probability ratio, at least 0
    :param clip_range_vf: Largest change of a value since the rollout, ``None`` for no limit
    :param ent_coef: Coefficient of the entropy loss
    :param vf_coef: Coefficient of the value loss
    :param surrogate: Name of the policy loss, among :data:`SURROGATES`
    :param dual_clip: Dual clip d of the surrogate ``"clip"``, more than 1; ``None`` for no bound
    :param vf_clip_mode: Value loss with ``clip_range_vf``: ``"clip"`` (SB3) or ``"max"`` (OpenAI's PPO2)
    :param bounds_limit: Absolute value of the mean action above which the bounds loss acts, in units of the bounds
    :param action_bounds: Lower and upper bounds of the actions in the buffer, both of shape ``(action_dim,)``; ``None`` for
        actions without bounds
    :param value_scale: Unit of the value loss and of ``clip_range_vf``: the standard deviation of the returns if values are
        normalised, ``None`` for that of the return
    :param as_recurrent_ppo: Whether the order of operations is that of RecurrentPPO, where it is another than PPO's
    :param extra: Losses that evaluate the policy at further observations, by name, see ``update/extra_losses.py``
    :param penalties: Coefficients of the active penalties, by their name in :data:`PENALTIES`
    """

    clip_range: Coefficient
    clip_range_vf: Coefficient | None = None
    ent_coef: Coefficient = 0.0
    vf_coef: Coefficient = 0.5
    surrogate: SurrogateName = "clip"
    dual_clip: float | None = None
    vf_clip_mode: VfClipMode = "clip"
    bounds_limit: float = 1.1
    action_bounds: tuple[th.Tensor, th.Tensor] | None = None
    value_scale: Coefficient | None = None
    as_recurrent_ppo: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    penalties: Mapping[str, Coefficient] = field(default_factory=dict)

    def with_tensors(self, device: th.device) -> LossConfig:
        """
        :param device: Device of the policy
        :return: Copy of the options with tensors as coefficients
        """

        def tensor(value: Coefficient | None) -> Any:
            return None if value is None else th.as_tensor(value, dtype=th.float32, device=device)

        names = ("clip_range", "clip_range_vf", "ent_coef", "vf_coef", "value_scale")
        changed: dict[str, Any] = {name: tensor(getattr(self, name)) for name in names}
        return replace(self, **changed, penalties={name: tensor(value) for name, value in self.penalties.items()})


class LossInputs(Protocol):
    """Quantities of a minibatch that a loss may read. An engine may compute them lazily."""

    @property
    def data(self) -> RolloutBufferSamples:
        """The minibatch, SB3's ``RolloutBufferSamples``, with the advantages as the policy loss uses them."""

    @property
    def values(self) -> th.Tensor:
        """Values by the current critic, shape ``(batch_size,)``."""

    @property
    def log_prob(self) -> th.Tensor:
        """Log probabilities of the actions under the current policy, shape ``(batch_size,)``."""

    @property
    def entropy(self) -> th.Tensor | None:
        """Entropies of the action distributions in nats, shape ``(batch_size,)``; ``None`` without a closed form."""

    @property
    def log_ratio(self) -> th.Tensor:
        """Log probabilities under the current policy minus those at collection time, shape ``(batch_size,)``."""

    @property
    def ratio(self) -> th.Tensor:
        """Probability ratios, the exponential of the log ratios, shape ``(batch_size,)``."""

    @property
    def distribution(self) -> Distribution:
        """Action distributions of the current policy."""

    @property
    def old_distribution(self) -> th.Tensor | None:
        """
        Parameters of the action distributions before the update, shape ``(batch_size, n)``; ``None`` if no loss reads them or
        the distribution has no KL divergence in closed form.
        """

    @property
    def policy_name(self) -> str:
        """Name of the policy class, for messages."""


# Policy losses


class Surrogate(NamedTuple):
    """
    A surrogate objective; the policy loss is its negative mean.

    :param objective: Function of advantages, probability ratios and the options, which returns the objectives of the samples,
        shape ``(batch_size,)``
    :param slope: The same function in NumPy, which returns the objectives and their derivatives with respect to the log
        probabilities, both of shape ``(batch_size,)``
    """

    objective: Callable[[th.Tensor, th.Tensor, LossConfig], th.Tensor]
    slope: Callable[[np.ndarray, np.ndarray, LossConfig], Slopes]


def clipped_objective(advantages: th.Tensor, ratio: th.Tensor, config: LossConfig) -> th.Tensor:
    """
    ``min(r A, clip(r, 1 - c, 1 + c) A)``; with ``dual_clip`` d, ``max(min(...), d A)`` where A < 0, which bounds the loss of
    bad actions that have become much more likely.

    Papers: https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/1912.09729 (dual clip)

    :param advantages: Advantages A, normalised or not, shape ``(batch_size,)``
    :param ratio: Ratios r of the action probabilities under the current policy to those at collection time, shape
        ``(batch_size,)``
    :param config: Options with ``clip_range`` c and ``dual_clip`` d
    :return: Objectives of the samples, shape ``(batch_size,)``
    """
    clip_range: Any = config.clip_range
    unclipped = advantages * ratio
    clipped = advantages * th.clamp(ratio, 1 - clip_range, 1 + clip_range)
    objective = th.min(unclipped, clipped)
    if config.dual_clip is not None:
        objective = th.where(advantages < 0, th.max(objective, config.dual_clip * advantages), objective)
    return objective


def clipped_slope(advantages: np.ndarray, ratio: np.ndarray, config: LossConfig) -> Slopes:
    """Values and slopes of :func:`clipped_objective`."""
    clip_range = config.clip_range
    dual_clip = config.dual_clip
    gain = advantages * ratio
    # Equal to `np.clip`, in a third of its time
    limited = advantages * np.minimum(np.maximum(ratio, 1 - clip_range), 1 + clip_range)
    # The clipped objective is constant where it is smaller. A product, unlike `np.where`, propagates NaN and infinity.
    objective, slope = np.minimum(gain, limited), gain * (gain <= limited)
    if dual_clip is not None:
        bounded = (advantages < 0) & (objective < dual_clip * advantages)
        objective = np.where(bounded, dual_clip * advantages, objective)
        slope *= ~bounded
    return objective, slope


def spo_objective(advantages: th.Tensor, ratio: th.Tensor, config: LossConfig) -> th.Tensor:
    """
    Simple Policy Optimization (SPO): ``r A - |A| (r - 1)^2 / (2 c)``, which is largest at ``r = 1 + sign(A) c``. Unlike the
    clipped surrogate, it pulls back a ratio that has moved past this point.

    Paper: https://arxiv.org/abs/2401.16025

    :param advantages: Advantages A, shape ``(batch_size,)``
    :param ratio: Probability ratios r, shape ``(batch_size,)``
    :param config: Options with ``clip_range`` c, which is raised to at least 0.001, since a schedule may end at 0
    :return: Objectives of the samples, shape ``(batch_size,)``
    """
    clip_range = th.as_tensor(config.clip_range, dtype=advantages.dtype).clamp(min=SPO_MIN_RANGE)
    return ratio * advantages - advantages.abs() / (2 * clip_range) * (ratio - 1).square()


def spo_slope(advantages: np.ndarray, ratio: np.ndarray, config: LossConfig) -> Slopes:
    """Values and slopes of :func:`spo_objective`."""
    clip_range = config.clip_range
    pull = np.abs(advantages) / max(clip_range, SPO_MIN_RANGE) * (ratio - 1)
    gain = advantages * ratio
    return gain - pull * (ratio - 1) / 2, gain - pull * ratio


SURROGATES: dict[str, Surrogate] = {
    "clip": Surrogate(clipped_objective, clipped_slope),
    "spo": Surrogate(spo_objective, spo_slope),
}


def policy_loss(advantages: th.Tensor, ratio: th.Tensor, config: LossConfig, weights: th.Tensor | None = None) -> th.Tensor:
    """
    The negative mean of the surrogate objective.

    :param advantages: Advantages, shape ``(batch_size,)``
    :param ratio: Probability ratios, shape ``(batch_size,)``
    :param config: Options with the name of the surrogate
    :param weights: Importance weights with mean 1, shape ``(batch_size,)``, ``None`` for equal weights
    :return: Scalar to minimise
    """
    return -_mean(SURROGATES[config.surrogate].objective(advantages, ratio, config), weights)


# Value loss and entropy loss


def value_loss(
    values: th.Tensor,
    old_values: th.Tensor,
    returns: th.Tensor,
    config: LossConfig,
    weights: th.Tensor | None = None,
) -> th.Tensor:
    """
    ``mean((R - V)^2)``. With ``clip_range_vf``, V' is V clipped to this distance from the old value, and the loss is
    ``mean((R - V')^2)`` in mode ``"clip"`` (SB3), ``mean(max((R - V)^2, (R - V')^2))`` in mode ``"max"`` (OpenAI's PPO2).
    With ``value_scale``, all of them are divided by it first.

    :param values: Values V by the current critic, shape ``(batch_size,)``
    :param old_values: Values at collection time, shape ``(batch_size,)``
    :param returns: Returns R, shape ``(batch_size,)``
    :param config: Options with ``clip_range_vf``, ``vf_clip_mode`` and ``value_scale``
    :param weights: Importance weights with mean 1, shape ``(batch_size,)``, ``None`` for equal weights
    :return: Scalar to minimise
    """
    if (scale := config.value_scale) is not None:
        return value_loss(values / scale, old_values / scale, returns / scale, replace(config, value_scale=None), weights)
    limit: Any = config.clip_range_vf
    clipped = values
    if limit is not None:
        clipped = old_values + th.clamp(values - old_values, -limit, limit)
        if config.vf_clip_mode == "max":
            return _mean(th.max((returns - values).square(), (returns - clipped).square()), weights)
    if weights is None and not config.as_recurrent_ppo:
        return F.mse_loss(returns, clipped)
    return _mean((returns - clipped).square(), weights)


def value_slope(values: np.ndarray, old_values: np.ndarray, returns: np.ndarray, config: LossConfig) -> Slopes:
    """
    Errors and slopes of :func:`value_loss`, which is the mean of the squared errors.

    :param values: Values V by the current critic, shape ``(batch_size,)``
    :param old_values: Values at collection time, shape ``(batch_size,)``
    :param returns: Returns, shape ``(batch_size,)``
    :param config: Options with ``clip_range_vf``, ``vf_clip_mode`` and ``value_scale``
    :return: Errors of the samples, and half the derivatives of their squares with respect to V, both of shape
        ``(batch_size,)``
    """
    if config.value_scale is not None:
        scale = config.value_scale
        errors, slope = value_slope(values / scale, old_values / scale, returns / scale, replace(config, value_scale=None))
        return errors, slope / scale
    limit = config.clip_range_vf
    errors = values - returns
    if limit is None:
        return errors, errors
    moved = values - old_values
    clipped = old_values + np.minimum(np.maximum(moved, -limit), limit) - returns
    slope = clipped * (np.abs(moved) <= limit)
    if config.vf_clip_mode == "clip":
        return clipped, slope
    worse = np.abs(errors) >= np.abs(clipped)
    return np.where(worse, errors, clipped), np.where(worse, errors, slope)


def entropy_loss(entropy: th.Tensor | None, log_prob: th.Tensor) -> th.Tensor:
    """
    ``-mean(entropy)``. Its slope is part of the action distribution, see ``NumpyDistribution.gradient``.

    :param entropy: Entropies in nats, shape ``(batch_size,)``; ``None`` if the distribution has no closed form
    :param log_prob: Log probabilities of the actions, shape ``(batch_size,)``; their negative approximates a missing entropy
    :return: Scalar to minimise
    """
    return -th.mean(-log_prob if entropy is None else entropy)


# Auxiliary losses


class Penalty(NamedTuple):
    """
    A loss that is added to PPO's loss if its coefficient is not 0.

    :param coef: Name of the option that sets the coefficient
    :param reads: Names of the properties of :class:`LossInputs` that the loss reads
    :param value: Function of the inputs and the options, which returns a scalar to minimise
    :param fallback: Loss to use instead if this one reads ``old_distribution`` and the distribution has no KL divergence in
        closed form
    """

    coef: str
    reads: tuple[str, ...]
    value: Callable[[LossInputs, LossConfig], th.Tensor]
    fallback: Penalty | None = None


def kl_penalty(inputs: LossInputs, config: LossConfig) -> th.Tensor:
    """
    ``mean(KL(old policy || new policy))``, exact.

    Paper: https://arxiv.org/abs/1707.06347, section 4

    :param inputs: Minibatch with the current distribution and the parameters of the old one
    :param config: Options of the loss, unused
    :return: Mean KL divergence in nats, a scalar
    """
    assert inputs.old_distribution is not None
    return kl_divergence(inputs.old_distribution, inputs.distribution).mean()


def estimated_kl_penalty(inputs: LossInputs, config: LossConfig) -> th.Tensor:
    """
    :func:`approximate_kl`, for action distributions without a KL divergence in closed form.

    :param inputs: Minibatch with the probability ratios and their logarithms
    :param config: Options of the loss, unused
    :return: Estimated KL divergence in nats, a scalar
    """
    return approximate_kl(inputs.ratio, inputs.log_ratio)


def bounds_penalty(inputs: LossInputs, config: LossConfig) -> th.Tensor:
    """
    :func:`bounds_loss` of the mean actions.

    :param inputs: Minibatch with the current distribution, a Gaussian
    :param config: Options with ``action_bounds`` and ``bounds_limit``
    :return: Scalar to minimise
    """
    assert config.action_bounds is not None
    return bounds_loss(unsquashed_mean(inputs.distribution), *config.action_bounds, config.bounds_limit)


PENALTIES: dict[str, Penalty] = {
    "kl": Penalty(
        "kl_coef",
        ("distribution", "old_distribution"),
        kl_penalty,
        fallback=Penalty("kl_coef", ("ratio", "log_ratio"), estimated_kl_penalty),
    ),
    "bounds_loss": Penalty("bounds_coef", ("distribution",), bounds_penalty),
}


def active_penalties(config: LossConfig, has_old_distribution: bool) -> dict[str, Penalty]:
    """
    :param config: Options with the coefficients of the penalties
    :param has_old_distribution: Whether the parameters of the old action distributions are available
    :return: Active penalties, by name
    """
    chosen = {}
    for name in config.penalties:
        loss = PENALTIES[name]
        if "old_distribution" in loss.reads and not has_old_distribution:
            if loss.fallback is None:
                refuse(
                    loss.coef, config.penalties[name], "the action distribution has no KL divergence in closed form; give 0"
                )
            loss = loss.fallback
        chosen[name] = loss
    return chosen


def penalties(inputs: LossInputs, config: LossConfig) -> Iterator[tuple[str, Coefficient, th.Tensor]]:
    """
    :param inputs: Minibatch that the losses read
    :param config: Options with the coefficients of the penalties
    :return: Name, coefficient and value of each active penalty
    :raises ValueError: if a loss reads the action distribution, and the policy does not provide it with a gradient
    """
    for name, loss in active_penalties(config, inputs.old_distribution is not None).items():
        if "distribution" in loss.reads:
            check_differentiable(loss.coef, config.penalties[name], inputs)
        yield name, config.penalties[name], loss.value(inputs, config)


def check_differentiable(option: str, value: object, inputs: LossInputs) -> None:
    """
    Check that a loss that reads the action distribution has a gradient.

    :param option: Name of the option that sets the coefficient of the loss
    :param value: Value of the option, for the message
    :param inputs: Minibatch that the loss reads
    :raises ValueError: if the loss would have no gradient, because the policy did not set ``action_dist``
    """
    distribution = inputs.distribution
    found = None if distribution is None else parameters(distribution)
    if found is None or (inputs.ratio.requires_grad and not found.requires_grad):
        refuse(option, value, f"`evaluate_actions` of {inputs.policy_name} does not set `action_dist`; set it there")


def bounds_loss(mean_actions: th.Tensor, low: th.Tensor, high: th.Tensor, limit: float) -> th.Tensor:
    """
    ``mean(sum(relu(|z| - b)^2))``, where z is the mean action in units of the bounds: -1 at ``low`` and 1 at ``high``.

    It keeps the mean of a clipped Gaussian from drifting far outside the bounds, where clipping removes the gradient.

    :param mean_actions: Mean actions, shape ``(batch_size, action_dim)``
    :param low: Lower bounds, shape ``(action_dim,)``; dimensions with an infinite bound or without width are ignored
    :param high: Upper bounds, shape ``(action_dim,)``
    :param limit: Limit b, at least 0, in units of the bounds
    :return: Scalar to minimise
    """
    middle, half = middle_and_half(low, high)
    z = (mean_actions - middle) / half
    return th.relu(z.abs() - limit).square().sum(dim=1).mean()


def middle_and_half(low: th.Tensor, high: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """
    :param low: Lower bounds, shape ``(action_dim,)``
    :param high: Upper bounds, of the same shape
    :return: Middle between them, and half of their distance, which is infinite where the bounds loss ignores a dimension
    """
    middle, half = (high + low) / 2, (high - low) / 2
    counts = th.isfinite(half) & (half > 0)
    # With an infinite half-width, z and its gradient are 0.
    return th.where(counts, middle, 0.0), th.where(counts, half, th.inf)


# Measurements


def approximate_kl(ratio: th.Tensor, log_ratio: th.Tensor) -> th.Tensor:
    """
    ``mean((r - 1) - log r)``, an unbiased and non-negative estimate of KL(old || new).

    Source: http://joschu.net/blog/kl-approx.html

    :param ratio: Probability ratios r, shape ``(batch_size,)``
    :param log_ratio: Logarithms of the ratios, shape ``(batch_size,)``
    :return: Estimated KL divergence in nats, a scalar
    """
    return th.mean((ratio - 1) - log_ratio)


def clip_fraction(ratio: th.Tensor, clip_range: Coefficient) -> th.Tensor:
    """
    :param ratio: Probability ratios, shape ``(batch_size,)``
    :param clip_range: Clip range c, at least 0
    :return: Fraction of samples with a ratio outside [1 - c, 1 + c], a scalar
    """
    return th.mean((th.abs(ratio - 1) > clip_range).float())


def _mean(values: th.Tensor, weights: th.Tensor | None) -> th.Tensor:
    return values.mean() if weights is None else (weights * values).mean()

"""The loss of a minibatch: evaluation of the policy, sum of the losses, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple, TypeAlias

import torch as th
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributions import bounded_part
from sb3_ppo_ext.policies.actor_critic import evaluator
from sb3_ppo_ext.update.extra_loss import PolicyInputs, PolicyView, extra_losses
from sb3_ppo_ext.update.extra_losses import LOGGED_LOSSES
from sb3_ppo_ext.update.losses import (
    PENALTIES,
    LossConfig,
    approximate_kl,
    clip_fraction,
    entropy_loss,
    penalties,
    policy_loss,
    value_loss,
)
from sb3_ppo_ext.update.metrics import RESERVED_NAMES
from sb3_ppo_ext.update.minibatches import Minibatch

# See ``PPOExt.extra_actor_loss``
ExtraActorLoss: TypeAlias = Callable[
    [RolloutBufferSamples, Distribution], tuple[th.Tensor | float, dict[str, th.Tensor | float]]
]


class Evaluation(NamedTuple):
    """Quantities of a minibatch that the losses read, see :class:`~sb3_ppo_ext.update.extra_loss.PolicyInputs`."""

    data: RolloutBufferSamples
    values: th.Tensor
    log_prob: th.Tensor
    entropy: th.Tensor | None
    log_ratio: th.Tensor
    ratio: th.Tensor
    distribution: Distribution
    old_distribution: th.Tensor | None
    policy_name: str
    actions: th.Tensor
    weights: th.Tensor | None
    view: PolicyView


def evaluate(
    policy: ActorCriticPolicy,
    minibatch: Minibatch,
    discrete_actions: bool,
    view: PolicyView | None = None,
) -> Evaluation:
    """
    :param policy: Policy that is updated
    :param minibatch: Minibatch of the rollout
    :param discrete_actions: Whether the action space is ``Discrete``
    :param view: Functions of the policy to call instead of its own, with the observations that they take
    :return: Quantities that the losses read
    """
    data = minibatch.data
    if view is None:
        following = minibatch.next_observations, minibatch.continues
        view = PolicyView(data.observations, *following, evaluator(policy), policy.get_distribution)
    actions = actions_of(data, discrete_actions)
    values, log_prob, entropy = view.evaluate_actions(view.observations, actions)
    log_ratio = log_prob - data.old_log_prob
    # `evaluate_actions` of SB3's policies has just set `action_dist`. It is copied, since later calls overwrite it.
    distribution: Any = copy(getattr(policy, "action_dist", None))
    return Evaluation(
        data,
        values.flatten(),
        log_prob,
        entropy,
        log_ratio,
        th.exp(log_ratio),
        distribution,
        minibatch.old_distribution,
        type(policy).__name__,
        actions,
        minibatch.weights,
        view,
    )


def actions_of(data: RolloutBufferSamples, discrete_actions: bool) -> th.Tensor:
    """
    :param data: Samples of the rollout buffer, with discrete actions as floats of shape ``(batch_size, 1)``
    :param discrete_actions: Whether the action space is ``Discrete``
    :return: Actions in the form that ``evaluate_actions`` takes
    """
    return data.actions.long().flatten() if discrete_actions else data.actions


def ppo_loss(
    inputs: PolicyInputs, config: LossConfig, extra: ExtraActorLoss | None = None
) -> tuple[th.Tensor, dict[str, th.Tensor]]:
    """
    The loss of PPO. It has no side effects, so that it can be compiled.

    :param inputs: Evaluated minibatch
    :param config: Options of the loss, with the coefficients
    :param extra: Loss that a subclass of ``PPOExt`` adds, ``None`` for none
    :return: Loss, a scalar, and metrics by name: scalars, and tensors of shape ``(batch_size, ...)``
    """
    data, weights = inputs.data, inputs.weights
    policy_term = policy_loss(data.advantages, inputs.ratio, config, weights)
    value_term = value_loss(inputs.values, data.old_values, data.returns, config, weights)
    entropy_term = entropy_loss(inputs.entropy, inputs.log_prob)
    loss = policy_term + config.ent_coef * entropy_term + config.vf_coef * value_term
    measured: dict[str, th.Tensor] = {}
    if (bounded := bounded_part(inputs.distribution)) is not None:
        measured["action_parameters"] = bounded.parameters().detach()
    for name, coefficient, term in penalties(inputs, config):
        measured[name] = term.detach()
        loss = loss + coefficient * term
    for name, coef, term in extra_losses(config.extra, inputs, config):
        measured[name] = term.detach()
        loss = loss + coef * term
    if extra is not None and (extra_term := _extra_loss(extra, inputs, measured)) is not None:
        loss = loss + extra_term

    ratio, log_ratio = inputs.ratio.detach(), inputs.log_ratio.detach()
    measured["approx_kl"] = approximate_kl(ratio, log_ratio)
    measured["policy_gradient_loss"] = policy_term.detach()
    measured["value_loss"] = value_term.detach()
    measured["entropy_loss"] = entropy_term.detach()
    measured["clip_fraction"] = clip_fraction(ratio, config.clip_range)
    measured["loss"] = loss.detach()
    measured["ratio"] = ratio
    return loss, measured


def _extra_loss(extra: ExtraActorLoss, inputs: PolicyInputs, measured: dict[str, th.Tensor]) -> th.Tensor | None:
    device = inputs.log_prob.device
    loss, logs = extra(inputs.data, inputs.distribution)
    for name, value in logs.items():
        if name in RESERVED_NAMES or name in PENALTIES or name in LOGGED_LOSSES:
            refuse("extra_actor_loss", name, "PPOExt logs something else under this name; give it another one")
        measured[name] = th.as_tensor(value, device=device).detach()
    if not isinstance(loss, th.Tensor) and loss == 0:
        return None
    loss = th.as_tensor(loss, device=device)
    measured["extra_actor_loss"] = loss.detach()
    return loss

"""Values that are logged after an update."""

from __future__ import annotations

import math

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import explained_variance

from sb3_ppo_ext.distributions import BoundedDistribution
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.metrics import LOGGED_OTHERWISE, Metrics


def sb3_metrics(metrics: Metrics, policy: ActorCriticPolicy, buffer: RolloutBuffer) -> dict[str, float]:
    """
    :param metrics: Metrics of the update
    :param policy: Policy after the update
    :param buffer: Buffer with the rollout
    :return: Values that SB3's PPO logs, by their name under ``train/``
    """
    names = ("entropy_loss", "policy_gradient_loss", "value_loss", "clip_fraction")
    logged = {name: metrics.mean(name) for name in names}
    # SB3 averages `approx_kl` in float32, the others as Python floats.
    logged["approx_kl"] = metrics.numbers("approx_kl").mean()
    logged["loss"] = metrics.numbers("loss")[-1].item()
    logged["explained_variance"] = explained_variance(buffer.values.flatten(), buffer.returns.flatten())
    if hasattr(policy, "log_std"):
        logged["std"] = th.exp(policy.log_std).mean().item()
    return logged


def further_metrics(
    metrics: Metrics, policy: ActorCriticPolicy, buffer: RolloutBuffer, config: UpdateConfig
) -> dict[str, float]:
    """
    :param metrics: Metrics of the update
    :param policy: Policy after the update
    :param buffer: Buffer with the rollout
    :param config: Options of the update
    :return: Values that SB3 does not log, by name; a name without a slash belongs under ``train/``
    """
    logged: dict[str, float] = {}
    if metrics["ratio"]:
        ratio = metrics.vector("ratio")
        logged |= {"ratio_mean": ratio.mean().item(), "ratio_std": ratio.std(correction=0).item()}
        logged["ratio_max"] = ratio.max().item()
    for name in (name for name, values in metrics.items() if values and name not in LOGGED_OTHERWISE):
        logged[name] = metrics.mean(name)
        if name.endswith("grad_norm") and name != "muon_grad_norm":
            # In float64: `max_grad_norm` may be beyond the range of float32.
            logged[f"{name}_clipped"] = float(np.minimum(np.float64(metrics.numbers(name)), config.max_grad_norm).mean())
    logged |= _action_statistics(metrics, policy, buffer, config)
    raw = buffer.advantages.astype(np.float64)  # Squares of large ones are beyond the range of float32.
    return logged | {f"adv/raw_{name}": float(getattr(np, name)(raw)) for name in ("mean", "std", "min", "max")}


def _action_statistics(
    metrics: Metrics, policy: ActorCriticPolicy, buffer: RolloutBuffer, config: UpdateConfig
) -> dict[str, float]:
    if metrics["action_parameters"] and isinstance(policy.action_dist, BoundedDistribution):
        return policy.action_dist.statistics(metrics.vector("action_parameters"))
    if config.loss.action_bounds is None or config.samples_latents:
        return {}
    # Fraction of the action components that are at or beyond a bound, where the environment receives the bound
    low, high = (bound.cpu().numpy() for bound in config.loss.action_bounds)
    actions = buffer.actions.reshape(-1, math.prod(low.shape))
    return {"actions_at_bounds": float(np.mean((actions <= low) | (actions >= high)))}

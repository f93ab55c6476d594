"""Values that are logged after an update."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import explained_variance

from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.distributed.ranks import Ranks
from sb3_ppo_ext.distributed.statistics import Moments
from sb3_ppo_ext.distributions import bounded_part
from sb3_ppo_ext.policies.value_normalization import normalized_value
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.metrics import LOGGED_OTHERWISE, Metrics

# Numbers, or scalar tensors on the device of the policy
Logged: TypeAlias = dict[str, Any]


def on_host(*logged: Logged) -> list[dict[str, float]]:
    """
    :param logged: Values to log, by name
    :return: The same as numbers; all tensors are transferred at once
    """
    tensors = [value for part in logged for value in part.values() if isinstance(value, th.Tensor)]
    if tensors:
        numbers = iter(th.stack([tensor.detach().to(tensors[0].device) for tensor in tensors]).tolist())
    return [{k: next(numbers) if isinstance(v, th.Tensor) else v for k, v in part.items()} for part in logged]


def sb3_metrics(metrics: Metrics, policy: ActorCriticPolicy, buffer: RolloutBuffer) -> Logged:
    """
    :param metrics: Metrics of the update
    :param policy: Policy after the update
    :param buffer: Buffer with the rollout
    :return: Values that SB3's PPO logs, by their name under ``train/``
    """
    names = ("entropy_loss", "policy_gradient_loss", "value_loss", "clip_fraction")
    logged: Logged = {name: metrics.mean(name) for name in names}
    # SB3 averages `approx_kl` in float32, the others as Python floats.
    logged["approx_kl"] = metrics.numbers("approx_kl").mean()
    logged["loss"] = metrics.numbers("loss")[-1].item()
    logged["explained_variance"] = _explained_variance(buffer)
    if hasattr(policy, "log_std"):
        logged["std"] = th.exp(policy.log_std).mean()
    return logged


def _explained_variance(buffer: RolloutBuffer) -> float | th.Tensor:
    columns = _on_device(buffer)
    if columns is None:  # bit for bit as in SB3
        return explained_variance(buffer.values.flatten(), buffer.returns.flatten())
    values, returns = columns["values"], columns["returns"]
    variance = returns.var(correction=0)
    return th.where(variance == 0, math.nan, 1 - (returns - values).var(correction=0) / variance)


def _on_device(buffer: RolloutBuffer) -> dict[str, Arrays] | None:
    """Tensors of a buffer that does not lie on the host, from which they would have to be transferred."""
    is_elsewhere = isinstance(buffer, TensorRolloutBuffer) and buffer.storage.type != "cpu"
    return buffer.tensors if is_elsewhere else None  # type: ignore[attr-defined]


def further_metrics(metrics: Metrics, policy: ActorCriticPolicy, buffer: RolloutBuffer, config: UpdateConfig) -> Logged:
    """
    :param metrics: Metrics of the update
    :param policy: Policy after the update
    :param buffer: Buffer with the rollout
    :param config: Options of the update
    :return: Values that SB3 does not log, by name; a name without a slash belongs under ``train/``
    """
    logged: Logged = {}
    if metrics["ratio"] and len(ratio := metrics.vector("ratio")):
        logged |= {"ratio_mean": ratio.mean(), "ratio_std": ratio.std(correction=0), "ratio_max": ratio.max()}
    for name in (name for name, values in metrics.items() if values and name not in LOGGED_OTHERWISE):
        logged[name] = metrics.mean(name)
        if name.endswith("grad_norm") and name != "muon_grad_norm":
            # In float64: `max_grad_norm` may be beyond the range of float32.
            logged[f"{name}_clipped"] = float(np.minimum(np.float64(metrics.numbers(name)), config.max_grad_norm).mean())
    if (layer := normalized_value(policy)) is not None:
        logged |= {"value_mean": layer.mean, "value_std": layer.std}
    return logged | action_statistics(metrics, policy, buffer, config) | _advantage_statistics(buffer)


def statistics_over(ranks: Ranks, metrics: Metrics, buffer: RolloutBuffer, of_actions: Logged) -> Logged:
    """
    :param ranks: Several ranks of a training run
    :param metrics: Metrics of the update, averaged over the ranks
    :param buffer: Buffer with the rollout of this rank
    :param of_actions: Means over the actions of this rank, by name
    :return: Values to log that are not means of minibatches, computed from the samples of all ranks, by name
    """
    values, returns, advantages = _estimated(buffer)
    errors, of_returns = Moments.of(returns - values, ranks), Moments.of(returns, ranks)
    logged = {"explained_variance": 1 - errors.variance / of_returns.variance if of_returns.variance > 0 else math.nan}
    raw = Moments.of(advantages, ranks)
    logged |= {"adv/raw_mean": raw.mean, "adv/raw_std": raw.variance**0.5, "adv/raw_min": raw.low, "adv/raw_max": raw.high}
    if any(ranks.gather(bool(metrics["ratio"]))):
        # With prioritised segments, a rank may have had no samples.
        ratio = Moments.of(metrics.vector("ratio") if metrics["ratio"] else np.zeros(0), ranks)
        logged |= {"ratio_mean": ratio.mean, "ratio_std": ratio.variance**0.5, "ratio_max": ratio.high}
    gathered = ranks.gather(of_actions)
    names = {name for each in gathered for name in each}
    return logged | {name: float(np.nanmean([each.get(name, np.nan) for each in gathered])) for name in sorted(names)}


def _estimated(buffer: RolloutBuffer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, returns and advantages in float64, each of shape ``(n_samples,)``."""
    names = ("values", "returns", "advantages")
    values, returns, advantages = (getattr(buffer, name).flatten().astype(np.float64) for name in names)
    return values, returns, advantages


def _advantage_statistics(buffer: RolloutBuffer) -> Logged:
    if (columns := _on_device(buffer)) is not None:
        on_device = columns["advantages"]
        statistics: Logged = {"mean": on_device.mean(), "std": on_device.std(correction=0)}
        statistics |= {"min": on_device.min(), "max": on_device.max()}
    else:
        raw = buffer.advantages.astype(np.float64)  # Squares of large ones are beyond the range of float32.
        statistics = {name: float(getattr(np, name)(raw)) for name in ("mean", "std", "min", "max")}
    return {f"adv/raw_{name}": value for name, value in statistics.items()}


def action_statistics(metrics: Metrics, policy: ActorCriticPolicy, buffer: RolloutBuffer, config: UpdateConfig) -> Logged:
    """
    :param metrics: Metrics of the update
    :param policy: Policy after the update
    :param buffer: Buffer with the rollout
    :param config: Options of the update
    :return: Means over the actions of the rollout, by name
    """
    if metrics["action_parameters"] and (bounded := bounded_part(policy.action_dist)) is not None:
        described = metrics.vector("action_parameters")
        return bounded.statistics(described) if len(described) else {}
    if config.loss.action_bounds is None or config.samples_latents:
        return {}
    # Fraction of the action components that are at or beyond a bound, where the environment receives the bound. In hybrid
    # actions, those with bounds come first.
    n = len(config.loss.action_bounds[0])
    if (columns := _on_device(buffer)) is not None:
        of_tensors = columns["actions"].flatten(0, 1)[:, :n]
        at_bounds = (of_tensors <= config.loss.action_bounds[0]) | (of_tensors >= config.loss.action_bounds[1])
        return {"actions_at_bounds": at_bounds.float().mean()}
    low, high = (bound.cpu().numpy() for bound in config.loss.action_bounds)
    actions = buffer.actions.reshape(-1, buffer.action_dim)[:, :n]
    return {"actions_at_bounds": float(np.mean((actions <= low) | (actions >= high)))}

"""One update of the policy from one rollout: estimates, epochs, minibatches, losses, steps of the optimiser."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from stable_baselines3.common.utils import explained_variance

from sb3_ppo_ext.common.guards import refuse_gradient
from sb3_ppo_ext.common.schedules import is_constant, value_of
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributions import BoundedDistribution, kl_divergence, parameters, unsquashed_mean
from sb3_ppo_ext.memory.sequences import SequenceBufferMixin
from sb3_ppo_ext.update.advantages import normalize, vtrace
from sb3_ppo_ext.update.losses import (
    approximate_kl,
    bounds_loss,
    clip_fraction,
    clipped_surrogate_loss,
    entropy_loss,
    spo_loss,
    value_loss,
)
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.minibatches import (
    Draw,
    Minibatch,
    PrioritizedSegments,
    SamplesOnDevice,
    flatten,
    knows_indices,
    shuffled,
    shuffled_segments,
    time_major,
)
from sb3_ppo_ext.update.optimizers import clip_gradients, critic_parameters

# Metrics of which the last epoch alone counts, as for SB3
OF_LAST_EPOCH = ("approx_kl", "kl", "ratio", "law")
LOGGED_OTHERWISE = {"entropy_loss", "policy_gradient_loss", "value_loss", "clip_fraction", "approx_kl", "loss", "ratio", "law"}
LOSS_TERMS = ("policy_gradient_loss", "value_loss", "entropy_loss", "kl", "bounds_loss", "extra_actor_loss")
# Names that the hook cannot give to what it logs
RESERVED = {*LOGGED_OTHERWISE, *LOSS_TERMS, "actor_rests", "grad_norm", "critic_grad_norm", "muon_grad_norm"}
RESERVED |= {"actions_at_bounds", "mass_near_bounds", "std", "concentration"}
# Samples that are evaluated at once where no gradient is needed
EVALUATION_BATCH = 1024
# Steps that stay together in minibatches of a policy with a memory
MIN_SEGMENT = 16


class Update:
    """
    One update. It reads the options of the model, and holds what lives as long as the update does.

    :param model: A ``PPOExt`` with a full rollout buffer
    """

    def __init__(self, model: Any):
        self.model, self.policy, self.buffer = model, model.policy, model.rollout_buffer
        progress = model._current_progress_remaining
        self.progress = progress
        self.clip_range = value_of(model.clip_range, progress)
        self.clip_range_vf = None if model.clip_range_vf is None else value_of(model.clip_range_vf, progress)
        # The last rollout may end past the end; SB3's own schedules see that, ours do not.
        self.ent_coef = value_of(model.ent_coef, max(progress, 0.0))
        self.vf_coef, self.bounds_coef = model.vf_coef, model.bounds_coef
        self.kl_coef = model.kl_coef if model.kl_coefficient is None else model.kl_coefficient.value
        self.metrics = Metrics()
        self.n_epochs_begun = 0
        # Past `max_clip_fraction` the critic learns on alone
        self.actor_rests = False
        self.knows_indices = knows_indices(type(self.buffer))
        self.action_bounds = self._action_bounds()
        # What gathers some samples of the rollout
        self.samples: Callable[[np.ndarray], RolloutBufferSamples] = self.buffer._get_samples
        # Of the whole rollout, flat; None where minibatches take the buffer's
        self.advantages: th.Tensor | None = None
        self.returns: th.Tensor | None = None
        self.segments: PrioritizedSegments | None = None
        self.old_distribution: th.Tensor | None = None

    def run(self) -> None:
        """Make all epochs."""
        if self.knows_indices:
            flatten(self.buffer)
            if self._copies_at_once():
                self.samples = SamplesOnDevice(self.buffer)
        if self.model.kl_coef > 0:
            with self._as_while_collecting():
                self.old_distribution = self._evaluate(
                    lambda data: parameters(self.policy.get_distribution(data.observations))
                )
        for epoch in range(self.model.n_epochs):
            for name in OF_LAST_EPOCH:
                self.metrics[name].clear()
            if self.knows_indices:
                self._estimate(epoch)
            go_on = self._epoch(epoch)
            self.n_epochs_begun += 1
            self.model._n_updates += 1
            if not go_on:
                break
        self._at_end()
        if self.model.kl_coefficient is not None:
            self.model.kl_coefficient.update(self.metrics.mean("kl"))
        if self.model.adaptive_lr is not None:
            self.model.adaptive_lr.update(self.metrics.mean("approx_kl"))

    def _copies_at_once(self) -> bool:
        """Whether the rollout is copied to another device once, and not minibatch by minibatch; sequences would overlap."""
        return self.model.device.type != "cpu" and not isinstance(self.buffer, SequenceBufferMixin)

    def _at_end(self) -> None:
        """For a subclass that measures in its own way."""

    # Estimates

    def _estimate(self, epoch: int) -> None:
        """Advantages and returns of this epoch, and what follows from them."""
        model, buffer = self.model, self.buffer
        if epoch > 0 and not model.vtrace:
            return
        raw = buffer.advantages.flatten()
        if model.vtrace:
            raw, returns = self._vtrace()
            self.returns = buffer.to_torch(returns)
        if model.priority_alpha > 0:
            self.segments = self._prioritized_segments(raw)
        if model.vtrace or (model.normalize_advantage and model.advantage_norm != "minibatch"):
            self.advantages = self._normalize_rollout(buffer.to_torch(raw), epoch)

    def _prioritized_segments(self, advantages: np.ndarray) -> PrioritizedSegments:
        model = self.model
        done = min(max(1 - self.progress, 0.0), 1.0)
        beta = model.priority_beta + (1 - model.priority_beta) * done
        length = min(model.priority_segment, model.n_steps, model.batch_size * model.accumulate_grad)
        return PrioritizedSegments(time_major(advantages, self.buffer), length, model.priority_alpha, beta)

    def _normalize_rollout(self, advantages: th.Tensor, epoch: int) -> th.Tensor:
        normalizer = self.model.advantage_normalizer
        if normalizer is not None:
            if epoch == 0:
                normalizer.observe(advantages)
                self.metrics["adv/clamped_fraction"].append(normalizer.clamped_fraction(advantages))
            return normalizer.normalize(advantages)
        if self.model.normalize_advantage and self.model.advantage_norm == "rollout":
            return normalize(advantages)
        return advantages

    def _vtrace(self) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns under the current policy and critic, flat."""
        model, buffer = self.model, self.buffer

        def values_and_log_probs(data: RolloutBufferSamples) -> th.Tensor:
            values, log_probs, _ = self.policy.evaluate_actions(data.observations, self._actions(data))
            return th.stack([values.flatten(), log_probs], dim=1)

        with self._as_while_collecting():
            evaluated = self._evaluate(values_and_log_probs)
            last_values = model.predict_last_values().cpu().numpy().flatten()
            rewards = buffer.rewards + model.change_of_terminal_values()
        assert evaluated is not None
        values, log_probs = (time_major(part, buffer) for part in evaluated.cpu().numpy().T)
        advantages, returns = vtrace(
            rewards,
            values,
            log_probs - time_major(buffer.log_probs, buffer),
            buffer.episode_starts,
            last_values,
            model._last_episode_starts,
            buffer.gamma,
            buffer.gae_lambda,
            model.vtrace_rho,
            model.vtrace_c,
        )
        return advantages.T.flatten(), returns.T.flatten()

    def _evaluate(self, function: Callable[[RolloutBufferSamples], th.Tensor | None]) -> th.Tensor | None:
        """What the function returns for the whole rollout; None if it returns that."""
        places = np.arange(self._n_samples())
        parts = []
        for start in range(0, len(places), EVALUATION_BATCH):
            part = function(self.samples(places[start : start + EVALUATION_BATCH]))
            if part is None:
                return None
            parts.append(part)
        return th.cat(parts)

    @contextmanager
    def _as_while_collecting(self) -> Iterator[None]:
        """Without gradient and, for dropout and the like, not in training mode."""
        self.policy.set_training_mode(False)
        with th.no_grad():
            yield
        self.policy.set_training_mode(True)

    # Minibatches

    def _epoch(self, epoch: int) -> bool:
        """
        :return: False if ``target_kl`` ended the update
        """
        return all(self._step(minibatches, epoch) for minibatches in self._minibatches())

    def _minibatches(self) -> Iterator[list[Minibatch]]:
        """Those of an epoch, as lists of what makes one step of the optimiser."""
        if not self.knows_indices:
            for data in self.buffer.get(self.model.batch_size):
                yield _normalize_together([Minibatch(data)]) if self._normalizes_minibatches() else [Minibatch(data)]
            return
        step_size = self.model.batch_size * self.model.accumulate_grad
        for draw in self._draws(step_size):
            yield self._split(*draw)

    def _draws(self, step_size: int) -> Iterator[Draw]:
        if self.segments is not None:
            return self.segments.epoch(step_size)
        buffer = self.buffer
        if isinstance(buffer, SequenceBufferMixin):
            # Long enough that what is before them, and is computed anew for each of them, is no more than they are
            length = min(max(buffer.n_before, MIN_SEGMENT), buffer.buffer_size, step_size)
            return shuffled_segments(buffer.buffer_size, buffer.n_envs, length, step_size)
        return shuffled(self._n_samples(), step_size)

    def _n_samples(self) -> int:
        return self.buffer.buffer_size * self.buffer.n_envs

    def _split(self, indices: np.ndarray, weights: np.ndarray | None) -> list[Minibatch]:
        """One draw, normalised as a whole, so that accumulated gradients are those of one large minibatch."""
        size = self.model.batch_size
        minibatches = [self._gather(indices[start : start + size]) for start in range(0, len(indices), size)]
        if self._normalizes_minibatches():
            minibatches = _normalize_together(minibatches)
        if weights is not None:
            parts = self.buffer.to_torch(weights).split(size)
            minibatches = [m._replace(weights=part) for m, part in zip(minibatches, parts, strict=True)]
        return minibatches

    def _normalizes_minibatches(self) -> bool:
        return self.model.normalize_advantage and self.model.advantage_norm == "minibatch"

    def _gather(self, indices: np.ndarray) -> Minibatch:
        data = self.samples(indices)
        if self.advantages is not None:
            data = data._replace(advantages=self.advantages[indices])
        if self.returns is not None:
            data = data._replace(returns=self.returns[indices])
        old = None if self.old_distribution is None else self.old_distribution[indices]
        return Minibatch(data, old_distribution=old)

    def _actions(self, data: RolloutBufferSamples) -> th.Tensor:
        if isinstance(self.model.action_space, spaces.Discrete):
            # The buffer holds floats of shape (batch_size, 1)
            return data.actions.long().flatten()
        return data.actions

    # Loss

    def _loss(self, minibatch: Minibatch) -> th.Tensor:
        """The loss, a scalar; its terms are measured on the way."""
        loss, measured = self._measured_loss(minibatch)
        self.metrics.add(measured)
        return loss

    def _measured_loss(self, minibatch: Minibatch) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        """The loss, and what is measured on the way: changes nothing, so that it can be compiled."""
        model, data, weights = self.model, minibatch.data, minibatch.weights
        values, log_prob, entropy = self._evaluate_actions(data)
        log_ratio = log_prob - data.old_log_prob
        ratio = th.exp(log_ratio)

        policy_term = self._surrogate(minibatch, ratio)
        value_term = value_loss(
            values.flatten(), data.old_values, data.returns, self.clip_range_vf, model.vf_clip_mode, weights
        )
        entropy_term = entropy_loss(entropy, log_prob)
        loss = policy_term + self.ent_coef * entropy_term + self.vf_coef * value_term
        measured: dict[str, th.Tensor] = {}
        for coefficient, term in self._further_terms(minibatch, ratio, log_ratio, measured):
            loss = loss + coefficient * term

        ratio, log_ratio = ratio.detach(), log_ratio.detach()
        measured["approx_kl"] = approximate_kl(ratio, log_ratio)
        measured["policy_gradient_loss"] = policy_term.detach()
        measured["value_loss"] = value_term.detach()
        measured["entropy_loss"] = entropy_term.detach()
        measured["clip_fraction"] = clip_fraction(ratio, self.clip_range)
        measured["loss"] = loss.detach()
        measured["ratio"] = ratio
        return loss, measured

    def _surrogate(self, minibatch: Minibatch, ratio: th.Tensor) -> th.Tensor:
        advantages, weights = minibatch.data.advantages, minibatch.weights
        if self.model.surrogate == "spo":
            return spo_loss(advantages, ratio, self.clip_range, weights)
        return clipped_surrogate_loss(advantages, ratio, self.clip_range, self.model.dual_clip, weights)

    def _further_terms(
        self, minibatch: Minibatch, ratio: th.Tensor, log_ratio: th.Tensor, measured: dict[str, th.Tensor]
    ) -> Iterator[tuple[float, th.Tensor]]:
        """What SB3's loss has not: coefficients and terms, which are ``measured`` on the way."""
        model = self.model
        # `evaluate_actions` of SB3's policies has just set it. A copy, for the next call for a distribution sets it anew.
        distribution: Any = copy(getattr(self.policy, "action_dist", None))
        if isinstance(distribution, BoundedDistribution):
            measured["law"] = distribution.parameters().detach()
        if model.kl_coef > 0:
            if minibatch.old_distribution is None:
                term = approximate_kl(ratio, log_ratio)
            else:
                self._check_distribution("kl_coef", distribution, ratio)
                term = kl_divergence(minibatch.old_distribution, distribution).mean()
            measured["kl"] = term.detach()
            yield self.kl_coef, term
        if model.bounds_coef > 0:
            self._check_distribution("bounds_coef", distribution, ratio)
            low, high = self.action_bounds
            term = bounds_loss(unsquashed_mean(distribution), low, high, model.bounds_limit)
            measured["bounds_loss"] = term.detach()
            yield self.bounds_coef, term
        extra, logs = model.extra_actor_loss(minibatch.data, distribution)
        for name, value in logs.items():
            if name in RESERVED:
                refuse("extra_actor_loss", name, "PPOExt logs something else under this name; give it another one")
            measured[name] = th.as_tensor(value, device=model.device).detach()
        if isinstance(extra, th.Tensor) or extra != 0:
            extra = th.as_tensor(extra, device=model.device)
            measured["extra_actor_loss"] = extra.detach()
            yield 1.0, extra

    def _check_distribution(self, option: str, distribution: Any, ratio: th.Tensor) -> None:
        """Refuse an option that would have no gradient where the ratio has one."""
        found = None if distribution is None else parameters(distribution)
        if found is None or (ratio.requires_grad and not found.requires_grad):
            remedy = f"`evaluate_actions` of {type(self.policy).__name__} does not set `action_dist`; set it there"
            refuse(option, getattr(self.model, option), remedy)

    def _action_bounds(self) -> tuple[th.Tensor, ...]:
        """Bounds of the actions in the buffer, flat: of a squashed policy -1 and 1, also for what it squashes."""
        space = self.model.action_space
        if not isinstance(space, spaces.Box):
            return ()
        bounds = (-np.ones_like(space.low), np.ones_like(space.high)) if self.policy.squash_output else (space.low, space.high)
        return tuple(th.tensor(bound.flatten(), dtype=th.float32, device=self.model.device) for bound in bounds)

    # Steps of the optimiser

    def _step(self, minibatches: list[Minibatch], epoch: int) -> bool:
        """
        :return: False if ``target_kl`` ends the update, and the step was not made
        """
        model = self.model
        self._zero_gradients()
        before = self.metrics.lengths()
        sizes = [len(minibatch.data.advantages) for minibatch in minibatches]
        shares = [size / sum(sizes) for size in sizes]
        for minibatch, share in zip(minibatches, shares, strict=True):
            self._add_gradient(minibatch, share)

        if model.target_kl is not None and self._is_past_target_kl(self.metrics.weighted("approx_kl", shares).item(), epoch):
            return False
        if model.max_clip_fraction is not None:
            self._let_actor_rest(shares)

        norms = self._clip()
        if not math.isfinite((sum(norms.values()) + self.metrics.weighted("loss", shares)).item()):
            self._skip(before, epoch)
            return True
        for name, norm in norms.items():
            self.metrics[name].append(norm)
        self._step_optimizer()
        return True

    def _is_past_target_kl(self, approx_kl: float, epoch: int) -> bool:
        if approx_kl <= 1.5 * self.model.target_kl:
            return False
        if self.model.verbose >= 1:
            print(f"Early stopping at step {epoch} due to reaching max kl: {approx_kl:.2f}")
        return True

    def _zero_gradients(self) -> None:
        self.policy.optimizer.zero_grad()

    def _evaluate_actions(self, data: RolloutBufferSamples) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        return self.policy.evaluate_actions(data.observations, self._actions(data))

    def _add_gradient(self, minibatch: Minibatch, share: float) -> None:
        """That of a minibatch, which makes so large a share of the step."""
        loss = self._loss(minibatch)
        self._backward(loss if share == 1 else share * loss)

    def _backward(self, loss: th.Tensor) -> None:
        loss.backward()

    def _clip(self) -> dict[str, th.Tensor]:
        return clip_gradients(self.policy, self.model.max_grad_norm)

    def _step_optimizer(self) -> None:
        self.policy.optimizer.step()

    def _skip(self, before: dict[str, int], epoch: int) -> None:
        """Leave a step out that is not finite, or raise; ``before`` are the lengths of the metrics without it."""
        if self.model.bad_gradients == "raise":
            terms = {name: self.metrics.bad_since(before, name) for name in LOSS_TERMS if self.metrics[name]}
            refuse_gradient(self.policy, terms, epoch, self.model.num_timesteps)
        self.model.n_skipped_updates += 1
        self.metrics.forget_since(before)

    def _let_actor_rest(self, shares: list[float]) -> None:
        if not self.actor_rests:
            self.actor_rests = bool(self.metrics.weighted("clip_fraction", shares) > self.model.max_clip_fraction)
        self.metrics["actor_rests"].append(th.tensor(float(self.actor_rests)))
        if self.actor_rests:
            of_critic = critic_parameters(self.policy)
            for parameter in self.policy.parameters():
                if parameter not in of_critic:
                    # Without a gradient no optimiser touches it, nor its moments
                    parameter.grad = None

    # What is logged

    def log(self) -> None:
        """Record the update, SB3's keys first."""
        model, record = self.model, self.model.logger.record
        for name in ("entropy_loss", "policy_gradient_loss", "value_loss", "clip_fraction"):
            record(f"train/{name}", self.metrics.mean(name))
        # SB3 averages these in float32, the others as Python floats.
        record("train/approx_kl", self.metrics.numbers("approx_kl").mean())
        record("train/loss", self.metrics.numbers("loss")[-1].item())
        values, returns = self.buffer.values.flatten(), self.buffer.returns.flatten()
        record("train/explained_variance", explained_variance(values, returns))
        if hasattr(self.policy, "log_std"):
            record("train/std", th.exp(self.policy.log_std).mean().item())
        record("train/n_updates", model._n_updates, exclude="tensorboard")
        record("train/clip_range", self.clip_range)
        if self.clip_range_vf is not None:
            record("train/clip_range_vf", self.clip_range_vf)
        for name, value in self._diagnostics().items():
            record(name if "/" in name else f"train/{name}", value)

    def _diagnostics(self) -> dict[str, float]:
        """What SB3 does not log."""
        model, metrics = self.model, self.metrics
        logged: dict[str, float] = {}
        if metrics["ratio"]:
            ratio = _cat(metrics["ratio"])
            logged |= {"ratio_mean": ratio.mean().item(), "ratio_std": ratio.std(correction=0).item()}
            logged["ratio_max"] = ratio.max().item()
        for name in (name for name, values in metrics.items() if values and name not in LOGGED_OTHERWISE):
            logged[name] = self.metrics.mean(name)
            if name.endswith("grad_norm") and name != "muon_grad_norm":
                logged[f"{name}_clipped"] = float(np.minimum(metrics.numbers(name), model.max_grad_norm).mean())
        logged |= self._action_statistics()
        if not is_constant(model.ent_coef):
            logged["ent_coef"] = self.ent_coef
        if model.kl_coef > 0:
            logged["kl_coef"] = self.kl_coef
        if model.target_kl is not None:
            logged["epochs"] = self.n_epochs_begun
        if self.segments is not None:
            logged["priority_beta"] = self.segments.beta
        if model.bad_gradients == "skip":
            logged["skipped_updates"] = model.n_skipped_updates
        return logged | self._advantage_statistics()

    def _action_statistics(self) -> dict[str, float]:
        if self.metrics["law"]:
            return self.policy.action_dist.statistics(_cat(self.metrics["law"]))
        if not self.action_bounds or self.model._samples_latents:
            return {}
        # How many of the actions, dimension by dimension, the environment gets at a bound
        low, high = (bound.cpu().numpy() for bound in self.action_bounds)
        actions = self.buffer.actions.reshape(-1, len(low))
        return {"actions_at_bounds": float(np.mean((actions <= low) | (actions >= high)))}

    def _advantage_statistics(self) -> dict[str, float]:
        raw, normalizer = self.buffer.advantages, self.model.advantage_normalizer
        logged = {f"adv/raw_{name}": float(getattr(np, name)(raw)) for name in ("mean", "std", "min", "max")}
        if normalizer is not None:
            logged |= {"adv/ema_mean": normalizer.mean, "adv/ema_std": normalizer.std}
        return logged


def _normalize_together(minibatches: list[Minibatch]) -> list[Minibatch]:
    sizes = [len(minibatch.data.advantages) for minibatch in minibatches]
    parts = normalize(_cat([minibatch.data.advantages for minibatch in minibatches])).split(sizes)
    return [m._replace(data=m.data._replace(advantages=part)) for m, part in zip(minibatches, parts, strict=True)]


def _cat(tensors: list[th.Tensor]) -> th.Tensor:
    return tensors[0] if len(tensors) == 1 else th.cat(tensors)

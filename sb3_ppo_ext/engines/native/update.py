"""The update on the extension module: networks and Adam there, the loss in NumPy, or in PyTorch if an option asks for it."""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from torch import nn

from sb3_ppo_ext.common.guards import refuse_gradient
from sb3_ppo_ext.engines.fused import FusedUpdate
from sb3_ppo_ext.engines.native.minibatches import FlatRollout, Measured, NativeMinibatches, normalize_each
from sb3_ppo_ext.engines.native.policy import NativePolicy
from sb3_ppo_ext.update.losses import SPO_MIN_RANGE
from sb3_ppo_ext.update.minibatches import Minibatch, shuffled

# Samples whose measurements are kept before they are averaged
MAX_MEASURED = 16384


class NativeUpdate(FusedUpdate):
    """
    An update whose networks are a :class:`NativePolicy`'s.

    The losses of actor and critic are differentiated by hand here, all further terms by PyTorch's autograd, which sees no more
    of the networks than their outputs; so it is with everything where gradients are accumulated, or another optimiser steps.

    :param model: A ``PPOExt`` with a full rollout buffer
    :param native: Its policy
    """

    def __init__(self, model: Any, native: NativePolicy):
        self.native, self.head = native, native.head
        super().__init__(model)
        self.by_hand = self.adam is not None and model.accumulate_grad == 1
        self.minibatches: NativeMinibatches | None = None
        # Of epochs that are still to be reported, together, for each report takes its time
        self.measured: list[Measured] = []
        self.has_further_terms = model.kl_coef > 0 or model.bounds_coef > 0

    def _make_gradients(self) -> Iterator[tuple[nn.Parameter, th.Tensor]]:
        return ((parameter, th.from_numpy(gradient)) for parameter, gradient in self.native.parameters())

    def _at_end(self) -> None:
        self._report()
        if self.minibatches is not None:
            self.minibatches.measured().report_last(self.metrics, self.head)

    # The networks, for a loss that autograd differentiates

    def _zero_gradients(self) -> None:
        # Whoever makes the steps, for the extension module writes into them
        self._zero_own_gradients()

    def _evaluate_actions(self, data: RolloutBufferSamples) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        features = self.native.features_of_tensor(data.observations)
        self.native.pack()
        self.outputs, self.values = (th.from_numpy(net(features)).requires_grad_() for net in self.native.networks)
        distribution = self.head.make(self.outputs)
        return self.values, distribution.log_prob(self._actions(data)), distribution.entropy()

    def _backward(self, loss: th.Tensor) -> None:
        super()._backward(loss)
        for net, outputs in zip(self.native.networks, (self.outputs, self.values), strict=True):
            if outputs.grad is not None:
                net.network.backward(outputs.grad[:, : net.n_outputs].contiguous().numpy(), True)

    # The loss by hand

    @cached_property
    def rollout(self) -> FlatRollout:
        """Flat."""
        buffer = self.buffer
        return FlatRollout(
            self.native.features(buffer.observations),
            buffer.actions.astype(np.float32, copy=False),
            *(array.ravel() for array in (buffer.values, buffer.log_probs, buffer.advantages, buffer.returns)),
        )

    def _epoch(self, epoch: int) -> bool:
        if not self.by_hand or (self.model.kl_coef > 0 and self.old_distribution is None):
            return super()._epoch(epoch)
        self.minibatches = minibatches = self._draw()
        go_on = all(self._native_step(minibatches, part, epoch) for part in minibatches.parts())
        self.measured.append(minibatches.measured())
        if sum(len(part.ratios) for part in self.measured) > MAX_MEASURED:
            self._report()
        return go_on

    def _report(self) -> None:
        if self.measured:
            coefficients = (self.clip_range, self.ent_coef, self.model.vf_coef)
            Measured.merged(self.measured).report(self.metrics, self.head, *coefficients)
            self.measured.clear()

    def _draw(self) -> NativeMinibatches:
        """Those of a whole epoch."""
        rollout, (order, sizes, weights) = self.rollout, self._draw_places()
        if self.advantages is not None:
            rollout = rollout._replace(advantages=self.advantages.numpy())
        if self.returns is not None:
            rollout = rollout._replace(returns=self.returns.numpy())
        samples = FlatRollout(*(array.take(order, axis=0) for array in rollout))
        if self._normalizes_minibatches():
            samples = samples._replace(advantages=normalize_each(samples.advantages, sizes))
        return NativeMinibatches(order, samples, sizes, weights, self.head)

    def _draw_places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Of the samples in the rollout, the sizes of the minibatches, and the weights of the samples."""
        size, n = self.model.batch_size, self._n_samples()
        if self.segments is None:
            (order, _), *_ = shuffled(n, n)
            return order, np.diff([*range(0, n, size), n]), None
        places, weights = zip(*self.segments.epoch(size), strict=True)
        return np.concatenate(places), np.array([len(part) for part in places]), np.concatenate(weights)

    def _native_step(self, minibatches: NativeMinibatches, part: slice, epoch: int) -> bool:
        """
        :return: False if ``target_kl`` ends the update, and the step was not made
        """
        model, adam, before = self.model, self.adam, self.metrics.lengths()
        assert adam is not None
        self._differentiate(minibatches, part)
        if model.target_kl is not None and self._is_past_target_kl(minibatches.approximate_kl(part), epoch):
            return False
        norm = adam.norm()
        if math.isfinite(norm):
            minibatches.norms.append(norm)
            adam.step(min(model.max_grad_norm / (norm + 1e-6), 1.0))
        elif model.bad_gradients == "raise":
            self._show_gradients()
            further = {name: self.metrics.bad_since(before, name) for name in ("kl", "bounds_loss") if self.metrics[name]}
            refuse_gradient(self.policy, minibatches.terms(part) | further, epoch, model.num_timesteps)
        else:
            model.n_skipped_updates += 1
            self.metrics.forget_since(before)
            minibatches.skip()
        return True

    def _differentiate(self, minibatches: NativeMinibatches, part: slice) -> None:
        """The gradient of PPO's loss, see ``sb3_ppo_ext.update.losses``."""
        m, samples, size = minibatches, minibatches.samples, part.stop - part.start
        actor, critic = self.native.networks
        self.native.pack()
        features, advantages = samples.features[part], samples.advantages[part]
        outputs = actor(features)
        log_prob = self.head.log_prob(outputs, samples.actions[part])
        m.described.append(self.head.described(outputs))
        log_ratio = np.subtract(log_prob, samples.log_probs[part], out=m.log_ratios[part])
        ratio = np.exp(log_ratio, out=m.ratios[part])
        m.objectives[part], d_log_prob = self._objectives(advantages, ratio)
        d_log_prob *= np.float32(-1 / size)
        m.errors[part], d_errors = self._value_errors(critic(features).ravel(), samples.values[part], samples.returns[part])
        d_values = d_errors * np.float32(2 * self.model.vf_coef / size)
        if m.weights is not None:
            d_log_prob, d_values = d_log_prob * m.weights[part], d_values * m.weights[part]
        d_outputs = self.head.gradient(d_log_prob, self.ent_coef)
        if self.has_further_terms:
            m.further[len(m.described) - 1] = self._add_further_gradients(outputs, m.order[part], d_outputs)
        actor.network.backward(d_outputs, False)
        critic.network.backward(d_values, False)

    def _objectives(self, advantages: np.ndarray, ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the policy loss averages, and its derivatives by the log probabilities."""
        gain, c, dual_clip = advantages * ratio, self.clip_range, self.model.dual_clip
        if self.model.surrogate == "spo":
            slope = np.abs(advantages) / max(c, SPO_MIN_RANGE) * (ratio - 1)
            return gain - slope * (ratio - 1) / 2, gain - slope * ratio
        limited = advantages * np.minimum(np.maximum(ratio, 1 - c), 1 + c)
        # Where the clipped one is less, it is constant; the product lets what is not finite through.
        objectives, derivatives = np.minimum(gain, limited), gain * (gain <= limited)
        if dual_clip is not None:
            bounded = (advantages < 0) & (objectives < dual_clip * advantages)
            objectives = np.where(bounded, dual_clip * advantages, objectives)
            derivatives *= ~bounded
        return objectives, derivatives

    def _add_further_gradients(self, outputs: np.ndarray, indices: np.ndarray, d_outputs: np.ndarray) -> float:
        """
        Those of what SB3's loss has not, to ``d_outputs`` and to that of ``log_std``.

        :return: What it adds to the loss
        """
        leaf = th.from_numpy(outputs).requires_grad_()
        self.head.make(leaf)
        no_data: Any = None
        old = None if self.old_distribution is None else self.old_distribution[indices]
        measured: dict[str, th.Tensor] = {}
        # Of the ratio, whose place the leaf takes, they ask whether it has a gradient: the KL divergence is the exact one.
        terms = self._further_terms(Minibatch(no_data, old_distribution=old), leaf, leaf, measured)
        loss = sum((coefficient * term for coefficient, term in terms), th.zeros(()))
        self.metrics.add(measured)
        log_std = self.head.log_std
        of = [leaf] if log_std is None or not log_std.requires_grad else [leaf, log_std]
        gradients = th.autograd.grad(loss, of, allow_unused=True)
        d_outputs += gradients[0].numpy()[:, : d_outputs.shape[1]]
        if len(of) > 1 and gradients[1] is not None:
            self.head.d_log_std += gradients[1].numpy()
        return loss.item()

    def _value_errors(self, values: np.ndarray, old_values: np.ndarray, returns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whose squares the value loss averages, and half the derivatives of these squares."""
        errors, limit = values - returns, self.clip_range_vf
        if limit is None:
            return errors, errors
        moved = values - old_values
        clipped = old_values + np.minimum(np.maximum(moved, -limit), limit) - returns
        derivatives = clipped * (np.abs(moved) <= limit)
        if self.model.vf_clip_mode == "clip":
            return clipped, derivatives
        worse = np.abs(errors) >= np.abs(clipped)
        return np.where(worse, errors, clipped), np.where(worse, errors, derivatives)

"""The update on the extension module: networks and Adam there, the loss in NumPy, or in PyTorch if an option asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from torch import nn

from sb3_ppo_ext.buffers import Minibatch, shuffled
from sb3_ppo_ext.fast_policy import FastPolicy, _mlp
from sb3_ppo_ext.guards import refuse_gradient
from sb3_ppo_ext.heads import Head, TorchHead
from sb3_ppo_ext.losses import SPO_MIN_RANGE
from sb3_ppo_ext.metrics import Metrics
from sb3_ppo_ext.update import Update

# Samples whose measurements are kept before they are averaged
MAX_MEASURED = 16384


class FastAdam:
    """
    Steps of torch's Adam, on its own state.

    :param optimizer: One that :meth:`takes` accepts
    :param parameters: Those that it optimises, with their gradients
    """

    def __init__(self, optimizer: th.optim.Optimizer, parameters: list[tuple[nn.Parameter, np.ndarray]]):
        (self.group,) = optimizer.param_groups
        for parameter, _ in parameters:
            if not optimizer.state[parameter]:
                zeros = {name: th.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": th.tensor(0.0), **zeros}
        self.states = [optimizer.state[parameter] for parameter, _ in parameters]
        self.n_steps = int(self.states[0]["step"])
        self.adam = _mlp.Adam(
            [
                (parameter.detach().numpy(), gradient, state["exp_avg"].numpy(), state["exp_avg_sq"].numpy())
                for (parameter, gradient), state in zip(parameters, self.states, strict=True)
            ]
        )

    @staticmethod
    def takes(optimizer: th.optim.Optimizer) -> bool:
        """
        :param optimizer: Of a policy
        :return: Whether it is an Adam whose steps this can make
        """
        if type(optimizer) is not th.optim.Adam or len(optimizer.param_groups) != 1:
            return False
        group = optimizer.param_groups[0]
        variants = ("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay")
        # Learning rate schedulers and others put a `step` of their own into the instance.
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, "step" in vars(optimizer))
        steps = {float(state["step"]) for state in optimizer.state.values()}
        whole = len(steps) <= 1 and len(optimizer.state) in (0, sum(p.requires_grad for p in group["params"]))
        return whole and not any(group.get(name) for name in variants) and not any(hooks)

    def norm(self) -> float:
        """:return: Of all gradients"""
        return float(self.adam.norm())

    def step(self, scale: float = 1.0) -> None:
        """
        :param scale: What the gradients are multiplied by
        """
        self.n_steps += 1
        group = self.group
        self.adam.step(self.n_steps, scale, float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"])

    def close(self) -> None:
        """Tell torch's optimiser how many steps it has made."""
        for state in self.states:
            state["step"].fill_(self.n_steps)


class LeanUpdate(Update):
    """
    An update whose networks are PyTorch's; norm, clipping and Adam are not.

    :param model: A ``PPOExt`` with a full rollout buffer, whose policy is on the CPU, in float32
    """

    def __init__(self, model: Any):
        super().__init__(model)
        self.gradients = list(self._make_gradients())
        # Of an actor at rest the optimiser must leave out some parameters.
        takes = model.max_clip_fraction is None and FastAdam.takes(self.policy.optimizer)
        self.adam = FastAdam(self.policy.optimizer, self.gradients) if takes else None
        self.scale = 1.0

    def _make_gradients(self) -> Iterator[tuple[nn.Parameter, np.ndarray]]:
        """Each parameter that is learned, with an array for its gradient."""
        for parameter in self.policy.parameters():
            if parameter.requires_grad:
                yield parameter, np.zeros(parameter.shape, np.float32)

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self.adam is not None:
                self.adam.close()

    def _zero_gradients(self) -> None:
        if self.adam is None:
            super()._zero_gradients()
        for parameter, gradient in self.gradients if self.adam is not None else ():
            gradient.fill(0.0)
            if parameter.grad is None or parameter.grad.data_ptr() != gradient.ctypes.data:
                parameter.grad = th.from_numpy(gradient)

    def _clip(self) -> dict[str, th.Tensor]:
        if self.adam is None:
            return super()._clip()
        norm = self.adam.norm()
        self.scale = min(self.model.max_grad_norm / (norm + 1e-6), 1.0)
        return {"grad_norm": th.tensor(norm, dtype=th.float32)}

    def _step_optimizer(self) -> None:
        if self.adam is None:
            super()._step_optimizer()
        else:
            self.adam.step(self.scale)


class FastUpdate(LeanUpdate):
    """
    An update whose networks are a :class:`FastPolicy`'s.

    The losses of actor and critic are differentiated by hand here, all further terms by PyTorch's autograd, which sees no more
    of the networks than their outputs; so it is with everything where gradients are accumulated, or another optimiser steps.

    :param model: A ``PPOExt`` with a full rollout buffer
    :param fast: Its policy
    """

    def __init__(self, model: Any, fast: FastPolicy):
        self.fast, self.head = fast, fast.head
        super().__init__(model)
        self.by_hand = self.adam is not None and model.accumulate_grad == 1
        self.minibatches: _Minibatches | None = None
        # Of epochs that are still to be reported, together, for each report takes its time
        self.measured: list[_Measured] = []
        self.has_further_terms = model.kl_coef > 0 or model.bounds_coef > 0
        self.log_std = None if self.head.log_std is None else self.head.log_std.detach().numpy()
        self.torch_head = TorchHead(self.head.distribution, self.head.log_std, getattr(self.head, "transform", None))

    def _make_gradients(self) -> Iterator[tuple[nn.Parameter, np.ndarray]]:
        return self.fast.parameters()

    def _at_end(self) -> None:
        self._report()
        if self.minibatches is not None:
            self.minibatches.measured().report_last(self.metrics, self.head)

    # The networks, for a loss that autograd differentiates

    def _zero_gradients(self) -> None:
        # Their own arrays whoever makes the steps, for the extension module writes into them
        for _, gradient in self.gradients:
            gradient.fill(0.0)
        self._show_gradients()

    def _evaluate_actions(self, data: RolloutBufferSamples) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        features = self.fast.features_of_tensor(data.observations)
        self.fast.pack()
        self.outputs, self.values = (th.from_numpy(net(features)).requires_grad_() for net in self.fast.networks)
        distribution = self.torch_head.make(self.outputs)
        return self.values, distribution.log_prob(self._actions(data)), distribution.entropy()

    def _backward(self, loss: th.Tensor) -> None:
        super()._backward(loss)
        for net, outputs in zip(self.fast.networks, (self.outputs, self.values), strict=True):
            if outputs.grad is not None:
                net.network.backward(outputs.grad.contiguous().numpy(), True)

    # The loss by hand

    @cached_property
    def rollout(self) -> _Rollout:
        """Flat."""
        buffer = self.buffer
        return _Rollout(
            self.fast.features(buffer.observations),
            buffer.actions.astype(np.float32, copy=False),
            *(array.ravel() for array in (buffer.values, buffer.log_probs, buffer.advantages, buffer.returns)),
        )

    def _epoch(self, epoch: int) -> bool:
        if not self.by_hand or (self.model.kl_coef > 0 and self.old_distribution is None):
            return super()._epoch(epoch)
        self.minibatches = minibatches = self._draw()
        go_on = all(self._fast_step(minibatches, part, epoch) for part in minibatches.parts())
        self.measured.append(minibatches.measured())
        if sum(len(part.ratios) for part in self.measured) > MAX_MEASURED:
            self._report()
        return go_on

    def _report(self) -> None:
        if self.measured:
            coefficients = (self.clip_range, self.ent_coef, self.model.vf_coef)
            _Measured.merged(self.measured).report(self.metrics, self.head, *coefficients)
            self.measured.clear()

    def _draw(self) -> _Minibatches:
        """Those of a whole epoch."""
        rollout, (order, sizes, weights) = self.rollout, self._draw_places()
        if self.advantages is not None:
            rollout = rollout._replace(advantages=self.advantages.numpy())
        if self.returns is not None:
            rollout = rollout._replace(returns=self.returns.numpy())
        samples = _Rollout(*(array.take(order, axis=0) for array in rollout))
        if self._normalizes_minibatches():
            samples = samples._replace(advantages=normalize_each(samples.advantages, sizes))
        return _Minibatches(order, samples, sizes, weights, self.head, self.fast.actor.n_outputs)

    def _draw_places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Of the samples in the rollout, the sizes of the minibatches, and the weights of the samples."""
        size, n = self.model.batch_size, self._n_samples()
        if self.segments is None:
            (order, _), *_ = shuffled(n, n)
            return order, np.diff([*range(0, n, size), n]), None
        places, weights = zip(*self.segments.epoch(size), strict=True)
        return np.concatenate(places), np.array([len(part) for part in places]), np.concatenate(weights)

    def _fast_step(self, minibatches: _Minibatches, part: slice, epoch: int) -> bool:
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

    def _differentiate(self, minibatches: _Minibatches, part: slice) -> None:
        """The gradient of PPO's loss, see ``sb3_ppo_ext.losses``."""
        m, samples, size = minibatches, minibatches.samples, part.stop - part.start
        actor, critic = self.fast.networks
        self.fast.pack()
        features, advantages = samples.features[part], samples.advantages[part]
        m.outputs[part] = outputs = actor(features)
        log_prob = self.head.log_prob(outputs, samples.actions[part])
        log_ratio = np.subtract(log_prob, samples.log_probs[part], out=m.log_ratios[part])
        ratio = np.exp(log_ratio, out=m.ratios[part])
        m.objectives[part], d_log_prob = self._objectives(advantages, ratio)
        d_log_prob *= np.float32(-1 / size)
        m.errors[part], d_errors = self._value_errors(critic(features).ravel(), samples.values[part], samples.returns[part])
        d_values = d_errors * np.float32(2 * self.model.vf_coef / size)
        if m.log_stds is not None:
            # Before the step changes them
            m.log_stds[m.n_evaluated] = self.log_std
        if m.weights is not None:
            d_log_prob, d_values = d_log_prob * m.weights[part], d_values * m.weights[part]
        d_outputs = self.head.gradient(d_log_prob, self.ent_coef)
        if self.has_further_terms:
            m.further[m.n_evaluated] = self._add_further_gradients(outputs, m.order[part], d_outputs)
        actor.network.backward(d_outputs, False)
        critic.network.backward(d_values, False)
        m.n_evaluated += 1

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
        self.torch_head.make(leaf)
        no_data: Any = None
        # Of the ratio, whose place the leaf takes, they ask whether it has a gradient: the KL divergence is the exact one.
        terms = self._further_terms(Minibatch(no_data, indices=indices), leaf, leaf)
        loss = sum((coefficient * term for coefficient, term in terms), th.zeros(()))
        log_std = self.head.log_std
        of = [leaf] if log_std is None or not log_std.requires_grad else [leaf, log_std]
        gradients = th.autograd.grad(loss, of, allow_unused=True)
        d_outputs += gradients[0].numpy()
        if len(of) > 1 and gradients[1] is not None:
            assert self.head.d_log_std is not None
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

    def _show_gradients(self) -> None:
        for parameter, gradient in self.gradients:
            parameter.grad = th.from_numpy(gradient)


class _Rollout(NamedTuple):
    """Arrays whose first dimension is that of the samples."""

    features: np.ndarray
    actions: np.ndarray
    values: np.ndarray
    log_probs: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray


class _Minibatches:
    """
    The minibatches of an epoch one after the other, and what is measured of them.

    :param order: Places in the rollout in the order in which they are drawn
    :param samples: In this order
    :param sizes: Of the minibatches
    :param weights: Of the samples, ``None`` for equal ones
    :param head: What the outputs of the network mean
    :param n_outputs: How many there are
    """

    def __init__(
        self,
        order: np.ndarray,
        samples: _Rollout,
        sizes: np.ndarray,
        weights: np.ndarray | None,
        head: Head,
        n_outputs: int,
    ):
        self.order, self.samples, self.sizes, self.weights, self.head = order, samples, sizes, weights, head
        # What other terms add to the loss of each minibatch
        self.further = np.zeros(len(sizes), np.float32)
        self.ends = np.cumsum(sizes)
        self.log_ratios, self.ratios, self.objectives, self.errors = np.empty((4, len(samples.features)), np.float32)
        self.outputs = np.empty((len(samples.features), n_outputs), np.float32)
        self.log_stds = None if head.log_std is None else np.empty((len(sizes), *head.log_std.shape), np.float32)
        self.n_evaluated = 0
        # Of each step that was made
        self.norms: list[float] = []
        self.skipped: list[int] = []

    def parts(self) -> Iterator[slice]:
        """:return: Where each minibatch is"""
        return (slice(end - size, end) for end, size in zip(self.ends.tolist(), self.sizes.tolist(), strict=True))

    def skip(self) -> None:
        """Leave the last one out of what is measured."""
        self.skipped.append(self.n_evaluated - 1)

    def approximate_kl(self, part: slice) -> float:
        """:return: See :func:`sb3_ppo_ext.losses.approximate_kl`"""
        return float(np.mean(self.ratios[part] - 1 - self.log_ratios[part]))

    def terms(self, part: slice) -> dict[str, float]:
        """:return: Those of the loss of a minibatch"""
        weights = 1.0 if self.weights is None else self.weights[part]
        log_stds = None if self.log_stds is None else self.log_stds[self.n_evaluated - 1 : self.n_evaluated]
        return {
            "policy_gradient_loss": -float(np.mean(self.objectives[part] * weights)),
            "value_loss": float(np.mean(np.square(self.errors[part]) * weights)),
            "entropy_loss": -float(np.mean(self.head.entropies(self.outputs[part], log_stds))),
        }

    def measured(self) -> _Measured:
        """:return: Of the minibatches that were evaluated"""
        sizes = self.sizes[: self.n_evaluated]
        n = int(sizes.sum())
        kept = np.ones(len(sizes), bool)
        kept[self.skipped] = False
        return _Measured(
            sizes,
            kept,
            self.further[: len(sizes)],
            None if self.log_stds is None else self.log_stds[: len(sizes)],
            np.array(self.norms, np.float32),
            self.outputs[:n],
            self.objectives[:n],
            self.errors[:n],
            self.ratios[:n],
            self.log_ratios[:n],
            None if self.weights is None else self.weights[:n],
        )


class _Measured(NamedTuple):
    """What was measured in some minibatches: of each, of each step that was made, and of each sample."""

    sizes: np.ndarray
    kept: np.ndarray
    further: np.ndarray
    log_stds: np.ndarray | None
    norms: np.ndarray
    outputs: np.ndarray
    objectives: np.ndarray
    errors: np.ndarray
    ratios: np.ndarray
    log_ratios: np.ndarray
    weights: np.ndarray | None

    @classmethod
    def merged(cls, parts: list[_Measured]) -> _Measured:
        """:return: The parts one after the other"""
        columns: Any = zip(*parts, strict=True)
        arrays: Any = [None if column[0] is None else np.concatenate(column) for column in columns]
        return cls(*arrays)

    def report(self, metrics: Metrics, head: Head, clip_range: float, ent_coef: float, vf_coef: float) -> None:
        """
        :param metrics: They get the means of each minibatch
        :param head: What the outputs mean
        :param clip_range: Of the ratios
        :param ent_coef: Coefficient of the entropy loss
        :param vf_coef: Coefficient of the value loss
        """
        weights = 1.0 if self.weights is None else self.weights
        policy_loss = -self._means(self.objectives * weights)
        value_loss = self._means(np.square(self.errors) * weights)
        entropy_loss = -self._means(head.entropies(self.outputs, self._log_stds()))
        means = {
            "policy_gradient_loss": policy_loss,
            "value_loss": value_loss,
            "entropy_loss": entropy_loss,
            "clip_fraction": self._means(np.abs(self.ratios - 1) > clip_range),
            "loss": policy_loss + ent_coef * entropy_loss + vf_coef * value_loss + self.further[self.kept],
            "grad_norm": self.norms,
        }
        for name, values in means.items():
            if len(values):
                metrics[name].append(th.from_numpy(values))

    def report_last(self, metrics: Metrics, head: Head) -> None:
        """
        :param metrics: They get what is measured in the last epoch alone
        :param head: What the outputs mean
        """
        approx_kl = self._means(self.ratios - 1 - self.log_ratios)
        samples = np.repeat(self.kept, self.sizes)
        if len(approx_kl):
            metrics["approx_kl"].append(th.from_numpy(approx_kl))
            metrics["ratio"].append(th.from_numpy(self.ratios[samples]))
        laws = head.laws(self.outputs, self._log_stds())
        if laws is not None and not metrics["law"]:
            metrics["law"].append(laws[samples])

    def _log_stds(self) -> np.ndarray | None:
        """For each sample."""
        return None if self.log_stds is None else np.repeat(self.log_stds, self.sizes, axis=0)

    def _means(self, values: np.ndarray) -> np.ndarray:
        """Of the minibatches that count."""
        return mean_of_each(values, self.sizes)[self.kept].astype(np.float32)


def mean_of_each(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """
    :param values: Shape ``(sizes.sum(),)``
    :param sizes: Of its parts
    :return: The mean of each part, in float64
    """
    if sizes.min() == sizes.max():
        return np.add.reduce(values.reshape(len(sizes), -1), axis=1, dtype=np.float64) / sizes
    return np.add.reduceat(values, np.cumsum(sizes) - sizes, dtype=np.float64) / sizes


def normalize_each(advantages: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """
    :param advantages: Shape ``(sizes.sum(),)``
    :param sizes: Of the minibatches
    :return: Each minibatch by itself as in :func:`sb3_ppo_ext.advantages.normalize`
    """
    centred = advantages - np.repeat(mean_of_each(advantages, sizes), sizes)
    # Of the sample, that is by n - 1; a single advantage stays as it is.
    variances = mean_of_each(np.square(centred), sizes) * sizes / np.maximum(sizes - 1, 1)
    centred /= np.repeat(np.sqrt(variances) + 1e-8, sizes)
    if sizes.min() == 1:
        centred = np.where(np.repeat(sizes > 1, sizes), centred, advantages)
    return centred.astype(np.float32)

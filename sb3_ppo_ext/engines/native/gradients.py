"""
Analytic gradients: the extension module differentiates the networks, and the losses for most action distributions. For the
others, the slopes in ``update.losses`` differentiate PPO's losses, and autograd differentiates penalties with respect to the
outputs of the networks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch as th
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from sb3_ppo_ext.distributed.statistics import mean_and_std_of_each
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.native.compiled_loss import compiled_loss
from sb3_ppo_ext.engines.native.compiled_steps import MAX_SAMPLES, compiled_steps
from sb3_ppo_ext.engines.native.epoch import FlatRollout, MeasuredMinibatches, NativeMinibatches, mean_of_each, normalize_each
from sb3_ppo_ext.engines.native.policy import NativePolicy, blocks, mask
from sb3_ppo_ext.engines.optimizer_steps import FusedAdamStepper, TorchStepper
from sb3_ppo_ext.update.advantages import standardize
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.estimates import Estimates
from sb3_ppo_ext.update.loop import GradientSource, Measured, Stepper
from sb3_ppo_ext.update.losses import SURROGATES, active_penalties, value_slope
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.minibatch_loss import actions_of
from sb3_ppo_ext.update.minibatches import n_counted

# Number of samples with measurements that are kept before they are averaged
MAX_MEASURED = 16384
# Slices of the minibatches of an optimiser step among the samples of an epoch
Step: TypeAlias = tuple[slice, ...]


class AnalyticGradients(GradientSource):
    """
    A ``GradientSource`` that evaluates and differentiates networks with the extension module.

    :param native: Policy on the extension module
    :param config: Options of the update
    :param estimates: Advantages, returns and priorities of the rollout
    :param stepper: Stepper of the optimiser
    """

    def __init__(
        self,
        native: NativePolicy,
        config: UpdateConfig,
        estimates: Estimates,
        stepper: Stepper,
    ):
        self.native, self.config, self.estimates, self.stepper = native, config, estimates, stepper
        self.distribution, self.loss, self.ent_coef = native.distribution, config.loss, float(config.loss.ent_coef)
        self.slope = SURROGATES[config.loss.surrogate].slope
        self.penalties = active_penalties(config.loss, estimates.old_distribution is not None)
        # Gradients that an optimiser of PyTorch reads
        is_of_torch = isinstance(stepper, TorchStepper)
        self.shown = [(p, th.from_numpy(gradient)) for p, gradient in native.parameters()] if is_of_torch else []
        # Norms of the gradients in steps that the extension module has made
        self.norms: list[float] = []
        # Numbers of epochs that are laid out one after the other, and of those among them that have begun, number of the next
        # step in them, and number of epochs that come after them
        self.n_laid_out = self.n_begun = self.next_step = 0
        self.n_epochs_left = config.n_epochs
        # Number of minibatches of the last step, and a number that is finite if the squared errors of its values are
        self.n_minibatches, self.squared_errors = 0, 0.0
        # Measurements of epochs that have not been reported yet; several epochs are reported together to save time
        self.measured: list[MeasuredMinibatches] = []
        self.reported = Metrics()

    # Minibatches

    @cached_property
    def rollout(self) -> FlatRollout:
        """The whole rollout in the form that the networks read."""
        buffer = self.estimates.rollout.buffer
        # A callback may have left arrays of another type.
        values, log_probs, advantages, returns = (
            array.ravel().astype(np.float32, copy=False)
            for array in (buffer.values, buffer.log_probs, buffer.advantages, buffer.returns)
        )
        return FlatRollout(
            self.native.features(buffer.observations),
            buffer.actions.astype(np.float32, copy=False),
            values,
            log_probs,
            advantages,
            returns,
            self.native.invalid(buffer.observations),
            None if (old := self.estimates.old_distribution) is None else old.numpy(),
        )

    def steps(self) -> Iterator[Step]:
        """
        :return: Steps of one epoch, but for those that the extension module makes itself, which may be those of later epochs
        """
        if self.n_begun == self.n_laid_out:
            self._begin_epochs()
        self.n_begun += 1
        end = self.n_begun * len(self.parts) // self.n_laid_out
        try:
            while self.next_step < end:
                n_made, is_stopped = self._make_steps(self.next_step)
                self.next_step += n_made
                if is_stopped and self.next_step < end:
                    yield self.parts[self.next_step]
                    self.next_step += 1
        finally:
            if self.n_begun == self.n_laid_out:
                self._end_epochs()

    def _make_steps(self, first: int) -> tuple[int, bool]:
        """Let the extension module make steps, and return their number, and whether the next one is left to the loop."""
        if self.compiled_steps is None:
            return 0, True
        norms, n_asked = self.compiled_steps.make(first)
        self.minibatches.n += sum(map(len, self.parts[first : first + len(norms)]))
        self.norms += norms
        return len(norms), len(norms) < n_asked

    def _begin_epochs(self) -> None:
        """Draw and gather the samples of an epoch, or of several that the extension module may make in one call."""
        rollout, estimates, config = self.rollout, self.estimates, self.config
        n, self.n_begun, self.next_step = self._n_at_once(), 0, 0
        self.n_epochs_left, self.n_laid_out = self.n_epochs_left - n, n
        order, sizes, weights = self._draw(n)
        if estimates.advantages is not None:
            rollout = rollout._replace(advantages=estimates.advantages.float().numpy())
        if estimates.returns is not None:
            rollout = rollout._replace(returns=estimates.returns.float().numpy())
        if hasattr(self, "minibatches") and weights is None and len(order) == len(self.minibatches.order):
            # The same arrays again, which the extension module knows
            self.minibatches.begin(order)
            rollout.take(order, self.minibatches.samples)
        else:
            self._lay_out(sizes, NativeMinibatches(order, rollout.take(order), self._split(sizes), weights, self.distribution))
        if config.normalizes_minibatches:
            self._normalize(self.minibatches.samples.advantages, sizes, weights)

    def _n_at_once(self) -> int:
        """Number of epochs that are drawn together: one, unless they are small and nothing comes in between."""
        config = self.config
        is_alone = config.target_kl is None and not config.vtrace and not config.ranks.are_several
        if not is_alone or self.estimates.segments is not None or not isinstance(self.stepper, FusedAdamStepper):
            return 1
        largest = max(MAX_SAMPLES // self.estimates.rollout.n_samples, 1)
        # As many each time, as far as possible
        return -(-self.n_epochs_left // -(-self.n_epochs_left // largest))

    def _split(self, sizes: np.ndarray) -> np.ndarray:
        """Number of samples in each minibatch, of which steps with several have no more than ``step_size`` samples."""
        return sizes if self.config.accumulate_grad == 1 else _split(sizes, self.config.batch_size)

    def _lay_out(self, sizes: np.ndarray, minibatches: NativeMinibatches) -> None:
        """Choose what computes the minibatches of an epoch, given the number of samples in each step."""
        config = self.config
        # Parts of draws that are spread over the ranks may be larger than `batch_size`.
        is_spread = minibatches.weights is not None and config.ranks.are_several
        self.parts = list(_steps(sizes.tolist(), int(sizes.max()) if is_spread else config.batch_size))
        self.minibatches = minibatches
        self.compiled = compiled_loss(self.distribution, minibatches, self.loss, self.penalties)
        ends = tuple(step[-1].stop for step in self.parts)
        self.compiled_steps = compiled_steps(self.native, minibatches, self.compiled, self.stepper, config, ends)

    @cached_property
    def _sizes(self) -> np.ndarray:
        """Number of samples in each step of an epoch in which every sample is drawn once."""
        return _split(np.array([self.estimates.rollout.n_samples]), self.config.step_size)

    def _normalize(self, advantages: np.ndarray, sizes: np.ndarray, weights: np.ndarray | None) -> None:
        """Normalise advantages in each step of the optimiser, over the samples of all ranks."""
        if self.config.ranks.are_several:
            advantages[:] = self._normalized_over_ranks(advantages, sizes, weights)
        elif weights is not None:
            advantages[:] = normalize_each(advantages, sizes)
        else:
            for of_epoch in advantages.reshape(self.n_laid_out, -1):
                extension.module.normalize(of_epoch, int(sizes[0]), of_epoch)

    def _normalized_over_ranks(self, advantages: np.ndarray, sizes: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        # A sample without weight stands for an empty step.
        counted = np.float64(1) if weights is None else (weights > 0).astype(np.float64)
        n = sizes if weights is None else mean_of_each(counted, sizes) * sizes
        own_means = mean_of_each(counted * advantages, sizes) * sizes / np.maximum(n, 1)
        squares = mean_of_each(counted * np.square(advantages - np.repeat(own_means, sizes)), sizes) * sizes
        own = th.from_numpy(np.stack([n, own_means, squares]))
        means, stds = (np.repeat(each.numpy(), sizes) for each in mean_and_std_of_each(own, self.config.ranks))
        of_all_ranks: np.ndarray = standardize(advantages, means, stds)
        return of_all_ranks

    def _draw(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Indices of the samples of some epochs, the number of samples in each step, and importance weights."""
        rollout, segments, size = self.estimates.rollout, self.estimates.segments, self.config.step_size
        if segments is None:
            orders = [rollout.order().numpy() for _ in range(n)]
            return (orders[0], self._sizes, None) if n == 1 else (np.concatenate(orders), np.tile(self._sizes, n), None)
        indices, weights = zip(*rollout.draws(size, size, segments), strict=True)
        return th.cat(indices).numpy(), np.array([len(part) for part in indices]), th.cat(weights).numpy()

    # Gradients

    def add(self, step: Step) -> Measured:
        """
        Write the gradient of the loss of a step into the memory of the gradients.

        :param step: Step of the optimiser
        :return: What has been measured
        """
        size, metrics, self.squared_errors = step[-1].stop - step[0].start, Metrics(), 0.0
        for number, part in enumerate(step):
            self._add_minibatch(part, size, number > 0, metrics)
        for parameter, gradient in self.shown:
            parameter.grad = gradient
        self.n_minibatches = len(step)
        return self._measured(step, metrics)

    def _add_minibatch(self, part: slice, size: int, accumulate: bool, metrics: Metrics) -> None:
        """Add the gradient of a minibatch, for a loss that is the mean over the ``size`` samples of the step."""
        self.native.pack()
        # For autograd, auxiliary losses are of the minibatch as a whole.
        parts = [part] if self.penalties and self.compiled is None else list(blocks(part.start, part.stop))
        self.minibatches.n += 1
        if self.compiled is not None:
            for number, each in enumerate(parts):
                self._add_compiled(self.compiled, each, size, accumulate or number > 0)
            return
        described = [self._add_block(each, size, accumulate or number > 0, metrics) for number, each in enumerate(parts)]
        self.minibatches.described.append(described[0] if len(described) == 1 else np.concatenate(described))

    def _add_compiled(self, loss: Any, part: slice, size: int, accumulate: bool) -> None:
        """Add the gradient of a part of a minibatch, with a loss of the extension module."""
        samples = self.minibatches.samples
        outputs, values = self.native.evaluate(samples.features[part])
        if samples.invalid is not None:
            mask(outputs, samples.invalid[part])
        d_outputs, d_values = self.native.actor.empty(outputs), np.empty_like(values)
        self.squared_errors += loss.add(part.start, size, outputs, values, d_outputs, d_values, accumulate)
        self.native.backward(d_outputs, d_values, accumulate)

    def _add_block(self, part: slice, size: int, accumulate: bool, metrics: Metrics) -> np.ndarray:
        """
        Add the gradient of a part of a minibatch.

        :return: Descriptions of the distributions, shape ``(n_samples, n)``
        """
        m, samples, distribution = self.minibatches, self.minibatches.samples, self.distribution
        advantages = samples.advantages[part]
        outputs, values = self.native.evaluate(samples.features[part])
        if samples.invalid is not None:
            mask(outputs, samples.invalid[part])
        log_prob = distribution.log_prob(outputs, samples.actions[part])
        described = distribution.described(outputs)
        log_ratio = np.subtract(log_prob, samples.log_probs[part], out=m.log_ratios[part])
        ratio = np.exp(log_ratio, out=m.ratios[part])
        m.objectives[part], d_log_prob = self.slope(advantages, ratio, self.loss)
        d_log_prob *= np.float32(-1 / size)
        m.errors[part], d_errors = value_slope(values, samples.values[part], samples.returns[part], self.loss)
        self.squared_errors += float(np.vdot(m.errors[part], m.errors[part]))
        d_values = d_errors * np.float32(2 * self.loss.vf_coef / size)
        if m.weights is not None:
            d_log_prob, d_values = d_log_prob * m.weights[part], d_values * m.weights[part]
        share = len(ratio) / size
        d_outputs = distribution.gradient(d_log_prob, self.ent_coef * share, accumulate=accumulate)
        if self.penalties:
            inputs = NativeInputs(self, outputs, values, part)
            m.penalties[m.n - 1] = self._add_penalties(inputs, d_outputs, d_values, share, metrics)
        self.native.backward(d_outputs, d_values, accumulate)
        return described

    def _add_penalties(
        self, inputs: NativeInputs, d_outputs: np.ndarray, d_values: np.ndarray, share: float, metrics: Metrics
    ) -> float:
        """
        Add the gradients of the penalties to ``d_outputs``, ``d_values`` and the gradient of ``log_std``.

        :return: Weighted sum of the penalties
        """
        total = th.zeros(())
        for name, loss in self.penalties.items():
            term = loss.value(inputs, self.loss)
            metrics[name].append(term.detach())
            total = total + self.loss.penalties[name] * term
        if not total.requires_grad:  # such as the entropy of Gaussians whose standard deviation is not learned
            return total.item()
        log_std = self.distribution.log_std
        leaves = [inputs.outputs, inputs.values]
        leaves += [] if log_std is None or not log_std.requires_grad else [log_std]
        gradients = th.autograd.grad(total, leaves, allow_unused=True)
        if gradients[0] is not None:
            d_outputs += share * gradients[0].numpy()[:, : d_outputs.shape[1]]
        if gradients[1] is not None:
            d_values += share * gradients[1].numpy()
        if len(leaves) > 2 and gradients[2] is not None:
            self.distribution.d_log_std += share * gradients[2].numpy()
        return total.item()

    # Metrics

    def _measured(self, step: Step, metrics: Metrics) -> Measured:
        part, config = _joined(step), self.config
        n = part.stop - part.start
        if config.ranks.are_several:
            weights = self.minibatches.weights
            n = n_counted(n, None if weights is None else weights[part])
        # If the loss is not finite, its gradient is not either, except where errors of the values overflow when squared.
        return Measured(
            self.squared_errors,
            0.0 if config.target_kl is None else self._approximate_kl(part),
            0.0 if config.max_clip_fraction is None else self._clip_fraction(part),
            n,
            lambda: self.minibatches.terms(part, len(step)) | {name: values[-1].item() for name, values in metrics.items()},
            metrics,
        )

    def _approximate_kl(self, part: slice) -> float:
        return float(np.mean(self.minibatches.ratios[part] - 1 - self.minibatches.log_ratios[part]))

    def _clip_fraction(self, part: slice) -> float:
        return float(np.mean(np.abs(self.minibatches.ratios[part] - 1) > self.loss.clip_range))

    def forget(self) -> None:
        """Leave the minibatches of the last step out of the metrics."""
        self.minibatches.skip(self.n_minibatches)

    def finish(self, metrics: Metrics) -> None:
        """
        :param metrics: Metrics that all measurements are added to
        """
        self._report()
        n_last = len(self.minibatches.sizes) // self.n_laid_out
        self.minibatches.measured(n_last * (self.n_begun - 1)).report_last(metrics, self.distribution)
        for name, values in self.reported.items():
            metrics[name].extend(values)
        if self.norms:
            metrics["grad_norm"].append(th.tensor(self.norms, dtype=th.float32))

    def _end_epochs(self) -> None:
        """Keep the measurements of the minibatches."""
        self.measured.append(self.minibatches.measured())
        if sum(len(part.ratios) for part in self.measured) > MAX_MEASURED:
            self._report()

    def _report(self) -> None:
        if self.measured:
            MeasuredMinibatches.merged(self.measured).report(self.reported, self.distribution, self.loss)
            self.measured.clear()


class NativeInputs:
    """
    Quantities of a minibatch that penalties read, see :class:`~sb3_ppo_ext.update.losses.LossInputs`. Each is computed
    from the outputs of the networks when it is first read.

    :param gradients: Gradient source with the minibatches of the epoch
    :param outputs: Outputs of the actor, shape ``(batch_size, n_outputs)``
    :param values: Outputs of the critic, shape ``(batch_size,)``
    :param part: Slice of the minibatch among the samples of the epoch
    """

    def __init__(self, gradients: AnalyticGradients, outputs: np.ndarray, values: np.ndarray, part: slice):
        self._gradients, self._part = gradients, part
        self._indices = gradients.minibatches.order[part]
        self.policy_name = type(gradients.native.policy).__name__
        self.outputs = th.from_numpy(outputs).requires_grad_()
        self.values = th.from_numpy(values).requires_grad_()

    @cached_property
    def data(self) -> RolloutBufferSamples:
        """Samples of the minibatch, with the advantages and returns that the losses use."""
        samples, part = self._gradients.minibatches.samples, self._part
        data = self._gradients.estimates.rollout.samples(th.from_numpy(self._indices))
        advantages, returns = (th.from_numpy(array[part]) for array in (samples.advantages, samples.returns))
        return data._replace(advantages=advantages, returns=returns)

    @cached_property
    def distribution(self) -> Distribution:
        """Action distributions with the outputs as parameters."""
        return self._gradients.distribution.make(self.outputs)

    @cached_property
    def log_prob(self) -> th.Tensor:
        """Log probabilities of the actions, shape ``(batch_size,)``."""
        return self.distribution.log_prob(actions_of(self.data, self._gradients.config.discrete_actions))

    @cached_property
    def entropy(self) -> th.Tensor | None:
        """Entropies of the action distributions in nats, shape ``(batch_size,)``; ``None`` without a closed form."""
        return self.distribution.entropy()

    @cached_property
    def log_ratio(self) -> th.Tensor:
        """Log probabilities under the current policy minus those at collection time, shape ``(batch_size,)``."""
        return self.log_prob - self.data.old_log_prob

    @cached_property
    def ratio(self) -> th.Tensor:
        """Probability ratios, shape ``(batch_size,)``."""
        return th.exp(self.log_ratio)

    @cached_property
    def old_distribution(self) -> th.Tensor | None:
        """Parameters of the action distributions before the update, shape ``(batch_size, n)``."""
        old = self._gradients.minibatches.samples.old
        return None if old is None else th.from_numpy(old[self._part])


def _steps(sizes: list[int], batch_size: int) -> Iterator[Step]:
    start = 0
    for size in sizes:
        end = start + size
        if size <= batch_size:
            yield (slice(start, end),)
        else:
            yield tuple(slice(i, min(i + batch_size, end)) for i in range(start, end, batch_size))
        start = end


def _joined(step: Step) -> slice:
    return slice(step[0].start, step[-1].stop)


def _split(sizes: np.ndarray, batch_size: int) -> np.ndarray:
    """Sizes of the minibatches, given the sizes of the steps."""
    return np.concatenate([np.diff([*range(0, size, batch_size), size]) for size in sizes.tolist()])

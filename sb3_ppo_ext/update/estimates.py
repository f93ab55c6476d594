"""Estimates from the whole rollout, before minibatches are drawn: advantages, returns, priorities, old distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from sb3_ppo_ext.distributions import parameters
from sb3_ppo_ext.policies.actor_critic import evaluator
from sb3_ppo_ext.rollout.gae import vtrace
from sb3_ppo_ext.update.advantages import AdvantageNormalizer, normalize_over
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.losses import PENALTIES
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.minibatch_loss import actions_of
from sb3_ppo_ext.update.minibatches import PrioritizedSegments, SharedPrioritizedSegments
from sb3_ppo_ext.update.rollout_data import Rollout

# Function of the epoch that returns values and log probabilities of the samples under the current policy, both of shape
# (n_steps, n_envs)
Evaluate: TypeAlias = Callable[[int], tuple[th.Tensor, th.Tensor]]


class Estimates:
    """
    Advantages, returns, sampling priorities and old action distributions of the current epoch.

    :param policy: Policy that is updated
    :param rollout: Rollout that the policy is updated from
    :param config: Options of the update
    :param metrics: Metrics that measurements are added to
    :param normalizer: Moving averages for ``advantage_norm="ema"``, ``None`` for other kinds of normalisation
    :param evaluate: Function that evaluates the current policy for V-trace, ``None`` for the policy's own
    """

    def __init__(
        self,
        policy: ActorCriticPolicy,
        rollout: Rollout,
        config: UpdateConfig,
        metrics: Metrics,
        normalizer: AdvantageNormalizer | None = None,
        evaluate: Evaluate | None = None,
    ):
        self.policy, self.rollout, self.config, self.metrics = policy, rollout, config, metrics
        self.normalizer, self.evaluate = normalizer, evaluate or self._evaluate
        # Advantages and returns of the whole rollout, shape (n_samples,); None if minibatches take those of the buffer
        self.advantages: th.Tensor | None = None
        self.returns: th.Tensor | None = None
        # Segments with priorities; None if minibatches are drawn uniformly
        self.segments: PrioritizedSegments | None = None
        # Parameters of the old action distributions, shape (n_samples, n); None if no loss reads them, or the distribution
        # has no KL divergence in closed form
        self.old_distribution: th.Tensor | None = None
        if any("old_distribution" in PENALTIES[name].reads for name in config.loss.penalties):
            with self._as_while_collecting():
                self.old_distribution = rollout.evaluate(lambda data: parameters(policy.get_distribution(data.observations)))

    def begin_epoch(self, epoch: int) -> None:
        """
        Compute the advantages and priorities of an epoch, where they differ from those of the epoch before.

        :param epoch: Index of the epoch, from 0
        """
        config = self.config
        if epoch > 0 and not config.vtrace:
            return
        raw = self._raw_advantages()
        if config.vtrace:
            raw, self.returns = self._vtrace(epoch)
        if config.priority_alpha > 0:
            self.segments = self._prioritized_segments(raw)
        if config.vtrace or (config.normalize_advantage and config.advantage_norm != "minibatch"):
            self.advantages = self._normalized(raw, epoch)

    def advantages_to_normalize(self) -> th.Tensor:
        """:return: Advantages of all samples, before minibatches are normalised, shape ``(n_samples,)``"""
        return self._raw_advantages() if self.advantages is None else self.advantages

    def _raw_advantages(self) -> th.Tensor:
        return _flat(self.rollout.columns["advantages"])

    def _prioritized_segments(self, advantages: th.Tensor) -> PrioritizedSegments:
        config = self.config
        length = min(config.priority_segment, self.rollout.buffer.buffer_size, config.step_size * config.ranks.size)
        by_time = self.rollout.time_major(advantages)
        if config.ranks.are_several:
            return SharedPrioritizedSegments(by_time.cpu(), length, config.priority_alpha, config.priority_beta, config.ranks)
        by_time = by_time.to(self.rollout.device_of_draws)
        return PrioritizedSegments(by_time, length, config.priority_alpha, config.priority_beta)

    def _normalized(self, advantages: th.Tensor, epoch: int) -> th.Tensor:
        normalizer = self.normalizer
        if normalizer is not None:
            if epoch == 0:
                normalizer.observe(advantages, self.config.ranks)
                self.metrics["adv/clamped_fraction"].append(normalizer.clamped_fraction(advantages))
            return normalizer.normalize(advantages)
        if self.config.normalize_advantage and self.config.advantage_norm == "rollout":
            return normalize_over(self.config.ranks, advantages)
        return advantages

    def _evaluate(self, epoch: int) -> tuple[th.Tensor, th.Tensor]:
        def values_and_log_probs(data: RolloutBufferSamples) -> th.Tensor:
            actions = actions_of(data, self.config.discrete_actions)
            values, log_probs, _ = evaluator(self.policy)(data.observations, actions)
            return th.stack([values.flatten(), log_probs], dim=1)

        evaluated = self.rollout.evaluate(values_and_log_probs)
        assert evaluated is not None
        values, log_probs = (self.rollout.time_major(part) for part in evaluated.T)
        return values, log_probs

    def _vtrace(self, epoch: int) -> tuple[th.Tensor, th.Tensor]:
        """Advantages and returns under the current policy and critic, both of shape ``(n_samples,)``."""
        config, policy, rollout = self.config, self.policy, self.rollout
        with self._as_while_collecting():
            values, log_probs = self.evaluate(epoch)
            last_values, rewards = rollout.last_values(policy), rollout.rewards(policy)
        columns, buffer = rollout.columns, rollout.buffer
        advantages, returns = vtrace(
            rewards,
            values,
            log_probs - columns["log_probs"],
            columns["episode_starts"],
            last_values,
            th.as_tensor(rollout.last_dones, device=values.device),
            buffer.gamma,
            buffer.gae_lambda,
            config.vtrace_rho,
            config.vtrace_c,
        )
        return _flat(advantages), _flat(returns)

    @contextmanager
    def _as_while_collecting(self) -> Iterator[None]:
        """Context manager without gradients and in evaluation mode, which matters for dropout."""
        self.policy.set_training_mode(False)
        with th.no_grad():
            yield
        self.policy.set_training_mode(True)


def _flat(by_time: th.Tensor) -> th.Tensor:
    """From shape ``(n_steps, n_envs)`` to the order of the samples, shape ``(n_samples,)``."""
    return by_time.T.reshape(-1)

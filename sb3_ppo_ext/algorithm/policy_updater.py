"""Updates of PPOExt: choice of the engine, its configuration from the current options, and logging."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import RolloutBufferSamples, Schedule

from sb3_ppo_ext.common.bounds import bounds_on_device
from sb3_ppo_ext.common.guards import normalizers_of
from sb3_ppo_ext.common.hybrid_actions import boxes_of, split_boxes
from sb3_ppo_ext.common.schedules import KLAdaptive, in_float32_range, is_constant, value_of
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.engines.engine import Engine, Setup
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.registry import ENGINES, choose_backend, may_keep_on_device
from sb3_ppo_ext.envs.tensors.tensor_vec_transpose_image import steps_in_tensors
from sb3_ppo_ext.memory.recurrent_policies import RecurrentPolicyMixin
from sb3_ppo_ext.options import ConfiguredPPO
from sb3_ppo_ext.options.arguments import has_single_step
from sb3_ppo_ext.policies.mixed_precision import LossScale
from sb3_ppo_ext.policies.value_normalization import normalized_value
from sb3_ppo_ext.rollout.actors import Act, Actor, RolloutConfig
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer
from sb3_ppo_ext.rollout.tensor_collector import TensorRolloutCollector
from sb3_ppo_ext.update.advantages import AdvantageNormalizer
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.extra_loss import ExtraLoss
from sb3_ppo_ext.update.extra_losses import active_extra_losses, make_extra_losses
from sb3_ppo_ext.update.loop import UpdateResult
from sb3_ppo_ext.update.losses import PENALTIES, LossConfig
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.minibatch_loss import ExtraActorLoss
from sb3_ppo_ext.update.report import action_statistics, further_metrics, on_host, sb3_metrics, statistics_over
from sb3_ppo_ext.update.rollout_data import Rollout


class PolicyUpdater(ConfiguredPPO, TensorRolloutCollector):
    """An on-policy algorithm that updates its policy with the options of PPOExt, on the engine of ``backend``."""

    critic_lr_schedule: Schedule | None
    # State of options that adapt during the training
    advantage_normalizer: AdvantageNormalizer | None = None
    kl_coefficient: KLAdaptive | None = None
    adaptive_lr: KLAdaptive | None = None
    loss_scale: LossScale | None = None
    n_skipped_updates = 0
    # Backend, and why others are not, while `learn` runs no code of a user that might replace what decides
    _choice: tuple[str, dict[str, str]] | None = None

    def _setup_engine(self) -> None:
        """Refuse a backend that does not support the policy or the options. Engines are created when they are needed."""
        # Engines used so far, by name, since the backend may be changed and changed back
        self._engines: dict[str, Engine] = {}
        if self.backend == "auto" and self.policy.device.type == "cpu":
            extension.warn_if_missing()
        self._check_backend()

    def _check_backend(self) -> None:
        backend, reasons = self._choose_backend()
        if ENGINES[backend].keeps_rollouts_on_device(self._engine_setup()):
            self._check_device_of_environments()
        if self.verbose >= 1 and self.backend != "eager":
            print(f"Backend: {backend}" + (f" (not native: {reasons['native']})" if "native" in reasons else ""))

    def _choose_backend(self) -> tuple[str, dict[str, str]]:
        """
        :return: See :func:`choose_backend`
        :raises ValueError: if the requested backend does not support the policy or the options
        """
        backend, reasons = choose_backend(self.backend, self._engine_setup())
        if self.backend in reasons:
            refuse("backend", self.backend, f'{reasons[self.backend]}; give "auto", which chooses a backend that fits')
        if self.amp_dtype is not None and not ENGINES[backend].supports_amp:
            refuse("amp_dtype", self.amp_dtype, f"{reasons['device']}; give None")
        return backend, reasons

    def _check_device_of_environments(self) -> None:
        env: Any = self.env
        if steps_in_tensors(env) and th.zeros(0, device=env.device).device != th.zeros(0, device=self.device).device:
            remedy = f'the environments step on {env.device}; give `device="{env.device}"` or "auto", or `backend="eager"`'
            if env.device.type == self.device.type == "cuda":
                remedy += '; with torchrun, call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before making them'
            refuse("device", str(self.device), remedy)

    def _engine_setup(self) -> Setup:
        return Setup(
            self.policy,
            self.rollout_buffer,
            has_extra_loss=self._extra_actor_loss() is not None,
            has_extra_losses=bool(active_extra_losses(self.auxiliary_losses)),
            has_amp=self.amp_dtype is not None,
            has_tensor_env=steps_in_tensors(self.env),
        )

    def _extra_actor_loss(self) -> ExtraActorLoss | None:
        """``extra_actor_loss`` of a subclass or an instance, ``None`` if it is not overridden."""
        own = getattr(self.extra_actor_loss, "__func__", None) is not PolicyUpdater.extra_actor_loss
        return self.extra_actor_loss if own else None

    def _find_engine(self) -> Engine:
        """Engine for the current backend and policy, which a callback may have changed since ``learn`` has checked them."""
        backend, reasons = self._choice or choose_backend(self.backend, self._engine_setup())
        if self.backend in reasons:
            warnings.warn(f'`backend="eager"` takes over from "{self.backend}": {reasons[self.backend]}', stacklevel=2)
        engine = self._engines.get(backend)
        if engine is not None and not engine.is_for(self.policy) and self._choice is not None:
            # An environment that holds the model has replaced something.
            self._choice = None
            return self._find_engine()
        if engine is None or not engine.is_for(self.policy):
            engine = self._engines[backend] = ENGINES[backend](self.policy)
        return engine

    def _make_actor(self, rollout_buffer: RolloutBuffer, config: RolloutConfig) -> Actor:
        return self._find_engine().make_actor(rollout_buffer, config)

    def _collects_tensors(self) -> bool:
        setup = self._engine_setup()
        # The choice takes long, and is made once more after `on_rollout_start`.
        if not may_keep_on_device(self.backend, setup):
            return False
        backend, _ = self._choice or choose_backend(self.backend, setup)
        return ENGINES[backend].keeps_rollouts_on_device(setup)

    @contextmanager
    def _engine_is_chosen(self, callback: BaseCallback) -> Iterator[None]:
        """Choose the backend once, if no code of a user runs that might replace what decides."""
        if not self._is_watched(callback):
            self._choice = choose_backend(self.backend, self._engine_setup())
        try:
            yield
        finally:
            self._choice = None

    def _is_watched(self, callback: BaseCallback) -> bool:
        return self._choice is None and super()._is_watched(callback)

    def _make_act(self) -> Act:
        return self._find_engine().make_act()

    def train(self) -> None:
        """
        Update policy using the currently gathered rollout buffer.
        """
        start = time.perf_counter()
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        self._normalize_values()
        config, result = self._update_config(), UpdateResult(Metrics())
        try:
            self._find_engine().update(self._rollout(), config, self.advantage_normalizer, result)
        finally:
            self._n_updates += result.n_epochs
            self.n_skipped_updates += result.n_skipped
        self._log_update(config, result)
        if not has_single_step(self):  # Its divergence is 0 up to rounding.
            self._adapt(result.metrics)
        self.logger.record("time/update_seconds", time.perf_counter() - start)

    def _adapt(self, metrics: Metrics) -> None:
        """Change the coefficient and the learning rate that adapt to the KL divergence of an update."""
        if self.kl_coefficient is not None:
            self.kl_coefficient.update(metrics.mean("kl"))
        if self.adaptive_lr is not None:
            self.adaptive_lr.update(metrics.mean("approx_kl"), self._current_progress_remaining)

    def _normalize_values(self) -> None:
        """Update the statistics of the returns, if the critic has them."""
        if (layer := normalized_value(self.policy)) is not None:
            buffer: Any = self.rollout_buffer
            is_own = isinstance(buffer, TensorRolloutBuffer)
            returns = buffer.tensors["returns"].to(self.device) if is_own else buffer.to_torch(buffer.returns)
            layer.observe(returns, self.ranks)

    def _rollout(self) -> Rollout:
        return Rollout(self.rollout_buffer, *self._last_inputs(), self._truncations, self.gamma)

    def _update_config(self) -> UpdateConfig:
        """Configuration of an update with the current values of the options."""
        progress = self._current_progress_remaining
        return UpdateConfig(
            loss=self._loss_config(progress),
            n_epochs=self.n_epochs,
            batch_size=self.batch_size // self.ranks.size,
            accumulate_grad=self.accumulate_grad,
            normalize_advantage=self.normalize_advantage,
            advantage_norm=self.advantage_norm,
            max_grad_norm=self.max_grad_norm,
            target_kl=self.target_kl,
            max_clip_fraction=self.max_clip_fraction,
            bad_gradients=self.bad_gradients,
            native_threads=self.native_threads,
            vtrace=self.vtrace,
            vtrace_rho=self.vtrace_rho,
            vtrace_c=self.vtrace_c,
            priority_alpha=self.priority_alpha,
            priority_beta=self.priority_beta + (1 - self.priority_beta) * (1 - progress),
            priority_segment=self.priority_segment,
            discrete_actions=isinstance(self.action_space, spaces.Discrete),
            samples_latents=self._samples_latents,
            extra_actor_loss=self._extra_actor_loss(),
            loss_scale=self.loss_scale,
            num_timesteps=self.num_timesteps,
            verbose=self.verbose,
            ranks=self.ranks,
        )

    def _loss_config(self, progress: float) -> LossConfig:
        coefficients = {name: value_of(getattr(self, loss.coef), progress) for name, loss in PENALTIES.items()}
        if self.kl_coefficient is not None and self.kl_coef > 0:
            coefficients["kl"] = self.kl_coefficient.value
        return LossConfig(
            clip_range=in_float32_range(value_of(self.clip_range, progress)),
            clip_range_vf=None if self.clip_range_vf is None else in_float32_range(value_of(self.clip_range_vf, progress)),
            ent_coef=value_of(self.ent_coef, progress),
            vf_coef=in_float32_range(self.vf_coef),
            surrogate=self.surrogate,
            dual_clip=None if self.dual_clip is None else in_float32_range(self.dual_clip),
            vf_clip_mode=self.vf_clip_mode,
            bounds_limit=in_float32_range(self.bounds_limit),
            action_bounds=self._action_bounds(),
            value_scale=self._value_scale(),
            as_recurrent_ppo=isinstance(self.policy, RecurrentPolicyMixin),
            extra=self._extra_losses(),
            penalties={name: value for name, value in coefficients.items() if value != 0},
        )

    def _extra_losses(self) -> dict[str, ExtraLoss]:
        """Losses of ``auxiliary_losses``, with the current statistics of ``VecNormalize``."""
        normalizers = [each for each in normalizers_of(self) if each.norm_obs]
        return make_extra_losses(self.auxiliary_losses, self.policy, normalizers[0] if normalizers else None)

    def _value_scale(self) -> float | th.Tensor | None:
        if (layer := normalized_value(self.policy)) is None:
            return None
        return layer.std.item() if layer.std.device.type == "cpu" else layer.std

    def _action_bounds(self) -> tuple[th.Tensor, th.Tensor] | None:
        """
        Lower and upper bounds of the actions in the buffer, flat; -1 and 1 for a squashed policy, also for its latents. Of
        hybrid actions, those of the ``Box`` parts.
        """
        space = self._sample_space
        if not isinstance(space, spaces.Box) or not boxes_of(space):
            return None
        bounds = (-np.ones_like(space.low), np.ones_like(space.high)) if self.policy.squash_output else (space.low, space.high)
        low, high = (split_boxes(space, bound)[0].flatten() for bound in bounds)
        return bounds_on_device(low, high, self.device)

    def _log_update(self, config: UpdateConfig, result: UpdateResult) -> None:
        """Log an update, SB3's keys first."""
        record, loss, metrics = self.logger.record, config.loss, result.metrics
        of_sb3, further = on_host(
            sb3_metrics(metrics, self.policy, self.rollout_buffer),
            further_metrics(metrics, self.policy, self.rollout_buffer, config),
        )
        if config.ranks.are_several:
            (of_actions,) = on_host(action_statistics(metrics, self.policy, self.rollout_buffer, config))
            over_ranks = statistics_over(config.ranks, metrics, self.rollout_buffer, of_actions)
            of_sb3["explained_variance"] = over_ranks.pop("explained_variance")
            further |= over_ranks
        for name, value in of_sb3.items():
            record(f"train/{name}", value)
        record("train/n_updates", self._n_updates, exclude="tensorboard")
        record("train/clip_range", loss.clip_range)
        if loss.clip_range_vf is not None:
            record("train/clip_range_vf", loss.clip_range_vf)
        for name, value in further.items():
            record(name if "/" in name else f"train/{name}", value)
        for name, value in self._options_to_log(config, result).items():
            record(name, value)

    def _options_to_log(self, config: UpdateConfig, result: UpdateResult) -> dict[str, Any]:
        """Current values of options that change during the training, counters and adapted statistics."""
        logged: dict[str, object] = {}
        if not is_constant(self.ent_coef):
            logged["train/ent_coef"] = config.loss.ent_coef
        if "kl" in config.loss.penalties:
            logged["train/kl_coef"] = config.loss.penalties["kl"]
        if self.adaptive_lr is not None and not is_constant(self.adaptive_lr.target):
            logged["train/adaptive_lr_kl"] = value_of(self.adaptive_lr.target, self._current_progress_remaining)
        if config.target_kl is not None:
            logged["train/epochs"] = result.n_epochs
        if config.priority_alpha > 0:
            logged["train/priority_beta"] = config.priority_beta
        if config.bad_gradients == "skip":
            logged["train/skipped_updates"] = self.n_skipped_updates
        if self.loss_scale is not None:
            logged["train/loss_scale"] = self.loss_scale.scale.item()
        if self.advantage_normalizer is not None:
            logged |= {"adv/ema_mean": self.advantage_normalizer.mean, "adv/ema_std": self.advantage_normalizer.std}
        return logged

    def _update_learning_rate(self, optimizers: list[th.optim.Optimizer] | th.optim.Optimizer) -> None:
        super()._update_learning_rate(optimizers)
        if self.critic_lr_schedule is None:
            return
        learning_rate = self.critic_lr_schedule(self._current_progress_remaining)
        self.logger.record("train/critic_learning_rate", learning_rate)
        for group in self.policy.optimizer.param_groups:
            if group.get("role") == "critic":
                group["lr"] = learning_rate

    def extra_actor_loss(
        self, rollout_data: RolloutBufferSamples, distribution: Distribution
    ) -> tuple[th.Tensor | float, dict[str, th.Tensor | float]]:
        """
        Additional loss, to be overridden in a subclass, for instance for symmetry or imitation. Called for every minibatch.

        :param rollout_data: The minibatch, SB3's ``RolloutBufferSamples``, with the advantages as the policy loss uses them
        :param distribution: Action distributions of the policy for the observations of the minibatch, with gradients
        :return: Scalar to minimise, and values to log by name: their mean over the update is logged under ``train/``, unless
            the name contains a slash
        :raises ValueError: if PPOExt itself logs a value under one of the names
        """
        return 0.0, {}

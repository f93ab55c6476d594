"""Setup of PPOExt: everything that the constructor and ``load`` create from the options."""

import warnings
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import FloatSchedule

from sb3_ppo_ext.algorithm.policy_updater import PolicyUpdater
from sb3_ppo_ext.common.observations import in_float32
from sb3_ppo_ext.common.schedules import DecaySchedule, KLAdaptive, make_schedule, value_of
from sb3_ppo_ext.common.validation import described, refuse
from sb3_ppo_ext.distributions import ACTION_DISTS
from sb3_ppo_ext.engines.registry import ENGINES
from sb3_ppo_ext.memory.policies import TransformerPolicyMixin
from sb3_ppo_ext.memory.sequence_buffers import SequenceDictRolloutBuffer, SequenceRolloutBuffer
from sb3_ppo_ext.policies.actor_critic import MlpPolicy, with_action_distributions
from sb3_ppo_ext.update.advantages import AdvantageNormalizer
from sb3_ppo_ext.update.optimizers import critic_parameters, make_optimizer


class ModelSetup(PolicyUpdater):
    """The steps of the setup of PPOExt; ``PPOExt._setup_model`` defines their order."""

    batch_size: int
    n_epochs: int
    normalize_advantage: bool

    def _setup_action_distribution(self, policy_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Choose a policy class that supports the action distribution, and return the ``policy_kwargs`` for it."""
        if self.action_dist == "gaussian":
            if policy_kwargs.keys() & {"mean_tanh", "learn_std"}:
                self.policy_class = with_action_distributions(self.policy_class)
            return policy_kwargs
        self.policy_class = with_action_distributions(self.policy_class)
        return {**policy_kwargs, "action_dist": self.action_dist, "deterministic_action": self.deterministic_action}

    def _setup_memory(self) -> None:
        """Create the rollout buffer for a history-based policy, which reads sequences."""
        policy = self.policy
        if not isinstance(policy, TransformerPolicyMixin):
            return
        is_dict = isinstance(self.observation_space, spaces.Dict)
        buffer_class: Any = SequenceDictRolloutBuffer if is_dict else SequenceRolloutBuffer
        self.rollout_buffer = buffer_class(
            self.n_steps,
            in_float32(self.observation_space),
            self.action_space,
            device=self.device,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            n_envs=self.n_envs,
            context_length=policy.context_length,
            n_action_features=policy.n_action_features,
            keeps_rewards=policy.use_last_reward,
        )

    def _setup_observations(self) -> None:
        """Store float64 observations in float32 as the policy reads them, unless the backend keeps SB3's dtype."""
        buffer: Any = self.rollout_buffer
        if not hasattr(buffer, "compute_returns_and_advantage"):
            remedy = f"it returns {described(buffer)}; give a class that inherits SB3's `RolloutBuffer`, or None"
            refuse("rollout_buffer_class", self.rollout_buffer_class, remedy)
        keeps_float32 = self.backend == "auto" or ENGINES[self.backend].keeps_float32
        if keeps_float32 and type(buffer) in (RolloutBuffer, DictRolloutBuffer):
            buffer.observation_space = in_float32(self.observation_space)
            buffer.reset()

    def _setup_latents(self) -> None:
        made = getattr(self.policy, "action_dist_name", "gaussian")
        if made != self.action_dist:
            refuse(
                "action_dist",
                self.action_dist,
                f"{self.policy_class.__name__} makes it {made!r}; give that, or change the class",
            )
        self._samples_latents = ACTION_DISTS[self.action_dist].is_bounded
        if self._samples_latents and self.action_space.dtype != np.float32:
            # Otherwise the buffer would round latents to the dtype of the actions.
            self.rollout_buffer.action_space = spaces.Box(-np.inf, np.inf, self.action_space.shape, np.float32)
            self.rollout_buffer.reset()

    def _maybe_recommend_cpu(self, mlp_class_name: str = "ActorCriticPolicy") -> None:
        super()._maybe_recommend_cpu(MlpPolicy.__name__ if self.policy_class is MlpPolicy else mlp_class_name)

    def _setup_schedules(self) -> None:
        self.clip_range = make_schedule("clip_range", self.clip_range, infinite=True)
        if self.clip_range_vf is not None:
            self.clip_range_vf = make_schedule("clip_range_vf", self.clip_range_vf, positive=True, infinite=True)
        if isinstance(self.ent_coef, str):
            # A number stays a number, so that SB3's PPO can load it, and callbacks can change it.
            self.ent_coef = make_schedule("ent_coef", self.ent_coef)
        self.kl_coefficient = None
        if self.kl_target is not None:
            bounds = (1e-6 * self.kl_coef, 1e6 * self.kl_coef)
            self.kl_coefficient = KLAdaptive(self.kl_coef, self.kl_target, factor=2.0, tolerance=1.5, bounds=bounds)

    def _setup_lr_schedule(self) -> None:
        learning_rate = make_schedule("learning_rate", self.learning_rate)
        if isinstance(self.learning_rate, str):
            # SB3's PPO could not load a zip with a string.
            self.learning_rate = learning_rate
        self.lr_schedule: Schedule = self._decayed(learning_rate)
        self.critic_lr_schedule: Schedule | None = None
        if self.critic_learning_rate is not None:
            self.critic_lr_schedule = self._decayed(make_schedule("critic_learning_rate", self.critic_learning_rate))
        self.adaptive_lr = None
        if self.adaptive_lr_kl is not None:
            low, high = self.adaptive_lr_bounds
            start = value_of(learning_rate, 1.0)
            self.adaptive_lr = KLAdaptive(start, self.adaptive_lr_kl, factor=1 / 1.5, tolerance=2.0, bounds=(low, high))
            self.lr_schedule = self.adaptive_lr

    def _decayed(self, schedule: FloatSchedule) -> Schedule:
        if self.lr_decay == "constant" and self.lr_warmup == 0:
            return schedule
        return DecaySchedule(schedule, self.lr_decay, self.lr_min_fraction, self.lr_warmup)

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        total_timesteps, callback = super()._setup_learn(*args, **kwargs)
        for schedule in (self.lr_schedule, self.critic_lr_schedule):
            if isinstance(schedule, DecaySchedule):
                schedule.rollout = self.n_steps * self.n_envs / max(total_timesteps, 1)
        return total_timesteps, callback

    def _setup_optimizer(self) -> None:
        for name in ("critic_learning_rate", "max_clip_fraction"):
            if getattr(self, name) is not None and not critic_parameters(self.policy):
                remedy = f"{self.policy_class.__name__} has no critic apart from its actor; give None"
                refuse(name, getattr(self, name), remedy)
        if self.optimizer == "adam" and self.weight_decay == 0 and self.critic_learning_rate is None:
            return  # the policy has created it
        self.policy.optimizer = make_optimizer(
            self.policy,
            self.optimizer,
            self.weight_decay,
            own_critic=self.critic_learning_rate is not None,
            optimizer_kwargs=self.policy_kwargs.get("optimizer_kwargs"),
        )

    def _setup_advantages(self) -> None:
        self.advantage_normalizer = None
        if self.normalize_advantage and self.advantage_norm == "ema":
            self.advantage_normalizer = AdvantageNormalizer(
                self.adv_ema_alpha, self.adv_ema_warm_start, self.adv_min_std, self.adv_clip, self.adv_shift_mean
            )

    def _warn_about_truncated_minibatch(self) -> None:
        if self.env is None:
            return
        buffer_size = self.env.num_envs * self.n_steps
        if buffer_size % self.batch_size > 0:
            warnings.warn(
                f"You have specified a mini-batch size of {self.batch_size},"
                f" but because the `RolloutBuffer` is of size `n_steps * n_envs = {buffer_size}`,"
                f" after every {buffer_size // self.batch_size} untruncated mini-batches,"
                f" there will be a truncated mini-batch of size {buffer_size % self.batch_size}\n"
                f"We recommend using a `batch_size` that is a factor of `n_steps * n_envs`.\n"
                f"Info: (n_steps={self.n_steps} and n_envs={self.env.num_envs})",
                stacklevel=3,
            )

    def _warn_about_single_step(self) -> None:
        if self.env is None or (self.kl_coef == 0 and self.adaptive_lr_kl is None):
            return
        if self.n_epochs == 1 and self.batch_size * self.accumulate_grad >= self.env.num_envs * self.n_steps:
            warnings.warn(
                "`kl_coef`, `kl_target` and `adaptive_lr_kl` depend on how far the policy has moved before each step of"
                " the optimizer, and there is only one step per update, before which it has not moved: they have no effect."
                f" Raise n_epochs={self.n_epochs}, or lower batch_size={self.batch_size}.",
                stacklevel=3,
            )

"""How PPOExt learns: schedules, the optimiser, and what adapts during the training."""

from typing import Any

from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import FloatSchedule

from sb3_ppo_ext.algorithm.buffer_setup import BufferSetup
from sb3_ppo_ext.common.schedules import DecaySchedule, KLAdaptive, in_float32_range, make_schedule, value_of
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.policies.mixed_precision import LossScale, set_precision
from sb3_ppo_ext.update.advantages import AdvantageNormalizer
from sb3_ppo_ext.update.optimizers import adopt_state, critic_parameters, knows_critic, make_optimizer

# Schedules that SB3 makes from options, and that users replace, with their options
SCHEDULES = {"lr_schedule": "learning_rate", "critic_lr_schedule": "critic_learning_rate"}


class LearningSetup(BufferSetup):
    """The part of PPOExt that sets up schedules, the optimiser, and what adapts during the training."""

    def _setup_schedules(self) -> None:
        self.clip_range = make_schedule("clip_range", self.clip_range, infinite=True)
        if self.clip_range_vf is not None:
            self.clip_range_vf = make_schedule("clip_range_vf", self.clip_range_vf, positive=True, infinite=True)
        if isinstance(self.ent_coef, str):
            # A number stays a number, so that SB3's PPO can load it, and callbacks can change it.
            self.ent_coef = make_schedule("ent_coef", self.ent_coef)

    def _setup_kl_coefficient(self) -> None:
        before, self.kl_coefficient = self.kl_coefficient, None
        if self.kl_coef == 0:
            self.kl_target = None  # The user has turned the penalty off.
        if self.kl_target is not None:
            bounds = (1e-6 * self.kl_coef, 1e6 * self.kl_coef)
            adaptive = KLAdaptive(self.kl_coef, self.kl_target, factor=2.0, tolerance=1.5, bounds=bounds)
            self.kl_coefficient = _continued(adaptive, before)

    def _setup_lr_schedule(self) -> None:
        learning_rate = make_schedule("learning_rate", self.learning_rate)
        if isinstance(self.learning_rate, str):
            # SB3's PPO could not load a zip with a string.
            self.learning_rate = learning_rate
        self.lr_schedule: Schedule = self._decayed(learning_rate)
        self.critic_lr_schedule: Schedule | None = None
        if self.critic_learning_rate is not None:
            self.critic_lr_schedule = self._decayed(make_schedule("critic_learning_rate", self.critic_learning_rate))
        before, self.adaptive_lr = self.adaptive_lr, None
        if isinstance(self.adaptive_lr_kl, str):
            self.adaptive_lr_kl = make_schedule("adaptive_lr_kl", self.adaptive_lr_kl)
        if self.adaptive_lr_kl is not None:
            low, high = self.adaptive_lr_bounds
            start = value_of(learning_rate, 1.0)
            tolerance = 2.0 if self.adaptive_lr_rule == "threshold" else None
            adaptive = KLAdaptive(start, self.adaptive_lr_kl, factor=1 / 1.5, tolerance=tolerance, bounds=(low, high))
            self.lr_schedule = self.adaptive_lr = _continued(adaptive, before)
        # A user who calls this method has not set the schedules.
        vars(self).setdefault("_set_up", {}).update({name: getattr(self, name) for name in SCHEDULES})

    def _decayed(self, schedule: FloatSchedule) -> Schedule:
        if self.lr_decay == "constant" and self.lr_warmup == 0:
            return schedule
        return DecaySchedule(schedule, self.lr_decay, self.lr_min_fraction, self.lr_warmup)

    def _setup_optimizer(self) -> None:
        self._check_critic()
        before, policy = self.policy.optimizer, self.policy
        if self.optimizer == "adam" and self.weight_decay == 0 and self.critic_learning_rate is None:
            if not any("role" in group for group in before.param_groups):
                return  # The policy has created it.
            make: Any = policy.optimizer_class
            policy.optimizer = make(policy.parameters(), lr=0.0, **policy.optimizer_kwargs)
        else:
            policy.optimizer = make_optimizer(
                policy,
                self.optimizer,
                in_float32_range(self.weight_decay),
                own_critic=self.critic_learning_rate is not None,
                optimizer_kwargs=self.policy_kwargs.get("optimizer_kwargs"),
            )
        if before.state:
            policy.optimizer.load_state_dict(adopt_state(policy, before.state_dict()))

    def _check_critic(self) -> None:
        for name in ("critic_learning_rate", "max_clip_fraction"):
            if getattr(self, name) is not None and not critic_parameters(self.policy):
                remedy = f"{self.policy_class.__name__} has no critic apart from its actor; give None"
                refuse(name, getattr(self, name), remedy)
            networks = getattr(self.policy, "mlp_extractor", None)
            if getattr(self, name) is not None and not knows_critic(networks):
                remedy = "call its two networks `policy_net` and `value_net`, as SB3 does, or give None"
                refuse(name, getattr(self, name), f"{type(networks).__name__} hides the critic's layers; {remedy}")

    def _setup_advantages(self) -> None:
        before, self.advantage_normalizer = self.advantage_normalizer, None
        if self.normalize_advantage and self.advantage_norm == "ema":
            normalizer = AdvantageNormalizer(
                self.adv_ema_alpha, self.adv_ema_warm_start, self.adv_min_std, self.adv_clip, self.adv_shift_mean
            )
            self.advantage_normalizer = _continued(normalizer, before)

    def _setup_extra_losses(self) -> None:
        """Refuse losses that do not fit the policy. They are made anew for each update."""
        self._extra_losses()

    def _setup_precision(self) -> None:
        set_precision(self.policy, self.amp_dtype)
        before, self.loss_scale = self.loss_scale, None
        if self.amp_dtype == "float16":
            self.loss_scale = _continued(LossScale().to(self.device), before)


def _continued(adaptive: Any, before: Any) -> Any:
    """Something that adapts during the training, with the state of its predecessor, if there is one."""
    if before is not None:
        adaptive.load_state_dict(before.state_dict())
    return adaptive

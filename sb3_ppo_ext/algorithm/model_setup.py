"""Setup of PPOExt: everything that the constructor and ``load`` create from the options."""

import warnings
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.algorithm.changes import is_same, remembered
from sb3_ppo_ext.algorithm.device_choice import Situation, choose_device
from sb3_ppo_ext.algorithm.normalization import Normalization
from sb3_ppo_ext.common.action_masks import ACTION_MASK, OBSERVATION, with_mask, without_mask
from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace
from sb3_ppo_ext.common.observations import in_float32
from sb3_ppo_ext.common.schedules import DecaySchedule, KLAdaptive, check_schedule, in_float32_range, make_schedule, value_of
from sb3_ppo_ext.common.user_code import hidden_methods, is_replaced, replaced_method
from sb3_ppo_ext.common.validation import assertions_as_value_errors, described, memory_errors_as_value_errors, refuse
from sb3_ppo_ext.distributed.launch import find_launch, own_device
from sb3_ppo_ext.distributions import ACTION_DISTS, bounded_part, on_device
from sb3_ppo_ext.engines.native.engine import NativeEngine
from sb3_ppo_ext.engines.registry import ENGINES, choose_backend
from sb3_ppo_ext.envs.tensors.tensor_vec_transpose_image import steps_in_tensors
from sb3_ppo_ext.memory.history import HistoryPolicy
from sb3_ppo_ext.options import check_options, convert_options
from sb3_ppo_ext.options.table import CHANGES
from sb3_ppo_ext.policies.actor_critic import OWN_KEYWORDS, ActionDistributionMixin, MlpPolicy, with_action_distributions
from sb3_ppo_ext.policies.mixed_precision import LossScale, set_precision
from sb3_ppo_ext.rollout.action_masks import check_masks
from sb3_ppo_ext.rollout.buffer import BUFFER_METHODS, TensorRolloutBuffer, knows_indices
from sb3_ppo_ext.update.advantages import AdvantageNormalizer
from sb3_ppo_ext.update.optimizers import adopt_state, critic_parameters, knows_critic, make_optimizer

# Schedules that SB3 makes from options, and that users replace
SCHEDULES = ("lr_schedule", "critic_lr_schedule")


class ModelSetup(Normalization):
    """The steps of the setup of PPOExt; ``PPOExt._setup_model`` defines their order."""

    # The rollout buffer that this class has made. Users may assign another one to `rollout_buffer`.
    _own_buffer: RolloutBuffer | None = None
    # Methods that its constructor has replaced
    _own_methods: list[str] | None = None
    batch_size: int
    n_epochs: int
    normalize_advantage: bool
    # Whether `device="auto"` was given
    _device_is_automatic = False

    def _setup_action_distribution(self, policy_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Choose a policy class that supports the action distribution, and return the ``policy_kwargs`` for it."""
        if self.normalize_value:
            self.policy_class = with_action_distributions(self.policy_class)
            policy_kwargs = {**policy_kwargs, "normalize_value": True}
        if self.normalize_obs:
            self.policy_class = with_action_distributions(self.policy_class)
        if self.action_masking:
            self.policy_class = with_action_distributions(self.policy_class)
            return {**policy_kwargs, "action_mask_key": self.action_mask_key or ACTION_MASK}
        if self.action_dist == "gaussian":
            if policy_kwargs.keys() & set(OWN_KEYWORDS) or isinstance(self.action_space, FlatActionSpace):
                self.policy_class = with_action_distributions(self.policy_class)
            return policy_kwargs
        self.policy_class = with_action_distributions(self.policy_class)
        return {**policy_kwargs, "action_dist": self.action_dist, "deterministic_action": self.deterministic_action}

    def _space_of_policy(self) -> spaces.Space:
        """Space of the observations that the policy reads and the rollout buffer stores, with masks if there are any."""
        if not self.action_masking or self.action_mask_key is not None:
            return self.observation_space
        return with_mask(self.observation_space, self.action_space)

    def _stored_space(self) -> spaces.Space:
        """Space of the observations in the rollout buffer, in float32."""
        space = in_float32(self.observation_space, self._normalized_parts)
        return space if self._space_of_policy() is self.observation_space else with_mask(space, self.action_space)

    def _space_of_features(self) -> spaces.Space:
        """Space of the observations without masks."""
        if self.action_mask_key is None:
            return self.observation_space
        return without_mask(self.observation_space, self.action_mask_key)

    def _setup_device(self) -> None:
        """Move the policy, which lies on the CPU, to the fastest device, if the user has left the choice to us."""
        if not self._device_is_automatic:
            return
        is_native = self.backend in ("auto", "native") and NativeEngine.unsupported_reason(self._engine_setup()) is None
        device, reason = choose_device(Situation(self.policy, self.env, is_native, self.backend, self.batch_size))
        launch = find_launch(self.distributed)
        device = th.device(own_device(device, launch))
        if launch.size > 1 and device.type == "cuda" and device != own_device("cuda", launch):
            remedy = f"the environments step on {device}, which is not the GPU of this rank; give a device, or call "
            refuse("device", "auto", remedy + '`torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before making them')
        if self.verbose >= 1:
            print(f"Using {device} device: {reason}")
        if device == self.device:
            return
        self.device, self.policy = device, self.policy.to(device)
        self._create_rollout_buffer()
        if self.seed is not None and device.type == "cuda":
            # As SB3 does when it sets the seed
            th.backends.cudnn.deterministic, th.backends.cudnn.benchmark = True, False

    def _setup_validation(self) -> None:
        """
        Keep SB3's distributions from validating their arguments on a GPU, which would wait for it, in policies of SB3 and of
        this package. On the CPU, the validation finds NaN.
        """
        policy: Any = self.policy
        is_known = isinstance(policy, ActionDistributionMixin) or type(policy) in self.policy_aliases.values()
        if is_known and policy.device.type != "cpu":
            policy.action_dist = on_device(policy.action_dist, policy.device)

    def _setup_precision(self) -> None:
        set_precision(self.policy, self.amp_dtype)
        before, self.loss_scale = self.loss_scale, None
        if self.amp_dtype == "float16":
            self.loss_scale = _continued(LossScale().to(self.device), before)

    def _setup_rollout_buffer(self) -> None:
        """Create the rollout buffer anew. A history-based policy continues with what it remembers."""
        before = self.rollout_buffer
        if before is not self._own_buffer or hidden_methods(before, BUFFER_METHODS) != self._own_methods:
            return self._adapt_buffer_of_user()
        self._create_rollout_buffer()
        self._adapt_rollout_buffer()
        self._place_rollout_buffer()
        after = self.rollout_buffer
        if isinstance(before, TensorRolloutBuffer) and isinstance(after, TensorRolloutBuffer) and after.memory is not None:
            assert before.memory is not None
            after.remember(before.memory.read(before.pos))
            after.memory.continue_from(before.memory)
        self._remember_buffer()

    def _remember_buffer(self) -> None:
        """Take the rollout buffer for one that this class has made, and may replace."""
        self._own_buffer = self.rollout_buffer
        self._own_methods = hidden_methods(self.rollout_buffer, BUFFER_METHODS)

    def _adapt_buffer_of_user(self) -> None:
        """A buffer that the user has assigned, or whose methods were replaced, stays, with the current discount factors."""
        buffer = self.rollout_buffer
        if buffer.buffer_size != self.n_steps:
            remedy = f"the buffer assigned to `rollout_buffer`, or changed, has {buffer.buffer_size} steps; assign another one"
            refuse("n_steps", self.n_steps, remedy)
        buffer.gamma, buffer.gae_lambda = self.gamma, self.gae_lambda

    def _create_rollout_buffer(self) -> None:
        """As SB3 does."""
        space = self._space_of_policy()
        has_dicts = isinstance(space, spaces.Dict)
        self.rollout_buffer_class = self.rollout_buffer_class or (DictRolloutBuffer if has_dicts else RolloutBuffer)
        with assertions_as_value_errors(), self._memory_errors():
            self.rollout_buffer = self.rollout_buffer_class(
                self.n_steps,
                space,
                self._sample_space,
                device=self.device,
                gamma=self.gamma,
                gae_lambda=self.gae_lambda,
                n_envs=self.n_envs,
                **(self.rollout_buffer_kwargs or {}),
            )

    def _memory_errors(self) -> AbstractContextManager[None]:
        what = f"A rollout of `n_steps={self.n_steps}`, or a policy with `policy_kwargs={described(self.policy_kwargs)}`,"
        return memory_errors_as_value_errors(what)

    def _adapt_rollout_buffer(self) -> None:
        """Replace SB3's rollout buffer by one of this package, unless it is of the user's class."""
        buffer: Any = self.rollout_buffer
        if not hasattr(buffer, "compute_returns_and_advantage"):
            remedy = f"it returns {described(buffer)}; give a class that inherits SB3's `RolloutBuffer`, or None"
            refuse("rollout_buffer_class", self.rollout_buffer_class, remedy)
        memory = self.policy.make_memory() if isinstance(self.policy, HistoryPolicy) else None
        is_plain = type(buffer) in (RolloutBuffer, DictRolloutBuffer)
        # A user may have changed SB3's class.
        if is_plain and (memory is not None or replaced_method(BUFFER_METHODS, buffer) is None):
            in_float32 = self._keeps_float32() or self._normalizes_integers or (memory is not None and memory.keeps_float32)
            with self._memory_errors():
                self.rollout_buffer = TensorRolloutBuffer(
                    self.n_steps,
                    self._stored_space() if in_float32 else self._space_of_policy(),
                    self._sample_space,
                    device=self.device,
                    gamma=self.gamma,
                    gae_lambda=self.gae_lambda,
                    n_envs=self.n_envs,
                    memory=memory,
                )
        self._warn_about_rounded_observations()
        self._setup_latents()

    def _place_rollout_buffer(self) -> None:
        """Move the rollout buffer to the device of the policy, if the backend keeps rollouts there."""
        buffer, setup = self.rollout_buffer, self._engine_setup()
        backend, reasons = choose_backend(self.backend, setup)
        is_on_device = self.backend not in reasons and ENGINES[backend].keeps_rollouts_on_device(setup)
        if isinstance(buffer, TensorRolloutBuffer) and is_on_device and buffer.storage != buffer.device:
            with self._memory_errors():
                buffer.allocate(buffer.device)

    def _keeps_float32(self) -> bool:
        return self.backend == "auto" or ENGINES[self.backend].keeps_float32

    def _setup_latents(self) -> None:
        made = getattr(self.policy, "action_dist_name", "gaussian")
        if made != self.action_dist:
            refuse(
                "action_dist",
                self.action_dist,
                f"{self.policy_class.__name__} makes it {made!r}; give that, or change the class",
            )
        self._samples_latents = ACTION_DISTS[self.action_dist].is_bounded
        space = self._sample_space
        if self._samples_latents and space.dtype != np.float32:
            # Otherwise the buffer would round latents to the dtype of the actions.
            self.rollout_buffer.action_space = spaces.Box(-np.inf, np.inf, space.shape, np.float32)
            if isinstance(self.rollout_buffer, TensorRolloutBuffer):
                self.rollout_buffer.allocate(self.rollout_buffer.storage)
            else:
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

    def _setup_extra_losses(self) -> None:
        """Refuse losses that do not fit the policy. They are made anew for each update."""
        self._extra_losses()

    def _setup_advantages(self) -> None:
        before, self.advantage_normalizer = self.advantage_normalizer, None
        if self.normalize_advantage and self.advantage_norm == "ema":
            normalizer = AdvantageNormalizer(
                self.adv_ema_alpha, self.adv_ema_warm_start, self.adv_min_std, self.adv_clip, self.adv_shift_mean
            )
            self.advantage_normalizer = _continued(normalizer, before)

    def _setup_truncations(self) -> None:
        self._truncations = [] if self.vtrace else None

    # What is changed between two calls of `learn`

    @property
    def _steps_in_tensors(self) -> bool:
        """Whether the steps of the environments are tensors, which ``set_env`` can change."""
        return self.env is not None and steps_in_tensors(self.env)

    @property
    def _has_own_get(self) -> bool:
        """Whether the user has assigned a rollout buffer, or replaced its ``get``, so that it draws its own minibatches."""
        buffer = getattr(self, "rollout_buffer", None)
        is_assigned = buffer is not self._own_buffer and not knows_indices(type(buffer))
        return buffer is not None and (is_assigned or is_replaced(buffer, "get"))

    @property
    def stats_window_size(self) -> int:
        """Number of episodes over which the logged statistics are averaged. Changes act at the next call of ``learn``."""
        return self._stats_window_size

    @stats_window_size.setter
    def stats_window_size(self, n_episodes: int) -> None:
        self._stats_window_size = n_episodes

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        self._apply_changed_options()
        self._choose_backend()  # Hooks and replaced methods may be new.
        total_timesteps, callback = super()._setup_learn(*args, **kwargs)
        for schedule in (self.lr_schedule, self.critic_lr_schedule):
            if isinstance(schedule, DecaySchedule):
                schedule.rollout = self.n_steps * self.n_envs * self.ranks.size / max(total_timesteps, 1)
        return total_timesteps, callback

    def _apply_changed_options(self) -> None:
        """Check options that have been changed since the last call of ``learn``, or refuse the change, and let them act."""
        self._check_environment()
        convert_options(self)
        changed = [name for name, value in self._set_up.items() if not is_same(value, getattr(self, name))]
        if not changed:
            return
        for name in changed:
            if name in CHANGES and (remedy := CHANGES[name].remedy) is not None:
                refuse(name, getattr(self, name), remedy)
        check_options(self, changed)
        own_schedules = {name: self._own_schedule(name) for name in SCHEDULES if name in changed}
        self._set_up.update({name: object() for name in changed})  # If a step fails, all are taken again.
        for step in dict.fromkeys(step for name in changed if name in CHANGES for step in CHANGES[name].steps):
            getattr(self, step)()
        vars(self).update(own_schedules)
        self._remember_options()

    def _check_environment(self) -> None:
        env: Any = self.env
        if env is None:
            refuse("env", None, "the model has no environment; give one to `load` or `set_env`")
        spaces_of_env = (getattr(env, "observation_space", None), getattr(env, "action_space", None))
        fits = isinstance(env, VecEnv) and env.num_envs == self.n_envs
        if not fits or spaces_of_env != (self.observation_space, self.action_space):
            remedy = "it is not like the environment that the model was made for; give it to `set_env`, or to `load`"
            refuse("env", env, remedy)
        self._check_masks()
        self._check_normalization()

    def _check_masks(self) -> None:
        if self.action_masking and self.action_mask_key is None and self.env is not None:
            check_masks(self.env)
        if self.action_masking and self.action_mask_key in (keys := self._normalized_parts):
            others = sorted(set(keys) - {self.action_mask_key})
            remedy = (
                f"`VecNormalize` normalises it, so that each action would count as valid; give it `norm_obs_keys={others}`"
            )
            refuse("action_mask_key", self.action_mask_key, remedy)

    def _own_schedule(self, name: str) -> Any:
        """A schedule that the user has set instead of the option, which it replaces until the option is changed."""
        value = getattr(self, name)
        if not callable(value):
            return None if value is None and name == "critic_lr_schedule" else make_schedule(name, value)
        check_schedule(name, value)
        return value

    def _remember_options(self) -> None:
        self._set_up = {name: remembered(getattr(self, name)) for name in (*CHANGES, *SCHEDULES)}

    def _setup_statistics(self) -> None:
        """Resize the buffers, which SB3 creates anew only if the timesteps are reset."""
        for name in ("ep_info_buffer", "ep_success_buffer"):
            if (episodes := getattr(self, name)) is not None:
                setattr(self, name, deque(episodes, maxlen=self._stats_window_size))

    def _setup_seed(self) -> None:
        self.set_random_seed(self.seed)

    def _setup_deterministic_action(self) -> None:
        if isinstance(self.policy, ActionDistributionMixin):
            self.policy.deterministic_action = self.deterministic_action
            if (bounded := bounded_part(self.policy.action_dist)) is not None:
                bounded.deterministic_action = self.deterministic_action

    def _warn_about_truncated_minibatch(self) -> None:
        if self.env is None:
            return
        buffer_size = self.env.num_envs * self.n_steps * find_launch(self.distributed).size
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

    def _warn_about_rounded_observations(self) -> None:
        """Normalised observations are not integers, and SB3's rollout buffer, which it equals, rounds them."""
        space: Any = self.rollout_buffer.observation_space
        for key in self._normalized_parts:
            part = space.spaces.get(key or OBSERVATION) if isinstance(space, spaces.Dict) else space
            if isinstance(part, spaces.Box) and part.dtype.kind != "f":
                warnings.warn(
                    f"`VecNormalize` normalises observations in {part}, and {type(self.rollout_buffer).__name__} rounds them"
                    f" to {part.dtype}, as in SB3: make them floats in the environment, or give neither `backend`"
                    " nor `rollout_buffer_class`.",
                    stacklevel=3,
                )

    def _warn_about_single_step(self) -> None:
        if self._has_single_step and (self.kl_coef > 0 or self.adaptive_lr_kl is not None):
            warnings.warn(
                "`kl_coef`, `kl_target` and `adaptive_lr_kl` depend on how far the policy has moved before each step of"
                " the optimizer, and there is only one step per update, before which it has not moved: they have no effect."
                f" Raise n_epochs={self.n_epochs}, or lower batch_size={self.batch_size}.",
                stacklevel=3,
            )


def _continued(adaptive: Any, before: Any) -> Any:
    """Something that adapts during the training, with the state of its predecessor, if there is one."""
    if before is not None:
        adaptive.load_state_dict(before.state_dict())
    return adaptive

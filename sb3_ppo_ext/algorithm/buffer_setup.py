"""The rollout buffer of PPOExt: made as SB3 does, replaced by one of this package, placed, and kept where it is a user's."""

import warnings
from contextlib import AbstractContextManager

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_ppo_ext.algorithm.normalization import Normalization
from sb3_ppo_ext.common.action_masks import OBSERVATION, with_mask
from sb3_ppo_ext.common.observations import in_float32
from sb3_ppo_ext.common.user_code import hidden_methods, is_replaced, replaced_method
from sb3_ppo_ext.common.validation import assertions_as_value_errors, described, memory_errors_as_value_errors, refuse
from sb3_ppo_ext.distributions import ACTION_DISTS
from sb3_ppo_ext.engines.registry import ENGINES, choose_backend
from sb3_ppo_ext.envs.time_limits import AUTO, discount_for, time_limit_of_all
from sb3_ppo_ext.memory.history import HistoryPolicy
from sb3_ppo_ext.rollout.buffer import BUFFER_METHODS, TensorRolloutBuffer, knows_indices


class BufferSetup(Normalization):
    """The part of PPOExt that sets up its rollout buffer."""

    # The rollout buffer that this class has made. Users may assign another one to `rollout_buffer`.
    _own_buffer: RolloutBuffer | None = None
    # Methods that its constructor has replaced
    _own_methods: list[str] | None = None

    def _choose_discount(self) -> None:
        """Make a number of ``gamma="auto"``, which is the discount factor from then on, also of a model that is saved."""
        if self.gamma != AUTO:
            return
        if self.env is None:
            refuse("gamma", self.gamma, "the time limit is that of the environments; give `env` as well, or a number")
        limit = time_limit_of_all(self.env)
        self.gamma = discount_for(limit)
        if self.verbose >= 1:
            reason = "no time limit is known" if limit is None else f"episodes have at most {limit} steps"
            print(f"gamma={self.gamma:.4g}: {reason}")

    def _space_of_policy(self) -> spaces.Space:
        """Space of the observations that the policy reads and the rollout buffer stores, with masks if there are any."""
        if not self.action_masking or self.action_mask_key is not None:
            return self.observation_space
        return with_mask(self.observation_space, self.action_space)

    def _stored_space(self) -> spaces.Space:
        """Space of the observations in the rollout buffer, in float32."""
        space = in_float32(self.observation_space, self._normalized_parts)
        return space if self._space_of_policy() is self.observation_space else with_mask(space, self.action_space)

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
        buffer = self.rollout_buffer
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

    def _setup_truncations(self) -> None:
        self._truncations = [] if self.vtrace else None

    @property
    def _has_own_get(self) -> bool:
        """Whether the user has assigned a rollout buffer, or replaced its ``get``, so that it draws its own minibatches."""
        buffer = getattr(self, "rollout_buffer", None)
        is_assigned = buffer is not self._own_buffer and not knows_indices(type(buffer))
        return buffer is not None and (is_assigned or is_replaced(buffer, "get"))

    def _warn_about_rounded_observations(self) -> None:
        """Normalised observations are not integers, and SB3's rollout buffer, which it equals, rounds them."""
        space = self.rollout_buffer.observation_space
        for key in self._normalized_parts:
            part = space.spaces.get(key or OBSERVATION) if isinstance(space, spaces.Dict) else space
            if isinstance(part, spaces.Box) and part.dtype.kind != "f":
                warnings.warn(
                    f"`VecNormalize` normalises observations in {part}, and {type(self.rollout_buffer).__name__} rounds them"
                    f" to {part.dtype}, as in SB3: make them floats in the environment, or give neither `backend`"
                    " nor `rollout_buffer_class`.",
                    stacklevel=3,
                )

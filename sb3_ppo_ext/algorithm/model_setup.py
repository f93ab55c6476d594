"""The policy of PPOExt, its device, and what it can be trained with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch as th
from gymnasium import spaces

from sb3_ppo_ext.algorithm.device_choice import Situation, choose_device
from sb3_ppo_ext.algorithm.learning_setup import LearningSetup
from sb3_ppo_ext.common.action_masks import ACTION_MASK, without_mask
from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace, sample_space
from sb3_ppo_ext.common.validation import assertions_as_value_errors, refuse
from sb3_ppo_ext.distributed.launch import find_launch, own_device
from sb3_ppo_ext.distributions import on_device
from sb3_ppo_ext.engines.native.engine import NativeEngine
from sb3_ppo_ext.envs.action_masks import check_masks
from sb3_ppo_ext.options import check_options, convert_options
from sb3_ppo_ext.options.policy_kwargs import check_observations
from sb3_ppo_ext.policies.actor_critic import OWN_KEYWORDS, ActionDistributionMixin, MlpPolicy, with_action_distributions
from sb3_ppo_ext.policies.value_normalization import NormalizedValue


class ModelSetup(LearningSetup):
    """The part of PPOExt that sets up its policy; ``PPOExt._setup_model`` has the order of all steps."""

    def _check_options(self) -> None:
        convert_options(self)
        check_options(self)

    def _check_observations(self) -> None:
        """Refuse observations that the policy cannot read."""
        check_observations(with_action_distributions(self.policy_class), self.policy_kwargs, self._space_of_features())

    def _forget_adaptation(self) -> None:
        """Whatever adapts during a training begins anew with the policy."""
        self.advantage_normalizer = self.kl_coefficient = self.adaptive_lr = None

    def _setup_policy(self) -> None:
        """Let SB3 make the policy and its rollout buffer."""
        with self._as_the_policy_takes_it(), assertions_as_value_errors(), self._memory_errors():
            super()._setup_model()
        if self.normalize_value and not isinstance(self.policy.value_net, NormalizedValue):
            remedy = f"`{type(self.policy).__name__}` has a `value_net` of its own, which would not be normalised; give False"
            refuse("normalize_value", True, remedy)

    @contextmanager
    def _as_the_policy_takes_it(self) -> Iterator[None]:
        """Spaces and ``policy_kwargs`` as the policy takes them, which differ from those that the user has given."""
        given = self.policy_kwargs, self.observation_space, self.action_space
        self.observation_space = self._space_of_policy()
        # The policy and the rollout buffer have hybrid actions as vectors.
        self.action_space = sample_space(self.action_space)
        self.policy_kwargs = self._setup_action_distribution(self.policy_kwargs)
        if self.optimizer != "adam":
            # `optimizer_kwargs` are for the class of `optimizer`, not for the one that the policy creates.
            self.policy_kwargs = {k: v for k, v in self.policy_kwargs.items() if k != "optimizer_kwargs"}
        try:
            yield
        finally:
            self.policy_kwargs, self.observation_space, self.action_space = given

    def _setup_action_distribution(self, policy_kwargs: dict[str, object]) -> dict[str, object]:
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
        policy = self.policy
        is_known = isinstance(policy, ActionDistributionMixin) or type(policy) in self.policy_aliases.values()
        if is_known and policy.device.type != "cpu":
            policy.action_dist = on_device(policy.action_dist, policy.device)

    def _maybe_recommend_cpu(self, mlp_class_name: str = "ActorCriticPolicy") -> None:
        super()._maybe_recommend_cpu(MlpPolicy.__name__ if self.policy_class is MlpPolicy else mlp_class_name)

    def _check_masks(self) -> None:
        if self.action_masking and self.action_mask_key is None and self.env is not None:
            check_masks(self.env)
        if self.action_masking and self.action_mask_key in (keys := self._normalized_parts):
            others = sorted(set(keys) - {self.action_mask_key})
            remedy = (
                f"`VecNormalize` normalises it, so that each action would count as valid; give it `norm_obs_keys={others}`"
            )
            refuse("action_mask_key", self.action_mask_key, remedy)

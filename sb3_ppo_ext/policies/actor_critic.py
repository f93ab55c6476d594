"""SB3's actor-critic policies, with more action distributions than the Gaussian."""

import math
import warnings
from collections.abc import Mapping
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import BernoulliDistribution, Distribution
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    BasePolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_ppo_ext.common.bounds import clipped
from sb3_ppo_ext.common.hybrid_actions import (
    FlatActionSpace,
    boxes_of,
    joined,
    sample_space,
    split_boxes,
    structured,
)
from sb3_ppo_ext.common.saved_models import OF_MASKABLE_PPO
from sb3_ppo_ext.common.type_aliases import Arrays, Kwargs, StateDict
from sb3_ppo_ext.common.user_code import has_method_of
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributions.base import DeterministicAction, bounded_part
from sb3_ppo_ext.distributions.registry import ACTION_DISTS, DEFAULT, ActionDist, DistributionFamily, hybrid_distribution
from sb3_ppo_ext.policies.action_masking import ActionMaskingMixin
from sb3_ppo_ext.policies.actions_within_bounds import (
    ActionsForEnv,
    WithinBounds,
    actions_of_latents,
    in_float64,
    unsquashed,
)
from sb3_ppo_ext.policies.distribution_checks import check_action_distribution, check_within_bounds, warn_if_wide
from sb3_ppo_ext.policies.normalized_observations import NormalizedObservationsMixin
from sb3_ppo_ext.policies.observation_keys import KEYWORDS as OF_KEYS
from sb3_ppo_ext.policies.value_normalization import NormalizedValue

# Prefix of the name of the action distribution in the state dict of a policy, now and in zips of earlier versions
_MARK, _OLD_MARK = "action_distribution_", "law_"
# Keywords that SB3's policies lack, and that `policy_kwargs` may have
OWN_KEYWORDS = ("mean_tanh", "learn_std", "net_type", *OF_KEYS)


class ActionDistributionMixin(ActionMaskingMixin):
    """
    Mixin that adds these keywords to an actor-critic policy of SB3; it comes before that policy among the base classes. With
    the defaults, nothing changes.

    Policies with a bounded action distribution sample and evaluate latents (see
    :class:`~sb3_ppo_ext.distributions.BoundedDistribution`): ``forward`` returns latents, ``evaluate_actions`` takes them, and
    the rollout buffer stores them. :meth:`unscale_action` turns them into actions; ``predict`` calls it, and so does every
    algorithm of SB3 for a policy with ``squash_output``. :meth:`evaluate_env_actions` takes actions of the environment.

    With a ``Dict`` or ``Tuple`` of actions, ``policy.action_space`` is the
    :class:`~sb3_ppo_ext.common.hybrid_actions.FlatActionSpace` of the vectors that the policy samples. ``predict`` returns the
    dictionaries and tuples of the environment, and :meth:`evaluate_env_actions` takes them.

    :param observation_space: Observation space
    :param action_space: Action space
    :param lr_schedule: Learning rate schedule
    :param action_dist: Action distribution, ``"gaussian"`` (SB3's), ``"squashed_gaussian"`` or ``"beta"``
    :param deterministic_action: Deterministic action of the Beta distribution, ``"mean"`` or ``"mode"``
    :param mean_tanh: Whether tanh keeps the mean of the Gaussian within the bounds of the action space; samples are clipped
    :param learn_std: Whether the standard deviation is learned; if not, it stays at ``exp(log_std_init)``, also when
        parameters with another one are loaded
    :param normalize_value: Whether the critic predicts normalised returns, see
        :class:`~sb3_ppo_ext.policies.value_normalization.NormalizedValue`
    :param kwargs: Keyword arguments of SB3's policy, of :class:`~sb3_ppo_ext.policies.action_masking.ActionMaskingMixin`, and
        of :class:`~sb3_ppo_ext.policies.observation_keys.ObservationKeysMixin`
    :raises ValueError: if a keyword is not valid, or cannot be combined with the action space or another keyword
    """

    action_space: Any

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *args: Any,
        action_dist: ActionDist = DEFAULT,
        deterministic_action: DeterministicAction = "mean",
        mean_tanh: bool = False,
        learn_std: bool = True,
        normalize_value: bool = False,
        **kwargs: Any,
    ):
        # `policy.action_dist` is the distribution itself, as in SB3.
        self.action_dist_name, self.deterministic_action = action_dist, deterministic_action
        self.mean_tanh, self.learn_std, self.normalize_value = mean_tanh, learn_std, normalize_value
        super().__init__(observation_space, sample_space(action_space), lr_schedule, *args, **kwargs)

    @property
    def _family(self) -> DistributionFamily:
        return ACTION_DISTS[self.action_dist_name]

    def _build(self, lr_schedule: Schedule) -> None:
        check_action_distribution(
            **self._action_distribution_keywords(),
            action_space=self.action_space,
            use_sde=self.use_sde,
            log_std_init=self.log_std_init,
        )
        if self.action_dist_name != DEFAULT:
            # SB3 does not know `action_dist`: this name keeps it from loading the parameters of one distribution into another.
            self.register_buffer(f"{_MARK}{self.action_dist_name}", th.ones(()))
            for space in boxes_of(self.action_space) if self._family.is_bounded else ():
                warn_if_wide(space)
        if isinstance(self.action_space, FlatActionSpace):
            self._build_hybrid(self.action_space, lr_schedule)
        else:
            # Creates the output layer and the `log_std` of SB3's Gaussian.
            super()._build(lr_schedule)
            if self.action_dist_name != DEFAULT:
                self._build_action_dist(lr_schedule)
        if self.mean_tanh:
            self.action_net = nn.Sequential(self.action_net, ScaledTanh(self.action_space))
        if not self.learn_std:
            self.log_std.requires_grad_(False)
        if self.normalize_value and isinstance(self.value_net, nn.Linear):
            self.value_net = NormalizedValue(self.value_net)

    def _build_hybrid(self, space: FlatActionSpace, lr_schedule: Schedule) -> None:
        distribution = hybrid_distribution(space, self.action_dist_name, self.deterministic_action)
        # SB3 creates the output layer of the distributions that it knows. This one has as many outputs.
        self.action_dist = BernoulliDistribution(sum(distribution.n_outputs))
        super()._build(lr_schedule)
        layer: Any = self.action_net
        distribution.init_bias(layer)
        self.action_dist = distribution
        if distribution.n_stds:
            self.log_std = nn.Parameter(th.ones(distribution.n_stds) * self.log_std_init)
            self._make_optimizer(lr_schedule)
        else:
            self._warn_of_log_std_init()

    def _build_action_dist(self, lr_schedule: Schedule) -> None:
        make: Any = self._family.torch_class
        self.action_dist = make(get_action_dim(self.action_space), self.deterministic_action)
        if not self._family.has_log_std:
            self._replace_output_layer(lr_schedule)

    def _replace_output_layer(self, lr_schedule: Schedule) -> None:
        """Replace the output layer by that of the distribution, and remove ``log_std``."""
        self._warn_of_log_std_init()
        layer: Any = self.action_dist.proba_distribution_net(self.mlp_extractor.latent_dim_pi)
        if self.ortho_init:
            nn.init.orthogonal_(layer.weight, gain=0.01)
        self.action_net = layer
        del self.log_std
        self._make_optimizer(lr_schedule)

    def _warn_of_log_std_init(self) -> None:
        # A tensor has one number for each action.
        if th.as_tensor(self.log_std_init).any() and boxes_of(self.action_space):
            warnings.warn(
                f'`log_std_init={self.log_std_init}` has no effect: `action_dist="{self.action_dist_name}"` has no standard '
                "deviation to learn.",
                stacklevel=2,
            )

    def _make_optimizer(self, lr_schedule: Schedule) -> None:
        make: Any = self.optimizer_class
        self.optimizer = make(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    @property
    def squash_output(self) -> bool:
        """Whether :meth:`unscale_action` must turn the policy's samples into actions."""
        return self._family.is_bounded or super().squash_output

    def _get_action_dist_from_latent(self, latent_pi: th.Tensor) -> Distribution:
        if self.action_dist_name == DEFAULT and not isinstance(self.action_space, FlatActionSpace):
            return super()._get_action_dist_from_latent(latent_pi)
        own = (self.log_std,) if hasattr(self, "log_std") else ()
        return self.action_dist.proba_distribution(self.action_net(latent_pi), *own)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[Arrays, tuple[np.ndarray, ...] | None]:
        """
        Get the policy action from an observation (and optional hidden state).

        :param observation: Observation of one environment, shape ``obs_shape``, or of several, shape ``(n_envs, *obs_shape)``
        :param state: Hidden state that the last call returned, of a history-based policy
        :param episode_start: Whether each environment has begun an episode with this observation, of a history-based policy
        :param deterministic: Whether to return the deterministic action instead of a sample
        :return: Action of each environment, and the next hidden state. With a ``Dict`` or ``Tuple`` action space, the actions
            are a dictionary or tuple, or for several environments a list of them
        """
        actions, state = super().predict(observation, state, episode_start, deterministic)
        return structured(self.action_space, actions), state

    def unscale_action(self, scaled_action: np.ndarray) -> np.ndarray:
        """
        :param scaled_action: Latents if the action distribution is bounded, else actions in [-1, 1], shape
            ``(n, *action_shape)``
        :return: Actions within the bounds and of the dtype of the action space, the same shape
        :raises ValueError: if a latent is not finite
        """
        if (bounded := bounded_part(self.action_dist)) is None:
            return super().unscale_action(scaled_action)
        space = self.action_space
        return actions_of_latents(scaled_action, *in_float64(space), bounded.position, space)

    def scale_action(self, action: np.ndarray) -> np.ndarray:
        """
        Inverse of :meth:`unscale_action`, for instance for the actions of an expert.

        :param action: Actions within the bounds, shape ``(n, *action_shape)``
        :return: Latents (float32) if the action distribution is bounded, else actions in [-1, 1], the same shape
        """
        if (bounded := bounded_part(self.action_dist)) is None:
            return super().scale_action(action)
        space = self.action_space
        actions, others = split_boxes(space, action)
        low, high = (split_boxes(space, bound)[0].astype(np.float64) / 2 for bound in (space.low, space.high))
        width = high - low
        position = np.where(width > 0, (actions / 2 - low) / np.where(width > 0, width, 1.0), 0.5)
        return joined(bounded.latents(position).astype(np.float32), others)

    def evaluate_actions(self, obs: PyTorchObs, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        """
        Evaluate what the policy has sampled: latents if the action distribution is bounded, see :meth:`evaluate_env_actions`
        for actions of the environment.

        :param obs: Observations
        :param actions: Samples of the policy, as the rollout buffer stores them, shape ``(batch_size, action_dim)``
        :return: Estimated values, log probabilities of the actions, and entropies of the action distributions
        :raises ValueError: if the action distribution is bounded, and a number is no latent of it
        """
        if (bounded := bounded_part(self.action_dist)) is not None and not th.compiler.is_compiling():
            self._check_latents(split_boxes(self.action_space, actions)[0], *bounded.latent_range)
        return self.evaluate_samples(obs, actions)

    def evaluate_samples(self, obs: PyTorchObs, samples: th.Tensor) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        """
        :meth:`evaluate_actions` without a check of the samples, for minibatches of a rollout.

        :param obs: Observations
        :param samples: Samples of the policy, shape ``(batch_size, action_dim)``
        :return: Estimated values, log probabilities of the actions, and entropies of the action distributions
        """
        self.use_masks(obs)
        return super().evaluate_actions(obs, samples)

    def _check_latents(self, latents: th.Tensor, low: float, high: float) -> None:
        if latents.numel() == 0:
            return
        smallest, largest = latents.min().item(), latents.max().item()
        # NaN fails the comparisons.
        if not (low <= smallest and largest <= high and math.isfinite(largest - smallest)):
            remedy = f"""`action_dist="{self.action_dist_name}"` evaluates latents from {low:g} to {high:g}"""
            refuse("actions", f"{smallest:g} to {largest:g}", f"{remedy}; give actions to `policy.evaluate_env_actions`")

    def evaluate_env_actions(self, obs: PyTorchObs, actions: object) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        """
        Evaluate actions as environments get them, for instance those of an expert (behaviour cloning), with gradients.

        The density of a bounded distribution at a bound itself can be infinite or zero: actions closer to a bound than a
        millionth of the width are evaluated there.

        :param obs: Observations, as :meth:`evaluate_actions` takes them
        :param actions: Actions within the bounds of the action space, shape ``(batch_size, *action_shape)``; of a ``Dict`` or
            ``Tuple`` action space a list of actions, or a dictionary or tuple of arrays
        :return: Estimated values, log probabilities of the actions, and entropies of the action distributions, with those of
            bounded distributions in units of the bounds
        :raises ValueError: if an action is not within the bounds, or there is not one for each observation
        """
        space = self.action_space
        actions = space.flattened(actions) if isinstance(space, FlatActionSpace) else actions
        array = th.as_tensor(actions).detach().cpu().numpy()
        if isinstance(obs, th.Tensor | dict):  # others are sequences
            shape = (len(next(iter(obs.values())) if isinstance(obs, dict) else obs), *(space.shape or ()))
            if array.size != np.prod(shape):
                refuse("actions.shape", array.shape, f"give one for each observation, shape {shape}")
            array = array.reshape(shape)
        if isinstance(space, spaces.Box):
            check_within_bounds(array, space)
            array = self.scale_action(array) if self.squash_output else array
            array = array.reshape(len(array), -1).astype(np.float32)
        elif isinstance(space, spaces.Discrete):
            array = array.reshape(-1)
        elif isinstance(space, spaces.MultiBinary):
            array = array.astype(np.float32)  # PyTorch's Bernoulli takes no integers
        return self.evaluate_actions(obs, th.as_tensor(array, device=self.device))

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """
        Load parameters as any module does, except that a standard deviation that is not learned keeps its configured value,
        and the parameters of another action distribution are refused.

        :param state_dict: Parameters by name
        :param strict: Whether the names must match exactly
        :param assign: Whether to use the given tensors themselves instead of copying their values
        :return: Missing and unexpected names
        :raises ValueError: if the parameters are those of another action distribution
        """
        check_parameters_are_of(state_dict, self.action_dist_name)
        results = super().load_state_dict(state_dict, strict, assign)
        if not self.learn_std:
            self.log_std.requires_grad_(False)
            configured = th.as_tensor(self.log_std_init, dtype=self.log_std.dtype, device=self.log_std.device)
            loaded = self.log_std.detach().cpu()
            if loaded.sub(configured.cpu()).abs().max() > 1e-6:
                warnings.warn(
                    f"`learn_std=False`: the standard deviation stays at exp of `log_std_init={self.log_std_init}` (0 by "
                    f"default); the loaded `log_std`, {loaded.numpy()}, is not used.",
                    stacklevel=2,
                )
            self.log_std.data.copy_(configured)
        return results

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: object, **kwargs: object) -> None:
        if (old := f"{prefix}{_OLD_MARK}{self.action_dist_name}") in state_dict:
            state_dict[f"{prefix}{_MARK}{self.action_dist_name}"] = state_dict.pop(old)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _action_distribution_keywords(self) -> Kwargs:
        return {
            "action_dist": self.action_dist_name,
            "deterministic_action": self.deterministic_action,
            "mean_tanh": self.mean_tanh,
            "learn_std": self.learn_std,
        }

    def _get_constructor_parameters(self) -> Kwargs:
        space = self.action_space
        # SB3 leaves out `share_features_extractor`.
        return {
            **super()._get_constructor_parameters(),
            "action_space": space.structure if isinstance(space, FlatActionSpace) else space,
            "share_features_extractor": self.share_features_extractor,
            **({"normalize_value": True} if self.normalize_value else {}),
            **self._action_distribution_keywords(),
        }


def unscaled(policy: ActorCriticPolicy, samples: th.Tensor, low: th.Tensor, high: th.Tensor) -> th.Tensor:
    """
    ``unscale_action`` of a policy with ``squash_output``, on the device of the samples.

    :param policy: Policy that made the samples
    :param samples: Latents if the action distribution is bounded, else actions in [-1, 1], shape ``(n, *action_shape)``
    :param low: Lower bounds of the actions, shape ``action_shape``
    :param high: Upper bounds of the actions, shape ``action_shape``
    :return: Actions within the bounds, shape ``(n, *action_shape)``
    """
    if (bounded := bounded_part(policy.action_dist)) is None:
        return low + 0.5 * (samples + 1.0) * (high - low)
    latents, others = split_boxes(policy.action_space, samples)
    low, high = (split_boxes(policy.action_space, bound)[0] for bound in (low, high))
    position = bounded.position_of_tensor(latents)
    return joined(th.clamp(low * (1 - position) + high * position, low, high), others)


def actions_for_env(policy: ActorCriticPolicy) -> ActionsForEnv | None:
    """
    :param policy: Policy
    :return: What makes actions of its samples; ``None`` if it has an ``unscale_action`` of its own
    """
    space: Any = policy.action_space
    if not isinstance(space, spaces.Box):
        return ActionsForEnv(space, methodcaller("copy"))
    if not policy.squash_output:
        return ActionsForEnv(space, WithinBounds(space.low, space.high, clipped))
    if not unscales_as_known(policy):
        return None
    if (bounded := bounded_part(policy.action_dist)) is None:
        return ActionsForEnv(space, WithinBounds(space.low, space.high, unsquashed))
    return ActionsForEnv(
        space, WithinBounds(*in_float64(space), partial(actions_of_latents, position=bounded.position, space=space))
    )


def unscales_as_known(policy: ActorCriticPolicy) -> bool:
    """
    :param policy: Policy
    :return: Whether :func:`unscaled` is its ``unscale_action``
    """
    return has_method_of(policy, "unscale_action", BasePolicy, ActionDistributionMixin)


def evaluator(policy: ActorCriticPolicy) -> Any:
    """
    :param policy: Policy that is updated
    :return: Its ``evaluate_actions``, without the check of the samples unless it is overridden
    """
    own = getattr(policy.evaluate_actions, "__func__", None)
    return policy.evaluate_samples if own is ActionDistributionMixin.evaluate_actions else policy.evaluate_actions


class MlpPolicy(ActionDistributionMixin, ActorCriticPolicy):
    """SB3's policy of this name, with the keywords of :class:`ActionDistributionMixin`."""


class CnnPolicy(ActionDistributionMixin, ActorCriticCnnPolicy):
    """SB3's policy of this name, with the keywords of :class:`ActionDistributionMixin`."""


class MultiInputPolicy(ActionDistributionMixin, MultiInputActorCriticPolicy):
    """SB3's policy of this name, with the keywords of :class:`ActionDistributionMixin`."""


_WITH_ACTION_DISTRIBUTIONS: dict[type, type[ActorCriticPolicy]] = {
    ActorCriticPolicy: MlpPolicy,
    ActorCriticCnnPolicy: CnnPolicy,
    MultiInputActorCriticPolicy: MultiInputPolicy,
}


def check_parameters_are_of(state_dict: StateDict, action_dist: str) -> None:
    """
    Refuse the parameters of another action distribution: those of a Gaussian would fit a squashed Gaussian, but mean something
    else.

    :param state_dict: Parameters of a policy, by name
    :param action_dist: Action distribution that they are to be used for
    :raises ValueError: if they are those of another action distribution
    """
    parts = {name.split(".")[0] for name in state_dict}
    names = [part.removeprefix(mark) for mark in (_MARK, _OLD_MARK) for part in parts if part.startswith(mark)]
    if not names and not parts >= {"action_net", "value_net"}:
        return  # Incomplete parameters do not tell their distribution.
    name = names[0] if names else DEFAULT
    if name != action_dist:
        remedy = f"the saved parameters are those of {name!r}; give `action_dist={name!r}`, or train a new model"
        refuse("action_dist", action_dist, remedy)


def with_action_distributions(policy_class: Any) -> Any:
    """
    :param policy_class: Policy class
    :return: Class with the keywords of :class:`ActionDistributionMixin` that replaces one of SB3's own; other classes are
        returned unchanged
    """
    return _WITH_ACTION_DISTRIBUTIONS.get(policy_class, policy_class)


def normalizes(policy_class: Any) -> bool:
    """
    :param policy_class: Policy class
    :return: Whether what ``predict`` gets can be normalised by the policy, as by those of this package
    """
    return issubclass(with_action_distributions(policy_class), NormalizedObservationsMixin)


def with_own_masking(policy_class: Any) -> Any:
    """
    :param policy_class: Policy class
    :return: The class of this package for one of MaskablePPO's; other classes are returned unchanged
    """
    names = {ours.__name__: ours for ours in _WITH_ACTION_DISTRIBUTIONS.values()}
    return names.get(_name_for_maskable(policy_class), policy_class)


def check_masking(policy_class: type[BasePolicy], action_masking: bool) -> None:
    """
    :param policy_class: Policy class
    :param action_masking: Whether actions are masked
    :raises ValueError: if it is or inherits a class of MaskablePPO, whose methods have other arguments
    """
    for parent in getattr(policy_class, "__mro__", ()):
        if (name := _name_for_maskable(parent)) is not None:
            remedy = f"let it inherit `sb3_ppo_ext.{name}`" if action_masking else f"give {name!r} and `action_masking=True`"
            refuse("policy", policy_class, f"it is of MaskablePPO ({parent.__name__}); {remedy}")


def _name_for_maskable(policy_class: type) -> Any:
    return OF_MASKABLE_PPO.get((getattr(policy_class, "__module__", ""), getattr(policy_class, "__name__", "")))


def fixes_std(saved: Mapping[str, object], given: object) -> bool:
    """
    :param saved: ``policy_kwargs`` of a zip
    :param given: ``policy_kwargs`` that it is to be loaded with
    :return: Whether they are the same, except that the standard deviation is no longer learned
    """
    if not isinstance(given, dict) or given.get("learn_std", True):
        return False
    free = {"learn_std", "log_std_init"}
    one, other = ({name: value for name, value in kwargs.items() if name not in free} for kwargs in (saved, given))
    return one == other


class ScaledTanh(nn.Module):
    """
    ``tanh``, scaled to the range from the lower to the upper bounds of a space.

    :param space: ``Box`` with finite bounds; its dimensions are flattened. Of a hybrid action space, the outputs for the
        ``Box`` parts, which come first, are scaled; the others are returned unchanged
    """

    middle: th.Tensor
    half_width: th.Tensor

    def __init__(self, space: spaces.Box):
        super().__init__()
        bounds = (split_boxes(space, bound)[0] for bound in (space.low, space.high))
        low, high = (th.tensor(bound.flatten(), dtype=th.float64) for bound in bounds)
        self.register_buffer("middle", (low / 2 + high / 2).float())
        self.register_buffer("half_width", (high / 2 - low / 2).float())

    def forward(self, values: th.Tensor) -> th.Tensor:
        """
        :param values: Values, shape ``(batch_size, n_outputs)``
        :return: Values within the bounds, the same shape
        """
        n = len(self.middle)
        scaled = self.middle + self.half_width * th.tanh(values[:, :n])
        return scaled if values.shape[1] == n else th.cat([scaled, values[:, n:]], dim=1)

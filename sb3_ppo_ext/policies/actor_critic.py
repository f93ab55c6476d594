"""SB3's actor-critic policies, which know further laws of the action beside the Gaussian."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.type_aliases import Schedule
from torch import nn

from sb3_ppo_ext.common.validation import check_choice, check_number, refuse
from sb3_ppo_ext.distributions.torch_distributions import (
    LOG_STD_RANGE,
    BoundedBetaDistribution,
    BoundedDistribution,
    TanhGaussianDistribution,
)

# Before the name of the law among the parameters of a policy
_MARK = "law_"
BOUNDED = ("squashed_gaussian", "beta")
# Wider than this, a dimension of the action space is probably not what its author would explore from end to end.
WIDE, WIDER_THAN_OTHERS = 50.0, 10.0


class ActionLawMixin(ActorCriticPolicy):
    """
    Stands before an actor-critic policy of SB3 among the parents of a class, and gives it these keywords. With none of them
    set, nothing changes.

    The bounded laws sample and evaluate latents (see ``sb3_ppo_ext.distributions``): these are what ``forward`` returns,
    what ``evaluate_actions`` takes, and what belongs in a rollout buffer. :meth:`unscale_action` turns them into actions,
    as ``predict`` does, and every algorithm of SB3 for a policy with ``squash_output``.

    :param observation_space: Observation space
    :param action_space: Action space
    :param lr_schedule: Learning rate schedule
    :param action_dist: ``"gaussian"`` (SB3's), ``"squashed_gaussian"`` or ``"beta"``
    :param deterministic_action: Of Beta: ``"mean"`` or ``"mode"``
    :param mean_tanh: Whether the mean of the Gaussian is bounded to the action space by tanh; its samples are clipped
    :param learn_std: Whether the standard deviation is learned; if not, it stays at ``exp(log_std_init)``, also when
        parameters with another one are loaded
    :raises ValueError: if a keyword is not valid, or does not go with the action space or another keyword
    """

    action_space: Any

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *args: Any,
        action_dist: str = "gaussian",
        deterministic_action: str = "mean",
        mean_tanh: bool = False,
        learn_std: bool = True,
        **kwargs: Any,
    ):
        # `action_dist` is SB3's name for the distribution that these make.
        self.action_law, self.deterministic_action = action_dist, deterministic_action
        self.mean_tanh, self.learn_std = mean_tanh, learn_std
        super().__init__(observation_space, action_space, lr_schedule, *args, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        check_action_law(**self._law(), action_space=self.action_space, use_sde=self.use_sde, log_std_init=self.log_std_init)
        # With the head of a Gaussian, as long as the law is not Beta
        super()._build(lr_schedule)
        if self.action_law != "gaussian":
            _warn_if_wide(self.action_space)
            # SB3, which knows no laws, must not find that the parameters of one fit another.
            self.register_buffer(f"{_MARK}{self.action_law}", th.ones(()))
        if self.action_law == "squashed_gaussian":
            self.action_dist = TanhGaussianDistribution(get_action_dim(self.action_space))
        if self.action_law == "beta":
            self._build_beta(lr_schedule)
        if self.mean_tanh:
            self.action_net = nn.Sequential(self.action_net, ScaledTanh(self.action_space))
        if not self.learn_std:
            self.log_std.requires_grad_(False)

    def _build_beta(self, lr_schedule: Schedule) -> None:
        if self.log_std_init != 0:
            warnings.warn(
                f'`log_std_init={self.log_std_init}` has no effect: `action_dist="beta"` has no standard deviation to learn.',
                stacklevel=2,
            )
        self.action_dist = BoundedBetaDistribution(get_action_dim(self.action_space), self.deterministic_action)
        head = self.action_dist.proba_distribution_net(self.mlp_extractor.latent_dim_pi)
        if self.ortho_init:
            nn.init.orthogonal_(head.weight, gain=0.01)
        self.action_net = head
        del self.log_std
        make_optimizer: Any = self.optimizer_class
        self.optimizer = make_optimizer(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    @property
    def squash_output(self) -> bool:
        """Whether what the network samples must be turned into actions by :meth:`unscale_action`."""
        return self.action_law != "gaussian" or super().squash_output

    def _get_action_dist_from_latent(self, latent_pi: th.Tensor) -> Any:
        if isinstance(self.action_dist, BoundedDistribution):
            own = () if self.action_law == "beta" else (self.log_std,)
            return self.action_dist.proba_distribution(self.action_net(latent_pi), *own)
        return super()._get_action_dist_from_latent(latent_pi)

    def unscale_action(self, scaled_action: np.ndarray) -> np.ndarray:
        """
        :param scaled_action: Latents of a bounded law, actions in [-1, 1] of another, shape ``(n, *action_shape)``
        :return: The actions, within the bounds and of the dtype of the action space
        :raises ValueError: if a latent is not finite
        """
        if not isinstance(self.action_dist, BoundedDistribution):
            return super().unscale_action(scaled_action)
        if not np.isfinite(scaled_action).all():
            raise ValueError(
                f"{np.sum(~np.isfinite(scaled_action))} of {np.size(scaled_action)} numbers in the policy's actions are not "
                "finite: check its observations and its parameters for NaN."
            )
        low, high = self.action_space.low, self.action_space.high
        position = self.action_dist.position(np.asarray(scaled_action, dtype=np.float64))
        # Not low + position * (high - low), which can overflow.
        actions = low * (1 - position) + high * position
        # Rounding can step over a bound.
        return np.clip(actions.astype(self.action_space.dtype), low, high)

    def scale_action(self, action: np.ndarray) -> np.ndarray:
        """
        The inverse of :meth:`unscale_action`, for instance for actions of an expert.

        :param action: Within the bounds, shape ``(n, *action_shape)``
        :return: Latents (float32) of a bounded law, actions in [-1, 1] of another
        """
        if not isinstance(self.action_dist, BoundedDistribution):
            return super().scale_action(action)
        low, high = (bound.astype(np.float64) / 2 for bound in (self.action_space.low, self.action_space.high))
        width = high - low
        position = np.where(width > 0, (action / 2 - low) / np.where(width > 0, width, 1.0), 0.5)
        return self.action_dist.latents(position).astype(np.float32)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """
        As any module's, but a standard deviation that is not learned stays as it was configured, and the parameters of
        another law are refused.

        :param state_dict: Parameters by name
        :param strict: Whether the names must match
        :param assign: Whether to take the tensors themselves
        :return: The names that did not match
        :raises ValueError: if the parameters are of another law
        """
        check_law_of_parameters(state_dict, self.action_law)
        results = super().load_state_dict(state_dict, strict, assign)
        if not self.learn_std:
            self.log_std.requires_grad_(False)
            if (loaded := self.log_std.detach().cpu()).sub(self.log_std_init).abs().max() > 1e-6:
                warnings.warn(
                    f"`learn_std=False`: the standard deviation stays at exp of `log_std_init={self.log_std_init}` (0 by "
                    f"default), that of the loaded parameters, {loaded.numpy()}, is not used.",
                    stacklevel=2,
                )
            nn.init.constant_(self.log_std, self.log_std_init)
        return results

    def _law(self) -> dict[str, Any]:
        return {
            "action_dist": self.action_law,
            "deterministic_action": self.deterministic_action,
            "mean_tanh": self.mean_tanh,
            "learn_std": self.learn_std,
        }

    def _get_constructor_parameters(self) -> dict[str, Any]:
        # SB3 leaves the first out.
        return {
            **super()._get_constructor_parameters(),
            "share_features_extractor": self.share_features_extractor,
            **self._law(),
        }


class MlpPolicy(ActionLawMixin, ActorCriticPolicy):
    """SB3's policy of this name, with the keywords of :class:`ActionLawMixin`."""


class CnnPolicy(ActionLawMixin, ActorCriticCnnPolicy):
    """SB3's policy of this name, with the keywords of :class:`ActionLawMixin`."""


class MultiInputPolicy(ActionLawMixin, MultiInputActorCriticPolicy):
    """SB3's policy of this name, with the keywords of :class:`ActionLawMixin`."""


_WITH_LAWS: dict[type, type[ActorCriticPolicy]] = {
    ActorCriticPolicy: MlpPolicy,
    ActorCriticCnnPolicy: CnnPolicy,
    MultiInputActorCriticPolicy: MultiInputPolicy,
}


def check_law_of_parameters(state_dict: Mapping[str, Any], action_dist: str) -> None:
    """
    :param state_dict: Parameters of a policy, by name
    :param action_dist: The law that they shall serve
    :raises ValueError: if they are those of another one. A Gaussian's would fit a squashed Gaussian, and mean something else.
    """
    parts = {name.split(".")[0] for name in state_dict}
    laws = [part.removeprefix(_MARK) for part in parts if part.startswith(_MARK)]
    if not laws and not parts >= {"action_net", "value_net"}:
        return  # Some parameters, of which nobody can tell
    law = laws[0] if laws else "gaussian"
    if law != action_dist:
        remedy = f"the saved parameters are those of {law!r}; give `action_dist={law!r}`, or train a new model"
        refuse("action_dist", action_dist, remedy)


def with_laws(policy_class: Any) -> Any:
    """
    :param policy_class: A policy
    :return: The one that takes the keywords of :class:`ActionLawMixin` in its place, if it is one of SB3's own; else itself
    """
    return _WITH_LAWS.get(policy_class, policy_class)


def fixes_std(saved: Mapping[str, Any], given: Any) -> bool:
    """
    :param saved: ``policy_kwargs`` of a zip
    :param given: ``policy_kwargs`` to load it with
    :return: Whether they are the same, but for a standard deviation that shall not be learned from here on
    """
    if not isinstance(given, dict) or given.get("learn_std", True):
        return False
    free = {"learn_std", "log_std_init"}
    one, other = ({name: value for name, value in kwargs.items() if name not in free} for kwargs in (saved, given))
    return one == other


class ScaledTanh(nn.Module):
    """
    ``tanh``, from the lower to the upper bounds of a space.

    :param space: With finite bounds; its dimensions are flattened
    """

    middle: th.Tensor
    half_width: th.Tensor

    def __init__(self, space: spaces.Box):
        super().__init__()
        low, high = (th.tensor(bound.flatten(), dtype=th.float64) for bound in (space.low, space.high))
        self.register_buffer("middle", (low / 2 + high / 2).float())
        self.register_buffer("half_width", (high / 2 - low / 2).float())

    def forward(self, values: th.Tensor) -> th.Tensor:
        """
        :param values: Shape ``(batch_size, action_dim)``
        :return: The same shape
        """
        return self.middle + self.half_width * th.tanh(values)


def check_action_law(
    action_dist: str,
    deterministic_action: str,
    mean_tanh: bool,
    learn_std: bool,
    action_space: spaces.Space | None,
    use_sde: bool,
    log_std_init: float,
) -> None:
    """
    :param action_dist: As for :class:`ActionLawMixin`, and so the next three
    :param action_space: ``None`` if it is not known yet
    :param use_sde: Whether there is state-dependent noise
    :param log_std_init: Logarithm of the standard deviation at the start
    :raises ValueError: if one of them is not valid, or they do not go together
    """
    check_choice("action_dist", action_dist, ("gaussian", *BOUNDED))
    check_choice("deterministic_action", deterministic_action, ("mean", "mode"))
    changed = {"action_dist": action_dist, "mean_tanh": mean_tanh, "learn_std": learn_std}
    for name, default in {"action_dist": "gaussian", "mean_tanh": False, "learn_std": True}.items():
        value = changed[name]
        if value == default:
            continue
        if name != "action_dist" and not isinstance(value, bool | np.bool_):
            refuse(name, value, "give True or False")
        if action_space is not None and not isinstance(action_space, spaces.Box):
            refuse(name, value, f"{action_space} is not a Box; leave it at {default!r}")
        if use_sde:
            refuse(name, value, f"gSDE samples a law of its own; give `use_sde=False`, or leave {name} at {default!r}")
    if isinstance(action_space, spaces.Box) and not np.all(np.isfinite([action_space.low, action_space.high])):
        for name in ("action_dist", "mean_tanh"):
            if changed[name] not in ("gaussian", False):
                remedy = f"{action_space} has an infinite bound; declare finite ones, and scale the action in the environment"
                refuse(name, changed[name], remedy)
    if action_dist != "gaussian":
        _check_bounded(action_dist, deterministic_action, mean_tanh, learn_std, action_space, log_std_init)


def _check_bounded(
    action_dist: str,
    deterministic_action: str,
    mean_tanh: bool,
    learn_std: bool,
    action_space: spaces.Space | None,
    log_std_init: float,
) -> None:
    if isinstance(action_space, spaces.Box) and not np.issubdtype(action_space.dtype, np.floating):
        remedy = f"{action_space} has integers; declare a Box of floats, and round in the environment"
        refuse("action_dist", action_dist, remedy)
    if mean_tanh:
        refuse("mean_tanh", mean_tanh, f'it is for `action_dist="gaussian"`; {action_dist!r} is bounded already, leave it out')
    if action_dist == "beta":
        if not learn_std:
            refuse("learn_std", learn_std, '`action_dist="beta"` has no standard deviation of its own; leave it out')
    else:
        check_number("log_std_init", log_std_init, *LOG_STD_RANGE)
        if deterministic_action != "mean":
            refuse("deterministic_action", deterministic_action, 'it is for `action_dist="beta"`; leave it at "mean"')


def _warn_if_wide(space: Any) -> None:
    # Half the width, for all of it can overflow
    halves = (space.high.astype(np.float64) / 2 - space.low.astype(np.float64) / 2).flatten()
    usual = np.median(halves[halves > 0]) if halves.any() else 0.0
    wide = np.flatnonzero((halves > WIDE / 2) | ((halves > 1) & (halves / WIDER_THAN_OTHERS > usual)))
    if len(wide) > 0:
        index = wide[0]
        bounds = f"{space.low.flat[index]:g} to {space.high.flat[index]:g}"
        warnings.warn(
            f"The action space {space} is very wide in its dimension {index} (from {bounds}), and a bounded law starts by "
            "exploring all of it: better declare [-1, 1], and scale the action inside the environment.",
            stacklevel=2,
        )

"""
Mirror symmetry of a task: the mirror image of an observation asks for the mirror image of the action.

Papers: https://arxiv.org/abs/1801.08093 (loss), https://arxiv.org/abs/2403.04359 (loss and augmentation with PPO)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ppo_ext.common.action_masks import OBSERVATION, choices_of
from sb3_ppo_ext.common.hybrid_actions import is_hybrid
from sb3_ppo_ext.common.type_aliases import Arrays, Kwargs
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributions import BoundedDistribution, location
from sb3_ppo_ext.memory.history import HistoryPolicy
from sb3_ppo_ext.memory.policies import TransformerPolicyMixin
from sb3_ppo_ext.memory.windows import Sequences
from sb3_ppo_ext.update.extra_loss import ExtraLoss, PolicyInputs, map_observed
from sb3_ppo_ext.update.losses import LossConfig, entropy_loss, policy_loss, value_loss
from sb3_ppo_ext.update.reflections import MapOfTensors, ReflectionMatrix, SignedPermutation, parse_reflection

SelfMirrored = TypeVar("SelfMirrored", bound="MirroredLoss")


def mirror_loss(actions: th.Tensor, of_mirrored: th.Tensor) -> th.Tensor:
    """
    ``mean(sum((a - M(a'))^2))``, the mean squared Euclidean distance of actions from the mirror images of the actions for
    mirrored observations.

    Paper: https://arxiv.org/abs/1801.08093, equation 4

    :param actions: Deterministic actions a, shape ``(batch_size, n)``
    :param of_mirrored: Mirror images M(a') of the deterministic actions for the mirrored observations, the same shape
    :return: Scalar to minimise
    """
    return (actions - of_mirrored).square().sum(dim=1).mean()


class Mirror:
    """
    Mirror images of the observations and actions of a policy.

    :param policy: Policy
    :param obs: Mirror image of an observation as plain data, see :func:`~sb3_ppo_ext.update.reflections.parse_reflection`;
        for a ``Dict``, a dictionary with the mirror image of each part, ``None`` for parts that stay as they are
    :param action: Mirror image of an action: of its numbers in a ``Box`` or ``MultiBinary`` space, of its choices in a
        ``Discrete`` space, and of the choices of all actions, one action after the other, in a ``MultiDiscrete`` space
    :param normalizer: ``VecNormalize`` that has normalised the observations, ``None`` if there is none. The mirror images are
        those of the observations before
    :param where: Name of the arguments in messages
    :raises ValueError: if they do not fit the spaces of the policy
    """

    def __init__(
        self,
        policy: ActorCriticPolicy,
        obs: object,
        action: object,
        normalizer: VecNormalize | None = None,
        where: str = "mirror",
    ):
        if isinstance(policy, HistoryPolicy) and not isinstance(policy, TransformerPolicyMixin):
            remedy = "its states are those of what it has seen, not of mirror images; give a policy with a transformer"
            refuse(where, dict(obs=obs, action=action), f"{type(policy).__name__} is recurrent: {remedy}")
        self.mask_key = getattr(policy, "action_mask_key", None)
        self.actions = MirroredActions(policy, f"{where}['action']", action)
        self.parts = _parts(policy, f"{where}['obs']", obs, normalizer)
        if self.mask_key is not None:
            space = policy.observation_space
            assert isinstance(space, spaces.Dict)
            self.parts[self.mask_key] = _flat(self.actions.of_mask, space[self.mask_key].shape or ())

    def of_observations(self, observations: object) -> Arrays:
        """
        :param observations: Observations as the policy takes them, a tensor, a dictionary or :class:`Sequences`
        :return: Their mirror images, in the same form
        """
        mirrored = map_observed(self._of_parts, observations)
        if isinstance(mirrored, Sequences) and mirrored.last_actions is not None:
            mirrored = mirrored._replace(last_actions=self.actions.of_features(mirrored.last_actions))
        return mirrored

    def _of_parts(self, observations: PyTorchObs) -> Arrays:
        if isinstance(observations, Mapping):
            return {key: self.parts[key](part) if key in self.parts else part for key, part in observations.items()}
        return self.parts[""](observations)


class MirroredActions:
    """
    Mirror images of actions, in the three forms that they take.

    :param policy: Policy
    :param where: Name of the argument in messages
    :param value: Mirror image of an action as plain data
    :raises ValueError: if it does not fit the action space
    """

    def __init__(self, policy: Any, where: str, value: Any):
        space, device = policy.action_space, policy.device
        reflection = parse_reflection(where, value)
        if is_hybrid(space):
            refuse(where, value, "the actions are a Dict or Tuple, which cannot be mirrored; leave the loss out")
        if isinstance(reflection, ReflectionMatrix):
            refuse(where, value, "actions are independent of each other in their distribution; give indices and signs")
        _check_actions(where, value, reflection, space)
        # Deterministic actions, see `distributions.location`
        self.of_location: MapOfTensors = reflection.on(device)
        # Last actions, as features of a policy with a memory
        self.of_features: MapOfTensors = self.of_location
        # Actions in the rollout buffer
        self.of_samples: MapOfTensors = self.of_location
        # Masks of invalid actions, one after the other
        self.of_mask: MapOfTensors = self.of_location
        if isinstance(space, spaces.Discrete):
            self.of_samples = _choices(reflection, [int(space.n)], device)
        elif isinstance(space, spaces.MultiDiscrete):
            self.of_samples = _choices(reflection, choices_of(space), device)
        elif isinstance(space, spaces.MultiBinary):
            self.of_samples = self.of_features = _from_zero_to_one(self.of_location)
            of_choices = _with_two_choices(reflection).on(device)
            self.of_mask = of_choices
            if getattr(policy, "action_mask_key", None) is not None:
                self.of_location = of_choices
        elif isinstance(policy.action_dist, BoundedDistribution) and policy.action_dist.latent_range == (0.0, 1.0):
            self.of_samples = _from_zero_to_one(self.of_location)


class MirroredLoss(ExtraLoss):
    """
    A loss with mirror images of the samples of a minibatch.

    :param coef: Coefficient
    :param mirror: Mirror images of observations and actions
    """

    keywords = ("obs", "action")
    remedy = "give a dictionary such as `dict(coef=0.5, obs=[0, [1, -1]], action=[[0, -1]])`"

    def __init__(self, coef: float, mirror: Mirror):
        super().__init__(coef)
        self.mirror = mirror

    @classmethod
    def check(cls, where: str, keywords: Mapping[str, object]) -> None:
        parse_reflection(f"{where}['action']", keywords["action"])
        # That of a dictionary can be checked only where the space is known.
        if not isinstance(keywords["obs"], Mapping) or keywords["obs"].keys() == {"matrix"}:
            parse_reflection(f"{where}['obs']", keywords["obs"])

    @classmethod
    def make(
        cls: type[SelfMirrored],
        where: str,
        coef: float,
        keywords: Kwargs,
        policy: ActorCriticPolicy,
        normalizer: VecNormalize | None,
    ) -> SelfMirrored:
        return cls(coef, Mirror(policy, keywords["obs"], keywords["action"], normalizer, where))


class MirrorLoss(MirroredLoss):
    """:func:`mirror_loss` of the policy, whose gradient goes through both actions."""

    def value(self, inputs: PolicyInputs, config: LossConfig) -> th.Tensor:
        mirrored = self.mirror.of_observations(inputs.view.observations)
        of_mirrored = location(inputs.view.get_distribution(mirrored))
        return mirror_loss(location(inputs.distribution), self.mirror.actions.of_location(of_mirrored))


class MirrorAugmentation(MirroredLoss):
    """
    The loss of PPO, with its value and entropy losses, for the mirror images of the samples.

    The mirror image of a step is a step of the mirrored policy, under which it has the probability that the original had under
    the policy that collected it, and the same advantage and return. The probability ratio is therefore ``pi(M a | M s) /
    pi_old(a | s)``, with the log probability in the rollout buffer.

    Paper: https://arxiv.org/abs/2403.04359, section III
    """

    def value(self, inputs: PolicyInputs, config: LossConfig) -> th.Tensor:
        data, view, weights = inputs.data, inputs.view, inputs.weights
        observations = self.mirror.of_observations(view.observations)
        values, log_prob, entropy = view.evaluate_actions(observations, self.mirror.actions.of_samples(inputs.actions))
        ratio = th.exp(log_prob - data.old_log_prob)
        loss = policy_loss(data.advantages, ratio, config, weights) + config.ent_coef * entropy_loss(entropy, log_prob)
        return loss + config.vf_coef * value_loss(values.flatten(), data.old_values, data.returns, config, weights)


# Observations


def _parts(policy: Any, where: str, value: object, normalizer: VecNormalize | None) -> dict[Any, MapOfTensors]:
    """Mirror image of each part of an observation that changes, by key; the key is empty if it is no dictionary."""
    space, mask_key = policy.observation_space, getattr(policy, "action_mask_key", None)
    if not isinstance(space, spaces.Dict):
        return {"": _part(policy, where, value, space, _statistics(normalizer, None))}
    keys = space.spaces.keys() - {mask_key}
    if keys == {OBSERVATION} and not (isinstance(value, Mapping) and OBSERVATION in value):
        value = {OBSERVATION: value}  # The mask of a method is added to an observation that is no dictionary.
    if not isinstance(value, Mapping) or value.keys() != keys:
        refuse(where, value, f"give a dictionary with {', '.join(map(repr, sorted(keys)))}, None for what stays as it is")
    return {
        key: _part(policy, f"{where}[{key!r}]", part, space[key], _statistics(normalizer, key))
        for key, part in value.items()
        if part is not None
    }


def _part(policy: Any, where: str, value: object, space: Any, statistics: Any) -> MapOfTensors:
    reflection = parse_reflection(where, value)
    if not isinstance(space, spaces.Box) or is_image_space(space):
        refuse(where, value, f"{space} is no vector of numbers; give observations that are, as a part of a Dict if need be")
    size = int(np.prod(space.shape))
    if reflection.size != size:
        refuse(where, value, f"it has {reflection.size} elements, and the observation {size}; give one for each")
    if statistics is None:
        return _flat(reflection.on(policy.device), space.shape)
    mean, std = statistics
    if mean.shape != space.shape:
        remedy = f"`VecNormalize` normalises observations of shape {mean.shape}, and the policy reads {space.shape}"
        refuse(where, value, f"{remedy}; let it be the outermost wrapper that changes observations")
    return _flat(reflection.on(policy.device, mean.flatten(), std.flatten()), space.shape)


def _statistics(normalizer: VecNormalize | None, key: str | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and standard deviation by which an observation, or a part of it, has been normalised."""
    if normalizer is None or not normalizer.norm_obs:
        return None
    running: Any = normalizer.obs_rms
    if isinstance(running, dict):
        if key not in running:
            return None
        running = running[key]
    return np.asarray(running.mean), np.sqrt(np.asarray(running.var) + normalizer.epsilon)


def _flat(function: MapOfTensors, shape: tuple[int, ...]) -> MapOfTensors:
    """The function for tensors of any leading dimensions, followed by this shape."""
    if len(shape) == 1:
        return function
    return lambda x: function(x.reshape(*x.shape[: x.ndim - len(shape)], -1)).reshape(x.shape)


# Actions


def _check_actions(where: str, value: object, reflection: SignedPermutation, space: object) -> None:
    if isinstance(space, spaces.Box):
        size, what = int(np.prod(space.shape)), "numbers"
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        size, what = sum(choices_of(space)), "choices"
    elif isinstance(space, spaces.MultiBinary):
        size, what = int(np.prod(space.shape)), "numbers"
    else:
        refuse(where, value, f"actions in {space} have no mirror images; leave the loss out")
    if reflection.size != size:
        refuse(where, value, f"it has {reflection.size} elements, and {space} has {size} {what}; give one for each")
    if what == "choices" and (reflection.signs != 1).any():
        refuse(where, value, "a choice has no sign; give only indices")
    if isinstance(space, spaces.MultiDiscrete):
        _check_blocks(where, value, reflection, choices_of(space))
    if isinstance(space, spaces.Box):
        _check_bounds(where, value, reflection, space)


def _check_blocks(where: str, value: object, reflection: SignedPermutation, choices: list[int]) -> None:
    owners = np.repeat(np.arange(len(choices)), choices)
    sources = [set(owners[part]) for part in np.split(reflection.indices, np.cumsum(choices)[:-1])]
    if any(len(source) > 1 for source in sources):
        refuse(where, value, f"the choices of one action must become those of one action; there are {choices} choices")


def _check_bounds(where: str, value: object, reflection: SignedPermutation, space: spaces.Box) -> None:
    low, high = (bound.flatten()[reflection.indices].astype(np.float64) for bound in (space.low, space.high))
    is_turned = reflection.signs < 0
    mirrored = np.where(is_turned, -high, low), np.where(is_turned, -low, high)
    if not all(np.allclose(*pair) for pair in zip(mirrored, (space.low.flatten(), space.high.flatten()), strict=True)):
        refuse(where, value, f"the mirror image of {space} has other bounds; scale the actions inside the environment")


def _choices(reflection: SignedPermutation, choices: list[int], device: th.device) -> MapOfTensors:
    """Mirror images of the indices of chosen actions, shape ``(batch_size,)`` or ``(batch_size, n_actions)``."""
    firsts = np.cumsum([0, *choices[:-1]])
    # Which action becomes which; the choices of each stay together.
    owners = np.repeat(np.arange(len(choices)), choices)[reflection.indices[firsts]]
    first, owner, table = (th.as_tensor(part, device=device) for part in (firsts, owners, reflection.indices))

    def mirrored(chosen: th.Tensor) -> th.Tensor:
        if chosen.ndim == 1:
            return table[chosen.long()].to(chosen.dtype)
        return (table[chosen.long() + first][:, owner] - first).to(chosen.dtype)

    return mirrored


def _from_zero_to_one(of_signed: MapOfTensors) -> MapOfTensors:
    """The same map for numbers from 0 to 1 as for numbers from -1 to 1."""
    return lambda x: (of_signed(2 * x - 1) + 1) / 2


def _with_two_choices(reflection: SignedPermutation) -> SignedPermutation:
    """The same reflection of bits for the two choices of each bit."""
    turned = reflection.signs < 0
    pairs = np.stack([2 * reflection.indices + turned, 2 * reflection.indices + ~turned], axis=1)
    return SignedPermutation(pairs.flatten(), np.ones(2 * reflection.size, np.int64))

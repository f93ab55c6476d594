"""The actor as one module: from observations as environments give them to actions as environments take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from sb3_ppo_ext.common.action_masks import ACTION_MASK, OBSERVATION
from sb3_ppo_ext.common.bounds import middle_and_half
from sb3_ppo_ext.common.hybrid_actions import FlatActionSpace, disassembled, kinds_of
from sb3_ppo_ext.common.user_code import replaced_method
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.distributions import family_of
from sb3_ppo_ext.distributions.masked import MaskedDistribution, masked_outputs
from sb3_ppo_ext.export.ports import ROLES, Port
from sb3_ppo_ext.memory.policies import TransformerPolicyMixin
from sb3_ppo_ext.memory.recurrence import step, without_memory
from sb3_ppo_ext.memory.recurrent_policies import RecurrentPolicyMixin
from sb3_ppo_ext.policies.actor_critic import unscaled
from sb3_ppo_ext.policies.observation_keys import ObservationKeysMixin

# Number that rewards are divided by, and their largest absolute value then
RewardScale: TypeAlias = tuple[float, float]
# Name of an observation that is no dictionary
PLAIN = OBSERVATION
# Methods of a policy in whose place the file computes, and further ones that decide on its samples
ACTING = ("predict", "_predict", "obs_to_tensor", "normalized", "unscale_action")
SAMPLING = ("get_distribution", "_get_action_dist_from_latent")


class Normalization(nn.Module):
    """
    ``VecNormalize`` of one part of the observations, in float32.

    :param mean: Mean, shape ``obs_shape``
    :param var: Variance, the same shape
    :param normalizer: ``VecNormalize`` with the other numbers
    """

    mean: th.Tensor
    std: th.Tensor

    def __init__(self, mean: np.ndarray, var: np.ndarray, normalizer: VecNormalize):
        super().__init__()
        self.clip = float(normalizer.clip_obs)
        self.register_buffer("mean", th.tensor(np.asarray(mean), dtype=th.float32))
        self.register_buffer("std", th.tensor(np.sqrt(np.asarray(var, np.float64) + normalizer.epsilon), dtype=th.float32))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """
        :param observations: Observations, shape ``(batch_size, *obs_shape)``
        :return: Normalised and clipped observations, the same shape
        """
        return ((observations.float() - self.mean) / self.std).clamp(-self.clip, self.clip)


class Actor(nn.Module):
    """
    The actor of a policy without memory.

    :param policy: Policy
    :param normalizer: ``VecNormalize`` with the statistics of the observations, ``None`` for none
    :param deterministic: Whether it acts deterministically; otherwise the random numbers of a sample are inputs
    :param transposed: Keys of images that the environment gives with the channels last, and the policy reads with the channels
        first
    :param reward_scale: What :func:`reward_scale_of` returns
    """

    low: th.Tensor
    high: th.Tensor

    def __init__(
        self,
        policy: Any,
        normalizer: VecNormalize | None,
        deterministic: bool,
        transposed: Iterable[str] = (),
        reward_scale: RewardScale | None = None,
    ):
        super().__init__()
        self.policy, self.is_deterministic, self.transposed = policy, deterministic, frozenset(transposed)
        self.reward_scale = reward_scale
        space = policy.observation_space
        parts = space.spaces if isinstance(space, spaces.Dict) else {PLAIN: space}
        # SB3's own policies read everything.
        self.mask_key: str | None = getattr(policy, "action_mask_key", None)
        has_keys = getattr(policy, "_read_by_actor", None) is not None
        read = (*policy._read_by_actor, *policy._not_read) if has_keys else parts
        self.parts = {key: parts[key] for key in read}
        self.is_plain = not isinstance(space, spaces.Dict)
        self.normalizations = nn.ModuleDict(_normalizations(self.parts, normalizer))
        n_latents = policy.mlp_extractor.latent_dim_pi
        family = family_of(policy.action_dist)
        if family is None:
            unknown = type(policy.action_dist).__name__
            refuse("policy", type(policy).__name__, f"its action distribution, {unknown}, cannot be exported")
        self.head = family.head(policy.action_dist, getattr(policy, "log_std", None), n_latents)
        low, high = _bounds(policy.action_space)
        self.register_buffer("low", th.as_tensor(low))
        self.register_buffer("high", th.as_tensor(high))

    # Ports

    def inputs(self) -> list[Port]:
        """:return: Inputs of :meth:`forward`, in its order"""
        return [*self._observation_ports(), *self._state_ports(), *self._more_inputs(), *self._noise_ports()]

    def outputs(self) -> list[Port]:
        """:return: Outputs of :meth:`forward`, in its order"""
        after = [Port(f"next_{port.name}", "state", port.shape, port.dtype, port.batch_dim) for port in self._state_ports()]
        return [*self.action_ports(), *after]

    def _observation_ports(self) -> list[Port]:
        ports = []
        for key, part in self.parts.items():
            shape = part.shape or ()
            if key in self.transposed:
                shape = (*shape[1:], shape[0])
            ports.append(Port(key, "observation", shape, _dtype_of(part)))
        return ports

    def action_ports(self) -> list[Port]:
        """:return: Outputs with the action, one for each part of a hybrid action space"""
        space = self.policy.action_space
        if not isinstance(space, FlatActionSpace):
            dtype = "float32" if isinstance(space, spaces.Box) else _dtype_of(space)
            return [replace(_action_port("action", space), dtype=dtype)]
        names = disassembled(space.structure, _names(space.structure, "action"))
        return [_action_port(*pair) for pair in zip(names, space.parts, strict=True)]

    def _noise_ports(self) -> list[Port]:
        noise = [] if self.is_deterministic else self.head.noise()
        return [Port(each.name, ROLES[each.kind], each.shape) for each in noise]

    def _state_ports(self) -> list[Port]:
        return []

    def _more_inputs(self) -> list[Port]:
        return []

    def normalization_of(self, key: str) -> nn.Module | None:
        """
        :param key: Key of a part of the observations
        :return: Its :class:`Normalization`, ``None`` if it has none
        """
        return self.normalizations[name] if (name := _module_name(key)) in self.normalizations else None

    # Acting

    def forward(self, *inputs: th.Tensor) -> tuple[th.Tensor, ...]:
        """
        :param inputs: Tensors for :meth:`inputs`
        :return: Tensors for :meth:`outputs`
        """
        rest = iter(inputs)
        observations = self._read(rest)
        latents, state = self._latents(observations, rest)
        outputs = self.policy.action_net(latents)
        if isinstance(self.policy.action_dist, MaskedDistribution):
            masks = observations[self.mask_key]
            outputs = masked_outputs(self.policy.action_dist, outputs, masks.flatten(start_dim=1) != 0)
        noise = list(rest)
        samples = self.head.deterministic(outputs) if self.is_deterministic else self.head.sample(outputs, latents, noise)
        actions = self._within_bounds(samples)
        return (*self._as_env_takes(actions), *self._after(state, actions))

    def _read(self, inputs: Iterator[th.Tensor]) -> Any:
        """Observations as the policy reads them."""
        parts = {key: self._normalized(key, next(inputs)) for key in self.parts}
        return parts[PLAIN] if self.is_plain else parts

    def _normalized(self, key: str, values: th.Tensor) -> th.Tensor:
        if key in self.transposed:
            values = values.permute(0, 3, 1, 2)
        normalize = self.normalization_of(key)
        return values if normalize is None else normalize(values)

    def _features(self, observations: PyTorchObs) -> th.Tensor:
        policy, extractor = self.policy, self.policy.pi_features_extractor
        if isinstance(policy, ObservationKeysMixin):
            return policy.features_of(observations, extractor)
        return BasePolicy.extract_features(policy, observations, extractor)

    def _latents(self, observations: PyTorchObs, inputs: Iterator[th.Tensor]) -> tuple[th.Tensor, Any]:
        """Inputs of the output layer, and the state after the step."""
        return self.policy.mlp_extractor.forward_actor(self._features(observations)), ()

    def _within_bounds(self, samples: th.Tensor) -> th.Tensor:
        """Actions within the bounds, as ``predict`` returns them, or vectors of hybrid ones."""
        space = self.policy.action_space
        if not isinstance(space, spaces.Box):
            return samples.reshape(-1, *(space.shape or ()))
        samples = samples.reshape(-1, *space.shape)
        if self.policy.squash_output:
            samples = unscaled(self.policy, samples, self.low, self.high)
        return th.minimum(th.maximum(samples, self.low), self.high)

    def _as_env_takes(self, actions: th.Tensor) -> list[th.Tensor]:
        space = self.policy.action_space
        if not isinstance(space, FlatActionSpace):
            # `predict` returns floats for integers in a `Box` as well.
            return [actions if isinstance(space, spaces.Box) else actions.to(_torch_dtype(space))]
        pairs = zip(space.parts, space.columns, strict=True)
        return [actions[:, columns].reshape(-1, *(part.shape or ())).to(_torch_dtype(part)) for part, columns in pairs]

    def _after(self, state: Any, actions: th.Tensor) -> list[th.Tensor]:
        """The state after the step, with the actions if they belong to it."""
        return list(state)


class RecurrentActor(Actor):
    """The actor of a recurrent policy: its state is that of the network."""

    def _state_ports(self) -> list[Port]:
        names = ("hidden_state", "cell_state")[: self.policy.n_states]
        shape = (self.policy.n_lstm_layers, self.policy.lstm_hidden_size)
        return [Port(name, "state", shape, batch_dim=1) for name in names]

    def _more_inputs(self) -> list[Port]:
        return [Port("episode_start", "episode_start", ())]

    def _latents(self, observations: PyTorchObs, inputs: Iterator[th.Tensor]) -> tuple[th.Tensor, Any]:
        state = tuple(next(inputs) for _ in self._state_ports())
        before = without_memory(state, next(inputs))
        latents, after = step(self.policy.lstm_actor, self._features(observations), before)
        return self.policy.mlp_extractor.forward_actor(latents), after


class TransformerActor(Actor):
    """
    The actor of a transformer policy: its state is what the transformer reads of the earlier steps, which of these belong to
    the episode, and the last action.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for number, (kind, _) in enumerate(kinds_of(self.policy.action_space)):
            if isinstance(kind, spaces.Box):
                middle, half = middle_and_half(kind)
                self.register_buffer(f"middle_{number}", th.as_tensor(middle, dtype=th.float32))
                self.register_buffer(f"half_{number}", th.as_tensor(half, dtype=th.float32))

    def _state_ports(self) -> list[Port]:
        policy, n_before = self.policy, self.policy.context_length - 1
        ports = [Port("history", "state", (n_before, policy.pi_transformer.features_dim)), Port("known", "state", (n_before,))]
        if policy.use_last_action:
            ports.append(Port("last_action", "state", (policy.n_action_features,)))
        return ports

    def _more_inputs(self) -> list[Port]:
        rewards = [Port("last_reward", "last_reward", ())] if self.policy.use_last_reward else []
        return [Port("episode_start", "episode_start", ()), *rewards]

    def _latents(self, observations: PyTorchObs, inputs: Iterator[th.Tensor]) -> tuple[th.Tensor, Any]:
        state = [next(inputs) for _ in self._state_ports()]
        goes_on = (1.0 - next(inputs)).unsqueeze(1)
        parts = [self._features(observations)]
        if self.policy.use_last_action:
            parts.append(state[2] * goes_on)
        if self.policy.use_last_reward:
            parts.append(self._read_rewards(next(inputs)).unsqueeze(1) * goes_on)
        history = th.cat([state[0], th.cat(parts, dim=1).unsqueeze(1)], dim=1)
        known = th.cat([state[1] * goes_on, th.ones_like(goes_on)], dim=1)
        features = self.policy.pi_transformer(history, known.long()).flatten(0, 1)
        return self.policy.mlp_extractor.forward_actor(features), [history[:, 1:], known[:, 1:]]

    def _read_rewards(self, rewards: th.Tensor) -> th.Tensor:
        if self.reward_scale is None:
            return rewards
        std, clip = self.reward_scale
        return (rewards / std).clamp(-clip, clip)

    def _after(self, state: Any, actions: th.Tensor) -> list[th.Tensor]:
        return [*state, self._encoded(actions)] if self.policy.use_last_action else list(state)

    def _encoded(self, actions: th.Tensor) -> th.Tensor:
        """Actions as the policy reads them, see ``TransformerPolicyMixin.encode_actions``."""
        parts = []
        for number, (kind, columns) in enumerate(kinds_of(self.policy.action_space)):
            encoded: Any = preprocess_obs(actions[columns], kind, normalize_images=False)
            flat = encoded.reshape(actions.shape[0], -1).float()
            if isinstance(kind, spaces.Box):
                flat = (flat - getattr(self, f"middle_{number}")) / getattr(self, f"half_{number}")
            parts.append(flat)
        return th.cat(parts, dim=1)


def make_actor(
    policy: nn.Module,
    normalizer: VecNormalize | None,
    deterministic: bool,
    transposed: Iterable[str] = (),
    reward_scale: RewardScale | None = None,
) -> Actor:
    """
    :param policy: Policy of this package
    :param normalizer: ``VecNormalize`` with the statistics of the observations, ``None`` for none
    :param deterministic: Whether it acts deterministically
    :param transposed: Keys of images that the environment gives with the channels last
    :param reward_scale: What :func:`reward_scale_of` returns
    :return: Module with the parameters of the policy
    :raises ValueError: if the policy computes actions in a way of its own
    """
    methods = ACTING if deterministic else (*ACTING, *SAMPLING)
    if (name := replaced_method(methods, policy)) is not None:
        remedy = f"its actions are computed by `{name}`, which the file would not have; export a policy without it"
        refuse("policy", type(policy).__name__, remedy)
    kind: type[Actor] = Actor
    if isinstance(policy, TransformerPolicyMixin):
        kind = TransformerActor
    elif isinstance(policy, RecurrentPolicyMixin):
        kind = RecurrentActor
    actor = kind(policy, normalizer, deterministic, transposed, reward_scale)
    names = [port.name for port in (*actor.inputs(), *actor.outputs())]
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        refuse(
            "policy", type(policy).__name__, f"its observations have the key {double!r}, the name of another input or output"
        )
    return actor


def _action_port(name: str, space: spaces.Space) -> Port:
    bounds = (space.low, space.high) if isinstance(space, spaces.Box) else None
    return Port(name, "action", space.shape or (), _dtype_of(space), bounds=bounds)


def _normalizations(parts: dict[str, Any], normalizer: Any) -> dict[str, nn.Module]:
    if normalizer is None or not normalizer.norm_obs:
        return {}
    if not isinstance(normalizer.obs_rms, dict):
        # Masks that the model adds to the observations are not normalised.
        keys = [key for key in parts if key != ACTION_MASK]
        return {_module_name(key): Normalization(normalizer.obs_rms.mean, normalizer.obs_rms.var, normalizer) for key in keys}
    found = {key: each for key, each in normalizer.obs_rms.items() if key in parts}
    return {_module_name(key): Normalization(each.mean, each.var, normalizer) for key, each in found.items()}


def reward_scale_of(normalizer: Any) -> RewardScale | None:
    """
    :param normalizer: ``VecNormalize`` or a :class:`~sb3_ppo_ext.envs.normalizer.Normalizer`, ``None`` for none
    :return: How rewards are normalised, ``None`` if they are not
    """
    if normalizer is None or not normalizer.norm_reward:
        return None
    return float(np.sqrt(np.asarray(normalizer.ret_rms.var) + normalizer.epsilon)), float(normalizer.clip_reward)


def _module_name(key: str) -> str:
    """A ``ModuleDict`` has no dots in its keys, nor names of its own methods."""
    return "of_" + key.replace(".", "_")


def _bounds(space: spaces.Space) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(space, spaces.Box):
        return space.low.astype(np.float32), space.high.astype(np.float32)
    return np.zeros(1, np.float32), np.zeros(1, np.float32)


def _dtype_of(space: spaces.Space) -> str:
    dtype = np.dtype(space.dtype)
    return "float32" if dtype == np.float64 else dtype.name


def _torch_dtype(space: spaces.Space) -> th.dtype:
    dtype: th.dtype = getattr(th, _dtype_of(space))
    return dtype


def _names(space: spaces.Space, path: str) -> object:
    """Names of the parts of a hybrid action space, in its structure: ``"action.gripper"``, ``"action.0"``."""
    if isinstance(space, spaces.Dict):
        return {key: _names(part, f"{path}.{key}") for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_names(part, f"{path}.{number}") for number, part in enumerate(space.spaces))
    return path

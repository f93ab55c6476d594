"""SB3's MLP policy on the extension module, with the same parameters in the same memory, without calls of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, MlpExtractor
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.user_code import has_method_of, hidden_methods, replaced_method
from sb3_ppo_ext.distributions import numpy_distribution, why_not_numpy
from sb3_ppo_ext.distributions.masked import INVALID
from sb3_ppo_ext.engines.engine import has_gradient_hooks
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.native.inputs import Inputs
from sb3_ppo_ext.engines.native.layers import Forward, layers_in, read, trained
from sb3_ppo_ext.engines.native.layers import unsupported_reason as layers_reason
from sb3_ppo_ext.policies.actor_critic import ActionDistributionMixin, ScaledTanh
from sb3_ppo_ext.policies.observation_keys import ObservationKeysMixin
from sb3_ppo_ext.policies.value_normalization import NormalizedValue

# Number of samples whose activations stay in the caches between `forward` and `backward`
BLOCK = 2048
# Methods that the extension module replaces: a policy that overrides one of them is computed by PyTorch.
METHODS = {
    "forward",
    "evaluate_actions",
    "predict_values",
    "get_distribution",
    "extract_features",
    "_get_action_dist_from_latent",
    "obs_to_tensor",
}
# The same of those that SB3's policies do not have
OWN_METHODS = ("evaluate_samples", "normalized")
# The same of modules and action distributions
PART_METHODS: tuple[str, ...] = ("forward", "forward_actor", "forward_critic", "_call_impl")
PART_METHODS += ("proba_distribution", "sample", "mode", "get_actions", "log_prob", "entropy")
PART_METHODS += ("actions_from_params", "log_prob_from_params", "sample_weights")
_version_of = attrgetter("_version")


class Perceptron(Forward):
    """
    The actor or critic network of a policy, in the memory of its parameters.

    :param hidden: Hidden layers
    :param last: Output layer
    :param with_latents: Whether to return the inputs of the output layer as well
    :param columns: Features that the network reads, ``None`` for all
    """

    def __init__(self, hidden: nn.Sequential, last: nn.Linear, with_latents: bool = False, columns: slice | None = None):
        layers = [*layers_in(hidden), last]
        self.trained = trained(layers)
        self.gradients = [tuple(np.zeros(p.shape, np.float32) for p in (layer.weight, layer.bias)) for layer in self.trained]
        n_latents = last.in_features if with_latents else 0
        super().__init__([read(layer) for layer in layers], self.gradients, last.out_features, n_latents, columns)
        # Mean and standard deviation by which values are normalised, in the memory of their tensors; `None` for neither
        self.statistics: tuple[np.ndarray, np.ndarray] | None = None
        if isinstance(last, NormalizedValue):
            self.statistics = last.mean.numpy(), last.std.numpy()
            self.is_completed = True
        self.pack()

    def pack(self) -> None:
        """Load the values of the parameters and statistics."""
        self.network.pack()
        self.packed_statistics = self.statistics and (self.statistics[0].copy(), self.statistics[1].copy())

    def parameters(self) -> Iterator[tuple[nn.Parameter, np.ndarray]]:
        """:return: Pairs of each parameter and its gradient"""
        for layer, gradients in zip(self.trained, self.gradients, strict=True):
            yield from zip((layer.weight, layer.bias), gradients, strict=True)

    def empty(self, features: np.ndarray) -> np.ndarray:
        """
        :param features: Features of the observations, shape ``(n, n_features)``
        :return: Array for the outputs, shape ``(n, n_outputs)``
        """
        return np.empty((len(features), self.n_outputs), np.float32)

    def complete(self, outputs: np.ndarray) -> np.ndarray:
        """
        :param outputs: Outputs of the last forward pass, shape ``(n, n_outputs)``
        :return: Outputs, of a critic in the units of the return, with the latents if these are needed
        """
        if self.packed_statistics is not None:
            mean, std = self.packed_statistics
            outputs = outputs * std + mean
        return super().complete(outputs)


class NativePolicy:
    """
    Evaluates and differentiates a policy for which :func:`unsupported_reason` returns ``None``.

    :param policy: Policy, with which the memory of the parameters is shared
    """

    def __init__(self, policy: ActorCriticPolicy):
        self.policy = policy
        last, transform = _split(policy.action_net)
        self._action_dist = policy.action_dist
        self.distribution = numpy_distribution(policy.action_dist, getattr(policy, "log_std", None), transform)
        # Networks that read different parts of the observations read different columns of the features.
        self.is_asymmetric = isinstance(policy, ObservationKeysMixin) and policy.is_asymmetric
        n = policy.pi_features_extractor.features_dim
        of_actor, of_critic = (slice(n), slice(n, None)) if self.is_asymmetric else (None, None)
        self.actor = Perceptron(policy.mlp_extractor.policy_net, last, self.distribution.needs_latents, of_actor)
        self.critic = Perceptron(policy.mlp_extractor.value_net, policy.value_net, columns=of_critic)
        self.networks = (self.actor, self.critic)
        # Threads that compute both networks; `None` for the thread of the caller alone
        self.threads: Any = None
        self.n_threads = 1
        self.mask_key: str | None = getattr(policy, "action_mask_key", None)
        # What each network reads of the observations; the critic what the actor does, unless they are asymmetric
        self.inputs = [Inputs(policy.observation_space, keys, policy.normalize_images) for keys in self._keys_read()]
        modules = list(policy.modules())
        # Each module with its children and its numbers of parameters and attributes, among which a method may be replaced, and
        # each parameter with its owner and its address
        self._modules = [(m, tuple(m._modules.values()), len(m._parameters), len(m.__dict__)) for m in modules]
        self._owners: list[tuple[Any, str, Any]] = [
            (m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None
        ]
        if isinstance(layer := policy.value_net, NormalizedValue):
            self._owners += [(layer._buffers, name, layer._buffers[name]) for name in ("mean", "std")]
        self._addresses = [tensor.data_ptr() for _, _, tensor in self._owners]
        self._tensors, self._version = [tensor for _, _, tensor in self._owners], -1

    def is_of(self, policy: ActorCriticPolicy) -> bool:
        """
        :param policy: Current policy of the model
        :return: Whether this object computes what this policy does, with the memory of its parameters
        """
        same_distribution = policy.action_dist is self._action_dist
        return policy is self.policy and same_distribution and self._has_same_modules() and self._has_same_memory()

    def _has_same_modules(self) -> bool:
        own = vars(self.policy)
        is_unchanged = not any(name in own for name in (*METHODS, *OWN_METHODS))
        is_unchanged = is_unchanged and not hidden_methods(self._action_dist, PART_METHODS)
        return is_unchanged and all(
            tuple(module._modules.values()) == children
            and len(module._parameters) == n_parameters
            and len(module.__dict__) == n_attributes
            and not module._forward_hooks
            and not module._forward_pre_hooks
            for module, children, n_parameters, n_attributes in self._modules
        )

    def _has_same_memory(self) -> bool:
        return all(
            owner.get(name) is parameter and parameter.data_ptr() == address
            for (owner, name, parameter), address in zip(self._owners, self._addresses, strict=True)
        )

    def parameters(self) -> Iterator[tuple[nn.Parameter, np.ndarray]]:
        """:return: Pairs of each trainable parameter and its gradient"""
        for network in self.networks:
            yield from network.parameters()
        if self.distribution.log_std is not None and self.distribution.log_std.requires_grad:
            yield self.distribution.log_std, self.distribution.d_log_std

    def use_threads(self, n: int) -> None:
        """
        :param n: Number of threads that compute :meth:`evaluate` and :meth:`backward`. Results are equal bit for bit
        """
        if n != self.n_threads:
            self.threads = None if n == 1 else extension.module.Threads(n)
            self.n_threads = n

    def _keys_read(self) -> list[Sequence[str] | None]:
        """Keys of the observations that actor and critic read, ``None`` if observations are no dictionaries."""
        space, policy = self.policy.observation_space, self.policy
        if not isinstance(space, spaces.Dict):
            return [None]
        of_actor, of_critic = (getattr(policy, name, None) for name in ("_read_by_actor", "_read_by_critic"))
        if of_actor is None:
            return [list(space.spaces)]
        return [of_actor, of_critic] if self.is_asymmetric else [of_actor]

    def evaluate(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """
        :param features: Features of the observations, float32 of shape ``(n, n_features)``
        :return: Outputs of the actor, see :meth:`Perceptron.__call__`, and values, shape ``(n,)``
        """
        if self.threads is None:
            return self.actor(features), self.critic(features).ravel()
        outputs, values = self.actor.empty(features), self.critic.empty(features)
        actor, critic = self.actor, self.critic
        self.threads.forward([(actor.network, actor.read(features), outputs), (critic.network, critic.read(features), values)])
        return self.actor.complete(outputs), self.critic.complete(values).ravel()

    def values_and_log_probs(self, observations: Arrays, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """
        :param observations: Batch of observations, as stored in the buffer
        :param actions: Samples of the policy, shape ``(n, ...)``
        :return: Values and log probabilities, float32 of shape ``(n,)``
        """
        features, invalid = self.features(observations), self.invalid(observations)
        actions = actions.reshape(len(features), -1).astype(np.float32, copy=False)
        values, log_probs = np.empty((2, len(features)), np.float32)
        for rows in blocks(0, len(features)):
            outputs, values[rows] = self.evaluate(features[rows])
            mask(outputs, None if invalid is None else invalid[rows])
            log_probs[rows] = self.distribution.log_prob(outputs, actions[rows])
        return values, log_probs

    def backward(self, d_outputs: np.ndarray, d_values: np.ndarray, accumulate: bool) -> None:
        """
        Write the gradients of the parameters of both networks, for the samples of the last :meth:`evaluate`.

        :param d_outputs: Gradients of the outputs of the actor, without latents, shape ``(n, n_outputs)``
        :param d_values: Gradients of the values, shape ``(n,)``
        :param accumulate: Whether to add to the gradients that are there
        """
        if (statistics := self.critic.statistics) is not None:
            d_values = d_values * statistics[1]
        pairs = [(self.actor.network, d_outputs), (self.critic.network, d_values[:, None])]
        if self.threads is not None:
            self.threads.backward(pairs, accumulate)
            return
        for network, gradient in pairs:
            network.backward(gradient, accumulate)

    def pack(self) -> None:
        """Load the values of the parameters. To be called after they have changed."""
        for network in self.networks:
            network.pack()
        self.distribution.pack()

    def watch(self) -> Any:
        """:return: Object whose ``has_changed`` compares all values of the parameters, which NumPy may have written"""
        return extension.module.Watch([tensor.detach().numpy() for tensor in self._tensors])

    def has_changed(self) -> bool:
        """:return: Whether PyTorch has modified a parameter in place since the last call"""
        before, self._version = self._version, sum(map(_version_of, self._tensors))
        return before != self._version

    def inputs_in(self, rows: np.ndarray) -> np.ndarray | None:
        """
        :param rows: Observations of a rollout in the buffer, shape ``(n_steps, n_envs, *obs_shape)``
        :return: The same memory, as :meth:`features` of each step; ``None`` if they are not what the networks read
        """
        is_array = self.inputs[0].keys is None and self.inputs[0].are_numbers
        is_read = is_array and rows.dtype == np.float32 and rows.flags.c_contiguous
        return rows.reshape(*rows.shape[:2], -1) if is_read else None

    def features(self, observations: Arrays) -> np.ndarray:
        """
        :param observations: Batch of observations, as returned by the environments or stored in the buffer
        :return: Features, float32 of shape ``(n, n_features)``
        """
        features = [read(observations) for read in self.inputs]
        return features[0] if len(features) == 1 else np.concatenate(features, axis=1)

    def invalid(self, observations: Arrays) -> np.ndarray | None:
        """
        :param observations: Batch of observations, as returned by the environments or stored in the buffer
        :return: Whether each action is invalid, shape ``(n, n_outputs)``; ``None`` without masks
        """
        return invalid_choices(observations, self.mask_key, self.actor.n_outputs)


def invalid_choices(observations: Arrays, key: str | None, n_choices: int) -> np.ndarray | None:
    """
    :param observations: Batch of observations
    :param key: Key of the masks in them, ``None`` for none
    :param n_choices: Number of choices of all actions
    :return: Whether each choice is invalid, shape ``(n, n_choices)``; ``None`` without masks
    """
    if key is None:
        return None
    masks: np.ndarray = observations[key]
    is_invalid: np.ndarray = np.logical_not(masks.reshape(-1, n_choices))
    return is_invalid


def mask(outputs: np.ndarray, invalid: np.ndarray | None) -> np.ndarray:
    """
    :param outputs: Outputs of the actor, modified in place, shape ``(n, n_outputs)``
    :param invalid: Whether each action is invalid, of the same shape; ``None`` without masks
    :return: Outputs that give invalid actions the probability 0
    """
    if invalid is not None:
        np.copyto(outputs, np.float32(INVALID), where=invalid)
    return outputs


def blocks(start: int, stop: int) -> Iterator[slice]:
    """
    :param start: First sample
    :param stop: Sample after the last one
    :return: Consecutive slices of so few samples that their activations stay in the caches
    """
    for first in range(start, stop, BLOCK):
        yield slice(first, min(first + BLOCK, stop))


def unsupported_reason(policy: ActorCriticPolicy) -> str | None:
    """
    :param policy: Policy of a model
    :return: Reason why :class:`NativePolicy` does not support the policy, ``None`` if it does
    """
    if (reason := extension.unsupported_reason(policy)) is not None:
        return reason
    known = (ActorCriticPolicy, ActionDistributionMixin)
    is_known = isinstance(policy, ActorCriticPolicy) and all(has_method_of(policy, name, *known) for name in METHODS)
    if not is_known or replaced_method(OWN_METHODS, policy) is not None:
        return f"{type(policy).__name__} computes in its own way, and this backend computes only SB3's policies"
    if (reason := why_not_numpy(policy.action_dist)) is not None:
        return reason
    space = policy.action_space
    if isinstance(space, spaces.Box) and space.dtype not in (np.float32, np.float64):
        return f"the buffer rounds actions to {space.dtype}, and this backend computes log probabilities from the buffer"
    for extractor in {policy.pi_features_extractor, policy.vf_features_extractor}:
        if not _only_flattens(extractor):
            return f"{type(extractor).__name__} may do more than flatten the observations, which is all that this backend can"
    return _networks_reason(policy)


def _split(action_net: nn.Module) -> tuple[Any, nn.Module | None]:
    """The linear output layer of the actor, and the module that bounds its outputs, if there is one."""
    if isinstance(action_net, nn.Sequential) and len(action_net) == 2 and type(action_net[1]) is ScaledTanh:
        return action_net[0], action_net[1]
    return action_net, None


def _only_flattens(extractor: nn.Module) -> bool:
    if type(extractor) is CombinedExtractor:
        return all(type(part) is nn.Flatten for part in extractor.extractors.values())
    return type(extractor) is FlattenExtractor


def _networks_reason(policy: ActorCriticPolicy) -> str | None:
    nets = policy.mlp_extractor
    if type(nets) is not MlpExtractor:
        return f"the hidden layers are in a {type(nets).__name__}, and this backend reads only SB3's `MlpExtractor`"
    last, _ = _split(policy.action_net)
    networks = [[*layers_in(nets.policy_net), last], [*layers_in(nets.value_net), policy.value_net]]
    for network in networks:
        if (reason := layers_reason(network)) is not None:
            return reason
    # PyTorch takes long to list them.
    modules, parameters = list(policy.modules()), list(policy.parameters())
    own = [p for network in networks for layer in trained(network) for p in (layer.weight, layer.bias)]
    if not {*own, getattr(policy, "log_std", None)} >= set(parameters):
        return "the policy has additional parameters of its own, which this backend would not train"
    if len(set(own)) < len(own):
        return "layers of the policy share parameters, which this backend would train as if each layer had its own"
    if any(p.dtype != th.float32 or not p.is_contiguous() for p in parameters):
        return "the policy has parameters that are not contiguous float32, the only ones that this backend supports"
    if _has_any_global_hook() or any(map(_has_hooks, modules)) or any(map(has_gradient_hooks, parameters)):
        return "the policy has hooks, which this backend would not call"
    parts = (module for module in modules if module is not policy)
    if (name := replaced_method(PART_METHODS, *parts, policy.action_dist)) is not None:
        return f"`{name}` of the policy was replaced, and this backend would not call it"
    return None


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks))

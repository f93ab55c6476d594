"""Kinds of hidden layers for actor and critic (``net_type``), in SB3's ``MlpExtractor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import MlpExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import nn

from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import check_choice, refuse
from sb3_ppo_ext.policies.normalized_observations import NormalizedObservationsMixin

NetType = Literal["mlp", "layer_norm", "simba"]
# Width of the hidden layer of a residual block, as a multiple of its input
EXPANSION = 4


class ResidualBlock(nn.Module):
    """
    ``x + W2 f(W1 LayerNorm(x) + b1) + b2``, with a hidden layer of four times the size.

    :param size: Size of the input and of the output
    :param activation_fn: Class of the activation function f
    """

    def __init__(self, size: int, activation_fn: type[nn.Module]):
        super().__init__()
        hidden = EXPANSION * size
        self.layers = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, hidden), activation_fn(), nn.Linear(hidden, size))

    def forward(self, inputs: th.Tensor) -> th.Tensor:
        """
        :param inputs: Inputs, shape ``(batch_size, size)``
        :return: Outputs, the same shape
        """
        outputs: th.Tensor = inputs + self.layers(inputs)
        return outputs


def normalized_layers(n_inputs: int, sizes: list[int], activation_fn: type[nn.Module]) -> nn.Sequential:
    """
    Linear layers, each followed by a LayerNorm (https://arxiv.org/abs/1607.06450) and the activation function.

    :param n_inputs: Number of inputs
    :param sizes: Sizes of the hidden layers
    :param activation_fn: Class of the activation function
    :return: Network
    """
    parts: list[nn.Module] = []
    for n_in, n_out in zip([n_inputs, *sizes], sizes, strict=False):
        parts += [nn.Linear(n_in, n_out), nn.LayerNorm(n_out), activation_fn()]
    return nn.Sequential(*parts)


def residual_layers(n_inputs: int, sizes: list[int], activation_fn: type[nn.Module]) -> nn.Sequential:
    """
    A linear layer, residual blocks and a LayerNorm, as in SimBa (https://arxiv.org/abs/2410.09754).

    :param n_inputs: Number of inputs
    :param sizes: Size of each residual block, all equal
    :param activation_fn: Class of the activation function
    :return: Network
    """
    if not sizes:
        return nn.Sequential()
    blocks = [ResidualBlock(size, activation_fn) for size in sizes]
    return nn.Sequential(nn.Linear(n_inputs, sizes[0]), *blocks, nn.LayerNorm(sizes[0]))


NETWORKS: dict[str, Callable[[int, list[int], type[nn.Module]], nn.Sequential]] = {
    "layer_norm": normalized_layers,
    "simba": residual_layers,
}


class NetTypeMixin(NormalizedObservationsMixin):
    """
    Mixin that gives an actor-critic policy of SB3 the choice between kinds of networks behind the features extractors.

    :param observation_space: Observation space
    :param action_space: Action space
    :param lr_schedule: Learning rate schedule
    :param args: Further positional arguments of SB3's policy
    :param net_type: ``"mlp"`` for SB3's networks, ``"layer_norm"`` for a LayerNorm before each activation function,
        ``"simba"`` for residual blocks with LayerNorm. For ``"simba"``, ``net_arch`` has the size of each block, all equal
        (``dict(pi=[64], vf=[128])`` by default), and ReLU is the default of ``activation_fn``
    :param kwargs: Keyword arguments of SB3's policy
    :raises ValueError: if there is no such kind, or the sizes of the blocks are not equal
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *args: Any,
        net_type: NetType = "mlp",
        **kwargs: Any,
    ):
        check_choice("net_type", net_type, get_args(NetType))
        self.net_type = net_type
        if net_type == "simba" and args:
            args = (blocks_of(args[0]), *args[1:])
        elif net_type == "simba":
            kwargs["net_arch"] = blocks_of(kwargs.get("net_arch"))
        if net_type == "simba" and len(args) < 2:
            kwargs.setdefault("activation_fn", nn.ReLU)
        super().__init__(observation_space, action_space, lr_schedule, *args, **kwargs)

    def _build_mlp_extractor(self) -> None:
        if self.net_type == "mlp":
            super()._build_mlp_extractor()
        else:
            self.mlp_extractor = self.make_networks(self.features_dim, self.features_dim)

    def make_networks(self, for_actor: int, for_critic: int) -> MlpExtractor:
        """
        :param for_actor: Number of inputs of the actor's network
        :param for_critic: Number of inputs of the critic's network
        :return: Both networks, those of SB3 with random numbers in its order
        """
        if self.net_type == "mlp" and for_actor == for_critic:
            return MlpExtractor(for_actor, self.net_arch, self.activation_fn, self.device)
        networks = MlpExtractor(for_actor, [], self.activation_fn, self.device)
        networks.policy_net, networks.latent_dim_pi = self._hidden_layers(for_actor, layers_of(self.net_arch, "pi"))
        networks.value_net, networks.latent_dim_vf = self._hidden_layers(for_critic, layers_of(self.net_arch, "vf"))
        return networks

    def _hidden_layers(self, n_inputs: int, sizes: list[int]) -> tuple[nn.Sequential, int]:
        """A network and the number of its outputs."""
        if self.net_type == "mlp":
            networks = MlpExtractor(n_inputs, {"pi": sizes}, self.activation_fn, self.device)
            return networks.policy_net, networks.latent_dim_pi
        network = NETWORKS[self.net_type](n_inputs, sizes, self.activation_fn)
        return network.to(self.device), [n_inputs, *sizes][-1]

    def _get_constructor_parameters(self) -> Kwargs:
        given = {} if self.net_type == "mlp" else {"net_type": self.net_type}
        return {**super()._get_constructor_parameters(), **given}


def layers_of(net_arch: Any, name: str) -> list[int]:
    """
    :param net_arch: Value of ``net_arch``
    :param name: ``"pi"`` or ``"vf"``
    :return: Sizes of the hidden layers of this network
    """
    layers: list[int] = net_arch.get(name, []) if isinstance(net_arch, dict) else net_arch
    return layers


def blocks_of(net_arch: Any) -> dict[str, list[int]]:
    """
    :param net_arch: Value of ``net_arch``, ``None`` for the default: the sizes of the blocks, one number for each, all equal,
        or a dictionary of such lists for actor (``pi``) and critic (``vf``)
    :return: Sizes of both
    :raises ValueError: if the sizes are not equal
    """
    if net_arch is None:
        return {"pi": [64], "vf": [128]}  # a critic gains more from width than an actor
    if isinstance(net_arch, list | tuple) and len(net_arch) == 1 and isinstance(net_arch[0], Mapping):
        net_arch = net_arch[0]  # the form before SB3 1.8, which it still takes
    given = dict(net_arch) if isinstance(net_arch, Mapping) else {"pi": net_arch, "vf": net_arch}
    sizes = {key: [int(size) for size in given.get(key, ())] for key in ("pi", "vf")}
    for each in sizes.values():
        if len(set(each)) > 1:
            remedy = (
                'with `net_type="simba"`, give the size of each residual block, all equal, such as dict(pi=[64], vf=[128])'
            )
            refuse("net_arch", net_arch, remedy)
    return sizes

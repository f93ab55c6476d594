"""Networks of residual blocks for actor and critic (``net_type="simba"``), in the place of SB3's ``MlpExtractor``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import MlpExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import nn

from sb3_ppo_ext.common.validation import check_choice, refuse
from sb3_ppo_ext.policies.saved_policies import SavedPolicy

NetType = Literal["mlp", "simba"]
# Sizes for actor and critic, if `net_arch` is not given: a critic gains more from width than an actor.
NET_ARCH = {"pi": [64], "vf": [128]}
# Width of the hidden layer of a block, as a multiple of its input
EXPANSION = 4


class ResidualBlock(nn.Module):
    """
    ``x + W2 f(W1 LayerNorm(x) + b1) + b2``

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


class ResidualExtractor(nn.Module):
    """
    Networks of the actor and of the critic: a linear layer, residual blocks, and a LayerNorm, as in SimBa.

    Paper: https://arxiv.org/abs/2410.09754

    :param for_actor: Number of inputs of the actor's network
    :param for_critic: Number of inputs of the critic's network
    :param net_arch: Sizes of the blocks of each, see :func:`check_blocks`
    :param activation_fn: Class of the activation function
    """

    def __init__(self, for_actor: int, for_critic: int, net_arch: Mapping[str, list[int]], activation_fn: type[nn.Module]):
        super().__init__()
        self.policy_net = _network(for_actor, net_arch["pi"], activation_fn)
        self.value_net = _network(for_critic, net_arch["vf"], activation_fn)
        self.latent_dim_pi, self.latent_dim_vf = (*net_arch["pi"], for_actor)[0], (*net_arch["vf"], for_critic)[0]

    def forward(self, features: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        :param features: Features, shape ``(batch_size, features_dim)``
        :return: Inputs of the output layers of actor and critic
        """
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: th.Tensor) -> th.Tensor:
        """
        :param features: Features for the actor, shape ``(batch_size, features_dim)``
        :return: Inputs of its output layer, shape ``(batch_size, latent_dim_pi)``
        """
        latents: th.Tensor = self.policy_net(features)
        return latents

    def forward_critic(self, features: th.Tensor) -> th.Tensor:
        """
        :param features: Features for the critic, shape ``(batch_size, features_dim)``
        :return: Inputs of its output layer, shape ``(batch_size, latent_dim_vf)``
        """
        latents: th.Tensor = self.value_net(features)
        return latents


class NetTypeMixin(SavedPolicy):
    """
    Mixin that gives an actor-critic policy of SB3 the choice between kinds of networks behind the features extractors.

    :param observation_space: Observation space
    :param action_space: Action space
    :param lr_schedule: Learning rate schedule
    :param args: Further positional arguments of SB3's policy
    :param net_type: ``"mlp"`` for SB3's networks, ``"simba"`` for residual blocks with LayerNorm. ``net_arch`` then has the size
        of each block, all equal (``dict(pi=[64], vf=[128])`` by default), and ReLU is the default of ``activation_fn``
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
        if net_type == "simba":
            kwargs["net_arch"] = blocks_of(kwargs.get("net_arch"))
            kwargs.setdefault("activation_fn", nn.ReLU)
        super().__init__(observation_space, action_space, lr_schedule, *args, **kwargs)

    def _build_mlp_extractor(self) -> None:
        if self.net_type == "mlp":
            super()._build_mlp_extractor()
        else:
            self.mlp_extractor = self.make_networks(self.features_dim, self.features_dim)

    def make_networks(self, for_actor: int, for_critic: int) -> Any:
        """
        :param for_actor: Number of inputs of the actor's network
        :param for_critic: Number of inputs of the critic's network
        :return: Both networks, those of SB3 with random numbers in its order
        """
        if self.net_type == "simba":
            arch: Any = self.net_arch
            return ResidualExtractor(for_actor, for_critic, arch, self.activation_fn).to(self.device)
        make = partial(MlpExtractor, activation_fn=self.activation_fn, device=self.device)
        if for_actor == for_critic:
            return make(for_actor, net_arch=self.net_arch)
        networks = make(for_actor, net_arch={"pi": layers_of(self.net_arch, "pi")})
        of_critic = make(for_critic, net_arch={"vf": layers_of(self.net_arch, "vf")})
        networks.value_net, networks.latent_dim_vf = of_critic.value_net, of_critic.latent_dim_vf
        return networks

    def _get_constructor_parameters(self) -> dict[str, Any]:
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


def _network(n_inputs: int, sizes: list[int], activation_fn: type[nn.Module]) -> nn.Sequential:
    if not sizes:
        return nn.Sequential()
    blocks = [ResidualBlock(size, activation_fn) for size in sizes]
    return nn.Sequential(nn.Linear(n_inputs, sizes[0]), *blocks, nn.LayerNorm(sizes[0]))


def blocks_of(net_arch: Any) -> dict[str, list[int]]:
    """
    :param net_arch: Value of ``net_arch``, ``None`` for the default: the sizes of the blocks, one number for each, all equal, or
        a dictionary of such lists for actor (``pi``) and critic (``vf``)
    :return: Sizes of both
    :raises ValueError: if the sizes are not equal
    """
    if net_arch is None:
        return NET_ARCH
    given = dict(net_arch) if isinstance(net_arch, Mapping) else {"pi": net_arch, "vf": net_arch}
    sizes = {key: [int(size) for size in given.get(key, ())] for key in ("pi", "vf")}
    for each in sizes.values():
        if len(set(each)) > 1:
            remedy = (
                'with `net_type="simba"`, give the size of each residual block, all equal, such as dict(pi=[64], vf=[128])'
            )
            refuse("net_arch", net_arch, remedy)
    return sizes

"""The layers of a network of PyTorch, as the extension module reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch as th
from torch import nn

from sb3_ppo_ext.common.type_aliases import StateDict
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.policies.networks import ResidualBlock
from sb3_ppo_ext.policies.value_normalization import NormalizedValue

ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.ReLU: "relu", nn.ELU: "elu", nn.SiLU: "silu", nn.GELU: "gelu"}
# The output layer of the critic may be one with statistics, which `Perceptron` applies.
LINEAR = (nn.Linear, NormalizedValue)
# Number of weights of a layer above which PyTorch multiplies as fast
LARGE_LAYER = 512 * 512
# Largest number of layers of a network, as in `csrc/network.h`
MAX_LAYERS = 64
# `eps` of a LayerNorm, as in `csrc/instruction_sets.h`
NORM_EPS = 1e-5

# Weight and bias of a linear layer or a LayerNorm, the name of an activation function, or the index of the layer further up
# whose outputs are added to those of the layer before
Layer = tuple[np.ndarray, np.ndarray] | str | int


def layers_in(network: Iterable[nn.Module]) -> list[object]:
    """
    :param network: Modules in order
    :return: These modules; a residual block as its modules and the index of the layer whose outputs are added in the end
    """
    layers: list[object] = []
    for module in network:
        if type(module) is ResidualBlock and [type(module.layers[0]), type(module.layers[-1])] == [nn.LayerNorm, nn.Linear]:
            layers += [*module.layers, len(layers) - 1]
        else:
            layers.append(module)
    return layers


def read(layer: Any) -> Layer:
    """
    :param layer: One of :func:`layers_in`
    :return: The same layer for the extension module, with the parameters in their memory
    """
    if isinstance(layer, int):
        return layer
    if type(layer) in ACTIVATIONS:
        return ACTIVATIONS[type(layer)]
    return layer.weight.detach().numpy(), layer.bias.detach().numpy()


def make_network(layers: Iterable[Layer], gradients: Iterable[tuple[np.ndarray, ...]]) -> Any:
    """
    :param layers: Layers of the network
    :param gradients: Arrays for the gradients of weight and bias of each layer with parameters
    :return: Network of the extension module
    """
    arrays = iter(gradients)
    return extension.module.Network([(*each, *next(arrays)) if isinstance(each, tuple) else each for each in layers])


class Forward:
    """
    The outputs of a network. It can be pickled, with the values of the parameters.

    :param layers: Layers of the network
    :param gradients: Arrays for their gradients, ``None`` for arrays that nobody reads
    :param n_outputs: Number of outputs
    :param n_latents: Number of inputs of the output layer, if these are returned as well, otherwise 0
    :param columns: Features that the network reads, ``None`` for all
    """

    def __init__(
        self,
        layers: list[Layer],
        gradients: Sequence[tuple[np.ndarray, ...]] | None,
        n_outputs: int,
        n_latents: int = 0,
        columns: slice | None = None,
    ):
        if gradients is None:
            gradients = [tuple(map(np.zeros_like, layer)) for layer in layers if isinstance(layer, tuple)]
        self.values, self.n_outputs, self.n_latents, self.columns = layers, n_outputs, n_latents, columns
        self.network = make_network(layers, gradients)
        # Whether the outputs of the last forward pass are finite
        self.are_finite = True
        # Whether `complete` has something to do
        self.is_completed = n_latents > 0

    def __getstate__(self) -> StateDict:
        return {name: getattr(self, name) for name in ("values", "n_outputs", "n_latents", "columns")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Forward.__init__(self, state["values"], None, state["n_outputs"], state["n_latents"], state["columns"])
        self.network.pack()

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """
        :param features: Features of the observations, float32 of shape ``(n, n_features)``
        :return: Outputs, shape ``(n, n_outputs)``, or outputs and latents, shape ``(n, n_outputs + n_latents)``
        """
        outputs = np.empty((len(features), self.n_outputs), np.float32)
        self.are_finite = self.network.forward(features if self.columns is None else self.read(features), outputs)
        return self.complete(outputs) if self.is_completed else outputs

    def read(self, features: np.ndarray) -> np.ndarray:
        """
        :param features: Features of the observations, shape ``(n, n_features)``
        :return: Inputs of the network
        """
        return features if self.columns is None else np.ascontiguousarray(features[:, self.columns])

    def complete(self, outputs: np.ndarray) -> np.ndarray:
        """
        :param outputs: Outputs of the last forward pass, shape ``(n, n_outputs)``
        :return: Outputs, with the latents if these are needed
        """
        if not self.n_latents:
            return outputs
        latents = np.empty((len(outputs), self.n_latents), np.float32)
        self.network.latents(latents)
        return np.concatenate([outputs, latents], axis=1)


def trained(layers: Iterable[Any]) -> list[Any]:
    """
    :param layers: Layers, as of :func:`layers_in`
    :return: Those that have parameters
    """
    return [layer for layer in layers if isinstance(layer, nn.Linear | nn.LayerNorm)]


def unsupported_reason(layers: list[object]) -> str | None:
    """
    :param layers: Layers of a network, as of :func:`layers_in`, with the output layer
    :return: Reason why the extension module cannot compute them, ``None`` if it can
    """
    if len(layers) > MAX_LAYERS:
        return f"the policy has too many layers: this backend supports {MAX_LAYERS} in each network, activations included"
    for before, layer in zip([None, *layers], layers, strict=False):
        if isinstance(layer, int):
            continue
        if reason := _layer_reason(layer):
            return reason
        if type(layer) in ACTIVATIONS and not isinstance(before, nn.Linear | nn.LayerNorm):
            return f"{layer} follows no linear layer and no LayerNorm, as it has to for this backend"
    if not isinstance(layers[0], nn.Linear):
        return f"the first layer is {layers[0]}, and this backend supports networks that begin with an `nn.Linear`"
    return None


def _layer_reason(layer: Any) -> str | None:
    if type(layer) in ACTIVATIONS:
        if layer.extra_repr() != type(layer)().extra_repr():
            return f"{layer} has other arguments than the defaults, which this backend does not support"
        return None
    if type(layer) is nn.LayerNorm:
        if len(layer.normalized_shape) != 1 or layer.weight is None or layer.bias is None or layer.eps != NORM_EPS:
            return f"{layer} has other arguments than the size, which this backend does not support"
    elif type(layer) not in LINEAR or layer.bias is None:
        return (
            f"the policy has the layer {layer}, and this backend supports `nn.Linear` with a bias, `nn.LayerNorm`, residual "
            f"blocks, and the activations {', '.join(kind.__name__ for kind in ACTIVATIONS)}"
        )
    if layer.weight.numel() == 0:
        return "the policy has layers without inputs or outputs, which this backend does not support"
    if type(layer) in LINEAR and layer.in_features * layer.out_features >= LARGE_LAYER:
        return "the policy has large layers, which this backend would multiply no faster than PyTorch"
    if any(p.dtype != th.float32 or not p.is_contiguous() for p in (layer.weight, layer.bias)):
        return "the policy has parameters that are not contiguous float32, the only ones that this backend supports"
    if not (layer.weight.requires_grad and layer.bias.requires_grad):
        return "the policy has frozen parameters, which this backend would train"
    return None

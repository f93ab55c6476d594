"""The layers of a network as functions of JAX, for rollouts that are one compiled function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sb3_ppo_ext.common.namespaces import namespace
from sb3_ppo_ext.common.type_aliases import JaxTree
from sb3_ppo_ext.engines.native.layers import NORM_EPS, Layer
from sb3_ppo_ext.envs.tensors.jax_functions import activation

# What a layer is without its parameters: "linear", "norm", the name of an activation function, or the index of the layer
# whose outputs are added
Kind = str | int


def split_layers(layers: Iterable[Layer]) -> tuple[tuple[Kind, ...], list[tuple[np.ndarray, ...]]]:
    """
    :param layers: Layers of a network
    :return: What they are, and the parameters of those that have some
    """
    layers = list(layers)
    kinds = tuple(_kind(layer) for layer in layers)
    return kinds, [layer for layer in layers if isinstance(layer, tuple)]


def _kind(layer: Layer) -> Kind:
    if not isinstance(layer, tuple):
        return layer
    return "linear" if layer[0].ndim == 2 else "norm"


def forward(kinds: Sequence[Kind], parameters: Sequence[JaxTree], features: JaxTree) -> tuple[JaxTree, JaxTree]:
    """
    :param kinds: What the layers are
    :param parameters: Parameters of those that have some
    :param features: Features of the observations, shape ``(n, n_features)``
    :return: Outputs of the network, and of the layer before the last one
    """
    arrays, outputs, before = iter(parameters), features, features
    made: list[JaxTree] = []
    for kind in kinds:
        before = outputs
        if isinstance(kind, int):
            outputs = outputs + made[kind]
        elif kind == "linear":
            weight, bias = next(arrays)
            outputs = outputs @ weight.T + bias
        elif kind == "norm":
            outputs = _normalized(outputs, *next(arrays))
        else:
            outputs = activation(kind)(outputs)
        made.append(outputs)
    return outputs, before


def _normalized(values: JaxTree, weight: JaxTree, bias: JaxTree) -> JaxTree:
    """``nn.LayerNorm``."""
    xp = namespace(values)
    centred = values - values.mean(axis=1, keepdims=True)
    variances = xp.square(centred).mean(axis=1, keepdims=True)
    return centred / xp.sqrt(variances + NORM_EPS) * weight + bias

"""
A GRU over successive steps on the CPU, where PyTorch has a fused kernel for an LSTM, but computes a GRU step by step: NumPy's
operations on small arrays take a fraction of the time of PyTorch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from torch import nn
from torch.autograd.function import once_differentiable


def is_faster(network: nn.Module) -> bool:
    """
    :param network: Recurrent network
    :return: Whether :func:`over_time` computes the same as the network, in less time
    """
    return isinstance(network, nn.GRU) and network.dropout == 0 and network.weight_hh_l0.device.type == "cpu"


def over_time(network: nn.Module, inputs: th.Tensor, hidden: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """
    :param network: GRU
    :param inputs: Inputs, shape ``(n_steps, n_sequences, input_size)``
    :param hidden: Hidden states before the first step, shape ``(n_layers, n_sequences, hidden_size)``
    :return: Outputs, shape ``(n_steps, n_sequences, hidden_size)``, and the hidden states after the last step
    """
    outputs, last = inputs, []
    for layer, before in enumerate(hidden):
        weights = [getattr(network, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh")]
        biases = [getattr(network, f"{name}_l{layer}", None) for name in ("bias_ih", "bias_hh")]
        from_inputs = nn.functional.linear(outputs, weights[0], biases[0])
        outputs = _OverTime.apply(from_inputs, before, weights[1], biases[1])
        last.append(outputs[-1])
    return outputs, th.stack(last)


class _OverTime(th.autograd.Function):
    """
    The recurrence of a layer, with reset gate r, update gate z and candidate n:
    ``n = tanh(x_n + r * (W_n h + b_n))``, ``h' = n + z * (h - n)``.

    Its inputs are the products of the layer's inputs, shape ``(n_steps, n_sequences, 3 * hidden_size)``, the hidden states
    before the first step, shape ``(n_sequences, hidden_size)``, and the weights and biases of the hidden states.
    """

    @staticmethod
    def forward(ctx: Any, from_inputs: th.Tensor, hidden: th.Tensor, weight: th.Tensor, bias: th.Tensor | None) -> th.Tensor:
        x, w = from_inputs.detach().numpy(), np.ascontiguousarray(weight.detach().numpy().T)
        n_steps, n_sequences, _ = x.shape
        size = hidden.shape[1]
        b = np.zeros(3 * size, x.dtype) if bias is None else bias.detach().numpy()
        states = np.empty((n_steps + 1, n_sequences, size), x.dtype)
        gates, candidates, products = (np.empty((n_steps, n_sequences, k), x.dtype) for k in (2 * size, size, 3 * size))
        states[0] = hidden.detach().numpy()
        for t in range(n_steps):
            state, product, gate, candidate = states[t], products[t], gates[t], candidates[t]
            np.matmul(state, w, out=product)
            product += b
            # The logistic function by tanh, which does not overflow
            np.add(x[t, :, : 2 * size], product[:, : 2 * size], out=gate)
            gate *= 0.5
            np.tanh(gate, out=gate)
            gate *= 0.5
            gate += 0.5
            np.multiply(gate[:, :size], product[:, 2 * size :], out=candidate)
            candidate += x[t, :, 2 * size :]
            np.tanh(candidate, out=candidate)
            after = states[t + 1]
            np.subtract(state, candidate, out=after)
            after *= gate[:, size:]
            after += candidate
        ctx.save_for_backward(weight)
        ctx.arrays, ctx.has_bias = (states, gates, candidates, products), bias is not None
        return th.from_numpy(states[1:].copy())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: th.Tensor) -> tuple[th.Tensor | None, ...]:
        states, gates, candidates, products = ctx.arrays
        (weight,) = ctx.saved_tensors
        w, outer = weight.detach().numpy(), d_outputs.contiguous().numpy()
        size = states.shape[2]
        reset, update = gates[..., :size], gates[..., size:]
        # Derivatives of the candidate, the update gate and the reset gate, before their non-linear functions
        of_candidate = (1 - update) * (1 - candidates**2)
        of_update = (states[:-1] - candidates) * update * (1 - update)
        of_reset = products[..., 2 * size :] * reset * (1 - reset)
        d_inputs, d_products = np.empty_like(products), np.empty_like(products)
        d_state = np.zeros_like(states[0])
        for t in reversed(range(len(outer))):
            d_state += outer[t]
            d_x, d_product = d_inputs[t], d_products[t]
            d_candidate = d_x[:, 2 * size :]
            np.multiply(d_state, of_candidate[t], out=d_candidate)
            np.multiply(d_candidate, of_reset[t], out=d_product[:, :size])
            np.multiply(d_state, of_update[t], out=d_product[:, size : 2 * size])
            np.multiply(d_candidate, reset[t], out=d_product[:, 2 * size :])
            d_state *= update[t]
            d_state += d_product @ w
        d_inputs[..., : 2 * size] = d_products[..., : 2 * size]
        flat = th.from_numpy(d_products).flatten(0, 1)
        d_weight = flat.T @ th.from_numpy(states[:-1]).flatten(0, 1)
        return th.from_numpy(d_inputs), th.from_numpy(d_state), d_weight, flat.sum(dim=0) if ctx.has_bias else None

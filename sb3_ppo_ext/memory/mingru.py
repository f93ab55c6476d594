"""
A minimal GRU, whose gates do not read its state: all steps of a sequence are then computed at once, by a parallel scan.

Paper: https://arxiv.org/abs/2410.01201
"""

from __future__ import annotations

from typing import Any

import torch as th
from torch import nn
from torch.autograd.function import once_differentiable


class MinGRU(nn.Module):
    """
    Layers of ``h_t = (1 - z_t) * h_{t-1} + z_t * g(W_h x_t + b_h)`` with ``z_t = sigmoid(W_z x_t + b_z)`` and a positive
    ``g(x) = max(x, 0) + sigmoid(min(x, 0))``. The arguments are those of ``torch.nn.GRU``.

    :param input_size: Number of inputs
    :param hidden_size: Number of units of each layer
    :param num_layers: Number of layers
    :param bias: Whether there are biases
    :param dropout: Probability that an output between two layers is dropped, in [0, 1]
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, dropout: float = 0.0):
        super().__init__()
        self.input_size, self.hidden_size, self.dropout = input_size, hidden_size, dropout
        sizes = [input_size, *(num_layers - 1) * [hidden_size]]
        # For update gate and candidate
        self.layers = nn.ModuleList(nn.Linear(size, 2 * hidden_size, bias) for size in sizes)

    def forward(self, inputs: th.Tensor, hidden: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        Run step by step.

        :param inputs: Inputs, shape ``(n_steps, n_sequences, input_size)``
        :param hidden: Hidden states before the first step, shape ``(n_layers, n_sequences, hidden_size)``
        :return: Outputs, shape ``(n_steps, n_sequences, hidden_size)``, and the hidden states after the last step
        """
        outputs = []
        for of_step in inputs:
            states = [of_step]
            for layer, before in enumerate(hidden):
                states.append(th.lerp(before, *_candidate_and_update(self._products(layer, states[-1], before.dtype))))
            hidden = th.stack(states[1:])
            outputs.append(states[-1])
        return th.stack(outputs), hidden

    def over_sequences(self, features: th.Tensor, firsts: th.Tensor, longest: int, hidden: th.Tensor) -> th.Tensor:
        """
        Run over sequences of any lengths at once: nothing is kept where another sequence begins.

        :param features: Features of all sequences, one sequence after the other, shape ``(n_samples, input_size)``
        :param firsts: Index of the first sample of each sequence, shape ``(n_sequences,)``
        :param longest: Number of samples of the longest sequence
        :param hidden: Hidden states before these samples, shape ``(n_layers, n_sequences, hidden_size)``
        :return: Outputs, shape ``(n_samples, hidden_size)``
        """
        for layer, before in enumerate(hidden):
            features = _OverSequences.apply(self._products(layer, features, before.dtype), before, firsts, longest)
        return features

    def _products(self, layer: int, inputs: th.Tensor, dtype: th.dtype) -> th.Tensor:
        """Update gate and candidate before their non-linear functions, in the precision of the state."""
        if layer > 0:
            inputs = nn.functional.dropout(inputs, self.dropout, self.training)
        products: th.Tensor = self.layers[layer](inputs)
        return products.to(dtype)


def _candidate_and_update(products: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    update, candidate = products.chunk(2, dim=-1)
    return th.relu(candidate) + th.sigmoid(candidate.clamp(max=0.0)), th.sigmoid(update)


class _OverSequences(th.autograd.Function):
    """
    The states of a layer, ``h_t = (1 - z_t) * h_{t-1} + z_t * g_t``. The slopes are ``D_t * (g_t - h_{t-1})`` by ``z_t`` and
    ``D_t * z_t`` by ``g_t``, where ``D_t = d_t + (1 - z_{t+1}) * D_{t+1}``, a scan from the last step on, adds up the slopes
    ``d`` by the states.

    Its inputs are the products of the layer's inputs, shape ``(n_samples, 2 * hidden_size)``, the states before each sequence,
    and the last two arguments of :meth:`MinGRU.over_sequences`.
    """

    @staticmethod
    def forward(ctx: Any, products: th.Tensor, before: th.Tensor, firsts: th.Tensor, longest: int) -> th.Tensor:
        candidate, update = _candidate_and_update(products)
        kept, states = 1.0 - update, update * candidate
        states.index_add_(0, firsts, kept[firsts] * before)
        scan_(kept.index_fill_(0, firsts, 0.0), states, longest)
        ctx.save_for_backward(candidate, update, kept, states, before, firsts)
        ctx.longest = longest
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: th.Tensor) -> tuple[th.Tensor | None, ...]:
        candidate, update, kept, states, before, firsts = ctx.saved_tensors
        d_all = d_states.clone()
        scan_(kept, d_all, ctx.longest, is_reversed=True)
        d_before = d_all[firsts] * (1.0 - update[firsts])
        d_all *= update
        of_update = (candidate - states.roll(1, 0).index_copy_(0, firsts, before)) * (1.0 - update)
        # Below one half, the candidate is a logistic function.
        of_candidate = th.where(candidate < 0.5, candidate * (1.0 - candidate), 1.0)
        return th.cat([d_all * of_update, d_all * of_candidate], dim=1), d_before, None, None


def scan_(kept: th.Tensor, added: th.Tensor, length: int, is_reversed: bool = False) -> None:
    """
    Turn summands into the states ``h_t = kept_t * h_{t-1} + added_t`` for all t, with ``h_{-1} = 0``, in place and in
    logarithmically many operations.

    They are computed as they stand, not by their logarithms as in the paper: products of numbers in [0, 1] do not overflow,
    and are exactly 0 where nothing is kept, while sums of logarithms are infinite there, and lose digits in long sequences.

    Paper: https://doi.org/10.1145/7902.7903

    :param kept: Factors in [0, 1], shape ``(n_steps, n_units)``
    :param added: Summands, of the same shape
    :param length: Number of steps after which a factor is 0 at the latest; ``n_steps`` is always right
    :param is_reversed: Whether to compute ``h_t = kept_{t+1} * h_{t+1} + added_t`` instead, from the last step on
    """
    # Each pass doubles the number n of steps that a state contains, with the products of n successive factors.
    kept, n = kept[1:], 1
    while n < length:
        later, earlier = added[n:], added[:-n]
        if is_reversed:
            earlier += kept * later
        else:
            later += kept * earlier
        kept = kept[n:] * kept[:-n]
        n *= 2

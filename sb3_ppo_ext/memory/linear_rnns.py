"""
Recurrent networks whose next state is linear in the state, so that all steps of a sequence are computed at once by a scan.

Papers: https://arxiv.org/abs/2410.01201 (MinGRU), https://arxiv.org/abs/2303.06349 (LRU)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch as th
from torch import nn
from torch.autograd.function import once_differentiable

from sb3_ppo_ext.memory.scan import product, states_of


class Layer(nn.Linear):
    """
    A layer with states ``h_t = kept_t * h_{t-1} + added_t``. If these are complex numbers, a state consists of the real parts
    of all numbers, and then their imaginary parts.

    :param input_size: Number of inputs
    :param hidden_size: Number of units
    :param bias: Whether there are biases
    """

    @abstractmethod
    def terms(self, inputs: th.Tensor, dtype: th.dtype) -> tuple[th.Tensor, th.Tensor]:
        """
        :param inputs: Inputs, shape ``(n_samples, input_size)``
        :param dtype: Precision of the states
        :return: Factors and summands of each sample, shape ``(n_samples, hidden_size)``, or for complex numbers
            ``(n_samples, 2, hidden_size / 2)``
        """

    def step(self, inputs: th.Tensor, before: th.Tensor) -> th.Tensor:
        """
        :param inputs: Inputs of one step, shape ``(n_sequences, input_size)``
        :param before: States before the step, shape ``(n_sequences, hidden_size)``
        :return: States after the step
        """
        kept, added = self.terms(inputs, before.dtype)
        return (product(kept, before.view_as(added)) + added).flatten(1)

    def over_sequences(self, inputs: th.Tensor, firsts: th.Tensor, longest: int, before: th.Tensor) -> th.Tensor:
        """
        :param inputs: Inputs of all sequences, shape ``(n_samples, input_size)``
        :param firsts: Index of the first sample of each sequence, shape ``(n_sequences,)``
        :param longest: Number of samples of the longest sequence
        :param before: States before these samples, shape ``(n_sequences, hidden_size)``
        :return: States, shape ``(n_samples, hidden_size)``
        """
        kept, added = self.terms(inputs, before.dtype)
        return states_of(kept, added, before.view(-1, *added.shape[1:]), firsts, longest).flatten(1)


class MinGRULayer(Layer):
    """
    ``h_t = (1 - z_t) * h_{t-1} + z_t * g(W_h x_t + b_h)`` with ``z_t = sigmoid(W_z x_t + b_z)`` and a positive
    ``g(x) = max(x, 0) + sigmoid(min(x, 0))``.
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool):
        super().__init__(input_size, 2 * hidden_size, bias)  # for update gate and candidate

    def terms(self, inputs: th.Tensor, dtype: th.dtype) -> tuple[th.Tensor, th.Tensor]:
        kept, added = _Gates.apply(self(inputs).to(dtype))
        return kept, added

    def step(self, inputs: th.Tensor, before: th.Tensor) -> th.Tensor:
        update, candidate = _gates(self(inputs).to(before.dtype))
        return th.lerp(before, candidate, update)


def _gates(products: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    update, candidate = products.chunk(2, dim=-1)
    return th.sigmoid(update), th.relu(candidate) + th.sigmoid(candidate.clamp(max=0.0))


class _Gates(th.autograd.Function):
    """What a MinGRU keeps and adds, ``1 - z`` and ``z * g``, with slopes in fewer operations than those of each operation."""

    @staticmethod
    def forward(ctx: Any, products: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        update, candidate = _gates(products)
        kept = 1.0 - update
        ctx.save_for_backward(update, candidate, kept)
        return kept, update * candidate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_kept: th.Tensor, d_added: th.Tensor) -> th.Tensor:
        update, candidate, kept = ctx.saved_tensors
        d_update = (d_added * candidate).sub_(d_kept).mul_(update).mul_(kept)
        # Below one half, the candidate c is a logistic function, with the slope c - c^2, which is 1/4 at its end; above, it is
        # linear. (On the CPU, `th.where` takes twice as long.)
        logistic = candidate.clamp(max=0.5)
        d_candidate = th.addcmul(logistic, logistic, logistic, value=-1).add_(candidate >= 0.5, alpha=0.75)
        return th.cat([d_update, d_candidate.mul_(update).mul_(d_added)], dim=-1)


class LRULayer(Layer):
    """
    ``h_t = lambda * h_{t-1} + gamma * (B x_t + b)`` with complex numbers ``lambda = exp(-nu + i theta)``: each unit forgets at
    a rate of its own, and turns by an angle of its own. The parameters are the logarithms of ``nu``, ``theta`` and ``gamma``,
    so that the modulus is never above 1, whatever is learned.

    What the paper reads from the states, ``C h_t + D x_t``, is left to the networks that follow.
    """

    # Moduli of the initial lambda, and their largest angle
    MODULI, ANGLE = (0.0, 0.999), 2 * math.pi

    def __init__(self, input_size: int, hidden_size: int, bias: bool):
        super().__init__(input_size, hidden_size, bias)
        nn.init.normal_(self.weight, std=(2 * input_size) ** -0.5)
        # Uniform on the ring
        smallest, largest = (modulus**2 for modulus in self.MODULI)
        squares = smallest + (largest - smallest) * th.rand(hidden_size // 2).clamp(min=1e-3)
        self.log_nu = nn.Parameter((-0.5 * squares.log()).log())
        self.log_theta = nn.Parameter((self.ANGLE * th.rand(hidden_size // 2).clamp(min=1e-3)).log())
        # Inputs that are unrelated to each other then lead to states as large as they are.
        self.log_gamma = nn.Parameter(0.5 * (1.0 - squares).log())

    def terms(self, inputs: th.Tensor, dtype: th.dtype) -> tuple[th.Tensor, th.Tensor]:
        modulus, angle = th.exp(-th.exp(self.log_nu)), th.exp(self.log_theta)
        kept = th.stack([modulus * th.cos(angle), modulus * th.sin(angle)])
        added = self(inputs).to(dtype).unflatten(1, (2, -1)) * th.exp(self.log_gamma)
        return kept.to(dtype).expand_as(added), added


class LinearRNN(nn.Module):
    """
    Layers of one kind. The arguments are those of ``torch.nn.GRU``.

    :param input_size: Number of inputs
    :param hidden_size: Number of units of each layer
    :param num_layers: Number of layers
    :param bias: Whether there are biases
    :param dropout: Probability that an output between two layers is dropped, in [0, 1]
    """

    kind: type[Layer]

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, dropout: float = 0.0):
        super().__init__()
        self.input_size, self.hidden_size, self.dropout = input_size, hidden_size, dropout
        sizes = [input_size, *(num_layers - 1) * [hidden_size]]
        self.layers = nn.ModuleList(self.kind(size, hidden_size, bias) for size in sizes)

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
            for number, (layer, before) in enumerate(zip(self._layers(), hidden, strict=True)):
                states.append(layer.step(self._inputs_of(number, states[-1]), before))
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
        for number, (layer, before) in enumerate(zip(self._layers(), hidden, strict=True)):
            features = layer.over_sequences(self._inputs_of(number, features), firsts, longest, before)
        return features

    def _layers(self) -> Iterator[Layer]:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    def _inputs_of(self, number: int, states: th.Tensor) -> th.Tensor:
        return states if number == 0 else nn.functional.dropout(self.between(states), self.dropout, self.training)

    def between(self, states: th.Tensor) -> th.Tensor:
        """
        :param states: States of a layer
        :return: Inputs of the next layer
        """
        return states


class MinGRU(LinearRNN):
    """A GRU whose gates do not read its state."""

    kind = MinGRULayer


class LRU(LinearRNN):
    """Linear Recurrent Units, a state-space model, with GELU between two layers."""

    kind = LRULayer

    def between(self, states: th.Tensor) -> th.Tensor:
        return nn.functional.gelu(states)

"""
Linear recurrences ``h_t = kept_t * h_{t-1} + added_t``, of all steps of many sequences at once.

Complex numbers are real and imaginary parts in dimension 1, since not every device and export knows others.
"""

from __future__ import annotations

from typing import Any

import torch as th
from torch.autograd.function import once_differentiable

try:
    from sb3_ppo_ext.memory import _scan as module
except ImportError:  # built without a C compiler
    module: Any = None  # type: ignore[no-redef]


def product(left: th.Tensor, right: th.Tensor) -> th.Tensor:
    """
    :param left: Real numbers, shape ``(n, n_units)``, or complex ones, shape ``(n, 2, n_units)``
    :param right: The same kind of numbers
    :return: Their products
    """
    if left.dim() == 2:
        return left * right
    (a, b), (c, d) = left.unbind(1), right.unbind(1)
    return th.stack([a * c - b * d, a * d + b * c], dim=1)


def conjugate(numbers: th.Tensor) -> th.Tensor:
    """
    :param numbers: Real numbers, shape ``(n, n_units)``, or complex ones, shape ``(n, 2, n_units)``
    :return: Their conjugates
    """
    return numbers if numbers.dim() == 2 else th.stack([numbers[:, 0], -numbers[:, 1]], dim=1)


def states_of(kept: th.Tensor, added: th.Tensor, before: th.Tensor, firsts: th.Tensor, longest: int) -> th.Tensor:
    """
    :param kept: Factors of the states, of moduli in [0, 1], for all samples of sequences that lie one after the other, shape
        ``(n_samples, n_units)``, or ``(n_samples, 2, n_units)`` for complex numbers
    :param added: Summands, of the same shape
    :param before: States before the first sample of each sequence, shape ``(n_sequences, n_units)``, or
        ``(n_sequences, 2, n_units)``
    :param firsts: Index of the first sample of each sequence, shape ``(n_sequences,)``
    :param longest: Number of samples of the longest sequence
    :return: States, of the shape of the summands, differentiable in the first three arguments
    """
    states: th.Tensor = _States.apply(kept, added, before, firsts, longest)
    return states


class _States(th.autograd.Function):
    """
    With the slopes ``d`` by the states, ``D_t = d_t + conj(kept_{t+1}) * D_{t+1}``, a scan from the last step on, adds up all
    slopes: those by ``added_t`` are ``D_t``, those by ``kept_t`` are ``D_t * conj(h_{t-1})``.
    """

    @staticmethod
    def forward(ctx: Any, kept: th.Tensor, added: th.Tensor, before: th.Tensor, firsts: th.Tensor, longest: int) -> th.Tensor:
        of_firsts = kept[firsts]
        states = added.index_add(0, firsts, product(of_firsts, before))
        within = kept.index_fill(0, firsts, 0.0)
        scan_(within, states, longest)
        ctx.save_for_backward(within, of_firsts, states, before, firsts)
        ctx.longest = longest
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: th.Tensor) -> tuple[th.Tensor | None, ...]:
        within, of_firsts, states, before, firsts = ctx.saved_tensors
        d_added = d_states.clone(memory_format=th.contiguous_format)
        scan_(conjugate(within), d_added, ctx.longest, is_reversed=True)
        d_firsts, d_kept = d_added[firsts], th.empty_like(d_added)
        d_kept[1:] = product(d_added[1:], conjugate(states[:-1]))
        d_kept.index_copy_(0, firsts, product(d_firsts, conjugate(before)))
        return d_kept, d_added, product(d_firsts, conjugate(of_firsts)), None, None


def scan_(kept: th.Tensor, added: th.Tensor, length: int, is_reversed: bool = False) -> None:
    """
    Turn summands into the states ``h_t = kept_t * h_{t-1} + added_t`` for all t, with ``h_{-1} = 0``, in place: one after the
    other in C, or in logarithmically many operations.

    States are computed as they stand, not by their logarithms: products of numbers in [0, 1] do not overflow, and are exactly
    0 where nothing is kept, while sums of logarithms are infinite there, and lose digits in long sequences.

    Paper: https://doi.org/10.1145/7902.7903

    :param kept: Factors of moduli in [0, 1], shape ``(n_steps, n_units)``, or ``(n_steps, 2, n_units)`` for complex numbers
    :param added: Summands, of the same shape
    :param length: Number of steps after which a factor is 0 at the latest; ``n_steps`` is always right
    :param is_reversed: Whether to compute ``h_t = kept_{t+1} * h_{t+1} + added_t`` instead, from the last step on
    """
    if module is not None and added.device.type == "cpu" and added.dtype == th.float32:
        module.scan(kept.detach().numpy(), added.detach().numpy(), is_reversed)
        return
    # Each pass doubles the number n of steps that a state contains, with the products of n successive factors.
    kept, n = kept[1:], 1
    while n < length:
        later, earlier = added[n:], added[:-n]
        if is_reversed:
            earlier += product(kept, later)
        else:
            later += product(kept, earlier)
        kept = product(kept[n:], kept[:-n])
        n *= 2

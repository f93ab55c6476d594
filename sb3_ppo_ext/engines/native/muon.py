"""Steps of Muon and AdamW for the native engine: Muon on all matrices of one shape at once, AdamW by the extension module."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, TypeAlias

import torch as th

from sb3_ppo_ext.common.type_aliases import StateDict
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.engines.optimizer_steps import GradientMemory, adam_states, has_own_steps, is_plain_adam
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.loop import Stepper
from sb3_ppo_ext.update.optimizers import MuonWithAdamW, kind_of_norm

# A matrix, its gradient and its momentum buffer
Row: TypeAlias = tuple[th.Tensor, th.Tensor, th.Tensor]


class NativeMuonStepper(Stepper):
    """
    Gradient clipping, Muon and AdamW, on the state of :class:`MuonWithAdamW`.

    :param optimizer: Optimiser that :meth:`takes` accepts
    :param memory: Memory of the gradients, which the source of the gradients overwrites
    """

    def __init__(self, optimizer: Any, memory: GradientMemory):
        self.memory, gradients = memory, dict(memory.pairs)
        self.parts: list[MuonPart | AdamWPart] = []
        for group in optimizer.param_groups:
            learned = [parameter for parameter in group["params"] if parameter in gradients]
            if group["algorithm"] == "Muon":
                rows = [(p.detach(), gradients[p], _momentum(optimizer, p)) for p in learned]
                self.parts += [MuonPart(group, *map(list, zip(*part, strict=True))) for part in _by_shape(rows)]
            elif learned:
                pairs = [(p.detach(), gradients[p]) for p in learned]
                self.parts.append(AdamWPart(group, pairs, adam_states(optimizer, learned)))
        self.scales: dict[str, float] = {}

    @staticmethod
    def takes(optimizer: th.optim.Optimizer, memory: GradientMemory, config: UpdateConfig) -> bool:
        """
        :param optimizer: Optimiser of a policy
        :param memory: Trainable parameters of this policy, with their gradients
        :param config: Options of the update
        :return: Whether this class can replace the optimiser
        """
        if type(optimizer) is not MuonWithAdamW or config.max_clip_fraction is not None:
            return False
        parts = optimizer.parts
        learned = {parameter for parameter, _ in memory.pairs}
        in_groups = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if learned != in_groups or len(parts) < 2 or any(map(has_own_steps, (optimizer, *parts.values()))):
            return False
        n_adamw = sum(p.requires_grad for group in parts["AdamW"].param_groups for p in group["params"])
        return is_plain_adam(parts["AdamW"], n_adamw)

    def zero_grad(self) -> None:
        """Nothing to do, since gradients are overwritten."""

    def freeze_actor(self, is_frozen: bool) -> None:
        """
        :param is_frozen: Not used: :meth:`takes` leaves updates that freeze the actor to PyTorch
        """

    def clip(self, max_norm: float) -> dict[str, float]:
        """
        :param max_norm: Maximum norm of the gradients of AdamW, separately for an actor and critic with groups of their own
        :return: Norms before clipping, by name
        """
        squares: dict[str, float] = defaultdict(float)
        for part in self.parts:
            squares[kind_of_norm(part.group)] += part.norm() ** 2
        norms = {name: math.sqrt(square) for name, square in squares.items()}
        self.scales = {name: min(max_norm / (norm + 1e-6), 1.0) for name, norm in norms.items()}
        return norms

    def step(self, is_made: bool) -> None:
        """
        :param is_made: Whether the step is made
        """
        if is_made:
            for part in self.parts:
                part.step(self.scales[kind_of_norm(part.group)])

    def show_gradients(self) -> None:
        """Set ``grad`` of the parameters to the gradients."""
        self.memory.show()

    def close(self) -> None:
        """Update the step counts in the state of the optimiser."""
        for part in self.parts:
            part.close()


class MuonPart:
    """
    Muon on matrices of one shape, in float32, where PyTorch rounds to bfloat16 in between.

    :param group: Parameter group with the options
    :param parameters: Matrices
    :param gradients: Their gradients
    :param momenta: Their momentum buffers
    """

    def __init__(self, group: StateDict, parameters: list[th.Tensor], gradients: list[th.Tensor], momenta: list[th.Tensor]):
        self.group, self.parameters, self.gradients, self.momenta = group, parameters, gradients, momenta

    def norm(self) -> float:
        """:return: Norm of the gradients"""
        return float(th.nn.utils.get_total_norm(self.gradients))

    def step(self, scale: float) -> None:
        """
        :param scale: Not used: steps do not depend on the scale of the gradients
        """
        group, momentum, lr = self.group, self.group["momentum"], float(self.group["lr"])
        th._foreach_lerp_(self.momenta, self.gradients, 1 - momentum)
        updates = th._foreach_lerp(self.gradients, self.momenta, momentum) if group["nesterov"] else self.momenta
        directions = orthogonalized(th.stack(list(updates)), group["ns_coefficients"], group["ns_steps"], group["eps"])
        th._foreach_mul_(self.parameters, 1 - lr * group["weight_decay"])
        # `match_rms_adamw`
        rate = lr * 0.2 * math.sqrt(max(self.parameters[0].shape))
        th._foreach_add_(self.parameters, list(directions), alpha=-rate)

    def close(self) -> None:
        """Nothing to do."""


class AdamWPart:
    """
    AdamW on a parameter group, by the extension module.

    :param group: Parameter group with the options
    :param pairs: Parameters and gradients
    :param states: State of each parameter
    """

    def __init__(self, group: StateDict, pairs: list[tuple[th.Tensor, th.Tensor]], states: list[StateDict]):
        self.group, self.parameters, self.states = group, [parameter for parameter, _ in pairs], states
        self.n_steps = int(states[0]["step"])
        self.adam = extension.module.Adam(
            [
                tuple(part.numpy() for part in (*pair, state["exp_avg"], state["exp_avg_sq"]))
                for pair, state in zip(pairs, states, strict=True)
            ]
        )

    def norm(self) -> float:
        """:return: Norm of the gradients"""
        return float(self.adam.norm())

    def step(self, scale: float) -> None:
        """
        :param scale: Factor of the gradients
        """
        group, lr = self.group, float(self.group["lr"])
        self.n_steps += 1
        if group["weight_decay"]:
            th._foreach_mul_(self.parameters, 1 - lr * group["weight_decay"])
        self.adam.step(self.n_steps, scale, lr, *group["betas"], group["eps"], 0.0)

    def close(self) -> None:
        """Update the step counts in the state of the optimiser."""
        for state in self.states:
            state["step"].fill_(self.n_steps)


def orthogonalized(matrices: th.Tensor, coefficients: tuple[float, float, float], n_steps: int, eps: float) -> th.Tensor:
    """
    Move the singular values of matrices to the neighbourhood of 1, by the Newton-Schulz iteration of Muon.

    :param matrices: Matrices, shape ``(n, n_rows, n_columns)``
    :param coefficients: Coefficients of its polynomial
    :param n_steps: Number of iterations
    :param eps: Smallest norm of a matrix that is divided by
    :return: Matrices of the same shape
    """
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / th.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(n_steps):
        gram = x @ x.mT
        x = th.baddbmm(x, th.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _momentum(optimizer: th.optim.Optimizer, parameter: th.Tensor) -> th.Tensor:
    """Momentum buffer of a matrix, as torch makes it at the first step."""
    momentum: th.Tensor = optimizer.state[parameter].setdefault("momentum_buffer", th.zeros_like(parameter.detach()))
    return momentum


def _by_shape(rows: list[Row]) -> list[list[Row]]:
    found: dict[th.Size, list[Row]] = defaultdict(list)
    for row in rows:
        found[row[0].shape].append(row)
    return list(found.values())

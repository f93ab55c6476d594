"""Steps of the optimiser, made by PyTorch or by the extension module in C."""

from __future__ import annotations

from collections.abc import Sequence

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from sb3_ppo_ext.common.type_aliases import StateDict
from sb3_ppo_ext.common.user_code import replaced_method
from sb3_ppo_ext.engines.native import extension
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.loop import Stepper
from sb3_ppo_ext.update.optimizers import clip_gradients, critic_parameters


class Reached:
    """
    Parameters that have got a gradient in this update. Optimisers of PyTorch leave others as they are, without decaying them.

    :param parameters: Trainable parameters of a policy
    """

    def __init__(self, parameters: Sequence[th.Tensor]):
        self.parameters: set[th.Tensor] = set()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self.parameters.add) for parameter in parameters]

    def __len__(self) -> int:
        return len(self.parameters)

    def __contains__(self, parameter: th.Tensor) -> bool:
        # Gradients that `torch.func` computes are there for all parameters.
        return not self.parameters or parameter in self.parameters

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()


class GradientMemory:
    """
    Memory of the gradients, which keeps its address during an update.

    :param pairs: Pairs of each trainable parameter and the tensor of its gradient
    """

    def __init__(self, pairs: Sequence[tuple[nn.Parameter, th.Tensor]]):
        self.pairs = list(pairs)
        self.gradients = [gradient for _, gradient in self.pairs]

    @classmethod
    def of(cls, policy: nn.Module) -> GradientMemory:
        """
        :param policy: Policy with trainable parameters
        :return: New memory for the gradients of these parameters
        """
        return cls([(p, th.zeros_like(p)) for p in policy.parameters() if p.requires_grad])

    def zero(self) -> None:
        """Set all gradients to 0."""
        th._foreach_zero_(self.gradients)

    def show(self) -> None:
        """Set ``grad`` of the parameters to these gradients."""
        for parameter, gradient in self.pairs:
            if parameter.grad is not gradient:  # a tenth of the time
                parameter.grad = gradient


class TorchStepper(Stepper):
    """
    Steps of the policy's optimiser.

    :param policy: Policy with the optimiser
    :param memory: Memory in which gradients are accumulated, ``None`` to let autograd allocate it
    """

    def __init__(self, policy: ActorCriticPolicy, memory: GradientMemory | None = None):
        self.policy, self.memory = policy, memory

    def zero_grad(self) -> None:
        self.policy.optimizer.zero_grad()
        if self.memory is not None:
            self.memory.zero()
            self.memory.show()

    def freeze_actor(self, is_frozen: bool) -> None:
        of_critic = critic_parameters(self.policy) if is_frozen else set()
        for parameter in self.policy.parameters():
            if is_frozen and parameter not in of_critic:
                # An optimiser leaves a parameter without a gradient, and its moments, unchanged.
                parameter.grad = None

    def clip(self, max_norm: float) -> dict[str, th.Tensor]:
        return clip_gradients(self.policy, max_norm)

    def step(self, is_made: bool) -> None:
        if is_made:
            self.policy.optimizer.step()

    def show_gradients(self) -> None:
        """Nothing to do, since the gradients are in ``grad`` of the parameters."""

    def close(self) -> None:
        """Nothing to do."""


class FusedAdamStepper(Stepper):
    """
    Gradient clipping and Adam, fused in the extension module, on the state of torch's optimiser.

    :param optimizer: Optimiser that :meth:`takes` accepts
    :param memory: Memory of the gradients
    :param is_overwritten: Whether the source of the gradients overwrites them, so that they need not be set to 0
    """

    def __init__(self, optimizer: th.optim.Optimizer, memory: GradientMemory, is_overwritten: bool = False):
        (self.group,) = optimizer.param_groups
        self.memory, self.is_overwritten = memory, is_overwritten
        self.states = adam_states(optimizer, [parameter for parameter, _ in memory.pairs])
        self.n_steps = int(self.states[0]["step"])
        self.scale = 1.0
        rows = [
            (parameter.detach().numpy(), gradient.numpy(), state["exp_avg"].numpy(), state["exp_avg_sq"].numpy())
            for (parameter, gradient), state in zip(memory.pairs, self.states, strict=True)
        ]
        self.adam = extension.module.Adam(rows)
        self.rows, self.n_decayed = rows, len(rows)
        # What is not decayed may be stepped: its gradients and averages are 0.
        watches = self.group["weight_decay"] != 0 and not is_overwritten
        self.reached = Reached([parameter for parameter, _ in memory.pairs]) if watches else None

    @staticmethod
    def takes(optimizer: th.optim.Optimizer, memory: GradientMemory) -> bool:
        """
        :param optimizer: Optimiser of a policy
        :param memory: Trainable parameters of this policy, with their gradients
        :return: Whether the optimiser is an Adam that the extension module can replace
        """
        if type(optimizer) is not th.optim.Adam or len(optimizer.param_groups) != 1 or extension.module is None:
            return False
        group = optimizer.param_groups[0]
        if not all(extension.is_readable(parameter) for parameter in group["params"]):
            return False
        learned = {parameter for parameter, _ in memory.pairs}
        # Parameters of the policy that were replaced are not in torch's optimiser, which does not update them.
        if learned != {parameter for parameter in group["params"] if parameter.requires_grad}:
            return False
        return is_plain_adam(optimizer, len(learned), "decoupled_weight_decay")

    def zero_grad(self) -> None:
        if not self.is_overwritten:
            self.memory.zero()
            self.memory.show()

    def freeze_actor(self, is_frozen: bool) -> None:
        """Not called: :func:`can_fuse_steps` leaves updates that freeze the actor to PyTorch."""

    def clip(self, max_norm: float) -> dict[str, float]:
        norm = float(self.adam.norm())
        self.scale = min(max_norm / (norm + 1e-6), 1.0)
        return {"grad_norm": norm}

    def step(self, is_made: bool) -> None:
        if not is_made:
            return
        self.n_steps += 1
        if self.reached and len(self.reached) != self.n_decayed:
            self._leave_out()
        self.adam.step(self.n_steps, self.scale, *self.options())

    def options(self) -> tuple[float, ...]:
        """:return: Learning rate, both betas, epsilon and weight decay"""
        group = self.group
        return float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]

    def _leave_out(self) -> None:
        """Step only the parameters that a loss reaches."""
        assert self.reached is not None
        pairs = zip(self.rows, self.memory.pairs, strict=True)
        self.adam = extension.module.Adam([row for row, (parameter, _) in pairs if parameter in self.reached])
        self.n_decayed = len(self.reached)

    def show_gradients(self) -> None:
        self.memory.show()

    def close(self) -> None:
        """Update the step counts in the state of torch's optimiser."""
        if self.reached is not None:
            self.reached.close()
        for state in self.states:
            state["step"].fill_(self.n_steps)


def can_fuse_steps(policy: ActorCriticPolicy, memory: GradientMemory, config: UpdateConfig) -> bool:
    """
    :param policy: Policy that is updated
    :param memory: Trainable parameters of the policy, with their gradients
    :param config: Options of the update
    :return: Whether the extension module can make the steps of the policy's optimiser
    """
    # A fused step updates all parameters, so that it cannot leave out those of a frozen actor.
    return config.max_clip_fraction is None and FusedAdamStepper.takes(policy.optimizer, memory)


def adam_states(optimizer: th.optim.Optimizer, parameters: Sequence[th.Tensor]) -> list[StateDict]:
    """
    :param optimizer: Adam or AdamW of torch
    :param parameters: Parameters of the optimiser
    :return: State of each parameter, as torch makes it at the first step
    """
    for parameter in parameters:
        if not optimizer.state[parameter]:
            zeros = {name: th.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": th.tensor(0.0), **zeros}
    return [optimizer.state[parameter] for parameter in parameters]


def is_plain_adam(optimizer: th.optim.Optimizer, n_learned: int, *variants: str) -> bool:
    """
    :param optimizer: Adam or AdamW of torch
    :param n_learned: Number of trainable parameters
    :param variants: Further options that the caller does not know
    :return: Whether nothing but the formula of Adam is in its steps, all parameters have made equally many, and the host knows
        how many
    """
    own = (parameter for group in optimizer.param_groups for parameter in group["params"] if parameter in optimizer.state)
    counts = [optimizer.state[parameter].get("step") for parameter in own]
    if not all(isinstance(count, th.Tensor) and count.device.type == "cpu" for count in counts):
        return False
    is_whole = len(counts) in (0, n_learned) and len({float(count) for count in counts}) <= 1
    unknown = ("amsgrad", "maximize", "capturable", "differentiable", *variants)
    return (
        is_whole
        and not any(group.get(name) for group in optimizer.param_groups for name in unknown)
        and not has_own_steps(optimizer)
    )


def has_own_steps(optimizer: th.optim.Optimizer) -> bool:
    """
    :param optimizer: Optimiser of torch
    :return: Whether more than its own formula is in its steps
    """
    # Learning rate schedulers, among others, replace `step` of the instance.
    replaced = replaced_method(("step", "zero_grad"), optimizer)
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks, replaced))

"""Steps of the optimiser that are made or left out by a decision on the device, for which the host does not wait."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.engines.optimizer_steps import GradientMemory, Reached, adam_states, is_plain_adam
from sb3_ppo_ext.update.loop import Stepper
from sb3_ppo_ext.update.optimizers import clip_gradients, critic_parameters


class MaskedStepper(Stepper):
    """
    Steps of any optimiser of torch: parameters and state are set back where a step is to be left out.

    :param policy: Policy with the optimiser
    :param can_freeze: Whether the actor may be frozen while the critic keeps learning
    """

    is_on_device = True

    def __init__(self, policy: ActorCriticPolicy, can_freeze: bool = False):
        self.policy, self.optimizer = policy, policy.optimizer
        self.learned = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        # All gradients in one tensor, so that one operation sets them to 0 or tests them
        self.gradients = th.cat([th.zeros_like(parameter).flatten() for parameter in self.learned])
        parts = self.gradients.split([parameter.numel() for parameter in self.learned])
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, self.learned, strict=True)]
        self.memory = GradientMemory(list(zip(self.learned, self.views, strict=True)))
        self.bad_gradients: th.Tensor | None = None
        of_critic = critic_parameters(policy) if can_freeze else set()
        self.of_actor = [parameter not in of_critic for parameter in self.learned]
        self.frozen: th.Tensor | None = None
        decays = any(group.get("weight_decay") for group in self.optimizer.param_groups)
        self.reached = Reached(self.learned) if decays else None

    def zero_grad(self) -> None:
        self.gradients.zero_()
        self.memory.show()

    def freeze_actor(self, is_frozen: th.Tensor) -> None:
        self.frozen = is_frozen
        of_actor = [view for view, is_actor in zip(self.views, self.of_actor, strict=True) if is_actor]
        th._foreach_mul_(of_actor, (~is_frozen).float())

    def clip(self, max_norm: float) -> dict[str, th.Tensor]:
        return clip_gradients(self.policy, max_norm)

    def unscale(self, scale: th.Tensor) -> None:
        """
        :param scale: Factor by which the loss was multiplied, a scalar
        """
        self.gradients.div_(scale)

    def keep_bad_gradients(self, are_bad: th.Tensor) -> None:
        """
        Keep the gradients for a message.

        :param are_bad: Whether these are the first gradients of the update that are not finite, a scalar
        """
        before = self.gradients if self.bad_gradients is None else self.bad_gradients
        self.bad_gradients = th.where(are_bad, self.gradients, before)

    def show_gradients(self) -> None:
        """Set ``grad`` of the parameters to the gradients that were kept."""
        assert self.bad_gradients is not None
        self.gradients.copy_(self.bad_gradients)
        self.memory.show()

    def step(self, is_made: th.Tensor) -> None:
        self.gradients.copy_(th.where(is_made, self.gradients, 0.0))
        before = {id(tensor): tensor.clone() for tensor, _ in self._tensors()}
        for parameter in self.learned:
            if self.reached is not None and parameter not in self.reached:
                parameter.grad = None
        self.optimizer.step()
        kept = is_made if self.frozen is None else is_made & ~self.frozen
        for tensor, is_actor in self._tensors():
            old = before.get(id(tensor))
            tensor.data.copy_(th.where(kept if is_actor else is_made, tensor, 0.0 if old is None else old))

    def close(self) -> None:
        if self.reached is not None:
            self.reached.close()

    def _tensors(self) -> list[tuple[th.Tensor, bool]]:
        """Parameters and their state on the device, and whether they belong to what may be frozen."""
        tensors: list[tuple[th.Tensor, bool]] = []
        for parameter, is_actor in zip(self.learned, self.of_actor, strict=True):
            state = self.optimizer.state.get(parameter, {}).values()
            on_device = (value for value in state if isinstance(value, th.Tensor) and value.device == parameter.device)
            tensors += [(tensor, is_actor) for tensor in (parameter, *on_device)]
        return tensors

    def correct_counts(self, n_left_out: int, n_frozen: int) -> None:
        """
        Correct the counts of steps that the optimiser keeps on the host.

        :param n_left_out: Number of steps of the update that were left out
        :param n_frozen: Number of other steps in which the actor was frozen
        """
        for parameter, is_actor in zip(self.learned, self.of_actor, strict=True):
            count = self.optimizer.state.get(parameter, {}).get("step")
            if isinstance(count, th.Tensor) and count.device != parameter.device:
                count -= n_left_out + (n_frozen if is_actor else 0)


class AdamGroup(NamedTuple):
    """A parameter group of Adam: its options, parameters, gradients, and averages of the gradients and of their squares."""

    options: Kwargs
    learned: list[th.Tensor]
    gradients: list[th.Tensor]
    means: list[th.Tensor]
    squares: list[th.Tensor]


class MaskedAdamStepper(MaskedStepper):
    """
    Steps of Adam or AdamW on the state of torch's optimiser, in few operations on all parameters of a group.

    Paper: https://arxiv.org/abs/1412.6980

    :param policy: Policy with an optimiser that :meth:`takes` accepts
    """

    def __init__(self, policy: ActorCriticPolicy):
        super().__init__(policy)
        states = dict(zip(self.learned, adam_states(self.optimizer, self.learned), strict=True))
        self.n_before = float(states[self.learned[0]]["step"])
        self.n_steps = 0
        self.count = th.full((), self.n_before, device=policy.device)
        views = dict(zip(self.learned, self.views, strict=True))
        self.groups: list[AdamGroup] = []
        for group in self.optimizer.param_groups:
            learned = [parameter for parameter in group["params"] if parameter in views]
            means, squares = ([states[parameter][name] for parameter in learned] for name in ("exp_avg", "exp_avg_sq"))
            if learned:
                self.groups.append(AdamGroup(group, [*learned], [views[parameter] for parameter in learned], means, squares))

    @staticmethod
    def takes(policy: ActorCriticPolicy) -> bool:
        """
        :param policy: Policy with an optimiser
        :return: Whether the optimiser is an Adam or AdamW that this class can replace
        """
        optimizer = policy.optimizer
        if type(optimizer) not in (th.optim.Adam, th.optim.AdamW):
            return False
        in_groups = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        learned = {parameter for parameter in policy.parameters() if parameter.requires_grad}
        return learned <= in_groups and is_plain_adam(optimizer, len(learned), "fused")

    @th.no_grad()
    def step(self, is_made: th.Tensor) -> None:
        self.n_steps += 1
        self.gradients.copy_(th.where(is_made, self.gradients, 0.0))
        made = is_made.float()
        self.count += made
        for group in self.groups:
            self._step_group(group, made)

    def _step_group(self, group: AdamGroup, made: th.Tensor) -> None:
        options, learned, gradients, means, squares = group
        (beta1, beta2), lr, decay = options["betas"], float(options["lr"]), options["weight_decay"]
        if decay:
            self._decay(group, lr, decay, made)
        _average(means, gradients, beta1, made)
        _average(squares, list(th._foreach_mul(gradients, gradients)), beta2, made)
        n = self.count.clamp(min=1.0)
        # `1 - beta^n` without cancellation
        of_mean, of_square = (-th.expm1(n * math.log(beta)) if beta > 0 else th.ones_like(n) for beta in (beta1, beta2))
        roots = list(th._foreach_sqrt(squares))
        th._foreach_mul_(roots, of_square.rsqrt())
        th._foreach_add_(roots, options["eps"])
        steps = list(th._foreach_div(means, roots))
        th._foreach_mul_(steps, made * (-lr / of_mean))
        th._foreach_add_(learned, steps)

    def _decay(self, group: AdamGroup, lr: float, decay: float, made: th.Tensor) -> None:
        pairs = zip(group.learned, group.gradients, strict=True)
        reached = [pair for pair in pairs if self.reached is None or pair[0] in self.reached]
        decayed, gradients = [parameter for parameter, _ in reached], [gradient for _, gradient in reached]
        if type(self.optimizer) is th.optim.AdamW or group.options.get("decoupled_weight_decay"):
            th._foreach_mul_(decayed, 1.0 - lr * decay * made)
        else:
            th._foreach_add_(gradients, list(th._foreach_mul(decayed, decay * made)))

    def correct_counts(self, n_left_out: int, n_frozen: int) -> None:
        """Update the counts in the state of torch's optimiser. This class does not freeze the actor."""
        for parameter in self.learned:
            self.optimizer.state[parameter]["step"].fill_(self.n_before + self.n_steps - n_left_out)


def _average(averages: list[th.Tensor], values: list[th.Tensor], beta: float, made: th.Tensor) -> None:
    """Exponential moving average; where no step is made, the values are 0 and the averages stay the same."""
    th._foreach_mul_(averages, 1.0 - (1.0 - beta) * made)
    th._foreach_add_(averages, values, alpha=1.0 - beta)


def make_masked_stepper(policy: ActorCriticPolicy, can_freeze: bool) -> MaskedStepper:
    """
    :param policy: Policy that is updated
    :param can_freeze: Whether the actor may be frozen
    :return: The fastest stepper for the policy's optimiser
    """
    if not can_freeze and MaskedAdamStepper.takes(policy):
        return MaskedAdamStepper(policy)
    return MaskedStepper(policy, can_freeze)

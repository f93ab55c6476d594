"""An update whose networks are PyTorch's, and whose steps of Adam the extension module makes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch as th
from torch import nn

from sb3_ppo_ext.common.observations import in_channels_last, map_observations
from sb3_ppo_ext.engines.native.policy import _mlp
from sb3_ppo_ext.update.minibatches import Minibatch
from sb3_ppo_ext.update.update import Update


class NativeAdam:
    """
    Steps of torch's Adam, on its own state.

    :param optimizer: One that :meth:`takes` accepts
    :param parameters: Those that it optimises, with their gradients
    """

    def __init__(self, optimizer: th.optim.Optimizer, parameters: list[tuple[nn.Parameter, th.Tensor]]):
        (self.group,) = optimizer.param_groups
        for parameter, _ in parameters:
            if not optimizer.state[parameter]:
                zeros = {name: th.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": th.tensor(0.0), **zeros}
        self.states = [optimizer.state[parameter] for parameter, _ in parameters]
        self.n_steps = int(self.states[0]["step"])
        self.adam = _mlp.Adam(
            [
                (parameter.detach().numpy(), gradient.numpy(), state["exp_avg"].numpy(), state["exp_avg_sq"].numpy())
                for (parameter, gradient), state in zip(parameters, self.states, strict=True)
            ]
        )

    @staticmethod
    def takes(optimizer: th.optim.Optimizer) -> bool:
        """
        :param optimizer: Of a policy
        :return: Whether it is an Adam whose steps this can make
        """
        if type(optimizer) is not th.optim.Adam or len(optimizer.param_groups) != 1:
            return False
        group = optimizer.param_groups[0]
        if _mlp is None or not all(
            p.device.type == "cpu" and p.dtype == th.float32 and p.is_contiguous() for p in group["params"]
        ):
            return False
        variants = ("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay")
        # Learning rate schedulers and others put a `step` of their own into the instance.
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, "step" in vars(optimizer))
        steps = {float(state["step"]) for state in optimizer.state.values()}
        whole = len(steps) <= 1 and len(optimizer.state) in (0, sum(p.requires_grad for p in group["params"]))
        return whole and not any(group.get(name) for name in variants) and not any(hooks)

    def norm(self) -> float:
        """:return: Of all gradients"""
        return float(self.adam.norm())

    def step(self, scale: float = 1.0) -> None:
        """
        :param scale: What the gradients are multiplied by
        """
        self.n_steps += 1
        group = self.group
        self.adam.step(self.n_steps, scale, float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"])

    def close(self) -> None:
        """Tell torch's optimiser how many steps it has made."""
        for state in self.states:
            state["step"].fill_(self.n_steps)


class FusedUpdate(Update):
    """
    An update whose networks are PyTorch's; norm, clipping and Adam are not.

    :param model: A ``PPOExt`` with a full rollout buffer, whose policy is on the CPU, in float32
    """

    def __init__(self, model: Any):
        super().__init__(model)
        self.gradients = list(self._make_gradients())
        # Of an actor at rest the optimiser must leave out some parameters.
        takes = model.max_clip_fraction is None and NativeAdam.takes(self.policy.optimizer)
        self.adam = NativeAdam(self.policy.optimizer, self.gradients) if takes else None
        self.scale = 1.0

    def _make_gradients(self) -> Iterator[tuple[nn.Parameter, th.Tensor]]:
        """Each parameter that is learned, with the memory of its gradient."""
        for parameter in self.policy.parameters():
            if parameter.requires_grad:
                yield parameter, th.zeros_like(parameter)

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self.adam is not None:
                self.adam.close()

    def _gather(self, indices: np.ndarray) -> Minibatch:
        minibatch = super()._gather(indices)
        data: Any = minibatch.data
        return minibatch._replace(data=data._replace(observations=map_observations(in_channels_last, data.observations)))

    def _zero_gradients(self) -> None:
        if self.adam is None:
            super()._zero_gradients()
        else:
            self._zero_own_gradients()

    def _zero_own_gradients(self) -> None:
        th._foreach_zero_([gradient for _, gradient in self.gradients])
        self._show_gradients()

    def _show_gradients(self) -> None:
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    def _clip(self) -> dict[str, th.Tensor]:
        if self.adam is None:
            return super()._clip()
        norm = self.adam.norm()
        self.scale = min(self.model.max_grad_norm / (norm + 1e-6), 1.0)
        return {"grad_norm": th.tensor(norm, dtype=th.float32)}

    def _step_optimizer(self) -> None:
        if self.adam is None:
            super()._step_optimizer()
        else:
            self.adam.step(self.scale)

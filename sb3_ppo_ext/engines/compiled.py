"""An update whose loss and gradient `torch.compile` has made one function of."""

import itertools
import warnings
from collections.abc import Callable
from copy import copy
from types import FunctionType
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import MultiCategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from torch import nn
from torch.func import functional_call, grad_and_value

from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.engines.fused import FusedUpdate
from sb3_ppo_ext.update.minibatches import Minibatch

# What may change from update to update: as numbers, each value would be compiled anew.
COEFFICIENTS = ("clip_range", "clip_range_vf", "ent_coef", "vf_coef", "kl_coef", "bounds_coef")
# Names and values of all scalars, and what else is measured
Measured = tuple[tuple[str, ...], th.Tensor, dict[str, th.Tensor]]


class CompiledLoss:
    """
    The loss of a policy and its gradient, compiled when they are first asked for. It lives as long as the policy does.

    :param policy: Of a model
    """

    def __init__(self, policy: Any):
        self.policy = policy
        self.module = _LossModule(policy)
        # On a GPU all kernels are launched as one graph, whose outputs lie where those of the run before did.
        self.reuses_memory = policy.device.type == "cuda"
        options: Any = {"triton.cudagraphs": True} if self.reuses_memory else None
        # `None` once torch has found that it cannot
        self.differentiate: Any = th.compile(_own(_loss_and_gradients), fullgraph=True, options=options)
        # Of observations for which nothing is left to do; `None` if the policy preprocesses in its own way
        self.preprocessed_space = _preprocessed(policy.observation_space) if _preprocesses_as_sb3(policy) else None
        if isinstance(policy.action_dist, MultiCategoricalDistribution):
            # NumPy's integers cannot be traced.
            policy.action_dist.action_dims = [int(n) for n in policy.action_dist.action_dims]

    def __reduce__(self) -> Any:
        # A copy of a model compiles its own.
        return type(None), ()


class CompiledUpdate(FusedUpdate):
    """
    An update whose loss and gradient :class:`CompiledLoss` computes. The rest is as in ``FusedUpdate``, or PyTorch's where the
    extension module is missing or the policy is not on the CPU.

    :param model: A ``PPOExt`` with a full rollout buffer
    :param compiled: The loss of its policy
    """

    def __init__(self, model: Any, compiled: CompiledLoss):
        super().__init__(model)
        self.compiled = compiled
        # Those of a minibatch for `traced`, preprocessed before, for SB3 asks NumPy how to, which cannot be traced
        self.observations: Any = None
        # What the compiled functions see of this: its coefficients are tensors.
        self.traced = copy(self)
        for name in COEFFICIENTS:
            if (value := getattr(self, name)) is not None:
                setattr(self.traced, name, th.tensor(value, dtype=th.float32, device=model.device))

    def _zero_gradients(self) -> None:
        if self.adam is None:
            super()._zero_gradients()  # of what was learned before, and is frozen now
        self._zero_own_gradients()

    def _add_gradient(self, minibatch: Minibatch, share: float) -> None:
        if self.compiled.differentiate is not None:
            try:
                return self._add_compiled_gradient(minibatch, share)
            except _compiler_errors() as error:
                self._give_up(error)
        super()._add_gradient(minibatch, share)

    def _give_up(self, error: Exception) -> None:
        """Nothing has been changed yet."""
        from torch._inductor.exc import InductorError

        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        if isinstance(error, InductorError):
            refuse("backend", "compile", f'the compiler has failed, give "auto" ({reason})')
        self.compiled.differentiate = None
        warnings.warn(f'`backend="compile"`: torch cannot trace the loss, which stays eager ({reason})', stacklevel=2)

    def _add_compiled_gradient(self, minibatch: Minibatch, share: float) -> None:
        if self.compiled.reuses_memory:
            th.compiler.cudagraph_mark_step_begin()
        if self.compiled.preprocessed_space is not None:
            policy, observations = self.policy, minibatch.data.observations
            self.traced.observations = preprocess_obs(observations, policy.observation_space, policy.normalize_images)
        with th.no_grad():
            gradients, measured = self.compiled.differentiate(self.compiled.module, self.traced, minibatch)
            th._foreach_add_([gradient for _, gradient in self.gradients], gradients, alpha=share)
        self._keep(measured)

    def _evaluate_actions(self, data: RolloutBufferSamples) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        if self.observations is None:
            return super()._evaluate_actions(data)
        policy = self.policy
        before = policy.observation_space, policy.normalize_images
        policy.observation_space, policy.normalize_images = self.compiled.preprocessed_space, False
        results = policy.evaluate_actions(self.observations, self._actions(data))
        policy.observation_space, policy.normalize_images = before
        return results

    def _keep(self, measured: Measured) -> None:
        names, scalars, vectors = measured
        if self.compiled.reuses_memory:
            scalars, vectors = scalars.clone(), {name: vector.clone() for name, vector in vectors.items()}
        self.metrics.add(dict(zip(names, scalars.unbind(), strict=True)) | vectors)


# What is compiled


class _LossModule(nn.Module):
    """The loss as a module, so that other tensors can stand for the policy's parameters."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy = policy
        # Where each parameter is used, and its name: a module may have several names, a parameter several modules.
        first: dict[nn.Parameter, str] = {}
        places = ((f"{of}.{name}", p) for of, part in self.named_modules() for name, p in part._parameters.items())
        self.names = {place: first.setdefault(parameter, place) for place, parameter in places if parameter is not None}

    def forward(self, update: CompiledUpdate, minibatch: Minibatch) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        # Nothing of this evaluation may be left in the policy: its tensors mean nothing outside.
        distribution = self.policy.action_dist
        self.policy.action_dist = copy(distribution)
        results = update._measured_loss(minibatch)
        self.policy.action_dist = distribution
        return results


def _loss_and_gradients(module: _LossModule, update: CompiledUpdate, minibatch: Minibatch) -> tuple[list[th.Tensor], Measured]:
    learned: dict[str, th.Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, th.Tensor]) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        everywhere = {place: parameters[name] for place, name in module.names.items() if name in parameters}
        return functional_call(module, everywhere, (update, minibatch), tie_weights=False)

    gradients, (_, measured) = grad_and_value(loss, has_aux=True)(learned)
    return list(gradients.values()), _split(measured)


def _preprocesses_as_sb3(policy: Any) -> bool:
    names = ("evaluate_actions", "extract_features")
    return all(getattr(type(policy), name) is getattr(ActorCriticPolicy, name) and name not in vars(policy) for name in names)


def _preprocessed(space: spaces.Space) -> spaces.Space:
    """A space of plain vectors in the place of each part, for the shape plays no role."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _preprocessed(part) for key, part in space.spaces.items()})
    return spaces.Box(-1.0, 1.0)


def _split(measured: dict[str, th.Tensor]) -> Measured:
    """All scalars together, for each tensor that a compiled function returns takes its time."""
    scalars = {name: value.float() for name, value in measured.items() if value.ndim == 0}
    vectors = {name: value for name, value in measured.items() if value.ndim > 0}
    return tuple(scalars), th.stack(list(scalars.values())), vectors


def _own(function: Callable) -> Callable:
    """The function with code and name of its own: torch keeps what it has compiled with the one, and what it knows of shapes
    with the other, and would count the variants of all models together."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return FunctionType(code, function.__globals__)


_numbers = itertools.count()


def _compiler_errors() -> tuple[type[Exception], ...]:
    """Looked up late, for the compiler takes a second to be imported."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit

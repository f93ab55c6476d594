"""The loss and its gradient, and acting, compiled by ``torch.compile``, for ``backend="compile"``."""

from __future__ import annotations

import itertools
import subprocess
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
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn
from torch.func import functional_call, grad_and_value

from sb3_ppo_ext.common.guards import without_validation
from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.user_code import has_method_of
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.engines.autograd_gradients import BackwardLoss
from sb3_ppo_ext.engines.engine import has_gradient_hooks
from sb3_ppo_ext.engines.optimizer_steps import GradientMemory
from sb3_ppo_ext.memory.policies import TransformerPolicyMixin
from sb3_ppo_ext.memory.windows import Sequences
from sb3_ppo_ext.policies.actor_critic import ActionDistributionMixin, evaluator
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.extra_loss import PolicyView
from sb3_ppo_ext.update.losses import LossConfig
from sb3_ppo_ext.update.minibatch_loss import ExtraActorLoss, evaluate, ppo_loss
from sb3_ppo_ext.update.minibatches import Minibatch

# Names of the scalar metrics, their values in one tensor, and all other metrics by name
Measured = tuple[tuple[str, ...], th.Tensor, dict[str, th.Tensor]]


def compiler_is_missing(policy: ActorCriticPolicy) -> str | None:
    """
    :param policy: Policy to compile
    :return: Reason why it cannot be compiled, ``None`` if it can
    """
    # These imports take seconds, so they are not at the top.
    from torch._dynamo import OptimizedModule, is_dynamo_supported
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._triton import has_triton

    if isinstance(policy, OptimizedModule):
        return "the policy is in the wrapper of `torch.compile`, and this backend compiles it itself"
    if any(map(has_gradient_hooks, policy.parameters())):
        return "parameters of the policy have hooks, which this backend would not call"
    if not is_dynamo_supported():
        return "`torch.compile` does not support this platform"
    if policy.device.type == "cuda":
        return None if has_triton() else f"{policy.device} has no Triton, which `torch.compile` needs there"
    try:
        get_cpp_compiler()
    except RuntimeError as error:
        return f"`torch.compile` needs a C++ compiler ({str(error).splitlines()[0]})"
    return None


class CompiledLoss:
    """
    The loss of a policy and its gradient, compiled at the first call. It is kept as long as the policy is.

    :param policy: Policy that is updated
    """

    def __init__(self, policy: ActorCriticPolicy):
        self.policy = policy
        self.module = _LossModule(policy)
        # On a GPU, all kernels are launched as one CUDA graph, which overwrites the outputs of its previous run.
        self.reuses_memory = policy.device.type == "cuda"
        options: Any = {"triton.cudagraphs": True} if self.reuses_memory else None
        # `None` after torch has failed to trace the loss
        with without_validation():
            self.differentiate: Any = th.compile(_own(_loss_and_gradients), fullgraph=True, options=options)
        # Space of preprocessed observations, which need no more preprocessing; `None` if the policy overrides preprocessing
        is_known = _preprocesses_as_sb3(policy, TransformerPolicyMixin)
        self.preprocessed_space = _preprocessed(policy.observation_space) if is_known else None
        if isinstance(policy.action_dist, MultiCategoricalDistribution):
            # NumPy integers cannot be traced.
            policy.action_dist.action_dims = [int(n) for n in policy.action_dist.action_dims]


class CompiledAct:
    """
    ``forward`` of a policy, compiled at the first call. If torch fails to trace it, it stays eager, with a warning.

    :param policy: Policy that acts
    """

    def __init__(self, policy: ActorCriticPolicy):
        self.policy = policy
        self.reuses_memory = policy.device.type == "cuda"
        options: Any = {"triton.cudagraphs": True} if self.reuses_memory else None
        # `None` if torch cannot trace it, or the policy overrides the preprocessing, which uses NumPy
        self.forward: Any = None
        if _preprocesses_as_sb3(policy):
            self.space = _preprocessed(policy.observation_space)
            with without_validation():
                self.forward = th.compile(_own(_act), fullgraph=True, options=options)

    def __call__(self, observations: Arrays) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        :param observations: Observations on the device, shape ``(n_envs, *obs_shape)``
        :return: Actions, values and log probabilities
        """
        policy = self.policy
        if self.forward is None:
            return self.policy.forward(observations)
        if self.reuses_memory:
            th.compiler.cudagraph_mark_step_begin()
        preprocessed = _preprocess(policy, observations)
        try:
            with without_validation():
                outputs = self.forward(policy, preprocessed, self.space)
        except _compiler_errors() as error:
            reason, self.forward = _reason_not_to_compile(error), None
            warnings.warn(f'`backend="compile"`: torch cannot trace the policy, which acts eagerly ({reason})', stacklevel=2)
            return self.policy.forward(observations)
        actions, values, log_probs = (part.clone() for part in outputs) if self.reuses_memory else outputs
        return actions, values, log_probs


class CompiledBackward:
    """
    Adds the gradient of a minibatch with :class:`CompiledLoss`, or with autograd after torch has failed to trace the loss.

    :param compiled: Compiled loss of the policy
    :param config: Options of the update
    :param memory: Memory of the gradients
    """

    def __init__(self, compiled: CompiledLoss, config: UpdateConfig, memory: GradientMemory):
        self.compiled, self.config, self.memory = compiled, config, memory
        # With numbers as coefficients, each new value would trigger a recompilation.
        self.loss_config = config.loss.with_tensors(compiled.policy.device)
        self.eager = BackwardLoss(compiled.policy, config)

    def __call__(self, minibatch: Minibatch, share: float) -> dict[str, th.Tensor]:
        """
        :param minibatch: Minibatch of the rollout
        :param share: Fraction of the samples of the step in this minibatch, by which its gradient is scaled
        :return: Metrics by name
        """
        if self.compiled.differentiate is not None:
            try:
                with without_validation():
                    return self._add_compiled(minibatch, share)
            except _compiler_errors() as error:
                self._give_up(error)
        return self.eager(minibatch, share)

    def _give_up(self, error: Exception) -> None:
        """Fall back to autograd. No gradient has been added yet."""
        reason = _reason_not_to_compile(error)
        self.compiled.differentiate = None
        warnings.warn(f'`backend="compile"`: torch cannot trace the loss, which stays eager ({reason})', stacklevel=2)

    def _add_compiled(self, minibatch: Minibatch, share: float) -> dict[str, th.Tensor]:
        compiled, config = self.compiled, self.config
        if compiled.reuses_memory:
            th.compiler.cudagraph_mark_step_begin()
        preprocessed = None
        if compiled.preprocessed_space is not None:
            # Outside the compiled function, since SB3's preprocessing uses NumPy, which cannot be traced.
            policy = compiled.policy
            both = (minibatch.data.observations, minibatch.next_observations)
            preprocessed = (
                *(None if part is None else _preprocess(policy, part) for part in both),
                compiled.preprocessed_space,
            )
        with th.no_grad():
            gradients, measured = compiled.differentiate(
                compiled.module, self.loss_config, minibatch, preprocessed, config.discrete_actions, config.extra_actor_loss
            )
            th._foreach_add_(self.memory.gradients, gradients, alpha=share)
        return self._kept(measured)

    def _kept(self, measured: Measured) -> dict[str, th.Tensor]:
        names, scalars, vectors = measured
        if self.compiled.reuses_memory:
            scalars, vectors = scalars.clone(), {name: vector.clone() for name, vector in vectors.items()}
        return dict(zip(names, scalars.unbind(), strict=True)) | vectors


# Compiled functions


class _LossModule(nn.Module):
    """The loss as a module, so that ``functional_call`` can replace the parameters of the policy."""

    def __init__(self, policy: ActorCriticPolicy):
        super().__init__()
        self.policy = policy
        # Every path of each parameter -> its first path, since modules can be shared and have several paths.
        first: dict[nn.Parameter, str] = {}
        paths = ((f"{of}.{name}", p) for of, part in self.named_modules() for name, p in part._parameters.items())
        self.names = {path: first.setdefault(parameter, path) for path, parameter in paths if parameter is not None}

    def forward(
        self,
        config: LossConfig,
        minibatch: Minibatch,
        preprocessed: Arrays,
        discrete_actions: bool,
        extra: ExtraActorLoss | None,
    ) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        # Tensors of the traced evaluation must not be left in the policy, since they are not valid outside.
        distribution = self.policy.action_dist
        self.policy.action_dist = copy(distribution)
        view = None if preprocessed is None else self._of_preprocessed(minibatch.continues, *preprocessed)
        inputs = evaluate(self.policy, minibatch, discrete_actions, view)
        results = ppo_loss(inputs, config, extra)
        self.policy.action_dist = distribution
        return results

    def _of_preprocessed(
        self, continues: th.Tensor | None, observations: PyTorchObs, next_observations: PyTorchObs, space: spaces.Space[object]
    ) -> PolicyView:
        """The policy for preprocessed observations."""

        def of_preprocessed(function: Callable[..., Any], *arguments: Any) -> Arrays:
            policy = self.policy
            before = policy.observation_space, policy.normalize_images
            policy.observation_space, policy.normalize_images = space, False
            results = function(*arguments)
            policy.observation_space, policy.normalize_images = before
            return results

        return PolicyView(
            observations,
            next_observations,
            continues,
            lambda obs, actions: of_preprocessed(evaluator(self.policy), obs, actions),
            lambda obs: of_preprocessed(self.policy.get_distribution, obs),
        )


def _act(
    policy: ActorCriticPolicy, preprocessed: Arrays, space: spaces.Space[object]
) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
    """``forward`` of a policy for preprocessed observations."""
    distribution = policy.action_dist
    before = policy.observation_space, policy.normalize_images
    # Tensors that are traced must not be left in the policy, since they are not valid outside.
    policy.action_dist, policy.observation_space, policy.normalize_images = copy(distribution), space, False
    actions, values, log_probs = policy.forward(preprocessed)
    policy.action_dist = distribution
    policy.observation_space, policy.normalize_images = before
    return actions, values, log_probs


def _loss_and_gradients(module: _LossModule, *inputs: object) -> tuple[list[th.Tensor], Measured]:
    learned: dict[str, th.Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, th.Tensor]) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        everywhere = {path: parameters[name] for path, name in module.names.items() if name in parameters}
        results: tuple[th.Tensor, dict[str, th.Tensor]] = functional_call(module, everywhere, inputs, tie_weights=False)
        return results

    gradients, (_, measured) = grad_and_value(loss, has_aux=True)(learned)
    return list(gradients.values()), _split(measured)


def _preprocess(policy: ActorCriticPolicy, observations: Any) -> Any:
    """Preprocessed observations, or sequences of them."""
    if isinstance(observations, Sequences):
        flat = map_observations(lambda part: part.flatten(0, 1), observations.observations)
        shape = observations.episodes.shape
        parts = map_observations(lambda part: part.unflatten(0, shape), _preprocess(policy, flat))
        return observations._replace(observations=parts)
    return preprocess_obs(observations, policy.observation_space, policy.normalize_images)


def _preprocesses_as_sb3(policy: ActorCriticPolicy, *further: type) -> bool:
    known = (ActorCriticPolicy, ActionDistributionMixin, *further)
    return all(has_method_of(policy, name, *known) for name in ("evaluate_actions", "extract_features"))


def _preprocessed(space: spaces.Space[object]) -> spaces.Space[object]:
    """Space of vectors that need no preprocessing, also for each key of a dictionary. Shapes do not matter."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _preprocessed(part) for key, part in space.spaces.items()})
    return spaces.Box(-1.0, 1.0)


def _split(measured: dict[str, th.Tensor]) -> Measured:
    """Stack all scalars, since each tensor that a compiled function returns costs time."""
    scalars = {name: value.float() for name, value in measured.items() if value.ndim == 0}
    vectors = {name: value for name, value in measured.items() if value.ndim > 0}
    return tuple(scalars), th.stack(list(scalars.values())), vectors


def _own(function: Callable[..., object]) -> Callable[..., Any]:
    """
    Copy of the function with its own code object and name. Torch caches compiled code by code object and dynamic shapes by
    name; with a shared function, the variants of all models would count towards one recompilation limit.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return FunctionType(code, function.__globals__)


_numbers = itertools.count()


def _compiler_errors() -> tuple[type[Exception], ...]:
    """What tracing and compiling raise, and the first launch of a kernel: a missing program, or a disk that is full."""
    return *_errors_of_dynamo(), OSError, subprocess.SubprocessError


def _errors_of_dynamo() -> tuple[type[Exception], ...]:
    """Imported late, since importing the compiler takes a second."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def _reason_not_to_compile(error: Exception) -> str:
    """
    The reason why a function cannot be traced, which then runs eagerly.

    :raises ValueError: if it was traced and the compiler has failed, which something on the machine has caused
    """
    from torch._dynamo.exc import BackendCompilerFailed

    reason = _described(_innermost(error))
    if isinstance(error, BackendCompilerFailed) or not isinstance(error, _errors_of_dynamo()):
        refuse("backend", "compile", f'the compiler has failed ({reason}); give "auto", which does without it')
    return reason


def _innermost(error: BaseException) -> BaseException:
    """The error that has caused all others."""
    seen = {id(error)}
    while (cause := getattr(error, "inner_exception", None) or error.__cause__) is not None and id(cause) not in seen:
        error = cause
        seen.add(id(error))
    return error


def _described(error: BaseException) -> str:
    """First line of an error, and the first one in the output of a compiler that says more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_compiler = [line for line in lines[1:] if "error" in line.lower()]
    return f"{type(error).__name__}: " + ": ".join([*lines[:1], *of_compiler[:1]])

"""
Guards against environment data that cannot be used, and against NaN and infinity in policy outputs and gradients: the error
says where the value was found, and the model is left unchanged.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from typing import Any, NoReturn

import numpy as np
import torch as th
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize
from torch import nn

from sb3_ppo_ext.common.reward_errors import describe_bad_reward
from sb3_ppo_ext.common.workers import WorkerError, raise_if_worker_died, worker_deaths_noticed

# Numbers with a smaller square are finite in float32, which policies and buffers compute with.
_SQUARE_IN_FLOAT32 = 1e76
# Discrete action of a policy on a GPU whose outputs are not finite
NO_ACTION = -1


class EnvironmentDataError(ValueError):
    """The environment returned data of another type or shape than a vectorised environment does."""


class NonFiniteDataError(EnvironmentDataError):
    """The environment returned NaN or infinity, or a number beyond the range of float32."""


class NonFinitePolicyError(ValueError):
    """The policy outputs NaN or infinity."""


class NonFiniteGradientError(ValueError):
    """A loss or a gradient is NaN or infinite."""


def refuse_gradient(policy: th.nn.Module, terms: dict[str, float], epoch: int, num_timesteps: int) -> NoReturn:
    """
    Clear the gradients and raise an error that names the terms and parameters that are not finite.

    :param policy: Policy with gradients that are not finite
    :param terms: Terms of the loss, by name
    :param epoch: Epoch of the update, from 0
    :param num_timesteps: Number of timesteps trained so far
    :raises NonFiniteGradientError: always
    """
    bad = [name for name, p in policy.named_parameters() if p.grad is not None and not th.isfinite(p.grad).all()]
    of_norm = "none, but their norm overflows" if all(math.isfinite(value) for value in terms.values()) else "none"
    policy.zero_grad()
    raise NonFiniteGradientError(
        f"The loss or its gradient is not finite in epoch {epoch} of the update after {num_timesteps} timesteps. "
        f"Terms: {', '.join(f'{name} {value:.3g}' for name, value in terms.items())}. "
        f"Gradients that are not finite: {', '.join(bad) or of_norm}. This step was not made. "
        "Lower the learning rate or the scale of the rewards (`VecNormalize`), "
        'or give `bad_gradients="skip"` to leave such minibatches out.'
    )


def check_finite(model: OnPolicyAlgorithm, what: str, data: object, step: int, env_index: int | None = None) -> None:
    """
    Check that data returned by the environment are finite, also in float32, in which policies read them.

    :param model: Model that is trained in the environment
    :param what: Name of the data for the error message, such as ``"reward"``
    :param data: Array of shape ``(n_envs, ...)``, or a dictionary of such arrays; without the first dimension if
        ``env_index`` is given
    :param step: Step of the rollout
    :param env_index: Index of the environment that returned the data, ``None`` if the data are from all environments
    :raises NonFiniteDataError: if the data contain NaN, infinity or a number beyond the range of float32
    """
    if _is_surely_finite(data):
        return
    found = find_non_finite(data, batched=env_index is None)
    if found is None:
        return
    normalizers = find_normalizers(model.env)
    if env_index is None and normalizers:
        # The running mean has spread the NaN of one environment to all of them.
        innermost = normalizers[-1]
        original = innermost.get_original_reward() if what == "reward" else innermost.get_original_obs()
        found = find_non_finite(original) or found
    index, place = found
    raise NonFiniteDataError(
        f"Environment {index if env_index is None else env_index}: the {what} is not finite ({place}) "
        f"at step {step} of the rollout, after {model.num_timesteps} timesteps. Nothing was learned from this rollout. "
        "Check what the environment computes there; `stable_baselines3.common.vec_env.VecCheckNan` helps to find it."
    )


def check_outputs(policy: th.nn.Module, outputs: np.ndarray, step: int, num_timesteps: int) -> None:
    """
    Check that the outputs of the policy are finite.

    :param policy: Policy that computed the outputs
    :param outputs: Outputs of the last layer of the policy, shape ``(n_envs, n_outputs)``, or actions, shape
        ``(n_envs, *action_shape)``
    :param step: Step of the rollout
    :param num_timesteps: Number of timesteps trained so far
    :raises NonFinitePolicyError: if the outputs contain NaN or infinity
    """
    if not (_is_surely_finite(outputs) or _is_output(policy, outputs)):
        refuse_policy(policy, step, num_timesteps)


def check_predicted(policy: th.nn.Module, actions: np.ndarray) -> None:
    """
    Check the actions that a policy on a GPU predicts.

    :param policy: Policy that predicted the actions
    :param actions: Actions, shape ``(n_envs, *action_shape)``, or that of a single action
    :raises NonFinitePolicyError: if they contain NaN, infinity or :data:`NO_ACTION`
    """
    if not _is_output(policy, actions):
        raise NonFinitePolicyError(f"The outputs of the policy are not finite ({_why_not_finite(policy)}).")


def check_actions(actions: np.ndarray) -> None:
    """
    Check the numbers that a policy returns in place of actions, before they are converted.

    :param actions: Latents or vectors, any shape
    :raises NonFinitePolicyError: if they contain NaN or infinity
    """
    if not (_is_surely_finite(actions) or np.isfinite(actions).all()):
        raise NonFinitePolicyError(
            f"{np.sum(~np.isfinite(actions))} of {np.size(actions)} numbers in the policy's actions are not finite: check its "
            "observations and its parameters for NaN."
        )


def _is_output(policy: nn.Module, outputs: np.ndarray) -> bool:
    """Whether these are outputs of a policy, not what it returns instead because they are not finite."""
    if outputs.dtype.kind == "f":
        return bool(np.isfinite(outputs).all())
    distribution = getattr(policy, "action_dist", None)
    return not (getattr(distribution, "marks_actions", False) and bool((outputs == NO_ACTION).any()))


def refuse_policy(policy: th.nn.Module, step: int, num_timesteps: int) -> NoReturn:
    """
    Raise an error that names the parameters that are not finite.

    :param policy: Policy that cannot act
    :param step: Step of the rollout
    :param num_timesteps: Number of timesteps trained so far
    :raises NonFinitePolicyError: always
    """
    raise NonFinitePolicyError(
        f"The outputs of the policy are not finite at step {step} of the rollout, after {num_timesteps} timesteps "
        f"({_why_not_finite(policy)}). Nothing was learned from this rollout. Continue from an earlier checkpoint, with a "
        "lower learning rate."
    )


def _why_not_finite(policy: th.nn.Module) -> str:
    bad = [name for name, parameter in policy.named_parameters() if not th.isfinite(parameter).all()]
    if not bad:
        return "its parameters are finite, but too large or too small"
    return f"parameters that are not finite: {', '.join(bad)}"


def is_finite(data: np.ndarray) -> bool:
    """
    :param data: Array of shape ``(n_envs, ...)``
    :return: Whether all numbers are finite, also in float32
    """
    return _is_surely_finite(data) or find_non_finite(data) is None


def _is_surely_finite(data: object) -> bool:
    """Quick check of a float array, three times as fast as the full check, because it runs at every step."""
    if type(data) is not np.ndarray or data.dtype.kind != "f":
        return False
    return float(np.vdot(data, data)) < _SQUARE_IN_FLOAT32


@contextmanager
def reset_after_errors(model: OnPolicyAlgorithm) -> Iterator[None]:
    """
    After an error or Ctrl-C in a rollout whose environments are ahead of the model, or behind it: without a last observation,
    ``learn`` resets them.

    :param model: Model that collects the rollout
    """
    try:
        yield
    except BaseException:
        model._last_obs = None
        raise


@contextmanager
def restored_if_refused(model: OnPolicyAlgorithm, further_envs: Sequence[VecEnv] = ()) -> Iterator[None]:
    """
    Context manager that restores the model if one of the checks of a rollout fails.

    :param model: Model with the timestep counter, the episode statistics and the ``VecNormalize`` statistics to restore
    :param further_envs: Environments whose workers may die as well, such as those of an ``EvalCallback``
    :raises NonFinitePolicyError: if torch refuses the parameters of an action distribution
    :raises WorkerError: if a process of the environment has died
    """
    before = {name: copy(getattr(model, name)) for name in ("num_timesteps", "ep_info_buffer", "ep_success_buffer")}
    normalizers = normalizers_of(model)
    # `obs_rms` exists only with `norm_obs`.
    statistics = [{k: _copied(v) for k, v in vars(n).items() if k in ("obs_rms", "ret_rms")} for n in normalizers]
    try:
        with _errors_explained(model, [model.env, *further_envs]):
            yield
    except (EnvironmentDataError, NonFinitePolicyError, WorkerError):
        vars(model).update(before)
        for normalizer, values in zip(normalizers, statistics, strict=True):
            vars(normalizer).update(values)
        model.rollout_buffer.reset()
        # The environment cannot be rewound: without a last observation, `learn` resets it.
        model._last_obs = None
        raise


def _copied(statistics: Any) -> Any:
    """Copy of running statistics, on their device if they are tensors."""
    if isinstance(statistics, dict):
        return {key: _copied(part) for key, part in statistics.items()}
    return statistics.clone() if hasattr(statistics, "clone") else deepcopy(statistics)


@contextmanager
def _errors_explained(model: OnPolicyAlgorithm, envs: Sequence[VecEnv | None]) -> Iterator[None]:
    """Name the worker of a broken pipe, a reward that is no number, and parameters of a distribution that torch refuses."""
    try:
        with ExitStack() as stack:
            for env in envs:
                stack.enter_context(worker_deaths_noticed(env))
            yield
    except (EOFError, OSError) as error:
        for env in envs:
            raise_if_worker_died(env, error)
        raise
    except (TypeError, ValueError) as error:
        if not isinstance(error, EnvironmentDataError) and (wrong := describe_bad_reward(error)) is not None:
            raise EnvironmentDataError(wrong) from error
        # The message of `torch.distributions.Distribution.__init__`
        if not str(error).startswith("Expected parameter "):
            raise
        try:
            refuse_policy(model.policy, model.rollout_buffer.pos, model.num_timesteps)
        except NonFinitePolicyError as explanation:
            raise explanation from error


def find_normalizers(env: VecEnv | None) -> list[VecNormalize]:
    """
    :param env: Vectorised environment with its wrappers
    :return: All ``VecNormalize`` wrappers, from the outermost to the innermost
    """
    normalizers = []
    while isinstance(env, VecEnvWrapper):
        if isinstance(env, VecNormalize):
            normalizers.append(env)
        env = env.venv
    return normalizers


def normalizers_of(model: OnPolicyAlgorithm) -> list[Any]:
    """
    :param model: Model, with or without environments
    :return: What normalises for it and has running statistics: the ``VecNormalize`` wrappers of its environments, or the
        model's own, which has the same attributes
    """
    own = getattr(model, "normalizer", None)
    return [*([] if own is None else [own]), *find_normalizers(model.env)]


def normalized_parts(env: VecEnv | None) -> list[str]:
    """
    :param env: Vectorised environment with its wrappers
    :return: Keys of the observations that a ``VecNormalize`` normalises, ``[""]`` if they are no dictionaries
    """
    normalizers = [each for each in find_normalizers(env) if each.norm_obs]
    return sorted({key for each in normalizers for key in each.norm_obs_keys or [""]})


def find_non_finite(data: object, batched: bool = True) -> tuple[int, str] | None:
    """
    :param data: Array of shape ``(n_envs, ...)``, or a dictionary of such arrays
    :param batched: Whether the data have the first dimension, over environments
    :return: Index of the first environment with a value that is not finite in float32 and a description of the value and its
        position, ``None`` if all values are finite
    """
    if isinstance(data, dict):
        for key, part in data.items():
            if (found := find_non_finite(part, batched)) is not None:
                return found[0], f"{key!r}: {found[1]}"
        return None
    data = np.asarray(data) if batched else np.asarray(data)[np.newaxis]
    if data.dtype.kind != "f":
        return None
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(data.astype(np.float32))
    if is_finite.all():
        return None
    index = tuple(int(i) for i in np.argwhere(~is_finite)[0])
    place = f" at index {index[1:]}" if len(index) > 1 else ""
    beyond = ", beyond the range of float32" if np.isfinite(data[index]) else ""
    return index[0], f"{data[index]}{place}{beyond}"


@contextmanager
def without_validation() -> Iterator[None]:
    """
    Let distributions not check their parameters, which cannot be traced. ``torch.compile`` and, from PyTorch 2.15 on, the
    export to ONNX switch the checks off for the whole process, where other models need them.
    """
    before: bool = th.distributions.Distribution._validate_args
    th.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        th.distributions.Distribution.set_default_validate_args(before)

"""
What is done about NaN and infinity, from the environment or in a gradient: the place is named, and the model stays as it was.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any, NoReturn

import numpy as np
import torch as th
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize


class NonFiniteDataError(ValueError):
    """The environment returned NaN or infinity."""


class NonFinitePolicyError(ValueError):
    """The policy puts out NaN or infinity."""


class NonFiniteGradientError(ValueError):
    """A loss or a gradient is NaN or infinite."""


def refuse_gradient(policy: th.nn.Module, terms: dict[str, float], epoch: int, num_timesteps: int) -> NoReturn:
    """
    :param policy: Whose gradients are not finite; they are taken away
    :param terms: The terms of the loss by name
    :param epoch: Of the update
    :param num_timesteps: Of the training
    :raises NonFiniteGradientError: always
    """
    bad = [name for name, p in policy.named_parameters() if p.grad is not None and not th.isfinite(p.grad).all()]
    policy.zero_grad()
    raise NonFiniteGradientError(
        f"The loss or its gradient is not finite in epoch {epoch} of the update after {num_timesteps} timesteps. "
        f"Terms: {', '.join(f'{name} {value:.3g}' for name, value in terms.items())}. "
        f"Gradients that are not finite: {', '.join(bad) or 'none'}. This step was not made. "
        "Lower the learning rate or the scale of the rewards (`VecNormalize`), "
        'or give `bad_gradients="skip"` to leave such minibatches out.'
    )


def check_finite(model: OnPolicyAlgorithm, what: str, data: Any, step: int, env_index: int | None = None) -> None:
    """
    :param model: Whose environment it is
    :param what: What the data are, for the message
    :param data: Array of shape ``(n_envs, ...)`` or a dictionary of such; without the first dimension if ``env_index``
        is given
    :param step: Of the rollout
    :param env_index: The environment that they are from, if they are from one
    :raises NonFiniteDataError: if there is NaN or infinity
    """
    if _is_surely_finite(data):
        return
    found = find_non_finite(data, batched=env_index is None)
    if found is None:
        return
    normalizers = find_normalizers(model.env)
    if env_index is None and normalizers:
        # The running mean has carried the NaN of one environment into all of them.
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
    :param policy: The policy
    :param outputs: Outputs of its last layer, shape ``(n_envs, n_outputs)``
    :param step: Step of the rollout
    :param num_timesteps: Steps of the training so far
    :raises NonFinitePolicyError: if there is NaN or infinity
    """
    if _is_surely_finite(outputs) or np.isfinite(outputs).all():
        return
    bad = [name for name, parameter in policy.named_parameters() if not th.isfinite(parameter).all()]
    where = f"parameters that are not finite: {', '.join(bad)}" if bad else "its parameters are finite, but too large"
    raise NonFinitePolicyError(
        f"The outputs of the policy are not finite at step {step} of the rollout, after {num_timesteps} timesteps "
        f"({where}). Nothing was learned from this rollout. Go on from an earlier checkpoint, with a lower learning rate."
    )


def _is_surely_finite(data: Any) -> bool:
    """A test of a float array that takes a third of the time of the whole one, for it is made at each step."""
    if type(data) is not np.ndarray or data.dtype.kind != "f":
        return False
    flat = data.ravel()
    return math.isfinite(np.vdot(flat, flat))


@contextmanager
def restored_if_not_finite(model: OnPolicyAlgorithm) -> Iterator[None]:
    """
    Take back what the steps of the environment have changed if one of the checks above refuses what it sees.

    :param model: Whose timesteps, statistics of episodes and of ``VecNormalize`` are restored
    """
    before = {name: copy(getattr(model, name)) for name in ("num_timesteps", "ep_info_buffer", "ep_success_buffer")}
    normalizers = find_normalizers(model.env)
    # Without `norm_obs` there is no `obs_rms`.
    statistics = [{k: deepcopy(v) for k, v in vars(n).items() if k in ("obs_rms", "ret_rms")} for n in normalizers]
    try:
        yield
    except (NonFiniteDataError, NonFinitePolicyError):
        vars(model).update(before)
        for normalizer, values in zip(normalizers, statistics, strict=True):
            vars(normalizer).update(values)
        model.rollout_buffer.reset()
        # The environment has moved on: without an observation, `learn` resets it.
        model._last_obs = None
        raise


def find_normalizers(env: VecEnv | None) -> list[VecNormalize]:
    """
    :param env: With its wrappers
    :return: Every ``VecNormalize`` among them, from the outside in
    """
    normalizers = []
    while isinstance(env, VecEnvWrapper):
        if isinstance(env, VecNormalize):
            normalizers.append(env)
        env = env.venv
    return normalizers


def find_non_finite(data: Any, batched: bool = True) -> tuple[int, str] | None:
    """
    :param data: Array of shape ``(n_envs, ...)``, or a dictionary of such arrays
    :param batched: Whether the first dimension is there
    :return: The index of the first environment with NaN or infinity and a description of the place, ``None`` if all is
        finite
    """
    if isinstance(data, dict):
        for key, part in data.items():
            if (found := find_non_finite(part, batched)) is not None:
                return found[0], f"{key!r}: {found[1]}"
        return None
    data = np.asarray(data) if batched else np.asarray(data)[np.newaxis]
    if data.dtype.kind != "f" or np.isfinite(data).all():
        return None
    index = tuple(int(i) for i in np.argwhere(~np.isfinite(data))[0])
    place = f" at index {index[1:]}" if len(index) > 1 else ""
    return index[0], f"{data[index]}{place}"

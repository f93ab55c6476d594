"""
Rollouts on the extension module: in the loop only the action is computed, values and log probabilities of all steps follow at
once, for callbacks that might read them at each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.common.guards import check_finite, check_outputs
from sb3_ppo_ext.common.observations import stack
from sb3_ppo_ext.engines.native.policy import NativePolicy, _mlp

# Callbacks of these packages read no values and log probabilities.
KNOWN_PACKAGES = ("stable_baselines3", "sb3_contrib", "rl_zoo3", "sb3_ppo_ext")


def collect(
    model: Any, native: NativePolicy, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
) -> bool:
    """
    As ``collect_rollouts`` of SB3's on-policy algorithms; its random numbers are drawn for all steps at once.

    :param model: A ``PPOExt``
    :param native: Its policy
    :param env: The training environment
    :param callback: Called at each step, and at the beginning and end
    :param rollout_buffer: To fill
    :param n_rollout_steps: Per environment
    :return: False if the callback ended the rollout
    """
    model.policy.set_training_mode(False)
    rollout_buffer.reset()
    truncations: list[tuple[int, int, Any]] = []
    if model.use_sde:
        model.policy.reset_noise(env.num_envs)
    callback.on_rollout_start()
    native.has_changed()
    native.pack()
    noise = native.head.noise(n_rollout_steps, env.num_envs, native.actor.n_outputs)
    n_estimated = 0
    estimates = _reads_estimates(callback)
    is_discrete = isinstance(model.action_space, spaces.Discrete)
    # Callbacks find these under SB3's names.
    shared: dict[str, Any] = {"self": model, "env": env, "callback": callback, "rollout_buffer": rollout_buffer}
    shared["n_rollout_steps"] = n_rollout_steps

    for n_steps in range(n_rollout_steps):
        _resample_exploration(model, env.num_envs, n_steps)
        _write_observations(rollout_buffer, n_steps, model._last_obs)
        features = native.features(model._last_obs)
        if native.has_changed():
            # A callback has: the steps before have the estimates of the policy that took them.
            _estimate(model, native, rollout_buffer, slice(n_estimated, n_steps), truncations)
            n_estimated = n_steps
            native.pack()
            noise[n_steps:] = native.head.noise(n_rollout_steps - n_steps, env.num_envs, native.actor.n_outputs)
        outputs = native.actor(features)
        check_outputs(model, outputs, n_steps)
        samples = native.head.sample(outputs, noise[n_steps])
        if not is_discrete:
            samples = samples.reshape(env.num_envs, *model.action_space.shape)
        clipped_actions = model._actions_for_env(samples)
        actions = clipped_actions if model._samples_latents else samples
        if estimates:
            shared |= _estimates(model, native, features, samples)

        new_obs, rewards, dones, infos = env.step(clipped_actions)
        check_finite(model, "observation", new_obs, n_steps)
        check_finite(model, "reward", rewards, n_steps)
        model.num_timesteps += env.num_envs

        shared |= {"n_steps": n_steps, "actions": actions, "clipped_actions": clipped_actions, "new_obs": new_obs}
        shared |= {"rewards": rewards, "dones": dones, "infos": infos}
        callback.update_locals(shared)
        if not callback.on_step():
            return False

        model._update_info_buffer(infos, dones)
        rollout_buffer.actions[n_steps] = samples.reshape(env.num_envs, -1)
        rollout_buffer.rewards[n_steps] = rewards
        rollout_buffer.episode_starts[n_steps] = model._last_episode_starts
        if estimates:
            rollout_buffer.values[n_steps] = shared["values"].numpy().ravel()
            rollout_buffer.log_probs[n_steps] = shared["log_probs"].numpy()
        if dones.any():
            truncations += [(n_steps, *truncated) for truncated in model.truncated_episodes(dones, infos, n_steps)]
        rollout_buffer.pos += 1
        model._last_obs = new_obs
        model._last_episode_starts = dones

    rollout_buffer.full = True
    _estimate(model, native, rollout_buffer, slice(n_estimated, n_rollout_steps), truncations)
    last_values = _estimate_advantages(model, native, rollout_buffer)
    if is_discrete:
        shared["actions"] = actions.reshape(-1, 1)
    shared |= {"n_steps": n_rollout_steps, "values": th.from_numpy(last_values).reshape(-1, 1)}
    callback.update_locals(shared)
    callback.on_rollout_end()
    return True


def _resample_exploration(model: Any, n_envs: int, step: int) -> None:
    if model.use_sde and model.sde_sample_freq > 0 and step % model.sde_sample_freq == 0:
        model.policy.reset_noise(n_envs)


def _write_observations(buffer: RolloutBuffer, step: int, observations: Any) -> None:
    # Before the environment's step, for it may write the next ones into the same array.
    if isinstance(observations, dict):
        for key, array in observations.items():
            buffer.observations[key][step] = array.reshape(buffer.observations[key][step].shape)
    else:
        buffer.observations[step] = observations.reshape(buffer.observations[step].shape)


def _estimates(model: Any, native: NativePolicy, features: np.ndarray, samples: np.ndarray) -> dict[str, Any]:
    """Of one step, as SB3's policy returns them."""
    log_probs = native.head.log_prob(native.actor(features), samples.reshape(len(features), -1))
    return {
        "obs_tensor": obs_as_tensor(model._last_obs, model.device),
        "values": th.from_numpy(native.critic(features)),
        "log_probs": th.from_numpy(log_probs),
    }


def _estimate(
    model: Any, native: NativePolicy, buffer: RolloutBuffer, steps: slice, truncations: list[tuple[int, int, Any]]
) -> None:
    """Values and log probabilities of some steps, and what follows from the truncations among them, which are then done."""
    shape = buffer.rewards[steps].shape
    features = native.features(_joined(buffer.observations, steps))
    actions = buffer.actions[steps].reshape(len(features), -1).astype(np.float32, copy=False)
    buffer.values[steps] = native.critic(features).reshape(shape)
    buffer.log_probs[steps] = native.head.log_prob(native.actor(features), actions).reshape(shape)
    if truncations:
        _bootstrap(model, native, buffer, truncations)
        truncations.clear()


def _estimate_advantages(model: Any, native: NativePolicy, buffer: RolloutBuffer) -> np.ndarray:
    """
    And returns.

    :return: Values of the last observations, shape ``(n_envs,)``
    """
    last_values = native.critic(native.features(model._last_obs)).ravel()
    dones = np.asarray(model._last_episode_starts)
    if type(buffer).compute_returns_and_advantage is RolloutBuffer.compute_returns_and_advantage:
        arrays = (buffer.rewards, buffer.values, buffer.episode_starts, last_values, dones.astype(np.float32))
        _mlp.gae(*arrays, buffer.gamma, buffer.gae_lambda, buffer.advantages)
        buffer.returns = buffer.advantages + buffer.values
    else:
        buffer.compute_returns_and_advantage(last_values=th.from_numpy(last_values), dones=dones)
    return last_values


def _joined(observations: Any, steps: slice) -> Any:
    """Some steps, and environments, in one dimension."""
    if isinstance(observations, dict):
        return {key: _joined(array, steps) for key, array in observations.items()}
    return observations[steps].reshape(-1, *observations.shape[2:])


def _bootstrap(model: Any, native: NativePolicy, buffer: RolloutBuffer, truncations: list[tuple[int, int, Any]]) -> None:
    """See ``RolloutCollector._bootstrap_truncated``."""
    steps, environments, observations = zip(*truncations, strict=True)
    values = native.critic(native.features(stack(observations))).ravel()
    np.add.at(buffer.rewards, (list(steps), list(environments)), np.float32(model.gamma) * values)
    model.keep_truncations(steps, environments, observations, values.tolist())


def _reads_estimates(callback: BaseCallback) -> bool:
    """Whether a callback may read the values or log probabilities of a step: from its locals, or from the buffer."""
    if isinstance(callback, ConvertCallback):
        return callback.callback is not None  # a function, which gets the locals
    if any(_reads_estimates(child) for child in _children(callback)):
        return True
    own = [cls for cls in type(callback).__mro__ if cls.__module__.split(".")[0] not in (*KNOWN_PACKAGES, "builtins", "abc")]
    functions = (function for cls in own for value in vars(cls).values() for function in _functions(value))
    return any({"locals", "rollout_buffer"} & set(_names(function.__code__)) for function in functions)


def _children(callback: BaseCallback) -> Iterator[BaseCallback]:
    """Those that SB3's lists and events call, under whatever name; ``parent`` leads back."""
    for name, value in vars(callback).items():
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, BaseCallback) and name != "parent":
                yield child


def _functions(value: Any) -> Iterator[FunctionType]:
    """Those in an attribute of a class: methods of every kind, and properties."""
    if isinstance(value, property):
        value = [value.fget, value.fset]
    for function in value if isinstance(value, list) else [value]:
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType):
            yield function


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)

"""
Environments in JAX as two functions of one copy, and the step of all copies that is compiled from them.

JAX is imported where it is used, so that importing this module does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from sb3_ppo_ext.common.validation import refuse

INSTALL = "`pip install 'sb3-ppo-ext[jax]'`"
#: Of the ids of gymnax in Gymnasium's registry
GYMNAX_PREFIX = "gymnax/"
#: No episode has that many steps; fits into int32.
_NEVER = 2**31 - 1


class JaxFunctions(NamedTuple):
    """
    An environment of one copy.

    :param reset: Function of a key; returns the first observation and the state
    :param step: Function of a key, a state and an action; returns the observation, the state, the reward, terminated,
        truncated, and a dictionary of scalars for the log. It does not begin a new episode
    :param observation_space: Observation space, ``None`` if it is unknown
    :param action_space: Action space, ``None`` if it is unknown
    """

    reset: Callable[..., Any]
    step: Callable[..., Any]
    observation_space: spaces.Space | None = None
    action_space: spaces.Space | None = None


def import_jax() -> Any:
    """
    :return: The module ``jax``
    :raises ImportError: if it is not installed
    """
    try:
        import jax
    except ImportError as error:
        raise ImportError(f"JAX is not installed: {INSTALL}") from error
    return jax


def make_gymnax(env_id: str) -> Any:
    """
    :param env_id: Id of an environment of gymnax, such as ``"CartPole-v1"``
    :return: The environment
    :raises ImportError: if gymnax is not installed
    :raises ValueError: if there is no such environment
    """
    try:
        import gymnax
        from gymnax.registration import registered_envs
    except ImportError as error:
        raise ImportError(f"gymnax is not installed: {INSTALL}") from error
    name = env_id.removeprefix(GYMNAX_PREFIX)
    if name not in registered_envs:
        refuse("env", env_id, f"gymnax has {', '.join(registered_envs)}")
    return gymnax.make(name)[0]


def functions_of(env: Any, env_params: Any = None) -> JaxFunctions:
    """
    :param env: Id or environment of gymnax, environment of brax, or a pair of functions
    :param env_params: Parameters of an environment of gymnax, or a dictionary of changes to its own
    :return: The functions of the environment
    :raises ValueError: if it is none of these
    """
    if isinstance(env, str):
        env = make_gymnax(env)
    if hasattr(env, "step_env") and hasattr(env, "reset_env"):
        return _gymnax_functions(env, _params(env.default_params, env_params))
    if env_params is not None:
        refuse("env_params", env_params, "only environments of gymnax have parameters")
    if isinstance(env, tuple) and len(env) == 2 and all(callable(each) for each in env):
        return _checked_functions(*env)
    if all(hasattr(env, name) for name in ("reset", "step", "observation_size", "action_size")):
        return _brax_functions(env)
    refuse("env", env, "give an id or environment of gymnax, an environment of brax, or a pair of functions (reset, step)")


def _params(default: Any, given: Any) -> Any:
    if not isinstance(given, dict):
        return default if given is None else given
    if unknown := given.keys() - vars(default).keys():
        refuse("env_params", given, f"there is no {', '.join(map(repr, unknown))}; there are {', '.join(vars(default))}")
    return default.replace(**given)


def _checked_functions(reset: Callable[..., Any], step: Callable[..., Any]) -> JaxFunctions:
    def step_with_log(key: Any, state: Any, action: Any) -> Any:
        results = step(key, state, action)
        if len(results) not in (5, 6):
            refuse("env", step, f"`step` returns {len(results)} values; return obs, state, reward, terminated, truncated")
        return results if len(results) == 6 else (*results, {})

    return JaxFunctions(reset, step_with_log)


def _gymnax_functions(env: Any, params: Any) -> JaxFunctions:
    limit = getattr(params, "max_steps_in_episode", None)
    lifted = params if limit is None else params.replace(max_steps_in_episode=_NEVER)

    def reset(key: Any) -> Any:
        return env.reset_env(key, params)

    def step(key: Any, state: Any, action: Any) -> Any:
        observation, new_state, reward, done, _ = env.step_env(key, state, action, params)
        # Only `done` of a step without the limit tells terminations from time-outs. What both steps compute in the same way
        # is computed once by the compiled function.
        terminated = env.step_env(key, state, action, lifted)[3]
        return observation, new_state, reward, terminated, done & ~terminated, {}

    import_jax()
    import gymnax.environments.spaces as gymnax_spaces

    def convert(space: Any) -> spaces.Space | None:
        if isinstance(space, gymnax_spaces.Discrete):
            return spaces.Discrete(int(space.n))
        if isinstance(space, gymnax_spaces.Box):
            shape = tuple(space.shape)
            low, high = (np.broadcast_to(np.asarray(bound, np.float32), shape) for bound in (space.low, space.high))
            return spaces.Box(low.copy(), high.copy(), dtype=np.float32)
        return None

    return JaxFunctions(reset, step, convert(env.observation_space(params)), convert(env.action_space(params)))


def _brax_functions(env: Any) -> JaxFunctions:
    inner = env
    while inner is not None:
        name = type(inner).__name__
        if "AutoReset" in name or "Vmap" in name:
            remedy = "it begins new episodes by itself, or steps many copies; make it with `auto_reset=False, batch_size=None`"
            refuse("env", env, remedy)
        inner = vars(inner).get("env")
    jax = import_jax()

    def reset(key: Any) -> Any:
        state = env.reset(key)
        return state.obs, state

    def step(key: Any, state: Any, action: Any) -> Any:
        state = env.step(state, action)
        done = state.done.astype(bool)
        truncated = done & jax.numpy.asarray(state.info.get("truncation", 0)).astype(bool)
        return state.obs, state, state.reward, done & ~truncated, truncated, dict(state.metrics)

    size = env.observation_size
    is_dict = hasattr(size, "items")
    observation_space = spaces.Dict({key: _unbounded(part) for key, part in size.items()}) if is_dict else _unbounded(size)
    return JaxFunctions(reset, step, observation_space, spaces.Box(-1, 1, (int(env.action_size),), np.float32))


def _unbounded(size: Any) -> spaces.Box:
    shape = tuple(size) if isinstance(size, tuple | list) else (int(size),)
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def compiled(
    functions: JaxFunctions, num_envs: int, max_episode_steps: int | None, is_finite_horizon: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """
    Compile a reset of all copies, and a step of all copies that begins new episodes where one has ended.

    :param functions: Environment of one copy
    :param num_envs: Number of copies
    :param max_episode_steps: Number of steps after which episodes are cut off, ``None`` if the environment does it
    :param is_finite_horizon: Whether episodes that run out of time are terminated
    :return: A function of a key, which returns the observations and the state of all copies, and a function of that state and
        actions, which returns the new state, and what a step returns, with the last observations and the log
    """
    jax = import_jax()
    jnp = jax.numpy
    reset, step = jax.vmap(functions.reset), jax.vmap(functions.step)

    def reset_all(key: Any) -> Any:
        key, of_reset = jax.random.split(key)
        observations, state = reset(jax.random.split(of_reset, num_envs))
        return observations, (key, state, jnp.zeros(num_envs, jnp.int32))

    def step_all(everything: Any, actions: Any) -> Any:
        key, state, time = everything
        key, of_step, of_reset = jax.random.split(key, 3)
        last, state, rewards, terminated, truncated, log = step(jax.random.split(of_step, num_envs), state, actions)
        terminated, truncated, time = terminated.astype(bool), truncated.astype(bool), time + 1
        if max_episode_steps is not None:
            truncated = truncated | ((time >= max_episode_steps) & ~terminated)
        if is_finite_horizon:
            terminated, truncated = terminated | truncated, jnp.zeros_like(truncated)
        ended = terminated | truncated

        def begun(new: Any, old: Any) -> Any:
            return jnp.where(ended.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        first, first_state = reset(jax.random.split(of_reset, num_envs))
        observations, state, time = jax.tree.map(begun, (first, first_state, jnp.zeros_like(time)), (last, state, time))
        rewards = rewards.astype(jnp.float32)
        return (key, state, time), (observations, rewards, terminated, truncated, last, log)

    # Actions that a function does not use are read nevertheless: by them, JAX knows that PyTorch has read the results before.
    return jax.jit(reset_all), jax.jit(step_all, keep_unused=True)

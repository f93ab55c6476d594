"""
Environments in JAX as two functions of one copy, and the step of all copies that is compiled from them.

JAX is imported where it is used, so that importing this module does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from sb3_ppo_ext.common.type_aliases import Arrays, JaxEnv, JaxTree
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.envs.tensors.tensor_spaces import as_gymnasium

INSTALL = "`pip install 'sb3-ppo-ext[jax]'`"
#: Of the ids of gymnax in Gymnasium's registry
GYMNAX_PREFIX = "gymnax/"
#: No episode has that many steps; fits into int32.
_NEVER = 2**31 - 1
#: Names of the limit of steps in the parameters of environments in the style of gymnax: of gymnax, of craftax
LIMITS = ("max_steps_in_episode", "max_timesteps")


class JaxFunctions(NamedTuple):
    """
    An environment of one copy.

    :param reset: Function of a key; returns the first observation and the state
    :param step: Function of a key, a state and an action; returns the observation, the state, the reward, terminated,
        truncated, and a dictionary of scalars for the log. It does not begin a new episode
    :param observation_space: Observation space, ``None`` if it is unknown
    :param action_space: Action space, ``None`` if it is unknown
    :param max_episode_steps: Number of steps after which an episode has to be cut off, because ``step`` does not do it;
        ``None`` if there is none
    :param own_limit: Number of steps after which ``step`` cuts episodes off, ``None`` if it is not known
    """

    reset: Callable[..., object]
    step: Callable[..., object]
    observation_space: spaces.Space | None = None
    action_space: spaces.Space | None = None
    max_episode_steps: int | None = None
    own_limit: int | None = None


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


def activation(name: str) -> Callable[[JaxTree], JaxTree]:
    """
    :param name: Name of an activation function, as in ``jax.nn``
    :return: What PyTorch computes by default
    """
    nn = import_jax().nn
    return partial(nn.gelu, approximate=False) if name == "gelu" else getattr(nn, name)


def make_gymnax(env_id: str) -> JaxEnv:
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


def functions_of(env: JaxEnv, env_params: JaxEnv = None) -> JaxFunctions:
    """
    :param env: Id or environment of gymnax, or one in its style; environment of brax or MuJoCo Playground, or a pair of
        functions
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
    kinds = "an id or environment of gymnax, an environment of brax or MuJoCo Playground, or a pair of functions (reset, step)"
    refuse("env", env, f"give {kinds}")


def _params(default: JaxEnv, given: JaxEnv) -> JaxEnv:
    if not isinstance(given, dict):
        return default if given is None else given
    if unknown := given.keys() - vars(default).keys():
        refuse("env_params", given, f"there is no {', '.join(map(repr, unknown))}; there are {', '.join(vars(default))}")
    return default.replace(**given)


def _checked_functions(reset: Callable[..., object], step: Callable[..., object]) -> JaxFunctions:
    names = "obs, state, reward, terminated, truncated"

    def reset_of_two(key: object) -> object:
        results = reset(key)
        if not isinstance(results, tuple | list) or len(results) != 2:
            refuse("env", reset, f"`reset` returns {_kind(results)}; return obs, state")
        return tuple(results)

    def step_with_log(key: object, state: object, action: object) -> object:
        results = step(key, state, action)
        if not isinstance(results, tuple | list) or len(results) not in (5, 6):
            refuse("env", step, f"`step` returns {_kind(results)}; return {names}")
        for name, value in zip(("terminated", "truncated"), results[3:5], strict=True):
            if not _is_one_number(value):
                refuse("env", step, f"`step` returns {_kind(value)} as `{name}`, the order is {names}; return a Boolean there")
        if not _is_one_number(results[2]):
            remedy = "return a number there, and weight the rewards of several objectives"
            refuse("env", step, f"`step` returns {_kind(results[2])} as `reward`, the order is {names}; {remedy}")
        return tuple(results) if len(results) == 6 else (*results, {})

    return JaxFunctions(reset_of_two, step_with_log)


def _is_one_number(value: Any) -> bool:
    return np.shape(value) == () if hasattr(value, "dtype") else isinstance(value, bool | int | float)


def _kind(value: Any) -> str:
    """What a function has returned, in words."""
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    return f"an array of shape {np.shape(value)}" if hasattr(value, "dtype") else f"a {type(value).__name__}"


def _gymnax_functions(env: JaxEnv, params: JaxEnv) -> JaxFunctions:
    limits = {name: _NEVER for name in LIMITS if hasattr(params, name)}
    lifted = params.replace(**limits) if limits else params

    def reset(key: JaxTree) -> JaxTree:
        return env.reset_env(key, params)

    def step(key: JaxTree, state: JaxTree, action: Arrays) -> JaxTree:
        observation, new_state, reward, done, _ = env.step_env(key, state, action, params)
        # Only `done` of a step without the limit tells terminations from time-outs. What both steps compute in the same way
        # is computed once by the compiled function.
        terminated = env.step_env(key, state, action, lifted)[3]
        return observation, new_state, reward, terminated, done & ~terminated, {}

    both_spaces = as_gymnasium(env.observation_space(params)), as_gymnasium(env.action_space(params))
    own_limit = min((int(getattr(params, name)) for name in limits), default=None)
    return JaxFunctions(reset, step, *both_spaces, own_limit=own_limit)


def _brax_functions(env: JaxEnv) -> JaxFunctions:
    inner, names = env, []
    while inner is not None:
        names.append(type(inner).__name__)
        inner = vars(inner).get("env")
    for name in names:
        if "AutoReset" in name or "Vmap" in name:
            refuse(
                "env",
                env,
                f"its {name} begins new episodes by itself, or steps many copies, as here `num_envs` does; with brax, make it "
                "with `auto_reset=False, batch_size=None`; with MuJoCo Playground, give what `registry.load` returns, without "
                "`wrap_for_brax_training`, and its `episode_length` as `max_episode_steps`",
            )
    jax = import_jax()

    def reset(key: JaxTree) -> JaxTree:
        state = env.reset(key)
        return state.obs, state

    def step(key: JaxTree, state: JaxTree, action: Arrays) -> JaxTree:
        state = env.step(state, action)
        done = state.done.astype(bool)
        truncated = done & jax.numpy.asarray(state.info.get("truncation", 0)).astype(bool)
        return state.obs, state, state.reward, done & ~truncated, truncated, dict(state.metrics)

    size = env.observation_size
    is_dict = hasattr(size, "items")
    observation_space = spaces.Dict({key: _unbounded(part) for key, part in size.items()}) if is_dict else _unbounded(size)
    # MuJoCo Playground leaves the limit to a wrapper of brax.
    limit = None if "EpisodeWrapper" in names else getattr(getattr(env, "_config", None), "episode_length", None)
    return JaxFunctions(reset, step, observation_space, spaces.Box(-1, 1, (int(env.action_size),), np.float32), limit)


def _unbounded(size: JaxTree) -> spaces.Box:
    shape = tuple(size) if isinstance(size, tuple | list) else (int(size),)
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def compiled(
    functions: JaxFunctions, num_envs: int, max_episode_steps: int | None, is_finite_horizon: bool, resets_seldom: bool
) -> tuple[Callable[..., JaxTree], Callable[..., JaxTree]]:
    """
    Compile a reset of all copies, and a step of all copies that begins new episodes where one has ended.

    :param functions: Environment of one copy
    :param num_envs: Number of copies
    :param max_episode_steps: Number of steps after which episodes are cut off, ``None`` for that of the environment
    :param is_finite_horizon: Whether episodes that run out of time are terminated
    :param resets_seldom: Whether copies are reset only in steps in which an episode ends. A reset may take longer than a step,
        but a GPU has to wait for the condition
    :return: A function of a key, which returns the observations and the state of all copies, and a function of that state and
        actions, which returns the new state, and what a step returns, with the last observations and the log
    """
    jax = import_jax()
    jnp = jax.numpy
    reset, step = jax.vmap(functions.reset), jax.vmap(functions.step)
    limit = functions.max_episode_steps if max_episode_steps is None else max_episode_steps

    def reset_all(key: JaxTree) -> JaxTree:
        key, of_reset = jax.random.split(key)
        observations, state = reset(jax.random.split(of_reset, num_envs))
        return observations, (key, state, jnp.zeros(num_envs, jnp.int32))

    def step_all(everything: JaxTree, actions: Arrays) -> JaxTree:
        key, state, time = everything
        key, of_step, of_reset = jax.random.split(key, 3)
        last, state, rewards, terminated, truncated, log = step(jax.random.split(of_step, num_envs), state, actions)
        terminated, truncated, time = terminated.astype(bool), truncated.astype(bool), time + 1
        if limit is not None:
            truncated = truncated | ((time >= limit) & ~terminated)
        if is_finite_horizon:
            terminated, truncated = terminated | truncated, jnp.zeros_like(truncated)
        ended = terminated | truncated

        def begun(new: JaxTree, old: JaxTree) -> JaxTree:
            if old.shape[:1] != (num_envs,):
                return old  # what all copies have in common, as the buffers of contacts of MuJoCo Warp
            return jnp.where(ended.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        def begin(before: JaxTree) -> JaxTree:
            first, first_state = reset(jax.random.split(of_reset, num_envs))
            if jax.tree.structure((first, first_state)) != jax.tree.structure(before[:2]):
                kinds = [_kind(part) for part in (*before[:2], first, first_state)]
                remedy = "`step` returns {} as obs and {} as state, and `reset` {} and {}; both have to return obs, then state"
                refuse("env", functions.step, remedy.format(*kinds))
            return jax.tree.map(begun, (first, first_state, jnp.zeros_like(time)), before)

        before = last, state, time
        observations, state, time = _changed(before, ended.any(), begin) if resets_seldom else begin(before)
        rewards = rewards.astype(jnp.float32)
        return (key, state, time), (observations, rewards, terminated, truncated, last, log)

    # Actions that a function does not use are read nevertheless: by them, JAX knows that PyTorch has read the results before.
    return jax.jit(reset_all), jax.jit(step_all, keep_unused=True)


def _changed(parts: JaxTree, is_needed: JaxTree, change: Callable[[JaxTree], JaxTree]) -> JaxTree:
    """The result of a function, or where it is not needed, its argument in the types of the result."""
    jax = import_jax()
    # Only leaves, since classes of an environment's state may not be able to keep descriptions of arrays
    kinds = jax.eval_shape(lambda parts: jax.tree.leaves(change(parts)), parts)

    def as_they_are(parts: JaxTree) -> JaxTree:
        leaves, structure = jax.tree.flatten(parts)
        pairs = zip(leaves, kinds, strict=True)
        return structure.unflatten([leaf if leaf.dtype == kind.dtype else leaf.astype(kind.dtype) for leaf, kind in pairs])

    return jax.lax.cond(is_needed, change, as_they_are, parts)

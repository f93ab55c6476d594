"""Environments for ``make``, from an id, a class, a function, an environment, or vectorised environments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import refuse, unknown_environments_as_value_errors
from sb3_ppo_ext.envs.envpool_vec_env import EnvPoolVecEnv, check_envpool_id
from sb3_ppo_ext.envs.fast_dummy_vec_env import FastDummyVecEnv
from sb3_ppo_ext.envs.staggered_start import StaggeredStart
from sb3_ppo_ext.envs.tensors.gymnax_ids import GYMNAX_PREFIX, JaxVecEnv

Wrap = Callable[[Any], Any]


class Spaces(NamedTuple):
    """
    :param observation: Observation space
    :param action: Action space
    """

    observation: spaces.Space
    action: spaces.Space


class Source(NamedTuple):
    """
    What environments are made from.

    :param env_id: Gymnasium's id, ``None`` if it is not known
    :param make: Function that makes one environment from keyword arguments, ``None`` if there is nothing to make
    :param made: Environment or vectorised environments that the user has made, ``None`` if there are none
    """

    env_id: str | None
    make: Callable[..., gym.Env] | None
    made: Any

    @classmethod
    def of(cls, env: Any) -> Source:
        """
        :param env: Argument of ``make``
        :return: What environments are made from
        :raises ValueError: if it is nothing of the kind
        """
        if isinstance(env, str):
            env = _registered(env)
            with unknown_environments_as_value_errors(env):
                return cls(env, gym.spec(env).make, None)
        if isinstance(env, VecEnv):
            return cls(None, None, env)
        if isinstance(env, gym.Env):
            return cls(_id_of(env), None, env)
        if callable(env):
            return cls(None, env, None)
        refuse("env", env, "give an id, a class, a function that makes an environment, an environment, or a `VecEnv`")

    @classmethod
    def of_envpool(cls, env_id: str) -> Source:
        """
        :param env_id: Argument of ``make`` for environments of EnvPool
        :return: The same, without what they are made from
        :raises ValueError: if EnvPool has no such environment, or is not installed
        """
        check_envpool_id(env_id)
        return cls(env_id, None, None)

    def spaces(self, env_kwargs: Kwargs, wrap: Wrap | None) -> Spaces:
        """
        :param env_kwargs: Keyword arguments of the environment
        :param wrap: Function that wraps an environment, ``None`` for none
        :return: Spaces of one environment with its wrappers
        """
        if isinstance(self.made, VecEnv):
            return Spaces(self.made.observation_space, self.made.action_space)
        if self.made is not None:
            env = self.made if wrap is None else wrap(self.made)
            return Spaces(env.observation_space, env.action_space)
        env = self.one(env_kwargs, wrap) if self.make is not None else EnvPoolVecEnv(str(self.env_id), **env_kwargs)
        env.close()
        return Spaces(env.observation_space, env.action_space)

    def one(self, env_kwargs: Kwargs, wrap: Wrap | None) -> gym.Env:
        """
        :param env_kwargs: Keyword arguments of the environment
        :param wrap: Function that wraps an environment, ``None`` for none
        :return: One of the environments
        :raises ValueError: if something else is made
        """
        assert self.make is not None
        env = self.make(**env_kwargs)
        if not hasattr(env, "observation_space") or isinstance(env, VecEnv):
            refuse("env", self.make, f"it makes a `{type(env).__name__}`, and has to make one environment of Gymnasium")
        return env if wrap is None else wrap(env)

    def steps_in_tensors(self, wrap: Wrap | None) -> bool:
        """
        :param wrap: Function that wraps each environment, ``None`` for none
        :return: Whether all copies step in one call of JAX, which is so unless each of them is wrapped
        """
        return wrap is None and str(self.env_id).startswith(GYMNAX_PREFIX)

    def environments(
        self, n_envs: int, seed: int | None, vec_env_cls: Any, env_kwargs: Kwargs, wrap: Wrap | None, device: str
    ) -> VecEnv:
        """
        :param n_envs: Number of environments
        :param seed: Their seed, ``None`` for none
        :param vec_env_cls: Class of the vectorised environments, ``None`` for the fastest in this process
        :param env_kwargs: Keyword arguments of the environment
        :param wrap: Function that wraps each environment, ``None`` for none
        :param device: Device of the policy
        :return: Vectorised environments
        """
        if isinstance(self.made, VecEnv):
            return self.made
        if vec_env_cls is None and self.steps_in_tensors(wrap):
            # Another device than the CPU is that of JAX, which may have been installed without CUDA.
            name = str(self.env_id).removeprefix(GYMNAX_PREFIX)
            return JaxVecEnv(name, num_envs=n_envs, device="cpu" if device == "cpu" else "auto", **env_kwargs)
        if self.make is None:
            single = Monitor(self.made if wrap is None else wrap(self.made))
            return make_vec_env(lambda: single, 1, seed, vec_env_cls=FastDummyVecEnv)
        make: Callable[..., gym.Env] = self.make
        kind = FastDummyVecEnv if vec_env_cls is None else vec_env_cls
        return make_vec_env(
            lambda **kwargs: make(**kwargs), n_envs, seed, env_kwargs=env_kwargs, wrapper_class=wrap, vec_env_cls=kind
        )


def _id_of(env: gym.Env) -> str | None:
    """The id of an environment, unless wrappers have made another task of it."""
    one, other = ((each.observation_space, each.action_space) for each in (env, env.unwrapped))
    return None if env.spec is None or one != other else env.spec.id


def _registered(env_id: str) -> str:
    """Only the id, after the import of the module in front of it."""
    module, colon, name = env_id.rpartition(":")
    if not colon:
        return env_id
    try:
        importlib.import_module(module)
    except ImportError as error:
        refuse("env", env_id, f"the module in front of the colon cannot be imported ({error})")
    return name


def wrapper_of(name: str, value: object) -> Wrap | None:
    """
    :param name: Name of the hyperparameter, for messages
    :param value: Import path of a class, a dictionary from the path to keyword arguments, a class or function, or a list of
        these, from the inside out; ``None`` for none
    :return: Function that wraps an environment, ``None`` for none
    :raises ValueError: if there is no such class
    """
    if value is None:
        return None
    parts = [_wrapper(name, part) for part in (value if isinstance(value, list | tuple) else [value])]

    def wrap(env: gym.Env) -> Any:
        for part in parts:
            env = part(env)
        return env

    return wrap


def staggered(wrap: Wrap | None) -> Wrap:
    """
    :param wrap: Function that wraps an environment, ``None`` for none
    :return: Function that wraps it in a :class:`~sb3_ppo_ext.StaggeredStart` as well
    """
    return StaggeredStart if wrap is None else lambda env: StaggeredStart(wrap(env))


def _wrapper(name: str, value: object) -> Wrap:
    kwargs: dict[str, object] = {}
    if isinstance(value, dict) and len(value) == 1:
        ((value, kwargs),) = value.items()
    if callable(value):
        return lambda env: value(env, **(kwargs or {}))
    module, _, attribute = str(value).rpartition(".")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        refuse(name, value, f"it cannot be imported ({error}); give `package.module.Class`, or the class")
    return lambda env: made(env, **(kwargs or {}))

"""Environments of EnvPool, which steps them in threads of C++, by their Gymnasium id."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import time
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import check_number, refuse
from sb3_ppo_ext.envs.vector_env_adapter import VectorEnvAdapter

#: The word that stands for these environments where a class of vectorised environments is asked for
ENVPOOL = "envpool"
# Its seeds are in int32, with one for each environment.
LARGEST_SEED = 2**30
NO_LIMIT = 2**31 - 1  # as 0 does
# Infos that say nothing about the task
_OF_THE_POOL = ("env_id", "players")


class EnvPoolVecEnv(VectorEnvAdapter):
    """
    Environments of EnvPool as a ``VecEnv``: observations, rewards and ends of episodes are those of its own API. Episodes are
    logged as by ``Monitor``; for Atari, an episode is a game with its score, also where the model sees single lives and
    clipped rewards. Without a seed, they are different each time, while EnvPool's own default is always the same seed.

    :param env_id: EnvPool's id, which is that of Gymnasium for most suites. ``ALE/Pong-v5`` and ``PongNoFrameskip-v4`` are its
        ``Pong-v5`` with their kind of sticky actions
    :param n_envs: Number of environments
    :param seed: Seed of the first of them; the others follow. ``None`` for none
    :param config: Keyword arguments of EnvPool, such as ``max_episode_steps``
    :raises ValueError: if the package is missing, or there is no such environment or argument
    """

    def __init__(self, env_id: str, n_envs: int = 1, seed: int | None = None, **config: Any):
        check_number("n_envs", n_envs, 1, integer=True)
        name, of_id = _name_and_config(env_id)
        self._name, self._config = name, {"num_envs": n_envs, **of_id, **config}
        self._is_game = is_atari_game(env_id)
        super().__init__(self._made(np.random.SeedSequence().generate_state(1)[0] if seed is None else seed))
        self.render_mode = None
        self._begin_episodes_of_all()

    def _made(self, seed: Any) -> Any:
        envpool = importlib.import_module("envpool")
        try:
            return envpool.make_gymnasium(self._name, seed=int(seed) % LARGEST_SEED, **self._config)
        except TypeError as error:
            given = {key: value for key, value in self._config.items() if key != "num_envs"}
            refuse("env_kwargs", given, f"EnvPool's {self._name} has other arguments ({str(error).splitlines()[0]})")

    @property
    def _max_episode_steps(self) -> int | None:
        return limit_of_pool(self.venv)

    def _begin_episodes_of_all(self) -> None:
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)
        self._start = time.time()

    def reset(self) -> VecEnvObs:
        if (seed := self._seeds[0]) is not None:
            self.venv.close()
            self.venv = self._made(seed)  # EnvPool takes a seed at no other time.
            self._reset_seeds()
        self._begin_episodes_of_all()
        return super().reset()

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, dones, infos = super().step_wait()
        scores: Any = [info["reward"] for info in infos] if self._is_game else rewards
        self._returns += scores
        self._lengths += 1
        for index in np.flatnonzero(dones).tolist():
            info = infos[index]
            if self._is_game and not info["TimeLimit.truncated"] and not info["terminated"]:
                continue  # The player has lost a life, and the game goes on.
            seconds = round(time.time() - self._start, 6)
            info["episode"] = {"r": round(float(self._returns[index]), 6), "l": int(self._lengths[index]), "t": seconds}
            self._returns[index] = self._lengths[index] = 0
        return observations, rewards, dones, infos

    def _split(self, arrays: Any) -> list[Kwargs]:
        return super()._split({key: values for key, values in arrays.items() if key not in _OF_THE_POOL})

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """Whether episodes are logged, for ``Monitor``; the environments have no wrappers."""
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]


def limit_of_pool(pool: Any) -> int | None:
    """
    :param pool: Environments of EnvPool
    :return: Largest number of steps of an episode, ``None`` if there is none
    """
    limit = pool.spec.config.max_episode_steps
    return limit if 0 < limit < NO_LIMIT else None


def _name_and_config(env_id: object) -> tuple[str, Kwargs]:
    """EnvPool's id, and the configuration that makes it the environment with Gymnasium's id."""
    if importlib.util.find_spec("envpool") is None:
        refuse("vec_env_cls", ENVPOOL, "the package is not installed: `pip install envpool`")
    if not isinstance(env_id, str):
        refuse("env", env_id, "EnvPool makes environments of its own; give the id of one")
    known = importlib.import_module("envpool.registration").registry.specs
    if env_id in known:
        return env_id, {}
    if (game := re.fullmatch(r"(\w+)NoFrameskip-v4", env_id)) and f"{game[1]}-v5" in known:
        return f"{game[1]}-v5", {}
    if env_id.startswith("ALE/") and (name := env_id.removeprefix("ALE/")) in known:
        return name, {"repeat_action_probability": 0.25}
    if env_id.startswith("EnvPool/") and (name := env_id.removeprefix("EnvPool/")) in known:
        return name, {}
    similar = difflib.get_close_matches(env_id.rpartition("/")[2], known, 3)
    hint = f"; it has {', '.join(similar)}" if similar else ""
    refuse("env", env_id, f"EnvPool has no such environment{hint}. `envpool.list_all_envs()` lists its ids")


def check_envpool_id(env_id: object) -> None:
    """
    :param env_id: Id of an environment
    :raises ValueError: if EnvPool has no such environment, or is not installed
    """
    _name_and_config(env_id)


def is_atari_game(env_id: str) -> bool:
    """
    :param env_id: Id of an environment that EnvPool has
    :return: Whether it is a game of Atari
    """
    specs = importlib.import_module("envpool.registration").registry.specs
    return bool(specs[_name_and_config(env_id)[0]][0] == "envpool.atari")


def config_for_wrappers(env_id: str, env_wrapper: Any) -> Kwargs:
    """
    :param env_id: Id of an environment that EnvPool has
    :param env_wrapper: Wrappers of single environments that an entry asks for, as names of classes
    :return: Keyword arguments of EnvPool that do the same
    :raises ValueError: if there are none: its environments have no wrappers
    """
    if not env_wrapper:
        return {}
    names = env_wrapper if isinstance(env_wrapper, list) else [env_wrapper]
    if is_atari_game(env_id) and [str(name).rpartition(".")[2] for name in names] == ["AtariWrapper"]:
        # Frames are stacked by `VecFrameStack`, as everywhere else.
        return {"episodic_life": True, "reward_clip": True, "stack_num": 1}
    refuse(
        "env_wrapper", env_wrapper, "EnvPool's environments are not wrapped one by one; leave it out, or take another class"
    )

"""How many steps an episode has at most, and the discount factor that fits it."""

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import VecEnv

AUTO = "auto"
LIMIT = "_max_episode_steps"  # of Gymnasium's `TimeLimit`
# Where the limit is not known, it is SB3's default.
UNKNOWN = 0.99
LOWEST, HIGHEST = 0.95, 0.995


def time_limit_of(env: gym.Env) -> int | None:
    """
    :param env: Environment
    :return: Largest number of steps of an episode, ``None`` if it is not known
    """
    limit = getattr(env.spec, "max_episode_steps", None)
    if limit is None and env.has_wrapper_attr(LIMIT):  # of a `TimeLimit` that was put around it by hand
        limit = env.get_wrapper_attr(LIMIT)
    return limit


def time_limit_of_all(venv: VecEnv) -> int | None:
    """
    :param venv: Vectorised environments
    :return: Largest number of steps of an episode in the first of them, ``None`` if it is not known
    """
    venv = venv.unwrapped
    if hasattr(venv, LIMIT):  # Those that step at once have it themselves.
        return getattr(venv, LIMIT)
    try:
        return venv.get_attr(LIMIT, 0)[0] if venv.has_attr(LIMIT) else None
    except NotImplementedError:  # by a class of the user's
        return None


def discount_for(limit: int | None) -> float:
    """
    :param limit: Largest number of steps of an episode, ``None`` if it is not known
    :return: Discount factor that looks a fifth of an episode ahead, between 0.95 and 0.995
        (`Hansen et al., 2024 <https://arxiv.org/abs/2310.16828>`_)
    """
    return UNKNOWN if limit is None else float(np.clip(1 - 5 / limit, LOWEST, HIGHEST))

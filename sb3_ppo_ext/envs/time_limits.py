"""How many steps an episode has at most, and the discount factor that fits it."""

import numbers

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
    :return: Largest number of steps of an episode, the smallest one of several limits; ``None`` if it is not known
    """
    limits = []
    while isinstance(env, gym.Wrapper):
        limits.append(_as_limit(vars(env).get(LIMIT)))
        env = env.env
    limits.append(_as_limit(getattr(env, LIMIT, None)))
    return min((limit for limit in limits if limit is not None), default=None)


def time_limit_of_all(venv: VecEnv) -> int | None:
    """
    :param venv: Vectorised environments
    :return: Largest number of steps of an episode in the first of them, ``None`` if it is not known
    """
    venv = venv.unwrapped
    try:
        if hasattr(venv, LIMIT):  # Those that step at once have it themselves.
            return _as_limit(getattr(venv, LIMIT))
        return _as_limit(venv.get_attr(LIMIT)[0]) if venv.has_attr(LIMIT) else None
    except Exception:  # of a class of the user's, which can be trained with all the same
        return None


def _as_limit(value: object) -> int | None:
    """The value of an attribute that environments use as they like, if it is a number of steps."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return int(value) if is_number and 1 <= value < np.inf else None  # type: ignore[operator, call-overload]


def discount_for(limit: int | None) -> float:
    """
    :param limit: Largest number of steps of an episode, ``None`` if it is not known
    :return: Discount factor that looks a fifth of an episode ahead, between 0.95 and 0.995
        (`Hansen et al., 2024 <https://arxiv.org/abs/2310.16828>`_)
    """
    return UNKNOWN if limit is None else float(np.clip(1 - 5 / limit, LOWEST, HIGHEST))

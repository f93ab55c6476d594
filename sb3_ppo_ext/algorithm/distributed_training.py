"""
Training of one model by several processes, the ranks, each with its own environments: what they agree on when ``learn``
begins, and which callbacks run on which rank.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    EventCallback,
    ProgressBarCallback,
)
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_ppo_ext.checkpoints.training_checkpoint import TrainingCheckpoint
from sb3_ppo_ext.common.guards import normalizers_of
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.distributed.launch import find_launch
from sb3_ppo_ext.distributed.ranks import SINGLE, Ranks, connect
from sb3_ppo_ext.distributed.statistics import share_statistics, unshare_statistics
from sb3_ppo_ext.options import ALL_OPTIONS
from sb3_ppo_ext.rollout.shared_rollout import broadcast_state, check_agreement
from sb3_ppo_ext.rollout.user_code import is_user_class, runs_user_code

# Options that may differ between the ranks
OF_RANK = {"seed", "device", "verbose", "tensorboard_log", "policy", "env", "_init_setup_model"}
# Callbacks, and all classes derived from them, that evaluate, save and print, only on rank 0
OF_FIRST_RANK = (EvalCallback, CheckpointCallback, ProgressBarCallback)


@contextmanager
def training_of(model: Any, **arguments: object) -> Iterator[Ranks]:
    """
    Connect the ranks for a call of ``learn``.

    :param model: Model of this rank
    :param arguments: Arguments of ``learn``, which have to be the same on all ranks
    :return: Ranks of the training
    :raises ValueError: on all ranks, if they were given different arguments, options or environments
    """
    ranks = connect(find_launch(model.distributed))
    if not ranks.are_several:
        yield ranks
        return
    model._check_environment()
    check_agreement(ranks, {**arguments, **_settings(model)})
    separate_seeds(model.env, ranks)
    separate_generators(ranks)
    model.ranks = ranks
    if not ranks.is_first:
        _silence(model)
    try:
        broadcast_state(model, ranks)
        share_statistics(normalizers_of(model), ranks)
        yield ranks
    except BaseException:
        ranks.abort()  # Others would wait for this rank.
        raise
    finally:
        unshare_statistics(normalizers_of(model))
        model.ranks = SINGLE


def _silence(model: Any) -> None:
    """Replace the logger by one without outputs. A model that was loaded has the verbosity of the one that was saved."""
    model.verbose = 0
    model.set_logger(Logger(folder=None, output_formats=[]))


# What the ranks agree on


def _settings(model: Any) -> Kwargs:
    env = model.env
    settings = {name: _plain(getattr(model, row.attribute)) for name, row in ALL_OPTIONS.items() if name not in OF_RANK}
    settings["stats_window_size"] = model._stats_window_size
    return settings | {
        "n_envs": None if env is None else env.num_envs,
        "observation_space": repr(model.observation_space),
        "action_space": repr(model.action_space),
        "policy": model.policy_class.__name__,
        "parameters of the policy": [(name, tuple(p.shape)) for name, p in model.policy.named_parameters()],
        "num_timesteps": model.num_timesteps if model._interrupted is None else model._interrupted.counters["num_timesteps"],
    }


def _plain(value: object) -> str:
    """A description that is the same in all processes."""
    if callable(value) and not isinstance(value, type):
        try:
            return str([float(value(progress)) for progress in (1.0, 0.5, 0.0)])
        except Exception:  # not a schedule
            value = getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def separate_seeds(env: VecEnv, ranks: Ranks) -> None:
    """
    Let the environments of each rank draw their own random numbers, if all were given the same seeds: those of one vectorised
    environment with the environments of all ranks.

    :param env: Environments of this rank
    :param ranks: Ranks of the training
    """
    innermost: Any = env.unwrapped
    seeds = list(getattr(innermost, "_seeds", []))
    if any(other != seeds for other in ranks.gather(seeds)):
        return
    innermost._seeds = [None if seed is None else seed + ranks.index * len(seeds) for seed in seeds]


def separate_generators(ranks: Ranks) -> None:
    """
    Seed the global random number generators of this rank anew, if they are in the same state on all ranks, which would then
    sample the same actions and permutations.

    :param ranks: Ranks of the training
    """
    state: Any = np.random.get_state()
    own = zlib.crc32(th.get_rng_state().numpy().tobytes()), zlib.crc32(state[1].tobytes()), state[2]
    of_first = ranks.gather(own)[0]
    if own == of_first and not ranks.is_first:
        seed = zlib.crc32(repr((own, ranks.index)).encode())
        random.seed(seed)
        np.random.seed(seed)
        th.manual_seed(seed)


# Callbacks


def callbacks_of_rank(callback: MaybeCallback, ranks: Ranks) -> MaybeCallback:
    """
    :param callback: Argument of ``learn``
    :param ranks: Ranks of the training
    :return: Callbacks of this rank: on rank 0 all, on others those that run code of users, and ``TrainingCheckpoint``
    """
    if isinstance(callback, list):
        callback = CallbackList(callback)
    if ranks.is_first or not isinstance(callback, BaseCallback):
        return callback
    return _kept(callback) or CallbackList([])


def _kept(callback: Any) -> Any:
    if isinstance(callback, OF_FIRST_RANK):
        return None
    if type(callback) is CallbackList:
        return CallbackList([each for each in map(_kept, callback.callbacks) if each is not None])
    if isinstance(callback, TrainingCheckpoint) or is_user_class(type(callback)):
        return callback
    if isinstance(callback, EventCallback) and _kept(callback.callback) is None:
        return None
    return callback if runs_user_code(callback) else None

"""
The state of a training between two iterations, beyond what ``save`` writes, and the files that hold both.

A checkpoint is a zip of the model, which ``PPOExt.load`` and SB3's ``PPO.load`` can read, with two members more.
"""

from __future__ import annotations

import io
import json
import pathlib
import pickle
import time
import uuid
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ppo_ext.checkpoints.environments import essentials
from sb3_ppo_ext.checkpoints.generators import generator_states, set_generator_states
from sb3_ppo_ext.checkpoints.log_files import LogFiles
from sb3_ppo_ext.checkpoints.object_state import (
    STATEFUL,
    Key,
    ObjectState,
    Selection,
    all_attributes,
    classes_of,
    stateful_objects,
)
from sb3_ppo_ext.common.atomic_files import written_atomically
from sb3_ppo_ext.common.observations import map_observations
from sb3_ppo_ext.common.type_aliases import StateDict
from sb3_ppo_ext.distributed.ranks import Ranks
from sb3_ppo_ext.rollout.buffer import TensorRolloutBuffer
from sb3_ppo_ext.rollout.user_code import is_user_class

CheckpointPath: TypeAlias = str | pathlib.Path

SUMMARY, STATE = "training.json", "training_state.pkl"
# Changed whenever earlier releases could not read the state
FORMAT = 2
READABLE = (1, FORMAT)
# Attributes of the model that a training run changes, and that constructor and `load` set anew
COUNTERS = (
    "num_timesteps",
    "_total_timesteps",
    "_num_timesteps_at_start",
    "_current_progress_remaining",
    "_n_updates",
    "_last_obs",
    "_last_original_obs",
    "_last_episode_starts",
    "_white_noise",
)


class TrainingState(NamedTuple):
    """
    State of an interrupted training, still pickled where it refers to objects that the script creates.

    :param iteration: Number of rollouts of the call of ``learn``
    :param seconds: Time that this call has taken
    :param counters: Attributes of the model
    :param strides: Memory layout of the last observations, which pickle does not keep: it decides how convolutions round
    :param generators: States of the global random number generators
    :param environments: Keys of the environments and their wrappers
    :param objects: State of the environments, the callbacks and further objects, see :func:`objects_of`
    :param logs: Contents of the log files
    :param memory: Last steps, which a history-based policy sees in the next rollout; ``None`` for other policies
    :param why_reset: Reason why the environments have to be reset, ``None`` if they can continue
    :param returns: Discounted returns of the running episodes, with which the model normalises rewards, or ``None``
    :param changes: What a callback has changed that options do not tell, or ``None`` in earlier checkpoints
    """

    iteration: int
    seconds: float
    counters: StateDict
    strides: object
    generators: dict[str, object]
    environments: list[Key]
    objects: bytes
    logs: StateDict
    memory: object
    why_reset: str | None
    returns: object = None
    changes: StateDict | None = None

    @classmethod
    def of(cls, model: Any, callback: BaseCallback, iteration: int, select: Selection, why_reset: str | None) -> TrainingState:
        """
        :param model: Model in training, between two iterations
        :param callback: All callbacks of the training
        :param iteration: Number of rollouts since the start of ``learn``
        :param select: Selects the attributes to save of callbacks and classes
        :param why_reset: Reason why the environments cannot continue
        :return: Current state of the training
        """
        generators = generator_states()
        objects, buffer = objects_of(model, callback), model.rollout_buffer
        return cls(
            iteration,
            (time.time_ns() - model.start_time) / 1e9,
            {name: getattr(model, name) for name in COUNTERS},
            map_observations(lambda part: part.strides, model._last_obs),
            generators,
            list(ObjectState(stateful_objects(model.env)).targets),
            objects.read(select if why_reset is None else _without_episodes(select)),
            LogFiles(model.logger, list(objects.targets.values())).read(),
            buffer.remembered() if isinstance(buffer, TensorRolloutBuffer) else None,
            why_reset,
            None if model.normalizer is None else deepcopy(model.normalizer.returns),
            model.changes_in_training(),
        )

    def check_environments(self, env: VecEnv) -> None:
        """
        :param env: Environments to continue with
        :raises ValueError: if their number is not that of the checkpoint
        """
        n_envs = len(self.counters["_last_episode_starts"])
        if env.num_envs != n_envs:
            raise ValueError(
                f"`env` has {env.num_envs} environments, and the checkpoint was written with {n_envs}: give as many."
            )

    def remaining_timesteps(self, total_timesteps: int, reset_num_timesteps: bool) -> int:
        """
        :param total_timesteps: Argument of ``learn``
        :param reset_num_timesteps: Argument of ``learn``
        :return: Number of time steps from the checkpoint to the end of this call of ``learn``
        """
        start = 0 if reset_num_timesteps else self.counters["_num_timesteps_at_start"]
        return start + total_timesteps - self.counters["num_timesteps"]

    def restore(self, model: Any, callback: BaseCallback) -> int:
        """
        Bring a model, its environments, callbacks, log files and the global generators into this state.

        :param model: Model after the set-up of ``learn``
        :param callback: All callbacks of the training
        :return: Number of rollouts of the interrupted call of ``learn``
        """
        total_timesteps = model._total_timesteps
        vars(model).update(self.counters)
        model._last_obs = map_observations(_with_strides, model._last_obs, self.strides)
        model._total_timesteps = total_timesteps
        model.start_time = time.time_ns() - int(self.seconds * 1e9)
        if self.changes is not None:
            model.repeat_changes(self.changes)
        objects = objects_of(model, callback)
        if model.normalizer is not None:
            model.normalizer.returns = deepcopy(self.returns)
        self._restore_objects(model, objects)
        if self.memory is not None:
            model.rollout_buffer.remember(self.memory)
        LogFiles(model.logger, list(objects.targets.values())).write(self.logs, model.num_timesteps)
        set_generator_states(self.generators)
        return self.iteration

    def _restore_objects(self, model: Any, objects: ObjectState) -> None:
        reason = self.why_reset
        try:
            ObjectState(stateful_objects(model.env)).check(self.environments)
            if reason is None:
                model.env.reset()  # creates what environments create at their first reset
            objects.write(self.objects)
        except Exception as error:  # objects raise errors of any type
            reason = f"their state cannot be set ({type(error).__name__}: {error})"
            objects.write(self.objects, _without_episodes(all_attributes))
        if reason is None:
            return
        warnings.warn(f"The training continues from a reset of the environments, since {reason}.", stacklevel=5)
        _forget_seeds(model)
        model._last_obs = model.env.reset()
        model._last_episode_starts = np.ones(model.n_envs, dtype=bool)
        if model.normalizer is not None:
            model.normalizer.reset(model._last_obs)
        if model.get_vec_normalize_env() is not None:
            model._last_original_obs = model.get_vec_normalize_env().get_original_obs()


def _forget_seeds(model: Any) -> None:
    """Let the next reset begin other episodes than those with which the training began."""
    env = model.env.unwrapped
    pending = getattr(env, "_seeds", [])
    if isinstance(env, DummyVecEnv):  # in this process, with generators that were restored
        env._reset_seeds()
    elif model.seed is not None or any(seed is not None for seed in pending):
        entropy = [model.seed or 0, *(seed or 0 for seed in pending), model.ranks.index, model.num_timesteps]
        model.env.seed(int(np.random.default_rng(entropy).integers(2**31)))


def _with_strides(array: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    """The array in another layout of the same memory; the array itself if the layout has gaps."""
    span = array.itemsize + sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True))
    if span != array.nbytes or min(strides) < 0:
        return array
    copy = np.lib.stride_tricks.as_strided(np.empty(array.size, array.dtype), array.shape, strides)
    copy[...] = array
    return copy


def objects_of(model: Any, callback: BaseCallback) -> ObjectState:
    """
    :param model: Model in training
    :param callback: All callbacks of the training
    :return: Stateful objects: environments; callbacks, environments that they hold, and a buffer of the user's class; classes
    """
    environments = stateful_objects(model.env)
    callbacks = [each for each in stateful_objects(callback) if all(each is not env for env in environments)]
    buffers = [model.rollout_buffer] if is_user_class(type(model.rollout_buffer)) else []
    classes = classes_of([*environments, *callbacks, *buffers])
    return ObjectState(environments, callbacks + buffers, classes, model=model)


def _without_episodes(select: Selection) -> Selection:
    """A selection of what lasts over a reset of environments, and of the same attributes of other objects."""

    def selected(target: object, key: Key, attributes: dict[str, object]) -> dict[str, object]:
        is_environment = isinstance(target, STATEFUL) and not isinstance(target, BaseCallback)
        return (essentials if is_environment else select)(target, key, attributes)

    return selected


def file_of_rank(name: str, rank: int) -> str:
    """
    :param name: Name of the file of rank 0, which ends with ``.zip``
    :param rank: Rank in a distributed training
    :return: Name of the file of this rank, which does not end with ``.zip``, so that nobody takes it for the checkpoint
    """
    return name if rank == 0 else f"{name.removesuffix('.zip')}.rank{rank}"


def write_checkpoint(path: pathlib.Path, model: Any, state: TrainingState) -> None:
    """
    :param path: Path of the zip. It and its folder exist as a whole or not at all
    :param model: Model of the training
    :param state: State of the training
    """
    file = io.BytesIO()
    model.save(file)
    summary = {"format": FORMAT, "saved_at": time.time(), "num_timesteps": model.num_timesteps, "n_ranks": model.ranks.size}
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(SUMMARY, json.dumps(summary))
        archive.writestr(STATE, pickle.dumps(tuple(state), protocol=5))
    with _folder(path.parent) as folder, written_atomically(folder / path.name) as target:
        target.write(file.getbuffer())


@contextmanager
def _folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder; if it does not exist, it appears at the end of the ``with`` statement with all that was written to it."""
    if path.exists():
        yield path
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
    except BaseException:
        if temporary.exists():
            temporary.rmdir()
        raise
    temporary.rename(path)


def is_checkpoint(path: CheckpointPath) -> bool:
    """
    :param path: Path of a file
    :return: Whether it is a checkpoint; a damaged file is none
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return SUMMARY in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def read_checkpoint_of_rank(path: CheckpointPath, ranks: Ranks) -> tuple[pathlib.Path, TrainingState]:
    """
    Read the files of all ranks of a distributed training. Rank 0 chooses the checkpoint.

    :param path: Checkpoint of rank 0, or a folder with checkpoints
    :param ranks: Ranks of the training
    :return: Path of the file of this rank, and its state
    :raises FileNotFoundError: on all ranks, if there is no checkpoint
    :raises ValueError: on all ranks, if the file of one of them is missing or damaged
    """
    if not ranks.are_several:
        return read_checkpoint(path)
    path = pathlib.Path(path)
    read: Any = _read_or_error(path) if ranks.is_first else None
    name = ranks.gather(read[0].name if isinstance(read, tuple) else "")[0]
    if name and not ranks.is_first:
        read = _read_or_error((path if path.is_dir() else path.parent) / file_of_rank(name, ranks.index))
    for error in ranks.gather(read if isinstance(read, Exception) else None):
        if error is not None:
            raise error
    checkpoint: tuple[pathlib.Path, TrainingState] = read
    return checkpoint


def _read_or_error(path: pathlib.Path) -> tuple[pathlib.Path, TrainingState] | Exception:
    try:
        return read_checkpoint(path)
    except (FileNotFoundError, ValueError) as error:
        return error


def read_checkpoint(path: CheckpointPath) -> tuple[pathlib.Path, TrainingState]:
    """
    :param path: Checkpoint, with or without ``.zip``, or a folder with checkpoints
    :return: Path of the checkpoint, in a folder the newest whole one, and its state. It is unpickled: only read files that
        you trust
    :raises FileNotFoundError: if there is no such file, or no checkpoint in the folder
    :raises ValueError: if the file is damaged, or is not a checkpoint
    """
    path = pathlib.Path(path)
    if path.is_dir():
        return _newest(path)
    if not path.exists():
        given, path = path, path.with_name(f"{path.name}.zip")
        if not path.exists():
            raise FileNotFoundError(f'There is no "{given}": give a checkpoint of `TrainingCheckpoint`, or their folder.')
    return path, _read(path)


def _newest(folder: pathlib.Path) -> tuple[pathlib.Path, TrainingState]:
    found = sorted(_saved_at(folder), reverse=True)
    for _, path in found:
        try:
            return path, _read(path)
        except ValueError as error:
            warnings.warn(f"{error} An earlier one is used.", stacklevel=4)
    what = "whole checkpoint" if found else "checkpoint of `TrainingCheckpoint`"
    raise FileNotFoundError(f"There is no {what} in {folder}: start the training anew.")


def _saved_at(folder: pathlib.Path) -> Iterator[tuple[float, pathlib.Path]]:
    """Time and path of each checkpoint in a folder that can be opened."""
    for path in folder.glob("*.zip"):
        try:
            with zipfile.ZipFile(path) as archive:
                yield json.loads(archive.read(SUMMARY))["saved_at"], path
        except (KeyError, ValueError, OSError, zipfile.BadZipFile):
            continue


def _read(path: pathlib.Path) -> TrainingState:
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"{damaged} is damaged")
            names = archive.namelist()
            summary = json.loads(archive.read(SUMMARY)) if SUMMARY in names else None
            state = archive.read(STATE) if STATE in names else b""
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged zip raises errors of many types
        raise ValueError(f"{path} is not a whole checkpoint ({type(error).__name__}: {error}).") from error
    if summary is None:
        raise ValueError(f"{path} is a model and no checkpoint of `TrainingCheckpoint`: read it with `load`.")
    if summary["format"] not in READABLE:
        raise ValueError(f"{path} was written by another release: continue with that one, or read the model with `load`.")
    return TrainingState(*pickle.loads(state))


def check_ranks(path: pathlib.Path, ranks: Ranks) -> None:
    """
    :param path: Path of a checkpoint
    :param ranks: Ranks of the training that continues with it
    :raises ValueError: if their number is not that of the training that wrote it
    """
    with zipfile.ZipFile(path) as archive:
        n_ranks = json.loads(archive.read(SUMMARY)).get("n_ranks", 1)
    if n_ranks != ranks.size:
        raise ValueError(
            f"{path} was written by {n_ranks} processes that trained together, and there are {ranks.size} now: start as many "
            'with torchrun, give `distributed="off"` for a training run of one process, or read the model with `load`.'
        )

"""Actions, observations, rewards and ends of episodes in memory that processes share."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env.util import obs_space_info

from sb3_ppo_ext.common.validation import UnsupportedSpaceError
from sb3_ppo_ext.envs.parallel.flags import STRIDE
from sb3_ppo_ext.envs.parallel.step_infos import StepInfos, pickled_infos, unpickled_infos

# Bytes for the pickled infos of a step of one process; larger ones, as with terminal images, travel through the pipe.
MAIL_SIZE = 1 << 16
# dtypes in which actions can be given, whatever that of their space
ACTION_DTYPES = tuple(map(np.dtype, ("f4", "f8", "i8", "i4", "i1", "u1", "?", "f2", "i2", "u2", "u4", "u8")))


class _Place(NamedTuple):
    """Place of an array in the memory."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def end(self) -> int:
        return self.start + int(np.prod(self.shape)) * self.dtype.itemsize


class SharedArrays:
    """
    Arrays in memory that has no name, so that none is left behind when all processes have ended, however they end.

    :param observation_space: Observation space
    :param action_space: Action space
    :param n_envs: Number of environments
    :param n_workers: Number of processes besides the main one
    :raises UnsupportedSpaceError: if observations are not arrays of numbers
    """

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, n_envs: int, n_workers: int):
        keys, shapes, dtypes = numbers_of(observation_space)
        self.places: dict[object, _Place] = {}
        self.size = 0
        self._add("to_workers", (n_workers * STRIDE,), np.uint8)
        self._add("from_workers", (n_workers * STRIDE,), np.uint8)
        self._add("action_dtype", (1,), np.int64)
        self._add("mail_sizes", (n_workers,), np.int64)
        # Steps of rollouts that each worker has begun, and whether nobody waits for the rollout any more
        self._add("n_begun", (n_workers,), np.int64)
        self._add("is_abandoned", (1,), np.bool_)
        self._add("rewards", (n_envs,), np.float32)
        self._add("dones", (n_envs,), np.bool_)
        for key in keys:
            self._add(("observation", key), (n_envs, *shapes[key]), dtypes[key])
        self.action_shape = (n_envs, *(action_space.shape or ())) if _is_flat(action_space) else None
        self._add("actions", (8 * int(np.prod(self.action_shape or 0)),), np.uint8)
        self._add("mail", (n_workers, MAIL_SIZE), np.uint8)
        # In a file without a name where it can be inherited. `fork` shares it as well.
        memory = mp.RawArray(ctypes.c_char, self.size + STRIDE)
        self.offset = -ctypes.addressof(memory) % STRIDE
        self._set_memory(memory)

    def _add(self, name: object, shape: tuple[int, ...], dtype: np.dtype | type) -> None:
        self.places[name] = place = _Place(self.size, shape, np.dtype(dtype))
        self.size = -(-place.end // STRIDE) * STRIDE

    def _set_memory(self, memory: Any) -> None:
        self.memory = memory
        self.action_views: dict[int, np.ndarray] = {}
        # The rewards that the environments of this process write
        self.own_rewards: np.ndarray | None = None
        self.to_workers, self.from_workers = self._array("to_workers"), self._array("from_workers")
        self.action_dtype, self.mail_sizes = self._array("action_dtype"), self._array("mail_sizes")
        self.n_begun, self.is_abandoned = self._array("n_begun"), self._array("is_abandoned")
        self.rewards, self.dones = self._array("rewards"), self._array("dones")
        self.observations = {key[1]: self._array(key) for key in self.places if isinstance(key, tuple)}
        self.mail = [memoryview(self._array("mail")[index]) for index in range(len(self.mail_sizes))]

    def _array(self, name: object) -> np.ndarray:
        return self._in_memory(*self.places[name])

    def _in_memory(self, start: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        count = int(np.prod(shape))
        return np.frombuffer(self.memory, dtype, count, self.offset + start).reshape(shape)

    def __getstate__(self) -> dict[str, object]:
        # The memory itself refuses to be pickled, unless a process is started with it.
        return {name: getattr(self, name) for name in ("places", "size", "offset", "action_shape", "memory")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._set_memory(self.memory)

    def write_actions(self, actions: np.ndarray) -> bool:
        """
        :param actions: Actions for all environments
        :return: Whether they are there for all processes; not if they are no array of the shape of the action space
        """
        if type(actions) is not np.ndarray or actions.shape != self.action_shape or actions.dtype not in ACTION_DTYPES:
            return False
        number = ACTION_DTYPES.index(actions.dtype)
        self.action_dtype[0] = number
        self._actions_of(number)[:] = actions
        return True

    def read_actions(self, envs: slice) -> np.ndarray:
        """
        :param envs: Environments
        :return: Copy of their actions, with the dtype that was given
        """
        return self._actions_of(int(self.action_dtype[0]))[envs].copy()

    def _actions_of(self, number: int) -> np.ndarray:
        if number not in self.action_views:
            assert self.action_shape is not None
            place = self.places["actions"]
            self.action_views[number] = self._in_memory(place.start, self.action_shape, ACTION_DTYPES[number])
        return self.action_views[number]

    def write_mail(self, index: int, value: StepInfos | None) -> bool:
        """
        :param index: Index of the worker
        :param value: Infos of a step; ``None`` for none
        :return: Whether they fit into the memory
        """
        data = b"" if value is None else pickled_infos(value)
        fits = len(data) <= MAIL_SIZE
        self.mail_sizes[index] = len(data) if fits else 0
        if fits:
            self.mail[index][: len(data)] = data
        return fits

    def read_mail(self, index: int) -> StepInfos | None:
        """
        :param index: Index of the worker
        :return: Infos of a step, ``None`` if there are none in the memory
        """
        size = int(self.mail_sizes[index])
        return unpickled_infos(self.mail[index][:size]) if size else None


def _is_flat(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def numbers_of(space: spaces.Space) -> tuple[list[Any], dict[Any, tuple[int, ...]], dict[Any, np.dtype]]:
    """
    :param space: Observation space
    :return: Keys, shapes and dtypes of its parts, as SB3 gives them
    :raises UnsupportedSpaceError: if observations are not arrays of numbers
    """
    try:
        keys, shapes, dtypes = obs_space_info(space)
    except (AssertionError, NotImplementedError) as error:
        raise UnsupportedSpaceError(f"The observation space {space} is not supported: {error}") from error
    for key in keys:
        if shapes[key] is None or dtypes[key] is None or np.dtype(dtypes[key]).kind not in "fiub":
            where = "" if key is None else f", under {key!r},"
            raise UnsupportedSpaceError(
                f"The observation space {space}{where} is not one of numbers in arrays: use Box, Discrete, MultiDiscrete, "
                "MultiBinary, or a flat Dict or Tuple of these."
            )
    return keys, shapes, dtypes

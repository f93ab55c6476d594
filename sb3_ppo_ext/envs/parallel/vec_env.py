"""A vectorised environment that steps its environments on all cores."""

from __future__ import annotations

import multiprocessing as mp
import pickle
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.util import dict_to_obs

from sb3_ppo_ext.common.cores import available_cores
from sb3_ppo_ext.common.guards import EnvironmentDataError
from sb3_ppo_ext.common.observations import observations_at
from sb3_ppo_ext.common.type_aliases import Arrays, Info
from sb3_ppo_ext.common.validation import check_choice, check_number, check_type, refuse
from sb3_ppo_ext.common.workers import WorkerError
from sb3_ppo_ext.distributed.launch import ranks_on_this_machine
from sb3_ppo_ext.envs.fast_dummy_vec_env import detached
from sb3_ppo_ext.envs.parallel.pool import Command, WorkerPool
from sb3_ppo_ext.envs.parallel.share import EnvironmentShare
from sb3_ppo_ext.envs.parallel.share_rollout import MaskSource, ShareActor, ShareRollout, joined
from sb3_ppo_ext.envs.parallel.shared_arrays import SharedArrays

# Seconds for which a process that has a core of its own waits actively. To be woken takes some 50 microseconds, and policies
# act within less than this time, while an update takes longer.
SPIN = 1e-3


class ParallelVecEnv(VecEnv):
    """
    Steps environments on several cores, with the results of SB3's ``DummyVecEnv``, whatever the number of processes: this
    process steps a share of the environments, and each worker process another one. Observations, actions, rewards and ends of
    episodes lie in memory that they share, and the processes wake each other by flags in this memory::

        env = make_vec_env("HalfCheetah-v5", 16, vec_env_cls=ParallelVecEnv)

    The results are those of ``DummyVecEnv`` with the same seeds, unless environments draw from the global generators of Python
    or NumPy, or share objects. Infos are copies.

    If an environment raises an error in ``step`` or ``reset``, or a worker dies or does not answer in time, a ``WorkerError``
    names the worker and the environment, with its traceback, and all workers are ended. Errors of attributes and methods that
    are called by name are raised as they are, and the environments can continue. Workers ignore Ctrl-C, which interrupts only
    this process, and end with it. Environments that may crash or hang should each have a process of their own, and none be in
    this one: see :class:`~sb3_ppo_ext.CheckedSubprocVecEnv`.

    :param env_fns: Functions that create the environments. The first of them are called in this process. With the start
        methods ``"forkserver"`` and ``"spawn"``, scripts need ``if __name__ == "__main__":``
    :param n_workers: Number of worker processes besides this one, from 0, which steps all environments here. No more than
        ``len(env_fns) - 1`` are started. ``None`` for one on each core that this process may use, except for its own: the
        affinity (``taskset``) and the quota of the control group are respected, and ranks that torchrun has started on this
        machine share the cores. More than that help if environments wait for something else than the processor
    :param start_method: Start method of ``multiprocessing``: ``"forkserver"`` where it exists, otherwise ``"spawn"``, by
        default
    :param timeout: Seconds that a worker may take to answer, the creation of its environments included; ``None`` for no
        limit. Greater than 0. Environments in this process have no limit
    :param overlap: Whether the processes may collect whole rollouts without waiting for each other at each step, where
        ``PPOExt`` finds that nobody can see the difference: each then acts for its own environments, with the same results bit
        for bit
    :raises ValueError: if there is no environment, an argument or the observation space is not valid, or functions that are
        called in the same process return the same environment twice
    :raises WorkerError: if an environment cannot be created in a worker
    """

    actions: Arrays

    def __init__(
        self,
        env_fns: list[Callable[[], gym.Env]],
        n_workers: int | None = None,
        start_method: str | None = None,
        timeout: float | None = None,
        overlap: bool = True,
    ):
        check_type("overlap", overlap, bool, "give True or False")
        self.overlap = overlap
        start_method = _check_arguments(env_fns, n_workers, start_method, timeout)
        n_cores = max(1, available_cores() // ranks_on_this_machine())
        n_workers = min(n_cores - 1 if n_workers is None else n_workers, len(env_fns) - 1)
        self._shares = _shares(len(env_fns), n_workers + 1)
        # In this process
        self._share = EnvironmentShare([env_fns[index] for index in self._shares[0]], 0)
        arrays = SharedArrays(self._share.observation_space, self._share.action_space, len(env_fns), n_workers)
        self._share.attach(arrays)
        self.closed = self._is_stepping = False
        self._arrays, spin = arrays, SPIN if n_workers < n_cores else 0.0
        self._pool = WorkerPool(self._shares[1:], arrays, timeout, spin)
        self._errors_named = _ErrorsNamed(self._share, self._pool)
        # No worker may write into the memory after it has been freed.
        self._finalizer = weakref.finalize(self, self._pool.end)
        try:
            self._pool.start(start_method, env_fns)
            self.processes = self._pool.processes
            super().__init__(len(env_fns), self._share.observation_space, self._share.action_space)
        except BaseException:
            self._pool.end()
            with suppress(Exception):
                self._share.close()
            raise
        self.metadata = self._share.metadata

    @property
    def n_workers(self) -> int:
        """Number of worker processes besides this one."""
        return len(self._pool.shares)

    def step_async(self, actions: np.ndarray) -> None:
        self._pool.prepare()
        self._is_stepping = True
        self._share.attach(self._arrays)
        # Copied, since an environment may write into its action.
        self.actions = actions.copy() if isinstance(actions, np.ndarray) else actions
        if self._arrays.write_actions(actions):
            self._pool.begin_steps()
        else:
            parts = {index: [actions[i] for i in share] for index, share in enumerate(self._pool.shares)}
            self._pool.begin({index: ("step_infos", (part,), {}) for index, part in parts.items()})

    def step_wait(self) -> VecEnvStepReturn:
        if not self._is_stepping:
            raise RuntimeError("`step_wait` needs `step_async` before it, and no other call in between.")
        self._is_stepping = False
        with self._errors_named:
            infos = [detached(info) if len(info) > 1 else info for info in self._share.step_envs(self.actions)]
        self.reset_infos[: len(infos)] = self._share.reset_infos
        infos += [{"TimeLimit.truncated": False} for _ in range(self.num_envs - len(infos))]
        for share, answer in zip(self._pool.shares, self._pool.step_infos(), strict=True):
            if answer is not None:
                self._fill(infos, share.start, *answer)
        return self._observations(), self._arrays.rewards.copy(), self._arrays.dones.copy(), infos

    def collect(
        self,
        make_actor: Callable[[slice], ShareActor],
        observations: Arrays,
        n_steps: int,
        source: MaskSource | None = None,
    ) -> ShareRollout:
        """
        Step all environments for a whole rollout, or to the first observation, reward or output of the policy that is not
        finite. Processes do not wait for each other.

        :param make_actor: Function that makes the actor for some environments
        :param observations: Last observations of all environments
        :param n_steps: Number of steps
        :param source: Where masks of invalid actions come from, ``None`` for no masks
        :return: What they returned
        :raises WorkerError: if a worker fails
        :raises EnvironmentDataError: if a mask cannot be used, or an observation or a reward has another shape or type
        """
        self._share.attach(self._arrays)
        places = [slice(share.start, share.stop) for share in self._shares]
        given = [(make_actor(own), observations_at(observations, own), n_steps, source) for own in places]
        try:
            with self._errors_named:
                answers = self._answers({k: ("collect", part, {}) for k, part in enumerate(given)})
        except BaseException:
            self._pool.abandon()
            raise
        rollout = joined([answers[k] for k in range(len(places))], [own.start for own in places])
        self.reset_infos = rollout.reset_infos
        return rollout

    def _fill(self, infos: list[Info], first: int, unusual: dict[int, Info], resets: dict[int, Info]) -> None:
        for index, info in unusual.items():
            infos[first + index] = info
        for index, info in resets.items():
            self.reset_infos[first + index] = info

    def _observations(self) -> VecEnvObs:
        arrays = {key: array.copy() for key, array in self._arrays.observations.items()}
        return dict_to_obs(self.observation_space, arrays)

    def reset(self) -> VecEnvObs:
        self._share.attach(self._arrays)
        given = [(self._seeds[share.start : share.stop], self._options[share.start : share.stop]) for share in self._shares]
        with self._errors_named:
            answers = self._answers({k: ("reset_envs", part, {}) for k, part in enumerate(given)})
        self.reset_infos = [info for k in range(len(given)) for info in answers[k]]
        # Seeds and options are only used once
        self._reset_seeds()
        self._reset_options()
        return self._observations()

    def close(self) -> None:
        """Close the environments and end all workers, also those that do not answer within ``timeout``."""
        if not self.closed:
            self.closed = True
            try:
                self._share.close()
            finally:
                self._pool.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
                stacklevel=2,
            )
            return [None for _ in range(self.num_envs)]
        return self._of_envs("render_envs", None)

    def has_attr(self, attr_name: str) -> bool:
        """Check if an attribute exists for a vectorized environment. (see base class)."""
        return all(self._of_envs("has_attr_each", None, attr_name))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return attribute from vectorized environment (see base class)."""
        return self._of_envs("get_attr", indices, attr_name)

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        """Set attribute inside vectorized environments (see base class)."""
        self._of_envs("set_attr", indices, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: object, indices: VecEnvIndices = None, **method_kwargs: object
    ) -> list[object]:
        """Call instance methods of vectorized environments."""
        return self._of_envs("env_method", indices, method_name, *method_args, **method_kwargs)

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """Check if worker environments are wrapped with a given wrapper"""
        return self._of_envs("env_is_wrapped", indices, wrapper_class)

    def _of_envs(self, method: str, indices: VecEnvIndices, /, *args: object, **kwargs: object) -> list[Any]:
        """
        Call a method of :class:`EnvironmentShare` in the processes of some environments.

        :param method: Name of the method, which takes ``indices``
        :param indices: Environments
        :return: Result for each of them, ``None`` if there is none
        """
        chosen = [range(self.num_envs)[index] for index in self._get_indices(indices)]
        results: list[object] = [None] * len(chosen)
        # For each process, where its results belong
        places = [[place for place, index in enumerate(chosen) if index in share] for share in self._shares]
        commands = {
            k: (method, args, {"indices": [chosen[place] - self._shares[k].start for place in places[k]], **kwargs})
            for k in range(len(places))
            if places[k]
        }
        answers = self._answers(commands)
        for k, values in answers.items():
            for place, value in zip(places[k], values or (), strict=False):
                results[place] = value
        return results

    def _answers(self, commands: dict[int, Command]) -> dict[int, Any]:
        """
        Call methods of :class:`EnvironmentShare` in several processes at once.

        :param commands: For each process, 0 for this one
        :return: Result of each process
        """
        self._is_stepping = False
        self._pool.prepare()
        self._pool.begin({k - 1: command for k, command in commands.items() if k})
        answers: dict[int, Any] = {}
        if 0 in commands:
            name, args, kwargs = commands[0]
            answers[0] = getattr(self._share, name)(*args, **kwargs)
        return answers | {k: self._pool.value(k - 1) for k in commands if k}

    def call_in_workers(self, function: Callable[..., object], args_per_env: Iterable[tuple[object, ...]]) -> list[Any]:
        """
        Call a function with each environment, in its process.

        :param function: Function that gets the environment and the arguments
        :param args_per_env: Arguments for each environment, length ``n_envs``
        :return: Result for each environment
        :raises ValueError: if there are not as many arguments as environments
        """
        given = list(args_per_env)
        if len(given) != self.num_envs:
            refuse("args_per_env", given, f"give a tuple of arguments for each of {self.num_envs} environments")
        parts = [given[share.start : share.stop] for share in self._shares]
        answers = self._answers({k: ("call", (function, part), {}) for k, part in enumerate(parts)})
        return [result for k in range(len(parts)) for result in answers[k]]

    def __getstate__(self) -> NoReturn:
        raise pickle.PicklingError(
            "A ParallelVecEnv cannot be copied or pickled, since its environments are in several processes: make another one."
        )


class _ErrorsNamed:
    """Errors of an environment in this process are named as those of a worker."""

    def __init__(self, share: EnvironmentShare, pool: WorkerPool):
        self.share, self.pool = share, pool

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, EnvironmentDataError | WorkerError):
            text = "".join(traceback.format_exception(error))
            self.pool.fail(f"Environment {self.share.active}, in the main process, has raised an error:\n\n{text}\n", error)


def _check_arguments(env_fns: object, n_workers: object, start_method: object, timeout: object) -> str:
    """:return: Start method"""
    if not isinstance(env_fns, list | tuple) or not env_fns or not all(map(callable, env_fns)):
        refuse("env_fns", env_fns, "give a list with a function for each environment")
    if n_workers is not None:
        check_number("n_workers", n_workers, 0, integer=True)
    if timeout is not None:
        check_number("timeout", timeout, 0, open_low=True)
    known = mp.get_all_start_methods()
    if start_method is None:
        return "forkserver" if "forkserver" in known else "spawn"
    check_choice("start_method", start_method, known)
    return str(start_method)


def _shares(n_envs: int, n_processes: int) -> list[range]:
    """Environments of each process; the main process, which has other things to do, gets one of the smaller shares."""
    sizes = [(n_envs + k) // n_processes for k in range(n_processes)]
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]

"""A ``SubprocVecEnv`` whose errors name the worker, and show its traceback."""

from __future__ import annotations

import multiprocessing as mp
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy, deepcopy
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper, VecEnvIndices
from stable_baselines3.common.vec_env.patch_gym import _patch_env
from stable_baselines3.common.vec_env.subproc_vec_env import _worker

from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.validation import check_number, refuse
from sb3_ppo_ext.common.workers import NO_GUARD, REMEDY, WorkerError, describe_death, end_processes, waiting_for

# Attributes of a wrapper itself
WRAPPER_STATE = frozenset(("env", "_action_space", "_observation_space", "_metadata", "_cached_spec"))
# Seconds in which a worker whose main process has gone may close its environment
GRACE = 2.0


class CheckedSubprocVecEnv(SubprocVecEnv):
    """
    SB3's ``SubprocVecEnv``, with the same results, whose workers do not fail in silence: if one raises an error, dies, or does
    not answer in time, a ``WorkerError`` names it, with its traceback. All workers are then ended, as by :meth:`close`.

    Workers ignore Ctrl-C, which interrupts only the main process; ``close`` ends them.

    :param env_fns: Functions that create the environments. With the start methods ``"forkserver"`` and ``"spawn"``, scripts
        need ``if __name__ == "__main__":``
    :param start_method: Start method of ``multiprocessing``: ``"forkserver"`` where it exists, otherwise ``"spawn"``, by
        default
    :param timeout: Seconds that a worker may take to answer, the creation of its environment included; ``None`` for no limit.
        Greater than 0
    :raises ValueError: if there is no environment, or ``timeout`` is not valid
    :raises WorkerError: if an environment cannot be created
    """

    def __init__(self, env_fns: list[Callable[[], gym.Env]], start_method: str | None = None, timeout: float | None = None):
        if not env_fns:
            refuse("env_fns", env_fns, "give a function for each environment")
        if timeout is not None:
            check_number("timeout", timeout, 0, open_low=True)
        self.waiting, self.closed, self.timeout = False, False, timeout
        if start_method is None:
            start_method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
        # Why a worker may die before it has an environment
        self.hint = "" if start_method == "fork" else NO_GUARD
        self.remotes: list[_Remote] = []
        self.processes: list[Any] = []
        try:
            for env_fn in env_fns:
                self._start(mp.get_context(start_method), env_fn)
            self.remotes[0].send(("get_spaces", None))
            VecEnv.__init__(self, len(env_fns), *self.remotes[0].recv())
            self.hint = ""
        except BaseException:
            self._end()
            raise

    def _start(self, context: Any, env_fn: Callable[[], gym.Env]) -> None:
        remote, work_remote = context.Pipe()
        # A forked process has a copy of all pipes, which would keep those of others open.
        copies = [*(other.connection for other in self.remotes), remote] if context.get_start_method() == "fork" else []
        process = context.Process(target=_work, args=(work_remote, copies, CloudpickleWrapper(env_fn)), daemon=True)
        process.start()
        work_remote.close()
        self.processes.append(process)
        self.remotes.append(_Remote(self, len(self.remotes), remote, process))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """As in SB3, see :meth:`_in_turns`."""
        return self._in_turns(super().get_attr, indices, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """As in SB3, see :meth:`_in_turns`."""
        self._in_turns(super().set_attr, indices, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """As in SB3, see :meth:`_in_turns`."""
        return self._in_turns(super().env_method, indices, method_name, *method_args, **method_kwargs)

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """As in SB3, see :meth:`_in_turns`."""
        return self._in_turns(super().env_is_wrapped, indices, wrapper_class)

    def _in_turns(self, method: Callable[..., Any], indices: VecEnvIndices, *args: Any, **kwargs: Any) -> Any:
        """Call a method of SB3 for all chosen environments at once, or in turns if one of them is chosen twice."""
        chosen = [remote.index for remote in self._get_target_remotes(indices)]
        if len(set(chosen)) == len(chosen):
            return method(*args, indices=indices, **kwargs)
        return [answer for index in chosen for answer in method(*args, indices=[index], **kwargs) or ()]

    def call_in_workers(self, function: Callable[..., object], args_per_worker: Iterable[tuple[object, ...]]) -> list[object]:
        """
        Call a function in each worker.

        :param function: Function of a module, which gets the environment and the arguments; its result is sent back
        :param args_per_worker: Arguments for each worker, length ``n_envs``
        :return: Result of each worker
        :raises WorkerError: if a worker fails
        """
        for remote, args in zip(self.remotes, args_per_worker, strict=True):
            remote.send(("call", (function, args)))
        return [remote.recv() for remote in self.remotes]

    def close(self) -> None:
        """Close the environments and end all workers, also those that do not answer within ``timeout``."""
        try:
            for remote in self.remotes if not self.closed else ():
                remote.send(("close", None))
            for process in self.processes:
                process.join(self.timeout)
        except WorkerError:
            pass  # It has ended all workers.
        finally:
            self._end()

    def _fail(self, message: str, cause: BaseException | None = None) -> NoReturn:
        """End all workers and raise an error."""
        self._end()
        raise WorkerError(f"{message} {REMEDY}") from cause

    def _end(self) -> None:
        self.closed, self.waiting = True, False
        for remote in self.remotes:
            remote.connection.close()  # Workers that find nobody there close their environments and end.
        end_processes(self.processes, GRACE)


class _Raised(NamedTuple):
    """The answer of a worker that has raised an error."""

    traceback: str


class _Remote:
    """The pipe to a worker, with the methods of a ``Connection`` that SB3 calls."""

    def __init__(self, env: CheckedSubprocVecEnv, index: int, connection: Connection, process: BaseProcess):
        self.env, self.index, self.connection, self.process = env, index, connection, process
        # Number of commands without an answer, more than 0 at the next command if the main process was interrupted
        self.n_due, self.deadline = 0, 0.0
        # Whether a message is on its way, of which a part is lost if the main process is interrupted
        self.is_torn = False
        self.wait = waiting_for(connection, process)

    def send(self, command: tuple[str, object]) -> None:
        """Send a command, after the answers to earlier ones have been discarded."""
        if self.env.closed:
            raise WorkerError("The workers have ended: the environment was closed, or a worker has failed.")
        if self.is_torn:
            self.env._fail(f"{self} was interrupted.")
        while self.n_due:
            self.recv()
        message = ForkingPickler.dumps(command)
        self.is_torn = True
        try:
            self.connection.send_bytes(message)
        except OSError as error:
            self._explain(error)
        self.is_torn = False
        self.n_due += 1
        if self.env.timeout is not None:
            self.deadline = time.monotonic() + self.env.timeout

    def recv(self) -> Any:
        """Wait for the answer to a command."""
        self._wait()
        self.is_torn = True
        try:
            answer = self.connection.recv()
        except Exception as error:
            self._explain(error)
        self.is_torn = False
        self.n_due -= 1
        if isinstance(answer, _Raised):
            self.env._fail(f"{self} has raised an error:\n\n{answer.traceback}\n")
        return answer

    def _wait(self) -> None:
        """Wait until there is an answer, or the worker has ended, at most until the deadline."""
        rest = None if self.env.timeout is None else max(0.0, self.deadline - time.monotonic())
        if not self.wait(rest):
            late = [str(remote) for remote in self.env.remotes if remote.n_due and not remote.connection.poll()]
            self.env._fail(f"No answer in {self.env.timeout} seconds: {', '.join(late)}.")

    def _explain(self, error: Exception) -> NoReturn:
        self.process.join(1)
        code = self.process.exitcode
        what = f"sent what cannot be read ({error!r})." if code is None else f"{describe_death(code)}.{self.env.hint}"
        self.env._fail(f"{self} {what}", error)

    def __str__(self) -> str:
        return f"Worker {self.index} (of 0 to {len(self.env.processes) - 1})"


def _work(connection: Connection, copies: list[Connection], env_fn: CloudpickleWrapper) -> None:
    """The main function of a worker: SB3's, whose errors are sent to the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = _Worker(connection, copies, env_fn)
    try:
        _worker(worker, worker.copies, worker)  # type: ignore[arg-type]
        report = "" if worker.is_told_to_end else "EOFError or KeyboardInterrupt, for which SB3's workers end in silence"
    except BaseException:
        report = traceback.format_exc()
    if report:
        with suppress(OSError):  # where the main process has ended
            connection.send(_Raised(report))
        with suppress(Exception):
            worker.env.close()


class _LastObservationCopied(gym.Wrapper[Any, Any, Any, Any]):
    """Copies the last observation of an episode, since the reset may write the next one into the same array."""

    def step(self, action: Arrays) -> Any:
        """:return: What the environment returns"""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return deepcopy(observation) if terminated or truncated else observation, reward, terminated, truncated, copy(info)

    def __setattr__(self, name: str, value: object) -> None:
        # Of the environment, except for what a wrapper has itself
        super().__setattr__(name, value) if name in WRAPPER_STATE else setattr(self.env, name, value)


class _Copies(list[Connection]):
    def close(self) -> None:
        """Close all."""
        for connection in self:
            connection.close()


class _Worker:
    """What SB3's worker takes for its pipe and for its environment function: it answers one command more, ``"call"``."""

    def __init__(self, connection: Connection, copies: list[Connection], env_fn: CloudpickleWrapper):
        self.connection, self.copies, self.env_fn = connection, _Copies(copies), env_fn
        self.is_told_to_end = False

    def var(self) -> gym.Env:
        """Create the environment."""
        self.env = _patch_env(self.env_fn.var())
        return _LastObservationCopied(self.env)

    def recv(self) -> Any:
        """Receive the next command for SB3's worker."""
        while True:
            try:
                command, data = self.connection.recv()
            except EOFError:
                command, data = "close", None  # The main process has ended.
            self.is_told_to_end = command == "close"
            if command != "call":
                return command, data
            function, args = data
            self.connection.send(function(self.env, *args))

    def send(self, answer: object) -> None:
        """Send the answer to a command."""
        self.connection.send(answer)

    def close(self) -> None:
        """Close the pipe."""
        self.connection.close()

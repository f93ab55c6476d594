"""Errors of environments in processes of their own, with the names of the workers."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnvWrapper

REMEDY = (
    "Make new environments; a model takes them with `set_env`, and is as it was before the rollout: it can be saved, predict"
    " and learn on."
)
# New processes import the script that starts them, which must not start processes again then.
NO_GUARD = (
    ' If a script starts the environments, that has to stand under `if __name__ == "__main__":`, or give '
    '`start_method="fork"` where there is no CUDA and no JAX.'
)


class WorkerError(RuntimeError):
    """A process of a vectorised environment has died, has raised an error, or has not answered in time."""


def raise_if_worker_died(env: object, error: Exception) -> None:
    """
    Name the workers that have died, if that is why a command to a vectorised environment failed. SB3's ``SubprocVecEnv`` would
    then wait forever in ``close`` for an answer, so that it is closed here.

    :param env: Vectorised environment with its wrappers, such as SB3's ``SubprocVecEnv`` in a ``VecNormalize``
    :param error: Error of a pipe to a process
    :raises WorkerError: if a process of the environment has ended
    """
    while isinstance(env, VecEnvWrapper):
        env = env.venv
    processes = getattr(env, "processes", None) or ()
    # The pipe of a process that dies closes a little before it has ended.
    ended = wait([process.sentinel for process in processes], timeout=1) if processes else ()
    deaths = []
    for index, process in enumerate(processes):
        if process.sentinel in ended:
            process.join(1)
            where = f"Worker {index} (of 0 to {len(processes) - 1}) of {type(env).__name__}"
            deaths.append(f"{where} {describe_death(process.exitcode)}.")
    if deaths:
        if type(env) is SubprocVecEnv:
            deaths.append("`CheckedSubprocVecEnv` shows the traceback of a worker.")
            _end(env)
        raise WorkerError(" ".join([*deaths, REMEDY])) from error


@contextmanager
def worker_deaths_noticed(env: object) -> Iterator[None]:
    """
    Let commands to SB3's ``SubprocVecEnv`` fail if the worker that has to answer has died, within the context. Forked workers
    have copies of the pipes of those that were forked later, so that a death does not close these, and SB3 would wait forever.

    :param env: Vectorised environment with its wrappers
    """
    while isinstance(env, VecEnvWrapper):
        env = env.venv
    if type(env) is not SubprocVecEnv or not isinstance(env.remotes[0], Connection) or not hasattr(select, "poll"):
        yield
        return
    remotes = env.remotes
    env.remotes = tuple(map(_WatchedPipe, remotes, env.processes))
    try:
        yield
    finally:
        env.remotes = remotes


class _WatchedPipe:
    """A pipe to a worker, which answers until the worker has ended."""

    def __init__(self, connection: Connection, process: BaseProcess):
        self.connection, self.wait = connection, waiting_for(connection, process)

    def recv(self) -> Any:
        """Wait for an answer, or for the end of the worker."""
        self.wait(None)
        if not self.connection.poll():
            raise EOFError
        return self.connection.recv()

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)


def waiting_for(connection: Connection, process: BaseProcess) -> Callable[[float | None], object]:
    """
    :param connection: Pipe to a worker
    :param process: Process of the worker
    :return: Function that waits until there is something to read, or the worker has ended, at most for some seconds; ``None``
        for no limit. It returns something true, or else something false after these seconds
    """
    if not hasattr(select, "poll"):
        return partial(wait, [connection, process.sentinel])
    # `wait` would register both each time, which takes as long as to receive.
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    poller.register(process.sentinel, select.POLLIN)
    return lambda rest: poller.poll(None if rest is None else 1000 * rest)


def _end(env: SubprocVecEnv) -> None:
    end_processes(env.processes)
    for remote in env.remotes:
        remote.close()
    env.closed, env.waiting = True, False


def end_processes(processes: Sequence[BaseProcess], grace: float = 0.0) -> None:
    """
    End processes by SIGTERM, and by SIGKILL those that ignore it, as processes do that were forked while pygame had a window.

    :param processes: Processes to end
    :param grace: Seconds that they have to end by themselves
    """
    deadline = time.monotonic() + grace
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for end in ("terminate", "kill"):
        for process in processes:
            if process.is_alive():
                getattr(process, end)()
        for process in processes:
            process.join(1)


def describe_death(exit_code: int | None) -> str:
    """
    :param exit_code: Exit code of a process, as ``multiprocessing`` gives it
    :return: What has happened to the process, as part of a sentence
    """
    if exit_code is None:
        return "has closed its pipe"
    if exit_code < 0:
        name = {number.value: number.name for number in signal.Signals}.get(-exit_code, f"signal {-exit_code}")
        return f"was killed by {name}" + (", perhaps because the memory was full" if name == "SIGKILL" else "")
    cause = "the environment was closed, or left its process" if exit_code == 0 else "its environment raised an error, or left"
    return f"has died with exit code {exit_code} ({cause})"

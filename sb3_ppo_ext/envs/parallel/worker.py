"""The process that steps a share of the environments."""

from __future__ import annotations

import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper

from sb3_ppo_ext.common.guards import EnvironmentDataError
from sb3_ppo_ext.envs.parallel.flags import RUNG, STRIDE, flags_in
from sb3_ppo_ext.envs.parallel.share import EnvironmentShare
from sb3_ppo_ext.envs.parallel.shared_arrays import SharedArrays

# Seconds between two looks whether the main process is still there, in case that another process keeps its pipe open
ORPHAN_CHECK = 5.0
# Commands after whose errors the environments cannot continue
OF_TRAINING = ("create", "step_infos", "reset_envs", "collect")
# What is written to the pipe if there is nothing to say; pickles begin with another byte
WAKE_UP = b"\0"


class Job(NamedTuple):
    """
    What a worker needs to know at its start.

    :param worker: Index of the worker, from 0
    :param first: Index of its first environment
    :param arrays: Shared memory
    :param connection: Its end of the pipe
    :param copies: Connections that it has to close, as a forked process has those of all others
    :param env_fns: Functions that create its environments
    :param spin: Seconds to wait actively for the next step
    """

    worker: int
    first: int
    arrays: SharedArrays
    connection: Connection
    copies: list[Connection]
    env_fns: CloudpickleWrapper
    spin: float


class Reply(NamedTuple):
    """
    Answer of a worker.

    :param value: Result
    :param traceback: Traceback if there was an error
    :param error: The error, if the environments can continue after it
    :param env_index: Index of the environment that has failed
    """

    value: object = None
    traceback: str | None = None
    error: Exception | None = None
    env_index: int | None = None


def work(job: Job) -> None:
    """
    The main function of a worker.

    :param job: What it needs to know
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts only the main process.
    for copy in job.copies:
        copy.close()
    worker = _Worker(job)
    with suppress(EOFError, OSError):  # The main process has ended, or has closed the pipe.
        worker.run()
    if worker.share is not None:
        worker.share.close()


class _Worker:
    def __init__(self, job: Job):
        self.job, self.arrays, self.connection = job, job.arrays, job.connection
        flag = slice(job.worker * STRIDE, (job.worker + 1) * STRIDE)
        self.inbox, self.outbox = flags_in(self.arrays.to_workers[flag]), flags_in(self.arrays.from_workers[flag])
        self.parent = os.getppid()
        self.share: EnvironmentShare | None = None
        self.poll: Callable[[], Any] = lambda: self.connection.poll(ORPHAN_CHECK)
        if hasattr(select, "poll"):
            # `Connection.poll` would register the pipe each time, which takes as long as to receive.
            poller = select.poll()
            poller.register(self.connection.fileno(), select.POLLIN)
            self.poll = lambda: poller.poll(1000 * ORPHAN_CHECK)

    def run(self) -> None:
        """Answer commands until the main process ends."""
        self.send(self.answer(self.create))
        while self.share is not None:
            data = self.receive()
            self.inbox.clear()
            self.send(self.answer(self.obey, data) if data else self.step())

    def create(self) -> None:
        """Create the environments."""
        self.share = EnvironmentShare(self.job.env_fns.var, self.job.first)
        self.share.attach(self.arrays)
        self.share.goes_on = self.goes_on  # type: ignore[method-assign]
        self.envs = slice(self.job.first, self.job.first + self.share.num_envs)

    def goes_on(self) -> bool:
        """Whether the main process still waits for the rollout. It sees that this one is alive."""
        self.arrays.n_begun[self.job.worker] += 1
        return not self.arrays.is_abandoned[0] and os.getppid() == self.parent

    def step(self) -> bytes:
        """Step the environments, with the actions in the shared memory."""
        try:
            assert self.share is not None
            return self._with_mail(self.share.step_infos(self.arrays.read_actions(self.envs)))
        except BaseException as error:
            return self._refused(error, "step_infos")

    def _with_mail(self, infos: Any) -> bytes:
        return b"" if self.arrays.write_mail(self.job.worker, infos) else _pickled(Reply(infos))

    def answer(self, function: Callable[..., object], *args: object) -> bytes:
        """Call a function that may answer by itself."""
        self.command = "create"
        try:
            result = function(*args)
            return result if isinstance(result, _Answered) else _pickled(Reply(result))
        except BaseException as error:
            return self._refused(error, self.command)

    def obey(self, data: bytes) -> object:
        """Obey a command: name, arguments, and keyword arguments of a method of the environments."""
        self.command, args, kwargs = pickle.loads(data)
        result = getattr(self.share, self.command)(*args, **kwargs)
        if self.command == "step_infos":
            return _Answered(self._with_mail(result))
        return result

    def _refused(self, error: BaseException, command: str) -> bytes:
        """Pass an error on."""
        text = traceback.format_exc()
        if isinstance(error, EnvironmentDataError) or (isinstance(error, Exception) and command not in OF_TRAINING):
            with suppress(Exception):  # which some errors raise when they are unpickled
                data = _pickled(Reply(traceback=text, error=error))
                pickle.loads(data)
                return data
        return _pickled(Reply(traceback=text, env_index=None if self.share is None else self.share.active))

    def receive(self) -> bytes:
        """Wait for a command; nothing means a step."""
        if self.inbox.wait(self.job.spin) == RUNG or not self.inbox.doze(0):
            return b""
        while not self.poll():
            if os.getppid() != self.parent:
                raise EOFError
        data = self.connection.recv_bytes()
        return b"" if data == WAKE_UP else data

    def send(self, data: bytes) -> None:
        """Answer; nothing means that all is in the shared memory."""
        if self.outbox.ring(0, bool(data)) or data:
            self.connection.send_bytes(data or WAKE_UP)


class _Answered(bytes):
    """An answer that is pickled already."""


def _pickled(reply: Reply) -> bytes:
    try:
        return pickle.dumps(reply, protocol=5)
    except Exception:
        return cloudpickle.dumps(reply)

"""The workers of a ``ParallelVecEnv``, as the main process sees them."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeAlias

import cloudpickle
import gymnasium as gym
from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper

from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.workers import NO_GUARD, REMEDY, WorkerError, describe_death, end_processes, waiting_for
from sb3_ppo_ext.envs.parallel.flags import RUNG, flags_in
from sb3_ppo_ext.envs.parallel.shared_arrays import SharedArrays
from sb3_ppo_ext.envs.parallel.worker import WAKE_UP, Job, Reply, work

# Method of :class:`EnvironmentShare`, its arguments and its keyword arguments
Command: TypeAlias = tuple[str, tuple[Any, ...], Kwargs]
# Seconds in which a worker whose main process has gone may close its environments
GRACE = 2.0


class RemoteTraceback(Exception):
    """The cause of an error of another process: its traceback there."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class WorkerPool:
    """
    Processes with a share of the environments each. A command goes to one or all of them, and each has one answer, after
    which the next command may follow.

    :param shares: For each worker, the range of its environments
    :param arrays: Shared memory
    :param timeout: Seconds that a worker may take to answer, ``None`` for no limit
    :param spin: Seconds to wait actively for an answer or a command
    """

    def __init__(self, shares: list[range], arrays: SharedArrays, timeout: float | None, spin: float):
        self.shares, self.arrays, self.timeout, self.spin = shares, arrays, timeout, spin
        self.outbox, self.inbox = flags_in(arrays.to_workers), flags_in(arrays.from_workers)
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        self.waits: list[Callable[[float | None], object]] = []
        # Workers that owe an answer; at the next command, these are those whose answers an interrupt has left behind
        self.due: list[int] = []
        # Whether a message was on its way when the main process was interrupted
        self.is_torn = False
        self.is_closed, self.deadline = False, 0.0
        # What is added if a worker dies before it has created its environments
        self.hint = ""
        # Steps of rollouts that each worker had begun when the deadline was set
        self.n_begun: list[int] = []
        # A forked copy of the main process has nothing to close.
        self.owner = os.getpid()

    def start(self, start_method: str, env_fns: Sequence[Callable[[], gym.Env]]) -> None:
        """
        Start all workers at once, and wait until they have created their environments.

        :param start_method: Start method of ``multiprocessing``
        :param env_fns: Functions that create the environments, for all of them
        :raises WorkerError: if an environment cannot be created
        """
        context: Any = mp.get_context(start_method)
        self.hint = "" if start_method == "fork" else NO_GUARD
        for index, share in enumerate(self.shares):
            connection, theirs = context.Pipe()
            copies = [*self.connections, connection] if start_method == "fork" else []
            functions = CloudpickleWrapper([env_fns[i] for i in share])
            job = Job(index, share.start, self.arrays, theirs, copies, functions, self.spin)
            name = f"environments {share.start} to {share.stop - 1}"
            process = context.Process(target=work, args=(job,), name=name, daemon=True)
            self.connections.append(connection)
            try:
                process.start()
            finally:
                theirs.close()
            self.processes.append(process)
            self.waits.append(waiting_for(connection, process))
        self.due = list(range(len(self.shares)))
        self._set_deadline()
        for index in range(len(self.shares)):
            self.value(index)
        self.hint = ""

    def _set_deadline(self) -> None:
        if self.timeout is not None:
            self.deadline, self.n_begun = time.monotonic() + self.timeout, self.arrays.n_begun.tolist()

    def prepare(self) -> None:
        """
        Get ready for a command: discard the answers to earlier ones that were interrupted.

        :raises WorkerError: if the workers have ended
        """
        if self.is_closed:
            raise WorkerError("The environments are closed: `close` was called, or one of them has failed. " + REMEDY)
        if self.is_torn:
            self.fail("A message between the processes was interrupted.")
        for index in list(self.due):
            self.receive(index)
        self._set_deadline()

    def begin_steps(self) -> None:
        """Let all workers step, with the actions in the shared memory."""
        self.is_torn = True
        self.inbox.clear()
        for index in self.outbox.ring_all():
            self._write(index, WAKE_UP)
        self.due = list(range(len(self.shares)))
        self.is_torn = False

    def begin(self, commands: dict[int, Command]) -> None:
        """
        Send commands.

        :param commands: Commands by the index of the worker
        """
        messages = {index: cloudpickle.dumps(command) for index, command in commands.items()}
        self.arrays.is_abandoned[0] = False
        self.is_torn = True
        self.inbox.clear()
        for index, message in messages.items():
            self.outbox.ring(index, True)
            self._write(index, message)
        self.due = list(messages)
        self.is_torn = False

    def abandon(self) -> None:
        """Let the workers end their rollouts before the next step. Their answers are discarded by the next command."""
        self.arrays.is_abandoned[0] = True

    def _write(self, index: int, data: bytes) -> None:
        try:
            self.connections[index].send_bytes(data)
        except OSError as error:
            self._explain(index, error)

    def step_infos(self) -> list[Any]:
        """
        Wait until all workers have stepped.

        :return: What :meth:`EnvironmentShare.step_infos` returns in each
        :raises WorkerError: if one fails
        """
        if self.inbox.wait(self.spin) == RUNG:
            self.due = []
            return [self.arrays.read_mail(index) for index in range(len(self.shares))]
        replies = [self.receive(index) for index in list(self.due)]
        return [self._value(index, reply) if reply else self.arrays.read_mail(index) for index, reply in enumerate(replies)]

    def value(self, index: int) -> Any:
        """
        :param index: Index of a worker
        :return: Its answer to a command
        :raises WorkerError: if it fails
        """
        return self._value(index, self.receive(index))

    def _value(self, index: int, data: bytes) -> object:
        try:
            reply: Reply = pickle.loads(data)
        except Exception as error:
            self.fail(f"{self.name(index)} sent what cannot be read ({error!r}).", error)
        if reply.error is not None:
            raise reply.error from RemoteTraceback(reply.traceback)
        if reply.traceback is not None:
            where = "" if reply.env_index is None else f" in environment {reply.env_index}"
            self.fail(f"{self.name(index)} has raised an error{where}:\n\n{reply.traceback}\n")
        return reply.value

    def receive(self, index: int) -> bytes:
        """
        :param index: Index of a worker that owes an answer
        :return: The answer; nothing if all is in the shared memory
        """
        data = b""
        if self.inbox.doze(index):
            self._block(index)
            self.is_torn = True
            try:
                data = self.connections[index].recv_bytes()
                data = b"" if data == WAKE_UP else data
            except (EOFError, OSError) as error:
                self._explain(index, error)
        self.due.remove(index)
        self.is_torn = False
        return data

    def _block(self, index: int) -> None:
        """Wait until there is an answer, or the worker has ended, at most until the deadline after its last step."""
        while not self._is_ready(index):
            if self.arrays.n_begun[index] != self.n_begun[index]:
                self._set_deadline()
                continue
            late = [self.name(each) for each in self.due if self.inbox.doze(each) and not self.connections[each].poll()]
            self.fail(f"No answer in {self.timeout} seconds: {', '.join(late)}.")

    def _is_ready(self, index: int) -> bool:
        """Wait until there is something to read, or the worker has ended, at most until the deadline."""
        rest = None if self.timeout is None else max(0.0, self.deadline - time.monotonic())
        return bool(self.waits[index](rest))

    def _explain(self, index: int, error: Exception) -> NoReturn:
        self.processes[index].join(1)
        self.fail(f"{self.name(index)} {describe_death(self.processes[index].exitcode)}.{self.hint}", error)

    def name(self, index: int) -> str:
        """
        :param index: Index of a worker
        :return: Its name, with its environments. The main process counts as the one before the first
        """
        share = self.shares[index]
        envs = f"environment {share[0]}" if len(share) == 1 else f"environments {share[0]} to {share[-1]}"
        return f"Worker {index + 1} (of 1 to {len(self.shares)}, with {envs})"

    def fail(self, message: str, cause: BaseException | None = None) -> NoReturn:
        """
        End all workers, and raise an error.

        :param message: Start of the message
        :param cause: Error that is the cause
        :raises WorkerError: always
        """
        self.end()
        raise WorkerError(f"{message} {REMEDY}") from cause

    def close(self) -> None:
        """Let the workers close their environments and end, also those that do not within ``timeout``."""
        if not self.is_closed and os.getpid() == self.owner:
            self.abandon()
            for connection in self.connections:
                hang_up(connection)  # Workers that find nobody there close their environments and end.
            for process in self.processes:
                process.join(self.timeout)
        self.end()

    def end(self) -> None:
        """End all workers soon."""
        if os.getpid() != self.owner:
            return
        self.is_closed, self.due = True, []
        self.abandon()
        for connection in self.connections:
            hang_up(connection)
        end_processes(self.processes, GRACE)


def hang_up(connection: Connection) -> None:
    """
    Close a pipe for all processes. Processes that were forked later, for whatever purpose, have copies of its end, so that
    closing it here would not be noticed at the other end.

    :param connection: End of a pipe
    """
    if not connection.closed and os.name == "posix":
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
    connection.close()

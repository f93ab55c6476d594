"""Processes that may die or hang: the one who asked learns which question killed them."""

import multiprocessing as mp
import signal
import threading
import warnings
from queue import Empty, SimpleQueue

from support.fuzzing.trials import Outcome

CONTEXT = mp.get_context("spawn")


def _work(connection, function):
    import torch as th

    th.set_num_threads(1)
    warnings.simplefilter("ignore")
    while (question := connection.recv()) is not None:
        connection.send(function(question))


class Worker:
    """
    A process that calls a function, and is replaced when it dies or hangs.

    :param function: Function of a module
    :param seconds: Time that a call may take
    :param start_up: Time that the first call may take in addition, since the process imports PyTorch first
    """

    def __init__(self, function, seconds=60, start_up=60):
        self.function, self.seconds, self.start_up = function, seconds, start_up
        self._start()

    def _start(self):
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_work, args=(theirs, self.function), daemon=True)
        self.process.start()
        theirs.close()
        self.is_new = True

    def ask(self, question):
        """What the function returns for the question; an ``Outcome`` if the process does not survive it."""
        self.connection.send(question)
        seconds, self.is_new = self.seconds + self.start_up * self.is_new, False
        try:
            if self.connection.poll(seconds):
                return self.connection.recv()
            answer = Outcome("other", "hangs", f"more than {seconds} seconds")
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode
            name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            answer = Outcome("other", f"dies of {name}", f"the process died of {name}")
        self.close()
        self._start()
        return answer

    def close(self):
        """End the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def ask_all(function, questions, jobs, **times):
    """
    :param function: Function of a module
    :param questions: Its arguments
    :param jobs: Number of processes
    :param times: Further arguments of :class:`Worker`
    :return: Questions and answers as they come
    """
    todo, answers = SimpleQueue(), SimpleQueue()
    for question in questions:
        todo.put(question)
    threads = [threading.Thread(target=_ask_until_empty, args=(Worker(function, **times), todo, answers)) for _ in range(jobs)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for _ in questions:
        yield answers.get()


def _ask_until_empty(worker, todo, answers):
    while True:
        try:
            question = todo.get_nowait()
        except Empty:
            return worker.close()
        answers.put((question, worker.ask(question)))

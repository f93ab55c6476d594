"""Processes that need not import everything again: PyTorch and SB3 alone take two seconds."""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

# One server for all processes of this start method, which holds nothing of ours
SERVED: Any = multiprocessing.get_context("forkserver")
SERVED.set_forkserver_preload(["stable_baselines3", "torch._dynamo", "pytest"])


def listen_to_ctrl_c() -> None:
    """What a shell starts in the background ignores SIGINT, and so do its children, unless they are told not to."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_fresh(code: str, *arguments: object) -> str:
    """
    :param code: Runs as by ``python -c``, where nothing of ours is imported yet
    :param arguments: Arguments of the command line
    :return: What it prints
    """
    return _finished(SERVED, _run, code, [str(each) for each in arguments])[1]


def run_forked(function: Callable[..., object], *arguments: object) -> tuple[int, str]:
    """
    :param function: Runs in a fork of this process
    :param arguments: Its arguments
    :return: Exit status, and all that is printed
    """
    return _finished(multiprocessing.get_context("fork"), function, *arguments)


def run_apart(function: Callable[..., object], *arguments: object) -> tuple[int, str]:
    """
    :param function: Function of a module that may use JAX, whose threads a fork would wait for: runs in a fork of this process
        as long as JAX is not here
    :param arguments: Its arguments
    :return: Exit status, and all that is printed
    """
    return _finished(SERVED, function, *arguments) if "jax" in sys.modules else run_forked(function, *arguments)


def _finished(context: Any, function: Callable[..., object], *arguments: object) -> tuple[int, str]:
    with tempfile.NamedTemporaryFile("r") as file:
        process = context.Process(target=_printing_to, args=(file.name, function, *arguments))
        process.start()
        process.join()
        printed = file.read()
    return process.exitcode, printed


def _printing_to(path: str, function: Callable[..., object], *arguments: object) -> None:
    with open(path, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
    function(*arguments)


def _run(code: str, arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})

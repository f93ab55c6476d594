"""Scripts that several ranks run as torchrun lets them, one after the other, in forks of a process that imports for all."""

import os
import runpy
import socket
import sys
import traceback


def variables(rank, n_ranks, port):
    """Environment variables that torchrun sets."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks, "MASTER_PORT": port}
    return {**{name: str(n) for name, n in numbers.items()}, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "forked"}


def forked(script, arguments, environment):
    """:return: Id of a process that runs the script"""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.environ.update(environment)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(n_ranks, script, *arguments):
    """Run one script by this number of ranks; end with an error if a rank does, for which the others may wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environments = [variables(rank, n_ranks, port) for rank in range(n_ranks)] or [{}]
    left = {forked(script, arguments, environment) for environment in environments}
    while left:
        pid, status = os.wait()
        left.remove(pid)
        if status:
            for other in left:
                os.kill(other, 9)
            sys.exit(1)


def run_all(jobs):
    """
    :param jobs: Number of ranks, script and arguments of each job; with 0 ranks, a process runs the script without torchrun
    """
    import rl_zoo3.train  # noqa: F401
    import torch._dynamo  # noqa: F401  # which PyTorch imports with the first optimizer

    for n_ranks, script, *arguments in jobs:
        run(n_ranks, str(script), *map(str, arguments))

"""What all tests share. Plain helpers, such as toy environments, are in `tests/support`."""

import functools
import gc
import os
import platform
import random
import signal
import subprocess
import sys
from collections import Counter
from multiprocessing.process import BaseProcess

# Before PyTorch is imported: OpenMP's threads are not there in forked processes, which would wait for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch as th

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # in tests and examples that import ONNX Runtime
platform.uname().processor  # noqa: B018 - SB3's `save` asks for it, by a process whose answer is kept


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Whatever ran before, and in whichever process."""
    random.seed(0)
    np.random.seed(0)
    th.manual_seed(0)


@pytest.fixture(autouse=True)
def _signals_are_left_alone():
    """Handlers that stay would make later tests, and the processes that they fork, ignore signals."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    yield
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.fixture(autouse=True)
def _integration_is_marked(request, monkeypatch):
    """A test that starts processes or compiles is marked `integration`, since `make test-fast` leaves it out."""
    if request.node.get_closest_marker("integration"):
        return

    popen = subprocess.Popen.__init__

    def refuse(*args, **kwargs):
        if args[1:] and args[1][:1] == ["fc-list"]:  # Matplotlib looks for fonts when it is first imported on a machine
            return popen(*args, **kwargs)
        # Not an `Exception`, so that nothing that is tested can catch it.
        pytest.fail("This test starts a process or compiles: mark it with `@pytest.mark.integration`")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(BaseProcess, "start", refuse)
    monkeypatch.setattr(th, "compile", refuse)


@pytest.fixture
def quick_compiler(monkeypatch):
    """`torch.compile` traces, and runs what it has traced: gradients and C++ take most of the time."""
    monkeypatch.setattr(th, "compile", functools.partial(th.compile, backend="eager"))


@pytest.fixture(scope="session")
def quick_export():
    """PyTorch reads its translations to ONNX once: for each export, they take half of the time."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture
def train_here(tmp_path, monkeypatch):
    """RL Zoo's command `train` in this process, which need not start, and in the folder of the test."""
    from rl_zoo3.train import train
    from support.zoo import QUICK

    def command(*arguments, algo="ppo_ext"):
        # The number of threads would stay for the tests to come.
        monkeypatch.setattr(sys, "argv", ["train", "--algo", algo, *QUICK, "--num-threads=-1", *map(str, arguments)])
        train()

    monkeypatch.chdir(tmp_path)
    return command


@pytest.fixture
def short_episodes(monkeypatch):
    """A function that gives an environment of Gymnasium's registry episodes of 20 steps, for evaluations."""
    import gymnasium as gym

    return lambda env_id: monkeypatch.setattr(gym.spec(env_id), "max_episode_steps", 20)


@pytest.fixture
def enjoy_here(tmp_path, monkeypatch, capsys):
    """What RL Zoo's command `enjoy` prints, in this process and in the folder of the test."""
    from rl_zoo3.enjoy import enjoy

    def command(env_id, n_timesteps):
        words = ["--algo", "ppo_ext", "--env", env_id, "-f", "logs", "-n", str(n_timesteps), "--no-render"]
        monkeypatch.setattr(sys, "argv", ["enjoy", *words])
        enjoy()
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    return command


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with an agent for CartPole-v1, trained by `python -m rl_zoo3.train`, for tests of the xdist group "trained"."""
    from support import zoo  # The Zoo takes its time to import.

    folder = tmp_path_factory.mktemp("trained")
    arguments = ["--env", "CartPole-v1", "-n", "600", "-tb", "tb", "--save-freq", "300", "-P", "--vec-env", "subproc"]
    arguments += ["--eval-freq", "300", "-params", "n_envs:2"]
    zoo.train(*arguments, cwd=folder, command=(*zoo.MODULE, "rl_zoo3.train"))
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a test that is marked `many`, `make test-fast` runs every n-th, beginning with the first."""
    seen = Counter()
    for item in items:
        mark = item.get_closest_marker("many")
        if mark is not None and item.get_closest_marker("slow") is None:
            test = item.path, item.originalname
            if seen[test] % mark.kwargs["one_in"] > 0:
                item.add_marker("integration")
            seen[test] += 1


def pytest_collection_finish(session):
    """What is there before the first test stays, and is not looked through by each garbage collection."""
    gc.freeze()
    # Autograd counts the devices when it is first used, which another test may do.
    if any("sim" in getattr(item, "fixturenames", ()) for item in session.items):
        from support.simulated_device import load

        load()


@pytest.fixture(scope="session")
def sim():
    """A device whose memory is the CPU's, which refuses and counts what CUDA would refuse or wait for."""
    from support.simulated_device import simulated_device

    return simulated_device()

"""What all tests share. Plain helpers, such as toy environments, are in `tests/support`."""

import platform
import random
import subprocess
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
import torch as th

platform.uname().processor  # noqa: B018 - SB3's `save` asks for it, by a process whose answer is kept


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Whatever ran before, and in whichever process."""
    random.seed(0)
    np.random.seed(0)
    th.manual_seed(0)


@pytest.fixture(autouse=True)
def _integration_is_marked(request, monkeypatch):
    """A test that starts processes or compiles is marked `integration`, for `make test-fast` leaves it out."""
    if request.node.get_closest_marker("integration"):
        return

    def refuse(*args, **kwargs):
        # Not an `Exception`, so that nothing that is tested can catch it.
        pytest.fail("This test starts a process or compiles: mark it with `@pytest.mark.integration`")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(BaseProcess, "start", refuse)
    monkeypatch.setattr(th, "compile", refuse)

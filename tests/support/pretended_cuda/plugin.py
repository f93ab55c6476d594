"""
A plugin of pytest that runs the tests marked `gpu` on the pretended device:
`PYTHONPATH=tests python -m pytest -p support.pretended_cuda.plugin -m gpu tests/engines`. A test fails if the host writes or
reads page-locked memory too early. Plugins that are named on the command line are imported before PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.pretended_cuda import device

if not device.install():
    raise pytest.UsageError("there is no C++ compiler for the pretended device")


@pytest.fixture(autouse=True)
def _without_hazards() -> Iterator[None]:
    device.hazards.clear()
    yield
    assert not device.hazards, f"{device.hazards[0].what}, at {device.hazards[0].place}"

"""The examples run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.integration
def test_ray_tune(tmp_path):
    """Ray Tune runs trials with ``PPOExt`` and finds the best one."""
    pytest.importorskip("ray.tune")
    command = [sys.executable, str(EXAMPLES / "ray_tune.py"), "--samples", "2", "--timesteps", "4096"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Best mean return" in done.stdout

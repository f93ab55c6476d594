"""The studies run, short of what makes them studies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[1] / "scripts" / "studies"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "timesteps", "tasks"),
    [
        ("reward_scale", 10240, []),
        ("bounds", 20480, []),
        ("adaptive_lr", 8192, []),
        ("backends", 4096, []),
        # The others take longer, and LunarLander needs Box2D, which the tests do without.
        ("action_laws", 1024, ["--tasks", "Pendulum-v1", "MountainCarContinuous-v0", "BangBang"]),
    ],
)
def test_study(name, timesteps, tasks, tmp_path):
    """Each writes its table and its plot, and prints a summary."""
    command = [sys.executable, STUDIES / f"{name}.py", "--seeds", "1", "--timesteps", timesteps, *tasks, "--out", tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True, env=environment).stdout
    assert "mean ± std over seeds" in printed
    assert len((tmp_path / f"{name}.csv").read_text().splitlines()) > 10
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_every_study_is_tested():
    """But for what they share."""
    names = {"reward_scale", "bounds", "adaptive_lr", "action_laws", "backends", "common"}
    assert {path.stem for path in STUDIES.glob("*.py")} == names

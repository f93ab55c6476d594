"""The examples of docs/checkpoints.md run as they are."""

import re
import runpy
from pathlib import Path

import pytest

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.checkpoints.training_checkpoint import TrainingCheckpoint

DOCS = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.mark.integration
def test_script_is_run_again(tmp_path, monkeypatch):
    """The script is interrupted, run again, and ends as a script that was not interrupted."""
    text = DOCS.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert "20,000 time" in " ".join(text.split())
    assert "20_000" in code
    script = tmp_path / "script.py"
    script.write_text(code.replace("20_000", "2_000").replace("1_000", "250"))

    def run(name, interrupt=False):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        with monkeypatch.context() as patch:
            if interrupt:
                patch.setattr(TrainingCheckpoint, "_on_step", interrupted(TrainingCheckpoint._on_step))
            runpy.run_path(str(script))
        return PPOExt.load(folder / "pendulum", device="cpu")

    with pytest.raises(KeyboardInterrupt):
        run("b", interrupt=True)
    assert (tmp_path / "b" / "checkpoints").exists()
    one, other = run("a"), run("b")
    assert one.num_timesteps == other.num_timesteps == 2048
    assert all((a == b).all() for a, b in zip(one.policy.parameters(), other.policy.parameters(), strict=True))


def interrupted(on_step):
    def interrupt(callback):
        if callback.num_timesteps >= 1500:
            raise KeyboardInterrupt
        return on_step(callback)

    return interrupt

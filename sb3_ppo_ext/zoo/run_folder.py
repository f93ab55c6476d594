"""The folder of the run that is resumed or begun in this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

# Subfolder of the checkpoints
CHECKPOINTS = "checkpoints"
# What identifies the call of torchrun
MARKER = "torchrun.json"
# What RL Zoo and this package write before there is a model
BEFORE_THE_MODEL = ("*.monitor.csv", MARKER)
# Folder of the run that is resumed in this process, `None` for a new run
RESUMED: ContextVar[Path | None] = ContextVar("resumed", default=None)


@contextmanager
def removed_if_not_begun(folder: Path) -> Iterator[None]:
    """
    Remove a new folder if an error ends the run before it has a model: ``rl_zoo3 enjoy`` would take it for the newest run.

    :param folder: Folder of the run, which is kept if it exists already
    """
    is_new = not folder.exists()
    try:
        yield
    except Exception:
        files = [path for path in folder.rglob("*") if not path.is_dir()]
        if is_new and all(any(map(path.match, BEFORE_THE_MODEL)) for path in files):
            shutil.rmtree(folder, ignore_errors=True)
        raise

"""The folder of the run that is resumed in this process."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

# Subfolder of the checkpoints
CHECKPOINTS = "checkpoints"
_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)


def set_resumed_folder(folder: Path) -> None:
    """
    :param folder: Folder of the run that is resumed in this process
    """
    _FOLDER.set(folder)


def resumed_folder() -> Path | None:
    """:return: Folder of the run that is resumed in this process, ``None`` for a new run"""
    return _FOLDER.get()

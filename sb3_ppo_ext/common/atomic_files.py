"""Files that are either old or new, and never half written."""

import contextlib
import io
import os
import pathlib
import uuid
import warnings
from collections.abc import Iterator
from typing import BinaryIO

from stable_baselines3.common.save_util import open_path


@contextlib.contextmanager
def written_atomically(path: str | pathlib.Path) -> Iterator[BinaryIO]:
    """
    Write a file under a temporary name in the same folder, which replaces ``path`` at the end of the ``with`` statement. After
    an error, a full disk or a kill, ``path`` holds what it held before.

    :param path: Path of the file; its folder is created if it does not exist
    :return: Context manager with the temporary file, open for reading and writing
    """
    path = pathlib.Path(os.path.realpath(path))  # a link keeps pointing to the file
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o777)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: str | pathlib.Path | io.BufferedIOBase, content: bytes, suffix: str = "") -> None:
    """
    Write a file at once and atomically, where SB3 would write it piece by piece: to the same path, with the same warnings.

    :param path: Path of the file, which gets the suffix if it has none, and ``_2`` if it is a folder; or an open file
    :param content: Content of the file
    :param suffix: Suffix without the dot; none by default
    """
    if not isinstance(path, str | pathlib.Path):
        opened = open_path(path, "w")  # an open file, which SB3 checks
        opened.write(content)
        opened.flush()  # as `zipfile` does for SB3
        return
    path = _path_to_write(pathlib.Path(path), suffix)
    with written_atomically(path) as file:
        file.write(content)


def _path_to_write(path: pathlib.Path, suffix: str) -> pathlib.Path:
    if path.suffix == "" and suffix:
        path = pathlib.Path(f"{path}.{suffix}")
    if path.is_dir():
        warnings.warn(f"Path '{path}' is a folder. Will save instead to {path}_2", stacklevel=4)
        return _path_to_write(pathlib.Path(f"{path}_2"), suffix)
    if not path.parent.exists():
        warnings.warn(f"Path '{path.parent}' does not exist. Will create it.", stacklevel=4)
    return path

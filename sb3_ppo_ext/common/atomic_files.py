"""Files that are either old or new, and never half written."""

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def written_atomically(path: str | pathlib.Path) -> Iterator[BinaryIO]:
    """
    Write a file under a temporary name in the same folder, which replaces ``path`` at the end of the ``with`` statement. After
    an error, a full disk or a kill, ``path`` holds what it held before.

    :param path: Path of the file; its folder is created if it does not exist
    :return: Context manager with the temporary file, open for reading and writing
    """
    path = pathlib.Path(os.path.realpath(path))  # a link goes on pointing to the file
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

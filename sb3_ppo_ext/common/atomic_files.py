"""Files that are either old or new, and never half written."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def written_atomically(path: str | pathlib.Path) -> Iterator[BinaryIO]:
    """
    Write a file under a temporary name in the same folder, which replaces ``path`` at the end of the ``with`` statement. After an
    error, a full disk or a kill, ``path`` holds what it held before.

    :param path: Path of the file; its folder is created if it does not exist
    :return: Context manager with the temporary file, open for reading and writing
    """
    # A link is followed, so that it goes on pointing to the file.
    path = pathlib.Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode_of(path))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _mode_of(path: pathlib.Path) -> int:
    """Permissions of an existing file, or those that ``open`` gives a new one."""
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        umask = os.umask(0)  # there is no way to read it alone
        os.umask(umask)
        return 0o666 & ~umask

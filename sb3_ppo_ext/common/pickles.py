"""Files that hold one pickled object, as ``VecNormalize.save`` writes them."""

import pickle
from pathlib import Path
from typing import TypeVar

from sb3_ppo_ext.common.validation import BadArgumentError, check_type

T = TypeVar("T")


class MissingFileError(BadArgumentError, FileNotFoundError):
    """There is no such file. Also a ``FileNotFoundError``, which ``VecNormalize.load`` raises."""


def read_pickled(name: str, path: str | Path, kind: type[T]) -> T:
    """
    Read a file. It is unpickled, which executes code of the file: only trusted files.

    :param name: Name of the argument that holds the path
    :param path: Path of the file
    :param kind: Class of the object in it
    :return: The object
    :raises BadArgumentError: if there is no such file, or it holds something else
    """
    file, remedy = Path(path), f"give a file that `{kind.__name__}.save` has written"
    if not file.is_file():
        raise MissingFileError(f"`{name}={str(path)!r}` is not valid: there is no such file; {remedy}")
    try:
        content = pickle.loads(file.read_bytes())
    except OSError:
        raise
    except Exception as error:  # damaged or foreign files raise almost anything
        reason = f"it cannot be unpickled ({type(error).__name__}: {' '.join(str(error).split())})"
        raise BadArgumentError(f"`{name}={str(path)!r}` is not valid: {reason}; {remedy}") from error
    check_type(name, content, kind, f"that is what {path} holds; {remedy}")
    return content

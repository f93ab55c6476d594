"""
C++ that the tests compile against PyTorch, once per machine: it is kept in the user's folder for temporary files. Does not
import PyTorch, since some of it must be loaded before.
"""

import getpass
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock


def torch_folder() -> Path:
    """
    :return: Folder of the installed PyTorch, which is not imported
    """
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def compiler() -> str | None:
    """
    :return: Name of a C++ compiler, ``None`` if there is none
    """
    return next(filter(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++")), None)


def built(source: Path, optimization: str = "-O1") -> Path | None:
    """
    Compile a file, unless it was compiled before. One process at a time does it.

    :param source: The file
    :param optimization: Flag of the compiler
    :return: The library, ``None`` without a compiler
    """
    found = compiler()
    if found is None:
        return None
    folder = Path(tempfile.gettempdir()) / f"sb3_ppo_ext-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    described = f"{version('torch')} {sysconfig.get_platform()} {optimization}".encode()
    library = folder / f"{source.stem}-{hashlib.sha256(described + source.read_bytes()).hexdigest()[:16]}.so"
    with FileLock(f"{library}.lock"):
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            subprocess.run(_command(found, source, unfinished, optimization), check=True)
            unfinished.replace(library)
    return library


def _command(found: str, source: Path, target: Path, optimization: str) -> list[str]:
    torch = torch_folder()
    includes = [f"-I{torch / part}" for part in ("include", "include/torch/csrc/api/include")]
    libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    flags = ["-shared", "-fPIC", "-std=c++20", optimization, "-w"]
    return [found, *flags, *includes, str(source), *libraries, "-o", str(target)]

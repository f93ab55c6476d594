"""Zip files that may come from anywhere: only the members that are needed are read, and no more than the file can hold."""

import io
import os
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

# A zip may have been unpacked and packed again by another program, while SB3 and PyTorch do not compress.
MAX_RATIO, ALWAYS_ALLOWED = 5, 10_000_000


def read_members(file: Any, wanted: Callable[[str], bool], compressed: bool = True) -> dict[str, bytes]:
    """
    Read some members of a zip, and check that they are whole.

    :param file: Open file with the zip
    :param wanted: Function of a name that returns whether the member of this name is read
    :param compressed: Whether members may be compressed: up to ``MAX_RATIO`` times, or ``ALWAYS_ALLOWED`` bytes together
    :return: Content of these members, by name
    :raises zipfile.BadZipFile: if they are damaged, too large, or not unique; damage can also raise other errors
    """
    with zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if wanted(member.filename)]
        _check_sizes(members, file.seek(0, os.SEEK_END), compressed)
        contents = {member.filename: archive.read(member) for member in members}
    if len(contents) < len(members):
        raise zipfile.BadZipFile("it has members of the same name")
    for member in members:  # `read` compares checksums, but not sizes.
        if len(contents[member.filename]) != member.file_size:
            raise zipfile.BadZipFile(f"{member.filename} is shorter than it says")
    return contents


def _check_sizes(members: list[zipfile.ZipInfo], size: int, compressed: bool) -> None:
    methods = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) if compressed else (zipfile.ZIP_STORED,)
    for member in members:
        if member.compress_type not in methods:
            raise zipfile.BadZipFile(f"{member.filename} is compressed by another method than SB3's")
    if sum(member.compress_size for member in members) > size:
        raise zipfile.BadZipFile("its members overlap")
    if sum(member.file_size for member in members) > max(MAX_RATIO * size, ALWAYS_ALLOWED):
        raise zipfile.BadZipFile(f"it is compressed more than {MAX_RATIO} times")


def zipped(members: Mapping[str, bytes]) -> bytes:
    """
    :param members: Content of members, by name
    :return: Zip with these members, not compressed
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def with_members(file: io.BytesIO, members: Mapping[str, bytes]) -> bytes:
    """
    :param file: Zip in memory
    :param members: Content of further members, by name
    :return: Zip with the further members at its end
    """
    with zipfile.ZipFile(file, "a") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def checked_tensors(content: bytes) -> bytes:
    """
    :param content: File written by ``torch.save``
    :return: The same file, written anew from its members, so that PyTorch reads what has been checked here
    :raises zipfile.BadZipFile: if it is damaged, or its size in memory would be larger; damage can also raise other errors
    """
    members = read_members(io.BytesIO(content), lambda name: True, compressed=False)
    for name, member in members.items():
        # PyTorch executes no code of a state dictionary, but would create a `bytearray` of any size.
        if name.endswith("data.pkl") and b"bytearray" in member:
            raise zipfile.BadZipFile("it has a bytearray")
    return zipped(members)

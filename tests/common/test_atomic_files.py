"""Files are written whole or not at all."""

import pathlib

import pytest

from sb3_ppo_ext.common.atomic_files import written_atomically


def test_new_file_and_its_folder(tmp_path: pathlib.Path):
    """A file is created with its folder and the permissions that any new file has, and nothing lies beside it."""
    path = tmp_path / "folder" / "model.zip"
    with written_atomically(path) as file:
        file.write(b"whole")
        assert not path.exists()
    (tmp_path / "other").touch()
    assert path.read_bytes() == b"whole"
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert list(path.parent.iterdir()) == [path]


def test_error_keeps_the_former_file(tmp_path: pathlib.Path):
    """After an error in the middle of writing, the former file is still there, alone."""
    path = tmp_path / "model.zip"
    path.write_bytes(b"former")
    with pytest.raises(OSError, match="No space"), written_atomically(path) as file:  # noqa: PT012
        file.write(b"half")
        raise OSError("No space left on device")
    assert path.read_bytes() == b"former"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_and_links_stay(tmp_path: pathlib.Path):
    """A file that is replaced keeps its permissions, and a link to it stays a link."""
    path, link = tmp_path / "model.zip", tmp_path / "best"
    path.touch(mode=0o600)
    link.symlink_to(path)
    with written_atomically(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600

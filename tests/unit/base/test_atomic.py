"""Atomic writes of files, and removal of files left by killed processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from megatron.base.atomic import atomic_write, check_writable, hold_lock, remove_leftovers
from megatron.base.errors import UserError


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / "link", tmp_path / "folder" / "file"
    link.symlink_to(target)
    for content in (b"first", b"second"):
        assert check_writable(link) == target
        with atomic_write(link) as stream:
            stream.write(content)
        assert link.is_symlink()
        assert target.read_bytes() == content
    assert os.listdir(target.parent) == ["file"]


def _write_half(stream: BinaryIO) -> None:
    stream.write(b"half")
    raise OSError("the disk is full")


def test_an_error_leaves_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(OSError, match="full"), atomic_write(tmp_path / "file") as stream:
        _write_half(stream)
    assert (tmp_path / "file").read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_names_of_maximum_length(tmp_path: Path) -> None:
    longest = "x" * os.pathconf(tmp_path, "PC_NAME_MAX")
    path = check_writable(tmp_path / longest)
    with atomic_write(path) as stream:
        stream.write(b"1")
    assert os.listdir(tmp_path) == [longest]
    with pytest.raises(UserError, match=r"--out .*: cannot be written"):
        check_writable(tmp_path / (longest + "x"), "--out")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (".", "is a folder"),
        ("nowhere/file", "there is no folder"),
        ("file/below", "there is no folder"),
        ("itself", "cannot be written"),
        ("pipe", "is not a regular file"),
    ],
)
def test_unwritable_paths_are_refused_with_a_reason(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "itself").symlink_to("itself")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UserError, match=f"^--out {tmp_path / name}: {reason}"):
        check_writable(tmp_path / name, "--out")
    assert sorted(os.listdir(tmp_path)) == before


def test_leftovers_are_removed_unless_a_process_holds_them(tmp_path: Path) -> None:
    names = [".file.1.partial", ".file.2.partial", ".file.x.partial", ".other.1.partial", ".file.1.tmp"]
    for name in names:
        (tmp_path / name).touch()
    with hold_lock(tmp_path / ".file.2.partial"):
        remove_leftovers(tmp_path / "file", "partial", Path.unlink)
    assert sorted(os.listdir(tmp_path)) == sorted(set(names) - {".file.1.partial"})

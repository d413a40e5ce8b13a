"""Atomic file writes: files are written beside their final path, synced, then renamed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megatron.base.errors import UserError


def fsync_directory(folder: Path) -> None:
    """Make renames inside ``folder`` survive a power cut, if the file system can sync folders.

    Raises:
        OSError: when syncing fails.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder may be writable but not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


@contextmanager
def hold_lock(path: Path, *, if_supported: bool = False) -> Iterator[None]:
    """Hold the lock of a file or folder; the system releases it when the process ends.

    Args:
        path: path of the file.
        if_supported: whether to go on without a lock on a file system that has none.

    Raises:
        BlockingIOError: when another process holds the lock.
        OSError: when the file system has no locks, unless ``if_supported``.
    """
    # NFS locks only files that are open for writing, never folders.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            if not if_supported:
                raise
        yield
    finally:
        os.close(descriptor)


def temporary_path(path: Path, ending: str) -> Path:
    """Path of this process's hidden temporary file beside a file, of valid length."""
    name = path.name
    if len(os.fsencode(name)) > 200:  # of 255
        name = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return path.with_name(f".{name}.{os.getpid()}.{ending}")


def remove_leftovers(path: Path, ending: str, remove: Callable[[Path], object]) -> None:
    """Remove temporary files that killed processes left beside a file, unless another process has locked them."""
    prefix = temporary_path(path, ending).name.removesuffix(f"{os.getpid()}.{ending}")
    for leftover in path.parent.iterdir() if path.parent.is_dir() else ():
        number = leftover.name.removeprefix(prefix).removesuffix(f".{ending}")
        if number.isdecimal() and leftover.name == f"{prefix}{number}.{ending}":
            with suppress(OSError), hold_lock(leftover):
                remove(leftover)


def check_writable(path: str | Path, flag: str = "") -> Path:
    """Check that ``atomic_write`` will be able to write a file, before its content is computed.

    Returns:
        The real path of the file, links followed.

    Raises:
        UserError: when it cannot be written; the message names ``flag`` and the file.
    """
    target = Path(os.path.realpath(path))
    label = f"{flag} {path or target}".strip()
    try:
        if not target.parent.is_dir():
            raise UserError(f"{label}: there is no folder {target.parent}; make it first")
        with suppress(FileNotFoundError):  # other errors are reported: names too long, links to themselves
            mode = target.stat().st_mode
            if stat.S_ISDIR(mode):
                raise UserError(f"{label}: is a folder; name a file")
            if not stat.S_ISREG(mode):
                raise UserError(f"{label}: is not a regular file and would be replaced; name another")
        # Permissions say nothing about read-only file systems; only an attempt does.
        temporary_path(target, "tmp").touch()
        temporary_path(target, "tmp").unlink(missing_ok=True)  # processes on different machines may have the same id
    except OSError as error:
        raise UserError(f"{label}: cannot be written ({error.strerror}); name a file elsewhere") from error
    return target


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path`` (links followed), renamed to it when the block ends without an error.

    The temporary name includes the process id, so ranks that write the same file at once do not interfere:
    the last rename wins, and every version is complete.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path, "tmp")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_whole(path: str | Path, data: bytes, flag: str = "") -> None:
    """Write a file atomically, after ``check_writable`` has checked its path; links are followed.

    Raises:
        UserError: when it cannot be written; the message names ``flag`` and the file.
    """
    try:
        with atomic_write(Path(path)) as stream:
            stream.write(data)
    except OSError as error:
        label = f"{flag} {path}".strip()
        raise UserError(f"{label}: cannot be written ({error.strerror}); name a file elsewhere") from error

"""Opens regular files only: opening a pipe without a writer would never return."""

from __future__ import annotations

import errno
import os
import stat
from hashlib import blake2b
from io import FileIO
from pathlib import Path

_SAMPLES, _SAMPLE_BYTES = 16, 64 << 10


def open_regular(path: str | Path) -> FileIO:
    """Open a file for reading, unbuffered; links are followed.

    Raises:
        OSError: when it cannot be read, or is a pipe, a device or a socket.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, limit: int | None = None) -> bytes:
    """Read a file's bytes, at most the first ``limit``.

    Raises:
        OSError: as ``open_regular``.
    """
    with open_regular(path) as stream:
        if limit is None:
            return stream.readall()
        data = b""
        while chunk := stream.read(limit - len(data)):
            data += chunk
        return data


def fingerprint(path: str | Path) -> str:
    """Short fingerprint of a file or a folder of files, for comparison between machines.

    For a file of more than 1 MiB, only its size and 16 evenly spaced samples are read, since many ranks call this.
    """
    digest = blake2b(digest_size=8)
    total = 0
    try:
        files = [Path(path)]
        if files[0].is_dir():
            files = sorted(file for file in files[0].iterdir() if file.is_file())
        for file in files:
            if file != Path(path):
                digest.update(os.fsencode(file.name) + b"\0")
            with open_regular(file) as stream:
                size = os.fstat(stream.fileno()).st_size
                total += size
                digest.update(b"%d\0" % size)
                samples = [(0, size)]
                if size > _SAMPLES * _SAMPLE_BYTES:
                    last = size - _SAMPLE_BYTES
                    samples = [(last * index // (_SAMPLES - 1), _SAMPLE_BYTES) for index in range(_SAMPLES)]
                for start, length in samples:
                    stream.seek(start)
                    digest.update(stream.read(length))
    except OSError as error:
        return f"unreadable ({error.strerror})"
    except ValueError as error:  # no file has such a name
        return f"unreadable ({error})"
    return f"{total} bytes with digest {digest.hexdigest()}"

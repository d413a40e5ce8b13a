"""A lock by which only one run at a time writes to a folder of checkpoints.

A lock of the file system tells processes of one machine apart, and of several where the file system shares locks (NFS
does unless it is mounted without). It goes with its process, whatever ends that. Where locks are not shared, the
owner's record in the file and its changing time stamp tell.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.base.atomic import holding
from megatron.base.errors import UserError
from megatron.base.regular import read_regular

LOCK = ".lock"
BEAT_SECONDS = 3.0
SILENT_SECONDS = 15.0
"""An owner on another machine whose time stamp stands still for this long is taken for dead."""
PATIENCE_SECONDS = 2.0
"""Time for which a process that is ending may still hold the lock."""


@dataclass(frozen=True)
class Owner:
    """The owner of a folder.

    Args:
        host: name of its machine, for people.
        place: a name of one boot of one machine or container, whose processes can see each other.
        process: its process id there.
        born: when that process started, by the machine's clock; numbers are used again.
        started: its start as time of day, for people.
        token: random name of this one lock.
    """

    host: str
    place: str
    process: int
    born: str
    started: str
    token: str

    @staticmethod
    def this() -> Owner:
        """This process as an owner."""
        number = os.getpid()
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        return Owner(socket.gethostname(), _place(), number, _born(number), started, uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.started}"


def _place() -> str:
    """Name of this boot of the machine and of its process namespace; the host's name where there is no Linux."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _born(process: int) -> str:
    """Start time of a process; empty when it is gone or cannot be seen."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _lives_here(owner: Owner) -> bool:
    """Whether an owner whose process is visible here still runs."""
    if Path("/proc/self/stat").exists():
        return bool(owner.born) and _born(owner.process) == owner.born
    try:
        os.kill(owner.process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


class FolderLock:
    """The lock of a folder, held from construction to ``release``.

    Args:
        root: the folder, which exists.
        log: prints a line before waiting to find out whether another machine's run still lives.

    Raises:
        UserError: when another run holds it.
        OSError: when the lock's file cannot be written.
    """

    def __init__(self, root: str | Path, log: Callable[[str], None] = lambda line: None) -> None:
        self.root = Path(root)
        self.path = self.root / LOCK
        self.owner = Owner.this()
        self._held = ExitStack()
        self._released = threading.Event()
        self.path.touch()
        try:
            self._take()
            before = self._read()
            if before is not None and self._lives(before, log):
                raise self._in_use(before)
            self._write(json.dumps(asdict(self.owner)))
        except BaseException:
            self._held.close()
            raise
        threading.Thread(target=self._beat, name="folder-lock", daemon=True).start()

    def _take(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self._held.enter_context(holding(self.path, where_there_are_locks=True))
                return
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise self._in_use(self._read()) from error
                time.sleep(0.05)

    def _in_use(self, owner: Owner | None) -> UserError:
        who = f" ({owner})" if owner else ""
        return UserError(f"--save {self.root} is in use by another run{who}; stop that one, or name another folder")

    def _read(self) -> Owner | None:
        """Reads the owner on record; None when there is none, or the record cannot be read."""
        try:
            return Owner(**json.loads(read_regular(self.path, 10_000)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def _write(self, text: str) -> None:
        with self.path.open("r+b") as stream:
            stream.truncate()
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def _lives(self, owner: Owner, log: Callable[[str], None]) -> bool:
        """Whether the owner on record is alive, although its lock does not keep this process out."""
        if owner.place == self.owner.place:
            return _lives_here(owner)
        log(f"{self.root} was in use by {owner}: waiting up to {SILENT_SECONDS:g} s for a sign of life")
        before, deadline = self._stamp(), time.monotonic() + SILENT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(1.0, SILENT_SECONDS / 10))
            if self._stamp() != before:
                return True
        return False

    def _stamp(self) -> int:
        """The file's modification time; opening it makes a network file system ask its server."""
        with self.path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_mtime_ns

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with suppress(OSError):
                if self._read() == self.owner:
                    os.utime(self.path)

    def lost(self) -> str | None:
        """The reason why this process may no longer write to the folder; None when it may."""
        owner = self._read()
        if owner == self.owner or (owner is None and not self._given_back()):
            return None
        who = f" ({owner})" if owner else ", which has ended,"
        return f"--save {self.root} was taken over by another run{who} while this one stood still"

    def _given_back(self) -> bool:
        """Whether the record was emptied, as by another owner that has finished."""
        with suppress(OSError):
            return not read_regular(self.path, 1)
        return False

    def release(self) -> None:
        """Releases the folder."""
        self._released.set()
        with suppress(OSError):
            if self._read() == self.owner:
                self._write("")
        self._held.close()

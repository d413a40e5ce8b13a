"""Lock that admits a single run to a checkpoint folder.

A file-system lock excludes processes of the same machine, and of other machines if the file system shares locks (NFS
does unless mounted without them). The system releases it when its process ends. If locks are not shared, the owner's
record in the file and its changing time stamp show whether the owner is alive.
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

from megatron.base.atomic import hold_lock
from megatron.base.errors import UserError
from megatron.base.regular import read_regular

LOCK = ".lock"
HEARTBEAT_SECONDS = 3.0
SILENT_SECONDS = 15.0
"""An owner on another machine is considered dead if its time stamp does not change for this long."""
PATIENCE_SECONDS = 2.0
"""Time that an ending process may still hold the lock."""


@dataclass(frozen=True)
class Owner:
    """The process that owns a folder.

    Args:
        host: host name, for messages.
        place: identifies a boot of a machine or container, whose processes can see each other.
        process: process id.
        born: start time of the process in clock ticks since boot, since process ids are reused.
        started: local time of the lock, for messages.
        token: random name of this lock.
    """

    host: str
    place: str
    process: int
    born: str
    started: str
    token: str

    @staticmethod
    def current() -> Owner:
        """This process as an owner."""
        host, process, started = socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        place = host
        with suppress(OSError):  # not on Linux
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            place = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return Owner(host, place, process, _start_ticks(process), started, uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.started}"


def _start_ticks(process: int) -> str:
    """Start time of a process; empty if it has ended or is not visible."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class FolderLock:
    """The lock of a folder, held from construction to ``release``.

    Args:
        root: the folder, which exists.
        log: prints a line before waiting for a heartbeat of another machine's run.

    Raises:
        UserError: when another run holds it.
        OSError: when the lock's file cannot be written.
    """

    def __init__(self, root: str | Path, log: Callable[[str], None] = lambda line: None) -> None:
        self.root = Path(root)
        self.path = self.root / LOCK
        self.owner = Owner.current()
        self._held = ExitStack()
        self._released = threading.Event()
        self.path.touch()
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while True:
                try:
                    self._held.enter_context(hold_lock(self.path, if_supported=True))
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise self._in_use(self._read()) from error
                    time.sleep(0.05)
            recorded = self._read()
            if recorded is not None and self._is_alive(recorded, log):
                raise self._in_use(recorded)
            self._write(json.dumps(asdict(self.owner)))
        except BaseException:
            self._held.close()
            raise
        threading.Thread(target=self._send_heartbeats, name="folder-lock", daemon=True).start()

    def _in_use(self, owner: Owner | None) -> UserError:
        owner_text = f" ({owner})" if owner else ""
        return UserError(
            f"--save {self.root} is in use by another run{owner_text}; stop that one, or name another folder"
        )

    def _read(self) -> Owner | None:
        """Read the recorded owner; None if there is no readable record."""
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

    def _is_alive(self, owner: Owner, log: Callable[[str], None]) -> bool:
        """Whether the recorded owner is alive, although its lock did not exclude this process."""
        if owner.place == self.owner.place:
            if Path("/proc/self/stat").exists():
                return bool(owner.born) and _start_ticks(owner.process) == owner.born
            try:
                os.kill(owner.process, 0)
            except OSError as error:
                return isinstance(error, PermissionError)
            return True
        log(f"{self.root} was in use by {owner}: waiting up to {SILENT_SECONDS:g} s for a sign of life")
        before, deadline = self._modification_time(), time.monotonic() + SILENT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(1.0, SILENT_SECONDS / 10))
            if self._modification_time() != before:
                return True
        return False

    def _modification_time(self) -> int:
        """The file's modification time; opening the file makes a network file system ask its server."""
        with self.path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_mtime_ns

    def _send_heartbeats(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):
                if self._read() == self.owner:
                    os.utime(self.path)

    def explain_loss(self) -> str | None:
        """The reason why this process may no longer write to the folder; None if it may."""
        owner = self._read()
        if owner == self.owner:
            return None
        if owner is None:
            try:
                is_released = not read_regular(self.path, 1)  # another owner leaves an empty record when it finishes
            except OSError:
                is_released = False
            if not is_released:
                return None
        owner_text = f" ({owner})" if owner else ", which has ended,"
        return f"--save {self.root} was taken over by another run{owner_text} while this one was suspended"

    def release(self) -> None:
        """Release the folder."""
        self._released.set()
        with suppress(OSError):
            if self._read() == self.owner:
                self._write("")
        self._held.close()

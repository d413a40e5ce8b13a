"""A control group whose processes together get no more than a share of the processors. Linux, root."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Short, so that a host waits for its next share for milliseconds, not for the usual 100 ms."""
_REMOVAL_SECONDS = 5.0


class CpuLimitError(Exception):
    """Raised when a group cannot be created; the message is a single line."""


def _parent() -> tuple[Path, bool]:
    """Return the parent folder of groups, and whether control groups are of version 2."""
    if (ROOT / "cgroup.controllers").exists():
        return ROOT, True
    return ROOT / "cpu", False


class CpuLimit:
    """A control group that processes join through ``members``; ``clean`` removes it.

    Args:
        name: name of the group, unique on this machine.
        cpus: number of processors, such as 0.5.
    """

    def __init__(self, name: str, cpus: float) -> None:
        self.cpus = cpus
        self.parent, self.unified = _parent()
        self.folder = self.parent / name

    @property
    def members(self) -> Path:
        """Path of the members' file: a process joins by writing its number there, and so do its children."""
        return self.folder / "cgroup.procs"

    def create(self) -> None:
        """Create the group.

        Raises:
            CpuLimitError: when it cannot be created.
        """
        quota = max(int(self.cpus * PERIOD_US), 1000)
        try:
            if self.unified and "cpu" not in (self.parent / "cgroup.subtree_control").read_text().split():
                (self.parent / "cgroup.subtree_control").write_text("+cpu")
            self.folder.mkdir()
            if self.unified:
                (self.folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self.folder / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            _remove(self.folder)
            raise CpuLimitError(
                f"processors cannot be limited here: {self.folder}: {error.strerror}; run as root where control groups "
                "with the cpu controller are writable, or leave out the limit"
            ) from error


def kill(members: Callable[[], Iterable[int]]) -> list[int]:
    """Kill processes and their new children. Return the processes that cannot be killed."""
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while pids := list(members()):
        if time.monotonic() > deadline:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return pids


def groups(prefix: str) -> list[str]:
    """Names of the groups with a prefix."""
    return sorted(folder.name for folder in _parent()[0].glob(f"{prefix}*") if folder.is_dir())


def clean(prefix: str) -> list[str]:
    """Remove the groups with a prefix, and their members. Return a line for each that remains."""
    lines = (_remove(_parent()[0] / name) for name in groups(prefix))
    return [line for line in lines if line is not None]


def _members(folder: Path) -> list[int]:
    try:
        pids = map(int, (folder / "cgroup.procs").read_text().split())
    except OSError:  # the group is gone
        return []
    return [pid for pid in pids if pid > 0]  # 0 stands for a process of another PID namespace


def _remove(folder: Path) -> str | None:
    pids = kill(lambda: _members(folder))
    if pids:
        return f"{folder}: processes {', '.join(map(str, pids))} cannot be killed"
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while folder.exists():
        try:
            folder.rmdir()
        except OSError as error:  # for a moment also after its last member
            if time.monotonic() > deadline:
                return f"{folder}: {error.strerror}"
            time.sleep(0.05)
    return None

"""A control group whose processes together get no more than a share of the processors. Linux, root."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Short, so that a host waits for its next share for milliseconds, not for the system's usual 100."""
_REMOVAL_SECONDS = 5.0


class CpuLimitError(Exception):
    """Why there is no such group here; one line."""


def _parent() -> tuple[Path, bool]:
    """Where groups are made, and whether that is version 2 of control groups."""
    if (ROOT / "cgroup.controllers").exists():
        return ROOT, True
    return ROOT / "cpu", False


class CpuLimit:
    """The group: ``make`` it, let processes join, ``remove`` it.

    Args:
        name: of the group, unique on this machine.
        cpus: processors, such as 0.5.
    """

    def __init__(self, name: str, cpus: float) -> None:
        self.cpus = cpus
        self.parent, self.unified = _parent()
        self.folder = self.parent / name

    @property
    def members(self) -> Path:
        """A process joins by writing its number here; its children are members from the start."""
        return self.folder / "cgroup.procs"

    def make(self) -> None:
        """Makes the group.

        Raises:
            CpuLimitError: where that cannot be done.
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
            self.remove()
            raise CpuLimitError(
                f"processors cannot be shared out here: {self.folder}: {error.strerror}; run as root where control "
                "groups with the cpu controller can be written, or leave the limit out"
            ) from error

    def remove(self) -> None:
        """Removes the group once its last process is gone."""
        _remove(self.folder)


def clean(prefix: str) -> None:
    """Removes the groups whose names begin so."""
    for folder in _parent()[0].glob(f"{prefix}*"):
        _remove(folder)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while folder.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # members that are just being ended
            folder.rmdir()
            return
        time.sleep(0.05)

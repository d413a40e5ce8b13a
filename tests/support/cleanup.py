"""Processes that end: with the test session that started them, by signals, or when a test says so."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.lab.removal import has_ended
from megatron.data.interrupt import SIGNALS

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies; elsewhere does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def heed_signals() -> None:
    """Lets this process be ended by signals that the shell has the tests ignore (nohup, or in the background)."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def have_ended(pids: Iterable[int], patience: float = 20.0) -> bool:
    """Whether processes end within so many seconds."""
    running, deadline = set(pids), time.monotonic() + patience
    while (running := {pid for pid in running if not has_ended(pid)}) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not running


def kill_tree(pid: int) -> None:
    """Kills a process and its descendants, those that left its session included (torchrun's workers do)."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Children of a process and theirs, as /proc knows them; none where there is no /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # pid (name) state parent ...; the name may hold spaces and brackets
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
    found_pids, pending = [], [pid]
    while pending:
        pending += (offspring := children[pending.pop()])
        found_pids += offspring
    return found_pids

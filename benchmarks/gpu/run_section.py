"""Runs a section in a process of its own, and survives its failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import REPO
from benchmarks.gpu.section import path_of, section_of
from benchmarks.gpu.setting import Setting, setting_text
from benchmarks.rows import Book

POLL_SECONDS = 0.1
_TOYS = 10
"""Times as long may toys take."""
GRACE_SECONDS = 15.0
"""Time in which a section may clean up when it is asked to end."""


def run_section(name: str, setting: Setting, keys: Sequence[str], book: Book, limit: float, bar: Any) -> Book:
    """Measures the missing rows; their outcomes are in the book.

    Args:
        name: name of the section.
        setting: its setting.
        keys: keys of all its rows.
        book: the section's book, opened; its file is what the section writes to.
        limit: seconds after which the section is ended.
        bar: progress bar.
    """
    path, patience = path_of(setting.out, name), section_of(name).PATIENCE_SECONDS
    if setting.toy:  # nobody waits for figures, and a busy processor takes minutes to begin
        limit, patience = _TOYS * limit, _TOYS * patience
    deadline = time.monotonic() + limit
    bar.update(sum(key in book.rows for key in keys))
    while left := [key for key in keys if key not in book.rows and key not in book.failures]:
        before = len(left)
        run = _SectionProcess(name, setting, left)
        why = run.watch(book, path, deadline, patience, bar)
        if why is None:
            reason = "its section ended without it"
            book.failures |= {key: reason for key in left if key not in book.rows and key not in book.failures}
            break
        if run.overdue:
            late = f"the section's limit of {limit:g} s was over; the same command goes on from here"
            book.failures |= {key: late for key in left if key not in book.rows and key not in book.failures}
            break
        if book.current in left and book.current not in book.rows and book.current not in book.failures:
            book.failures[book.current] = why
        if before == sum(key not in book.rows and key not in book.failures for key in left):
            book.failures |= dict.fromkeys(left, why)  # it does not even begin
    bar.set_postfix_str("")
    return book


def _paths() -> list[str]:
    """Folders of modules that this process was given: torch may be in one of them."""
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class _SectionProcess:
    """The process of a section.

    Args:
        name: name of the section.
        setting: its setting.
        left: keys of the rows to measure.
    """

    def __init__(self, name: str, setting: Setting, left: Sequence[str]) -> None:
        self.name, self.overdue = name, False
        self.log = setting.out / f"{name}.log"
        with self.log.open("ab") as log:
            self.start = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "benchmarks.gpu.section", name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPO,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), *_paths()])},
                start_new_session=True,
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(f"{setting_text(setting)}\n{json.dumps(list(left))}\n".encode())

    def watch(self, book: Book, path: Path, deadline: float, patience: float, bar: Any) -> str | None:
        """Waits for the process and reads what it writes; returns why it failed, or None."""
        book.current = None
        alive, known = time.monotonic(), (book.lines, len(book.rows))
        try:
            while (status := self.process.poll()) is None:
                time.sleep(POLL_SECONDS)
                book.read(path)
                if book.lines != known[0]:
                    alive = time.monotonic()
                    bar.update(len(book.rows) - known[1])
                    known = (book.lines, len(book.rows))
                    bar.set_postfix_str(f"{self.name}: {book.current}")
                self.overdue = time.monotonic() > deadline
                if self.overdue or time.monotonic() - alive > patience:
                    return f"it hung: no sign of life for {patience:g} s, and was ended"
        finally:
            self.end()
            book.read(path)
            bar.update(len(book.rows) - known[1])
        return None if status == 0 else self._reason(status)

    def _reason(self, status: int) -> str:
        """The last line that the process printed, or the signal that ended it."""
        if status < 0:
            perhaps = ", perhaps for lack of memory" if status == -signal.SIGKILL else ""
            return f"it was ended by {signal.Signals(-status).name}{perhaps}; see {self.log.name}"
        text = self.log.read_bytes()[self.start :].decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1].strip()[:300].rstrip(".") if lines else f"it ended with status {status}"

    def end(self) -> None:
        """Asks the process and its children to end, then kills them, and removes what they leave."""
        if self.process.poll() == 0:
            return
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 5.0)):
            running = self.process.poll() is None
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds if running else 0.0)
        section_of(self.name).tidy()

"""Runs a section in a separate process, whose failures it reports; as a command, this module is that process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from benchmarks import REPO
from benchmarks.gpu.setting import Section, Setting
from benchmarks.lab.removal import clean
from benchmarks.rows import RowFile, RowLog
from megatron.data.interrupt import interrupt_on_signals

NAMES = ("train", "fp8", "kernels", "generate", "network")
POLL_SECONDS = 0.1
TOY_FACTOR = 10
"""Factor of the time limits of toy sizes, since a busy processor takes minutes to start."""
GRACE_SECONDS = 15.0
"""Time that a section has for cleaning up after SIGTERM."""


def load_section(name: str) -> Section:
    """Import the module of a section: a module of this package, or a dotted name."""
    return cast(Section, import_module(name if "." in name else f"benchmarks.gpu.{name}"))


def rows_path(out: Path, name: str) -> Path:
    """Path of a section's file of rows."""
    return out / f"{name}.jsonl"


def run_section(name: str, setting: Setting, keys: Sequence[str], file: RowFile, limit: float, bar: Any) -> RowFile:
    """Measure the missing rows of a section.

    Args:
        name: name of the section.
        setting: its setting.
        keys: keys of all its rows.
        file: the section's rows, opened; the section writes to this file.
        limit: seconds after which the section is ended.
        bar: progress bar.
    """

    def missing() -> list[str]:
        return [key for key in keys if key not in file.rows and key not in file.failures]

    path, patience = rows_path(setting.out, name), load_section(name).PATIENCE_SECONDS
    if setting.toy:
        limit, patience = TOY_FACTOR * limit, TOY_FACTOR * patience
    deadline = time.monotonic() + limit
    bar.update(sum(key in file.rows for key in keys))
    while row_keys := missing():
        process = SectionProcess(name, setting, row_keys)
        reason = process.watch(file, path, deadline, patience, bar)
        if reason is None:
            file.failures |= dict.fromkeys(missing(), "the section ended before it")
        elif process.overdue:
            reason = f"the section reached its limit of {limit:g} s; repeat the command to continue"
            file.failures |= dict.fromkeys(missing(), reason)
        elif file.current in missing():
            file.failures[file.current] = reason
        elif len(missing()) == len(row_keys):
            file.failures |= dict.fromkeys(row_keys, reason)  # it cannot start
    bar.set_postfix_str("")
    return file


class SectionProcess:
    """The process of a section, which measures the rows of some keys."""

    def __init__(self, name: str, setting: Setting, row_keys: Sequence[str]) -> None:
        self.name, self.overdue = name, False
        self.log = setting.out / f"{name}.log"
        paths = [str(REPO), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        with self.log.open("ab") as log:
            self.start = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "benchmarks.gpu.section", name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPO,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(f"{setting.to_json()}\n{json.dumps(list(row_keys))}\n".encode())

    def watch(self, file: RowFile, path: Path, deadline: float, patience: float, bar: Any) -> str | None:
        """Wait for the process and read its rows; return the reason of a failure, or None."""
        file.current = None
        alive, line_count, row_count = time.monotonic(), file.line_count, len(file.rows)
        try:
            while (status := self.process.poll()) is None:
                time.sleep(POLL_SECONDS)
                file.read(path)
                if file.line_count != line_count:
                    bar.update(len(file.rows) - row_count)
                    alive, line_count, row_count = time.monotonic(), file.line_count, len(file.rows)
                    bar.set_postfix_str(f"{self.name}: {file.current}")
                self.overdue = time.monotonic() > deadline
                if self.overdue or time.monotonic() - alive > patience:
                    return f"it hung: it was stopped after {patience:g} s without a sign of life"
        finally:
            self.end()
            file.read(path)
            bar.update(len(file.rows) - row_count)
        return None if status == 0 else self._failure(status)

    def _failure(self, status: int) -> str:
        """Last line that the process printed, or the signal that ended it."""
        if status < 0:
            hint = ", perhaps for lack of memory" if status == -signal.SIGKILL else ""
            return f"it was ended by {signal.Signals(-status).name}{hint}; see {self.log.name}"
        text = self.log.read_bytes()[self.start :].decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1].strip()[:300].rstrip(".") if lines else f"it ended with status {status}"

    def end(self) -> None:
        """Ask the process and its children to end, then kill them, and remove their hosts."""
        if self.process.poll() == 0:
            return
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 5.0)):
            running = self.process.poll() is None
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds if running else 0.0)
        if shutil.which("ip") is not None:
            clean()


def main() -> int:
    name = sys.argv[1]
    setting, row_keys = Setting.from_json(sys.stdin.readline()), json.loads(sys.stdin.readline())
    try:
        with interrupt_on_signals():
            load_section(name).measure(setting, row_keys, RowLog(rows_path(setting.out, name)))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

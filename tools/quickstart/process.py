"""Runs a command so that its output is both kept in a log and, where asked for, shown as it comes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandFailed(Exception):
    """A command ended with an error; the message names its log."""


def run_logged(command: Sequence[str], log: Path, *, cwd: Path, env: Mapping[str, str], show: bool) -> None:
    """Runs a command to its end; its stdout and stderr go to the log, in the order they come.

    When shown on a terminal, the command gets a terminal too, so that it draws its progress bar.

    Raises:
        CommandFailed: when the exit code is not 0; with the last error line, if one looks like it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    reader, writer = os.openpty() if show and sys.stdout.isatty() else os.pipe()
    full_env = {**os.environ, **env, "COLUMNS": str(shutil.get_terminal_size().columns)}
    process = subprocess.Popen(command, cwd=cwd, env=full_env, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer)
    os.close(writer)
    try:
        with log.open("wb") as stream:
            while chunk := _read(reader):
                stream.write(chunk)
                stream.flush()
                if show:
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
        process.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=40)  # the terminal sent the signal to the command as well: let it save and end
        raise
    finally:
        os.close(reader)
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise CommandFailed(f"exit code {process.returncode}{_reason(log)}; everything it said: {log}")


def _read(descriptor: int) -> bytes:
    """The next piece of output, empty at its end; a terminal says so by an error."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def _reason(log: Path) -> str:
    """The last line of a log that names an error."""
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    for line in reversed(lines):
        text = line.strip()
        if text.lower().startswith("error:") or ("Error: " in text and not text.startswith(("E ", "raise "))):
            return f" ({text[:300]})"
    return ""

"""Run a command, write its output to a log, and optionally show it live."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandFailed(Exception):
    """A command failed; the message names its log."""


def run_logged(command: Sequence[str], log: Path, *, cwd: Path, env: Mapping[str, str], show: bool) -> None:
    """Run a command to its end; write its stdout and stderr to the log in their order.

    If its output is shown on a terminal, the command gets a terminal too, so that it draws its progress bar.

    Raises:
        CommandFailed: if the exit code is not 0; with the last line that names an error.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    reader, writer = _terminal() if show and sys.stdout.isatty() else os.pipe()
    process = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer
    )
    os.close(writer)
    interrupted = False
    try:
        with log.open("wb") as stream:
            while True:
                try:
                    chunk = os.read(reader, 65536)
                except OSError:  # the end of a pseudo-terminal
                    break
                except KeyboardInterrupt:
                    # The terminal interrupted the command as well: wait for its end, unless interrupted again.
                    if interrupted:
                        raise
                    interrupted = True
                    continue
                if not chunk:
                    break
                stream.write(chunk)
                stream.flush()
                if show:
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
        process.wait()
    finally:
        os.close(reader)
        _stop(process)
    if interrupted:
        raise KeyboardInterrupt
    if process.returncode != 0:
        raise CommandFailed(f"exit code {process.returncode}{_reason(log)}; its output: {log}")


def _terminal() -> tuple[int, int]:
    """Open a pseudo-terminal as wide as this one, without translation of line ends; return its reader and writer."""
    reader, writer = os.openpty()
    columns, lines = shutil.get_terminal_size()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    attributes = termios.tcgetattr(writer)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(writer, termios.TCSANOW, attributes)
    return reader, writer


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a command if it still runs; 40 s let a launcher stop its workers."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _reason(log: Path) -> str:
    """Return the last line of a log that names an error, in parentheses; empty if there is none."""
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    for line in reversed(lines):
        text = line.strip()
        if text.lower().startswith("error:") or ("Error: " in text and not text.startswith(("E ", "raise "))):
            return f" ({text[:300]})"
    return ""

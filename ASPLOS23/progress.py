"""Runs a training as a child process, with a bar of its iterations, or lines where there is no terminal."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.training.progress import ProgressBar

_LINE = re.compile(r"^ iteration\s+(\d+)/\s*(\d+) \|.* lm loss: (\S+) \|")
_LINES = 10
"""Lines of a whole run, where there is no terminal."""


def run_shown(words: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path, name: str) -> int:
    """Runs a command that trains, and shows its progress; returns its exit status.

    Args:
        words, env, cwd: the command, its environment and its working directory.
        log: file of all its output.
        name: name of the run.

    Raises:
        OSError: when the command cannot be started, or the log not be written.
    """
    print(f"{name}: starting", flush=True)
    began, done = time.monotonic(), 0
    bar: ProgressBar | None = None
    with log.open("w") as kept:
        process = subprocess.Popen(
            words, cwd=cwd, env=env, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                kept.write(line)
                found = _LINE.match(line)
                if found is None:
                    continue
                before, done, whole, loss = done, int(found[1]), int(found[2]), float(found[3])
                bar = bar or ProgressBar(whole, name=name)
                if bar.is_shown:
                    bar.update(loss=loss, steps=done - before)
                elif done * _LINES // whole > before * _LINES // whole:
                    print(f"{name}: iteration {done} of {whole}, lm loss {loss:.4f}", flush=True)
            status = process.wait()
        finally:
            if bar is not None:
                bar.close()
            if process.poll() is None:
                process.terminate()
                process.wait()
    if status == 0:
        print(f"{name}: {done} iterations in {time.monotonic() - began:.0f} s", flush=True)
    return status

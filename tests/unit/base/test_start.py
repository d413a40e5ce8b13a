"""Start and end of a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import REPO

_MAIN = """
import atexit, os, sys, threading, time, types
from megatron.base.start import start_program

class Loud:
    def __del__(self, write=os.write):
        write(1, b"torn down")

def main():
    if sys.argv[1] == "torch":
        sys.modules["torch"] = sys  # as good as any
    global keep
    keep = Loud()
    atexit.register(lambda: print("handler"))
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    sys.stdout.write("main ")
    return 7

sys.modules["program"] = types.SimpleNamespace(main=main)
start_program("program")
"""


def _run(
    folder: Path, *words: str, out: int | None = subprocess.PIPE, program: str = _MAIN
) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(program)
    command = [sys.executable, *words[:-1], str(script), words[-1]]
    env = {"PYTHONPATH": str(REPO)}
    return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=env, timeout=60)


def test_threads_and_exit_handlers_run_before_the_end(tmp_path: Path) -> None:
    done = _run(tmp_path, "torch")
    assert (done.returncode, done.stdout) == (7, "main thread\nhandler\n")


@pytest.mark.parametrize("words", [("no",), ("-m", "cProfile", "torch")], ids=["without torch", "profiled"])
def test_python_ends_normally_without_torch_or_with_a_profiler(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = _run(tmp_path, *words)
    assert done.stdout.startswith("main ")
    assert "thread\nhandler\n" in done.stdout
    assert done.stdout.endswith("torn down")
    assert ("function calls" in done.stdout) == ("cProfile" in words)


@pytest.mark.parametrize("tool", ["cProfile", None])
def test_a_profiler_of_sys_monitoring_is_noticed(tmp_path: Path, tool: str | None) -> None:
    """Like cProfile from Python 3.12 on, which prints at the end of the interpreter."""
    program = f"import sys, types; sys.monitoring = types.SimpleNamespace(get_tool={{2: {tool!r}}}.get)\n{_MAIN}"
    done = _run(tmp_path, "torch", program=program)
    assert done.stdout == "main thread\nhandler\n" + "torn down" * (tool is not None)


def test_a_full_disk_is_reported_as_python_does(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = _run(tmp_path, "torch", out=full.fileno())
    assert done.returncode == 120
    assert "No space left on device" in done.stderr

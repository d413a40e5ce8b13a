"""Results come in order, and no process outlives the tool that started it, whatever ends that."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.data.interrupt import SIGNALS
from megatron.data.lines import writing
from megatron.data.processes import ProcessKilled, in_processes
from tests.support.cleanup import have_ended, heed_signals

ROOT = Path(__file__).resolve().parents[3]


def _double(number: Any) -> Any:
    if number == 77:
        raise UserError("77")
    return 2 * number


def _die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_results_come_in_order_and_errors_as_they_are() -> None:
    assert list(in_processes(_double, range(50), 2)) == list(range(0, 100, 2))
    found: list[int] = []
    with pytest.raises(UserError, match="77"):
        found.extend(in_processes(_double, range(100), 2))
    assert found == list(range(0, 154, 2))
    with pytest.raises(RuntimeError, match="TypeError"):
        list(in_processes(_double, ["x", None], 2))


def test_a_killed_process_is_one_line_or_one_result() -> None:
    with pytest.raises(UserError, match=r"was killed .*--workers"):
        list(in_processes(_die, range(20), 2))
    found = list(in_processes(_die, range(20), 2, lost=lambda number: -number))
    assert found == [0, 1, 2, -3, *range(4, 20)]


def _die_in_the_middle_of_the_answer(number: int) -> int:
    def send_half(self: Any, message: bytes) -> None:
        os.write(self.fileno(), message[: len(message) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    connection: Any = Connection
    if number == 3:
        connection._send = send_half
    return number


@pytest.mark.timeout(60)
def test_a_process_that_was_killed_in_the_middle_of_its_answer_was_killed() -> None:
    found = list(in_processes(_die_in_the_middle_of_the_answer, range(20), 2, lost=lambda number: -number))
    assert found == [0, 1, 2, -3, *range(4, 20)]


def _dies_or_sleeps(dies: bool) -> None:
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_killed_process_is_said_before_earlier_ones_have_ended() -> None:
    start = time.monotonic()
    with pytest.raises(ProcessKilled):
        list(in_processes(_dies_or_sleeps, [False, True], 2))
    assert time.monotonic() - start < 300


def _waits_for(file: Path) -> bool:
    while not file.exists():
        time.sleep(0.01)
    return True


def test_who_waits_is_idle_now_and_then(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]

    def idle() -> None:
        for file in files:
            file.touch()

    assert list(in_processes(_waits_for, files, 2, idle=idle)) == [True, True]


def _with_children(number: int) -> list[int]:
    return list(in_processes(_double, [number, number + 1], 2))


def test_processes_may_have_processes() -> None:
    assert list(in_processes(_with_children, [1, 5], 2)) == [[_double(1), _double(2)], [_double(5), _double(6)]]


def test_killed_processes_leave_no_open_files() -> None:
    results = in_processes(_die, [3] * 45, 2, lost=abs)
    next(results)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(40):
        next(results)
    # Those of two that are being started; what belonged to the last ones that died is closed in the background, or once
    # the traceback of its error is collected.
    deadline = time.monotonic() + 20.0
    while (still := len(list(Path("/proc/self/fd").iterdir()))) > before + 24 and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.1)
    assert still <= before + 24


def test_a_signal_finds_no_lock_taken() -> None:
    """Python's own locks stay taken for ever when the exception of a signal comes at the wrong moment."""
    results = in_processes(_double, count(100), 2)
    assert [next(results) for _ in range(20)] == list(range(200, 240, 2))
    unsafe: set[str] = set()

    def look(frame: Any, *_: object) -> None:
        name = frame.f_globals["__name__"]
        disturbed = not set(SIGNALS) <= set(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        if disturbed and name.partition(".")[0] in ("concurrent", "multiprocessing", "threading", "queue"):
            unsafe.add(f"{name}.{frame.f_code.co_name}")

    sys.setprofile(look)
    try:
        more = [next(results) for _ in range(40)]
    finally:
        sys.setprofile(None)
    assert more == list(range(240, 320, 2))
    assert not unsafe


WRITES = """
import itertools, sys
from megatron.data.processes import in_processes
from megatron.data.interrupt import SIGNALS
from megatron.data.lines import writing
from megatron.data.cleaning.command import Report, Tool, add_common

def run(options):
    with writing(options.output) as write:
        write(b"{}")
        # A process names itself and its parent.
        asked = itertools.repeat("(__import__('os').getpid(), __import__('os').getppid())")
        if options.busy:
            slow = ["(__import__('time').sleep(0.1), __import__('os').getpid(), __import__('os').getppid())[1:]"] * 50
            sleeps = f"(open({options.output + '.busy'!r}, 'a').close(), __import__('time').sleep(600))"
            asked = itertools.chain(slow, itertools.repeat(sleeps))
        for pids in in_processes(eval, asked, options.workers):
            print(*pids, flush=True)
    return Report()

def add_flags(parser):
    parser.add_argument("output")
    parser.add_argument("--busy", action="store_true")
    add_common(parser)

if __name__ == "__main__":
    sys.exit(Tool("writes.py", "", add_flags, run)())
"""


@contextmanager
def running(folder: Path, *words: str, **settings: Any) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """A tool that writes for ever, and the processes that it has started."""
    script = folder / "writes.py"
    script.write_text(WRITES)
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder / "out"), "--workers", "2", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=heed_signals, **settings,
    )  # fmt: skip
    assert process.stdout is not None
    pids: set[int] = set()
    try:
        while len(pids) < 3:
            line = process.stdout.readline()
            assert line, "the tool has ended"
            pids.update(map(int, line.split()))
        yield process, pids
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_tool_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    with running(tmp_path) as (process, pids):
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        assert said == "writes: interrupted; no unfinished file is left\n"
        assert process.returncode == 130
        assert have_ended(pids)
    assert [entry.name for entry in tmp_path.iterdir()] == ["writes.py"]


def test_a_stopped_group_of_processes_says_one_line(tmp_path: Path) -> None:
    """As by Ctrl-C, which all processes see."""
    with running(tmp_path, start_new_session=True) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert said == "writes: interrupted; no unfinished file is left\n"
        assert have_ended(pids)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--busy"]])
def test_a_killed_tool_leaves_no_process(words: list[str], tmp_path: Path) -> None:
    """Neither one that is about to be asked, nor one that is at work for minutes."""
    with running(tmp_path, *words) as (process, pids):
        while words and not (tmp_path / "out.busy").exists():
            time.sleep(0.01)
        process.kill()
        process.communicate(timeout=20)
        assert have_ended(pids)
    (left,) = tmp_path.glob(".out.*.partial")
    with writing(tmp_path / "out"):
        pass
    assert not left.exists()

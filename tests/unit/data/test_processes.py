"""Results come in order, and no process outlives the tool that started it, whatever ends the tool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.data.lines import writing
from megatron.data.processes import ProcessKilled, map_in_processes
from tests.support.cleanup import have_ended, heed_signals

ROOT = Path(__file__).resolve().parents[3]


def _double(number: Any) -> Any:
    if number == 77:
        raise UserError("77")
    return 2 * number


def _kill_this_process(item: tuple[int, bytes]) -> int:
    if item[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item[0]


def test_results_come_in_order_and_errors_as_they_are() -> None:
    assert list(map_in_processes(_double, range(50), 2)) == list(range(0, 100, 2))
    results: list[int] = []
    with pytest.raises(UserError, match="77"):
        results.extend(map_in_processes(_double, range(100), 2))
    assert results == list(range(0, 154, 2))
    with pytest.raises(TypeError):
        list(map_in_processes(_double, ["x", None], 2))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("item_bytes", [0, 5_000_000])
def test_a_killed_process_is_one_line(item_bytes: int) -> None:
    """Also when the next items are larger than a pipe."""
    items = ((number, bytes(item_bytes)) for number in range(20))
    with pytest.raises(ProcessKilled, match=r"was killed .*--workers"):
        list(map_in_processes(_kill_this_process, items, 2))


def _die_in_the_middle_of_the_result(number: int) -> int:
    def send_half(self: Any, message: bytes) -> None:
        os.write(self.fileno(), message[: len(message) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    connection: Any = Connection
    if number == 3:
        connection._send = send_half
    return number


@pytest.mark.timeout(60)
def test_a_process_killed_in_the_middle_of_its_result_is_one_line() -> None:
    with pytest.raises(ProcessKilled):
        list(map_in_processes(_die_in_the_middle_of_the_result, range(20), 2))


def _raise_memory_error(number: int) -> None:
    raise MemoryError


def test_a_process_without_memory_is_one_line() -> None:
    with pytest.raises(ProcessKilled, match=r"out of memory.*--workers"):
        list(map_in_processes(_raise_memory_error, range(5), 2))


def _dies_or_sleeps(dies: bool) -> None:
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.timeout(60)
def test_a_killed_process_is_reported_before_earlier_processes_end() -> None:
    with pytest.raises(ProcessKilled):
        list(map_in_processes(_dies_or_sleeps, [False, True], 2))


def _waits_for(file: Path) -> bool:
    while not file.exists():
        time.sleep(0.01)
    return True


def test_idle_is_called_while_waiting(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]

    def idle() -> None:
        for file in files:
            file.touch()

    assert list(map_in_processes(_waits_for, files, 2, idle=idle)) == [True, True]


class _CallCounter:
    """Number of calls in the same process."""

    calls = 0

    def __call__(self, number: int) -> int:
        self.calls += 1
        return self.calls


def test_a_function_reaches_each_process_once_and_keeps_its_state() -> None:
    assert sum(calls == 1 for calls in map_in_processes(_CallCounter(), range(20), 2)) <= 2


def _with_children(number: int) -> list[int]:
    return list(map_in_processes(_double, [number, number + 1], 2))


def test_processes_may_have_processes() -> None:
    assert list(map_in_processes(_with_children, [1, 5], 2)) == [[_double(1), _double(2)], [_double(5), _double(6)]]


WRITES = """
import itertools, sys
from megatron.data.processes import map_in_processes
from megatron.data.lines import writing
from tools.openwebtext.cleaning.command import Report, Tool, add_common

def run(options):
    with writing(options.output) as write:
        write(b"{}")
        # A process names itself and its parent.
        asked = itertools.repeat("(__import__('os').getpid(), __import__('os').getppid())")
        if options.busy:
            slow = ["(__import__('time').sleep(0.1), __import__('os').getpid(), __import__('os').getppid())[1:]"] * 50
            sleeps = f"(open({options.output + '.busy'!r}, 'a').close(), __import__('time').sleep(600))"
            asked = itertools.chain(slow, itertools.repeat(sleeps))
        for pids in map_in_processes(eval, asked, options.workers):
            print(*pids, flush=True)
    return Report()

def add_flags(parser):
    parser.add_argument("output")
    parser.add_argument("--busy", action="store_true")
    add_common(parser)

if __name__ == "__main__":
    sys.exit(Tool("writes.py", "", add_flags, run)())
"""


INTERRUPTED = """
import signal, sys, threading
from megatron.data.processes import map_in_processes

locks_until_signal = 0
acquire = threading.Condition.__enter__

def acquire_and_stop(condition):
    global locks_until_signal
    locked = acquire(condition)
    if threading.get_ident() == threading.main_thread().ident:
        locks_until_signal -= 1
        if locks_until_signal == 0:
            signal.raise_signal(signal.SIGINT)
    return locked

if __name__ == "__main__":
    threading.Condition.__enter__ = acquire_and_stop
    for number in range(1, 25):
        locks_until_signal = number
        try:
            list(map_in_processes(abs, range(50), 2))
        except KeyboardInterrupt:
            print(number, flush=True)
"""


def test_a_signal_just_after_a_lock_was_acquired_stops_the_processes(tmp_path: Path) -> None:
    """Python may raise KeyboardInterrupt there, before the block that releases the lock."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60,
        preexec_fn=heed_signals,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert [int(number) for number in done.stdout.split()] == list(range(1, 25))


@contextmanager
def running(folder: Path, *words: str, **settings: Any) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """A tool that writes forever, and its child processes."""
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
        _, stderr = process.communicate(timeout=20)
        assert stderr == "writes: interrupted; no unfinished file is left\n"
        assert process.returncode == 130
        assert have_ended(pids)
    assert [entry.name for entry in tmp_path.iterdir()] == ["writes.py"]


def test_an_interrupted_process_group_prints_one_line(tmp_path: Path) -> None:
    """As by Ctrl-C, which reaches all processes."""
    with running(tmp_path, start_new_session=True) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
        assert stderr == "writes: interrupted; no unfinished file is left\n"
        assert have_ended(pids)


def test_a_killed_worker_gives_one_line_and_no_files(tmp_path: Path) -> None:
    with running(tmp_path) as (process, pids):
        assert process.stdout is not None
        worker, _ = map(int, process.stdout.readline().split())
        os.kill(worker, signal.SIGKILL)
        _, stderr = process.communicate(timeout=20)
        assert stderr == "writes: error: a process was killed (out of memory?); give fewer --workers\n"
        assert process.returncode == 2
        assert have_ended(pids)
    assert [entry.name for entry in tmp_path.iterdir()] == ["writes.py"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--busy"]])
def test_a_killed_tool_leaves_no_process(words: list[str], tmp_path: Path) -> None:
    """Neither a process about to be asked, nor a process busy for minutes."""
    with running(tmp_path, *words) as (process, pids):
        while words and not (tmp_path / "out.busy").exists():
            time.sleep(0.01)
        process.kill()
        process.communicate(timeout=20)
        assert have_ended(pids)
    (partial_file,) = tmp_path.glob(".out.*.partial")
    with writing(tmp_path / "out"):
        pass
    assert not partial_file.exists()

"""Last line and exit status of the launcher."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.base.start import ONE_TERMINAL
from megatron.distributed.process_group import write_error_file
from megatron.launcher import command as launch
from megatron.launcher.signals import list_stopped_children
from tests.support.cli import REPO
from tests.support.machines import debian


def _failure(folder: Path, exitcode: int, reason: str | None, printed: bool) -> ProcessFailure:
    path = folder / "error.json"
    if reason is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
            write_error_file(reason, printed)
    return ProcessFailure(local_rank=1, pid=4711, exitcode=exitcode, error_file=str(path))


@pytest.fixture(autouse=True)
def folder_of_script(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder holds x.py."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "x.py").touch()
    monkeypatch.chdir(folder)


@pytest.fixture
def launch_failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Run the launcher; torch raises an error. Return the exit status."""

    def launch_with(error: BaseException) -> int:
        def run(arguments: object) -> None:
            raise error

        monkeypatch.setattr("torch.distributed.run.run", run)
        monkeypatch.setenv("LOGLEVEL", "WARNING")
        return launch.main(["x.py"])

    return launch_with


@pytest.mark.parametrize(
    ("exitcode", "reason", "status", "line"),
    [
        (2, "error: --lr: 'x' is not a number", 2, None),  # already printed by the rank
        (2, "unprinted error: --lr: 'x' is not a number", 2, "error: --lr: 'x' is not a number"),
        (2, None, 2, "error: rank 5 (process 4711) ended with status 2"),
        (1, "rank 5 failed: ValueError: bad", 1, "error: rank 5 failed: ValueError: bad"),
        (3, "rank 5: rank 4 on a stopped answering", 3, "error: rank 5: rank 4 on a stopped answering"),
        (7, None, 7, "error: rank 5 (process 4711) ended with status 7"),
        (-15, None, 143, "error: rank 5 (process 4711) was ended by SIGTERM"),
        (-11, None, 139, "error: rank 5 (process 4711) was ended by SIGSEGV"),
        (-9, None, 137,
         "error: rank 5 (process 4711) was ended by SIGKILL; it may have run out of memory"),
    ],
)  # fmt: skip
def test_a_failed_rank_gives_the_status_and_the_last_line(
    exitcode: int,
    reason: str | None,
    status: int,
    line: str | None,
    tmp_path: Path,
    launch_failing: Callable[[BaseException], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = reason is None or not reason.startswith("unprinted ")
    failure = _failure(tmp_path, exitcode, reason and reason.removeprefix("unprinted "), printed)
    assert launch_failing(ChildFailedError("x", {5: failure})) == status
    assert capsys.readouterr().err.splitlines() == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--nproc-per-node 0", "--nproc-per-node 0: give at least 1"),
        ("--nproc-per-node -3", "--nproc-per-node -3: give at least 1"),
        ("--nproc-per-node two",
         "--nproc-per-node two: Unsupported nproc_per_node value: two; give a number, or cpu, gpu or auto"),
        ("--nnodes 0", "--nnodes 0: give a number of at least 1"),
        ("--nnodes 3:2", "--nnodes 3:2: give a number of at least 1"),
        ("--nnodes 1:2:3", "--nnodes 1:2:3: give a number of at least 1"),
        (
            "--nnodes 1:4 --rdzv-backend c10d",
            "--nnodes 1:4: give one number; to go on with more or fewer machines, start the run again with another "
            "number",
        ),
        ("--rdzv-backend etcd", "--rdzv-backend etcd: give static or c10d; others unpickle what they are sent"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint x:99999", "--rdzv-endpoint x:99999: give HOST:PORT"),
        ("--master-port 99999",
         "127.0.0.1:99999: give a port from 1 to 65535; on one machine leave it out for a free one"),
        ("--nnodes 2 --node-rank 2", "--node-rank 2 with --nnodes 2: nodes count from 0 to 1"),
        ("--node-rank -1", "--node-rank -1 with --nnodes 1: nodes count from 0 to 0"),
    ],
)  # fmt: skip
def test_invalid_flags_are_refused(
    flags: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.distributed.run.run", lambda arguments: pytest.fail("nothing is started"))
    assert launch.main([*flags.split(), "x.py"]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize("flags", ["", "--nproc-per-node 2", "--islands 2 --nproc-per-node 2"])
def test_a_missing_script_is_refused(
    flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not once by each rank's Python."""
    monkeypatch.setattr("torch.distributed.run.run", lambda arguments: pytest.fail("nothing is started"))
    assert launch.main([*flags.split(), "pretrain_gtp.py", "--lr", "1"]) == 2
    assert (
        capsys.readouterr().err == f"error: pretrain_gtp.py: no such script; give its path relative to {Path.cwd()}\n"
    )


@pytest.mark.parametrize("words", [["-m", "timeit"], ["--no-python", "true"]])
def test_modules_and_programs_need_no_script(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("torch.distributed.run.run", started.append)
    assert launch.main(words) == 0
    assert len(started) == 1


@pytest.mark.parametrize("flags", ["", "--nproc-per-node cpu", "--nnodes 4 --rdzv-backend c10d --node-rank 7"])
def test_valid_flags_start_ranks(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("torch.distributed.run.run", started.append)
    assert launch.main([*flags.split(), "x.py"]) == 0
    assert len(started) == 1


@pytest.mark.parametrize(
    ("printed_by_rank_0", "line"),
    [
        ("error: rank 5: --lr: 'x' is not a number", None),
        ("error: the disk is full", "error: --lr: 'x' is not a number"),
    ],
)
def test_an_unprinted_reason_is_the_last_line(
    printed_by_rank_0: str,
    line: str | None,
    tmp_path: Path,
    launch_failing: Callable[[BaseException], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless another rank has printed the same line."""
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    failures = {5: _failure(first, 2, "error: --lr: 'x' is not a number", False)}
    failures[0] = _failure(other, 2, printed_by_rank_0, True)
    failures[0].timestamp = failures[5].timestamp + 5
    assert launch_failing(ChildFailedError("x", failures)) == 2
    assert capsys.readouterr().err.splitlines() == ([] if line is None else [line])


@pytest.mark.parametrize(("reason", "is_printed"), [("error: --lr: 'x'", False), ("rank 5 failed: bad", True)])
def test_launchers_of_one_terminal_print_a_common_reason_once(
    reason: str,
    is_printed: bool,
    tmp_path: Path,
    launch_failing: Callable[[BaseException], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 0, which another launcher has started, prints it."""
    monkeypatch.setenv(ONE_TERMINAL, "1")
    assert launch_failing(ChildFailedError("x", {5: _failure(tmp_path, 2, reason, False)})) == 2
    assert capsys.readouterr().err == (f"error: {reason}\n" if is_printed else "")


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        (SignalException("got it", signal.SIGTERM), 143, "error: ended by SIGTERM"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (ValueError("nnodes\nmore"), 1, "error: the ranks cannot be started: nnodes"),
    ],
)
def test_a_failed_launcher_prints_one_line(
    raised: BaseException,
    status: int,
    line: str,
    launch_failing: Callable[[BaseException], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch_failing(raised) == status
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--nnodes 2 --master-addr debian --master-port {}", "(--master-addr, --rdzv-endpoint)"),
        ("--islands 2 --island 0 --serve-islands debian:{}", "(--serve-islands)"),
    ],
)
def test_a_loopback_name_is_refused_for_several_machines(
    words: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    debian(monkeypatch)
    monkeypatch.setenv("LOGLEVEL", "WARNING")
    with socket.create_server(("127.0.1.1", 0)) as free:
        port = str(free.getsockname()[1])
    assert launch.main([*words.format(port).split(), "x.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "debian is a loopback address on this machine, where no other machine reaches it; give the addr" in line
    assert line.endswith(remedy)


@pytest.mark.parametrize("node", [0, 1], ids=["for the second machine", "for the first one"])
def test_ctrl_c_ends_a_launcher_that_waits_for_other_machines(
    node: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGLEVEL", "WARNING")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port, "x.py"]
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    # A process that a shell starts in the background ignores the signal.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.5, press).start()
        assert launch.main(words) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - pressed[0] < 20  # otherwise it waits for minutes
    assert capsys.readouterr().err.splitlines() == ["error: interrupted"]


@pytest.mark.parametrize(
    "words", ["--nproc-per-node 1", pytest.param("--islands 2 --nproc-per-node 2", marks=pytest.mark.slow)]
)
def test_main_restores_the_process(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signal handlers, environment, logging level and threads are the same afterwards."""
    monkeypatch.delenv("LOGLEVEL", raising=False)
    monkeypatch.setattr(sys, "argv", ["tools/launch.py"])
    monkeypatch.chdir(REPO)
    script = tmp_path / "end.py"
    script.write_text("")

    def state() -> tuple[object, ...]:
        names = {thread.name for thread in threading.enumerate()}
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        return handlers, dict(os.environ), logging.root.manager.disable, names

    before = state()
    assert launch.main([*words.split(), str(script)]) == 0
    deadline = time.monotonic() + 5
    while state() != before and time.monotonic() < deadline:  # threads end soon
        time.sleep(0.05)
    assert state() == before


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_stopped_rank_with_a_pending_sigterm_is_found() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            assert child.pid not in list_stopped_children(os.getpid())
            child.send_signal(signal.SIGTERM)
            assert child.pid in list_stopped_children(os.getpid())
            child.send_signal(signal.SIGCONT)
            assert child.wait(10) == -signal.SIGTERM
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("ranks", "status"),
    [
        ({0: (3, "rank 0: rank 1 on a stopped answering: killed", 10), 1: (-9, None, 11)}, 137),
        ({0: (3, "rank 0: rank 1 on a stopped answering: killed", 10), 1: (-15, None, 11)}, 143),
        ({0: (3, "rank 0: rank 1 on a stopped answering: no sign of life for 20 s", 10), 1: (-9, None, 41)}, 3),
        ({0: (3, "rank 0: rank 1 on a stopped answering (gone)", 10), 1: (-11, None, 10), 2: (3, None, 9)}, 139),
        ({0: (3, "rank 0: ranks 1, 4 on a, rank 7 on b stopped answering", 9), 4: (-9, None, 11)}, 137),
        ({0: (3, "rank 0: rank 1 failed: ValueError: x", 10), 1: (1, "rank 1 failed: ValueError: x", 10)}, 1),
        ({0: (3, "rank 0: rank 9 on b stopped answering: killed", 10), 1: (-15, None, 10)}, 3),
        ({0: (3, "rank 0: rank 9 on b stopped answering: killed", 10), 1: (-9, None, 41)}, 3),
        ({1: (-15, "error: bad", 10), 0: (2, "error: bad", 10)}, 2),
        ({1: (-15, None, 10), 0: (-15, None, 10)}, 143),
    ],
)
def test_the_status_is_that_of_the_rank_named_by_others(
    ranks: Mapping[int, tuple[int, str | None, int]],
    status: int,
    tmp_path: Path,
    launch_failing: Callable[[BaseException], int],
) -> None:
    """Other ranks notice a killed rank before torch does, in the same second or the second before."""
    failures = {}
    for rank, (exitcode, reason, second) in ranks.items():
        folder = tmp_path / str(rank)
        folder.mkdir()
        failures[rank] = _failure(folder, exitcode, reason, True)
        failures[rank].timestamp = second
    assert launch_failing(ChildFailedError("x", failures)) == status


@pytest.mark.slow
def test_the_line_of_the_rank_is_the_last_line_after_restarts(tmp_path: Path) -> None:
    """With torch's launcher, and ranks that fail immediately like the programs of this project."""
    script = tmp_path / "fail.py"
    script.write_text(
        "import json, os, sys\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "line = f'error: attempt {attempt}'\n"
        "extra = {'py_callstack': line, 'timestamp': '1', 'printed': True}\n"
        "message = {'message': line, 'extraInfo': extra}\n"
        "json.dump({'message': message}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
        "print(line, file=sys.stderr)\n"
        "sys.exit(2)\n"
    )
    command = [sys.executable, "tools/launch.py", "--nproc-per-node", "1", "--max-restarts", "1", str(script)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: attempt 0", "error: attempt 1"]

"""A folder belongs to a single run at a time; a dead run does not block it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest

from megatron.base.errors import UserError
from megatron.checkpoint import folder_lock
from megatron.checkpoint.folder_lock import LOCK, FolderLock, Owner

HOLD = (
    "import sys, time; from megatron.checkpoint.folder_lock import FolderLock\n"
    "lock = FolderLock(sys.argv[1]); print('held', flush=True); time.sleep(100)"
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(folder_lock, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(folder_lock, "HEARTBEAT_SECONDS", 0.05)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def _sign(root: Path, owner: Owner) -> None:
    (root / LOCK).write_text(json.dumps(asdict(owner)))


def test_the_owner_blocks_a_folder_until_it_is_dead(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    for _ in range(2):
        with pytest.raises(UserError) as error:
            FolderLock(tmp_path)
        message = str(error.value)
        assert f"--save {tmp_path} is in use by another run (process {holder.pid} on " in message
        assert "since 20" in message
        assert "\n" not in message
        holder.send_signal(signal.SIGSTOP)  # a stopped owner is still the owner
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert json.loads((tmp_path / LOCK).read_text())["process"] == holder.pid
    started = time.monotonic()
    lock = FolderLock(tmp_path)
    assert time.monotonic() - started < 0.5
    assert lock.explain_loss() is None
    lock.release()


def test_a_lock_can_be_taken_repeatedly(tmp_path: Path) -> None:
    for _ in range(3):
        lock = FolderLock(tmp_path)
        with pytest.raises(UserError, match="in use"):
            FolderLock(tmp_path)
        lock.release()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert (tmp_path / LOCK).read_text() == ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}', "\0" * 9, "[" * 5000])
def test_an_invalid_record_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    FolderLock(tmp_path).release()
    assert (tmp_path / LOCK).read_text() == ""


def test_the_record_decides_if_files_have_no_locks(tmp_path: Path) -> None:
    with mock.patch("fcntl.flock", side_effect=OSError(95, "Operation not supported")):
        lock = FolderLock(tmp_path)
        with pytest.raises(UserError, match="in use by another run"):
            FolderLock(tmp_path)
        lock.release()
        # A dead process, whose number may belong to another process now.
        for dead in (replace(Owner.current(), born="1"), replace(Owner.current(), process=2**22 + 7)):
            _sign(tmp_path, dead)
            FolderLock(tmp_path).release()


def test_a_silent_machine_loses_its_folder(tmp_path: Path) -> None:
    elsewhere = replace(Owner.current(), host="far", place="another machine", token="x")
    _sign(tmp_path, elsewhere)
    lines: list[str] = []
    lock = FolderLock(tmp_path, lines.append)
    (line,) = lines
    assert "in use by process" in line
    assert "on far" in line
    lock.release()
    _sign(tmp_path, elsewhere)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.05):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(UserError, match=r"in use by another run \(process \d+ on far"):
        FolderLock(tmp_path)
    stop.set()
    thread.join()


def test_an_owner_updates_its_record_until_another_takes_over(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    before = (tmp_path / LOCK).stat().st_mtime_ns
    time.sleep(0.2)
    assert (tmp_path / LOCK).stat().st_mtime_ns > before
    _sign(tmp_path, replace(Owner.current(), host="far", token="x"))
    lost = lock.explain_loss()
    assert lost is not None
    assert "was taken over by another run (process" in lost
    time.sleep(0.1)
    before = (tmp_path / LOCK).stat().st_mtime_ns
    time.sleep(0.2)
    assert (tmp_path / LOCK).stat().st_mtime_ns == before
    lock.release()
    assert "far" in (tmp_path / LOCK).read_text()


def test_a_folder_is_also_lost_to_a_run_that_has_ended(tmp_path: Path) -> None:
    """It may contain newer checkpoints."""
    lock = FolderLock(tmp_path)
    (tmp_path / LOCK).write_text("")
    lost = lock.explain_loss()
    assert lost is not None
    assert "was taken over by another run, which has ended, while this one was suspended" in lost
    (tmp_path / LOCK).unlink()
    assert lock.explain_loss() is None
    lock.release()

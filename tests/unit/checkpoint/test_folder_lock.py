"""One run at a time has a folder, and a run that is gone keeps nobody out."""

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
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.05)


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


def test_another_process_is_refused_and_told_who_is_there(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(UserError) as error:
        FolderLock(tmp_path)
    said = str(error.value)
    assert f"--save {tmp_path} is in use by another run (process {holder.pid} on " in said
    assert "since 20" in said
    assert "\n" not in said


def test_a_killed_owner_keeps_nobody_out(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert json.loads((tmp_path / LOCK).read_text())["process"] == holder.pid
    started = time.monotonic()
    lock = FolderLock(tmp_path)
    assert time.monotonic() - started < 0.5
    assert lock.lost() is None
    lock.release()


def test_a_stopped_owner_is_an_owner(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(UserError, match="in use by another run"):
        FolderLock(tmp_path)


def test_it_can_be_held_again_and_again(tmp_path: Path) -> None:
    for _ in range(3):
        lock = FolderLock(tmp_path)
        with pytest.raises(UserError, match="in use"):
            FolderLock(tmp_path)
        lock.release()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert (tmp_path / LOCK).read_text() == ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}', "\0" * 9, "[" * 5000])
def test_a_half_written_record_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    FolderLock(tmp_path).release()
    assert (tmp_path / LOCK).read_text() == ""


def test_where_files_have_no_locks_the_record_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    lock = FolderLock(tmp_path)
    with pytest.raises(UserError, match="in use by another run"):
        FolderLock(tmp_path)
    lock.release()
    # The number of a process that is gone, which a new one may have by now.
    _sign(tmp_path, replace(Owner.this(), born="1"))
    lock = FolderLock(tmp_path)
    lock.release()
    _sign(tmp_path, replace(Owner.this(), process=2**22 + 7))
    FolderLock(tmp_path).release()


def test_a_machine_that_has_gone_is_waited_for_once(tmp_path: Path) -> None:
    elsewhere = replace(Owner.this(), host="far", place="another machine", token="x")
    _sign(tmp_path, elsewhere)
    said: list[str] = []
    lock = FolderLock(tmp_path, said.append)
    assert len(said) == 1
    assert "in use by process" in said[0]
    assert "on far" in said[0]
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


def test_an_owner_beats_until_another_has_taken_over(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    before = (tmp_path / LOCK).stat().st_mtime_ns
    time.sleep(0.2)
    assert (tmp_path / LOCK).stat().st_mtime_ns > before
    _sign(tmp_path, replace(Owner.this(), host="far", token="x"))
    lost = lock.lost()
    assert lost is not None
    assert "was taken over by another run (process" in lost
    time.sleep(0.1)
    before = (tmp_path / LOCK).stat().st_mtime_ns
    time.sleep(0.2)
    assert (tmp_path / LOCK).stat().st_mtime_ns == before
    lock.release()
    assert "far" in (tmp_path / LOCK).read_text()


def test_a_folder_that_another_has_used_and_left_is_lost_too(tmp_path: Path) -> None:
    """It may hold checkpoints that are newer than this run knows."""
    lock = FolderLock(tmp_path)
    (tmp_path / LOCK).write_text("")
    lost = lock.lost()
    assert lost is not None
    assert "was taken over by another run, which has ended, while this one stood still" in lost
    (tmp_path / LOCK).unlink()
    assert lock.lost() is None
    lock.release()

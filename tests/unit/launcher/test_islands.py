"""Flags of the launcher of islands."""

from __future__ import annotations

import subprocess

import pytest

from megatron.diloco.store import serve
from megatron.distributed.errors import CommunicationError
from megatron.launcher.islands import (
    _drop_island_flags,
    _wait,
    find_islands_problem,
    gpus_of,
    launch_parser,
    starts_islands,
    visible_gpus,
)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--islands 0 --nproc-per-node 2", "--islands 0: give at least 1"),
        ("--islands 3 --nproc-per-node 4", "start a multiple of 3 processes"),
        ("--islands 2 --nproc-per-node gpu", "--islands 2 does not divide --nproc-per-node gpu"),
        ("--islands 2 --nproc-per-node 2 --nnodes 2", "start each machine's island by --island NUMBER"),
        ("--islands 2 --island 2", "--island 2 with --islands 2: islands count from 0 to 1"),
        ("--islands 2 --island -1", "islands count from 0 to 1"),
        ("--islands 2 --island 0 --serve-islands 10.0.0.1", "--serve-islands 10.0.0.1: write HOST:PORT"),
        ("--islands 2 --island 0 --islands-address x:y", "--islands-address x:y: write HOST:PORT"),
        ("--islands 2 --island 0 --serve-islands 10.0.0.1:99999", "10.0.0.1:99999: write HOST:PORT, such as"),
        ("--islands 2 --island 0 --serve-islands ::1:29711", "or [fd00::1]:29600, with a port from 1 to 65535"),
        ("--islands 2 --island 0 --serve-islands 0.0.0.0:29711", "give the address at which other machines reach this"),
        ("--islands 2 --island 1 --islands-address [::1]:29711", None),
        ("--islands 2 --nproc-per-node 4", None),
        ("--islands 2 --island 1 --islands-address x:1 --nnodes 2", None),
    ],
)
def test_invalid_flags_of_islands_are_one_line(words: str, reason: str | None) -> None:
    arguments = launch_parser().parse_args([*words.split(), "script.py"])
    wrong = find_islands_problem(arguments)
    if reason is None:
        assert wrong is None
        assert starts_islands(arguments) == ("--island " not in words)
    else:
        assert wrong is not None
        assert reason in wrong
        assert "\n" not in wrong


def test_islands_get_the_other_flags_of_the_launcher() -> None:
    words = "--islands 2 --max-restarts 1 --nproc-per-node=4 --standalone --serve-islands 127.0.0.1:0 --log-dir x"
    assert _drop_island_flags(words.split()) == ["--max-restarts", "1", "--log-dir", "x"]
    arguments = launch_parser().parse_args([*words.split(), "--", "train.py", "--lr", "1"])
    assert (arguments.training_script, arguments.training_script_args) == ("train.py", ["--lr", "1"])
    assert _drop_island_flags([*words.split(), "--"]) == ["--max-restarts", "1", "--log-dir", "x"]


@pytest.mark.parametrize(
    ("visible", "processes", "expected"),
    [
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("GPU-a, GPU-b", 1, ["GPU-a", "GPU-b"]),
        ("4,5", 2, ["4,5", "4,5"]),
        ("4,5,6", 2, ["4,5", "6,4"]),
        ("7", 3, ["7", "7"]),
        ("0,1,-1,2", 2, ["0,1", "0,1"]),
        ("-1", 1, [None, None]),
        ("", 1, [None, None]),
        (None, 1, [None, None]),
    ],
)
def test_islands_of_a_machine_have_separate_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, processes: int, expected: list[str | None]
) -> None:
    """If there are enough; on CPUs the variable is not set."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for number, names in enumerate(expected):
        assert gpus_of(number, processes, visible_gpus()).get("CUDA_VISIBLE_DEVICES") == names


def test_all_gpus_of_a_machine_are_visible_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert visible_gpus() == ["0", "1", "2", "3"]


def test_a_failed_island_is_noted_at_once_and_others_go_on() -> None:
    lines: list[str] = []
    failed: list[tuple[int, bool]] = []
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other, subprocess.Popen(["false"]) as fails:

        def note(number: int) -> None:
            failed.append((number, other.poll() is None))
            assert other.stdin is not None
            other.stdin.close()

        assert _wait([other, fails], lines.append, note) == 0
    assert failed == [(1, True)]
    assert lines == ["island 1 ended with status 1"]


def test_a_port_in_use_is_named_in_one_line() -> None:
    store = serve("127.0.0.1", 0)
    with pytest.raises(CommunicationError, match=f"meeting place cannot be at 127.0.0.1:{store.port}: ") as caught:
        serve("127.0.0.1", store.port)
    assert "\n" not in str(caught.value)

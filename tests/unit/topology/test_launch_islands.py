"""Flags of the launcher of islands."""

from __future__ import annotations

import pytest

from megatron.topology.errors import CommunicationError
from megatron.topology.launch_islands import _without_own, launch_parser, starts_islands, wrong_islands
from megatron.topology.meeting_place import serve


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
        ("--islands 2 --nproc-per-node 4", None),
        ("--islands 2 --island 1 --islands-address x:1 --nnodes 2", None),
    ],
)
def test_what_cannot_be_started_is_one_line(words: str, reason: str | None) -> None:
    arguments = launch_parser().parse_args([*words.split(), "script.py"])
    wrong = wrong_islands(arguments)
    if reason is None:
        assert wrong is None
        assert starts_islands(arguments) == ("--island " not in words)
    else:
        assert wrong is not None
        assert reason in wrong
        assert "\n" not in wrong


def test_each_island_is_given_the_other_flags_of_the_launcher() -> None:
    words = "--islands 2 --max-restarts 1 --nproc-per-node=4 --standalone --serve-islands 127.0.0.1:0 --log-dir x"
    assert _without_own(words.split()) == ["--max-restarts", "1", "--log-dir", "x"]


def test_a_port_that_is_in_use_is_named_in_one_line() -> None:
    store = serve("127.0.0.1", 0)
    with pytest.raises(CommunicationError, match=f"meeting place cannot be at 127.0.0.1:{store.port}: ") as caught:
        serve("127.0.0.1", store.port)
    assert "\n" not in str(caught.value)

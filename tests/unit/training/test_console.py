"""Standard streams that fail while a run goes on."""

from __future__ import annotations

import io
import os

import pytest

from megatron.training.console import LastingStream


def test_a_full_disk_is_reported_once() -> None:
    warnings = io.StringIO()
    with open("/dev/full", "w") as full:
        stream = LastingStream(full, warnings, "the output")
        for _ in range(3):
            print("x" * 100_000, file=stream, flush=True)
    assert warnings.getvalue().count("\n") == 1
    assert warnings.getvalue().startswith("warning: the output cannot be written any more, left out: ")


@pytest.mark.parametrize("flush", [True, False])
def test_a_closed_pipe_is_reported_once(flush: bool) -> None:
    warnings = io.StringIO()
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        stream = LastingStream(pipe, warnings, "the output")
        for _ in range(3):
            print("x" * 100_000, file=stream, flush=flush)
    assert warnings.getvalue().count("\n") == 1


def test_characters_outside_the_encoding_are_escaped(tmp_path: object) -> None:
    path = f"{tmp_path}/log"
    with open(path, "w", encoding="ascii") as file:
        print("caf\u00e9", file=LastingStream(file, io.StringIO(), "the output"))
    with open(path) as file:
        assert file.read() == "caf\\xe9\n"

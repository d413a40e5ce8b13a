"""The command that generates texts: refusals before it starts, and texts kept when it cannot write."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from megatron.base.errors import UserError
from megatron.inference import generate_command
from megatron.inference.flags import SamplingFlags
from megatron.inference.generate import Generated
from megatron.inference.generate_command import GenerationTaskFlags, Session, check_flags
from megatron.inference.sampling import Sampling
from tests.unit.inference.support import trained_model


def refusal(**flags: object) -> str:
    with pytest.raises(UserError) as caught:
        check_flags(GenerationTaskFlags(**flags), SamplingFlags())  # type: ignore[arg-type]
    return str(caught.value)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts"
    path.write_text("1 2\n\n3\n")
    return path


@pytest.mark.parametrize(
    "name", ["folder", "/", "/proc/zz", "nowhere/file", "prompts/file", "/dev/null", "x" * 256, "x" * 5000]
)
def test_an_unwritable_output_is_refused_before_generation(
    name: str, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prompts.parent)
    Path("folder").mkdir()
    for flags in ({"genfile": name, "num_samples": 2}, {"sample_output_file": name, "sample_input_file": str(prompts)}):
        flag = f"--{next(iter(flags)).replace('_', '-')} {name}"
        assert refusal(**flags).startswith(flag)
    assert sorted(os.listdir()) == ["folder", "prompts"]


def test_the_default_output_file_is_checked_too(prompts: Path) -> None:
    Path(f"{prompts}.out").mkdir()
    assert f"{prompts}.out: is a folder" in refusal(sample_input_file=str(prompts))


def test_a_writable_output_is_unchanged_by_the_check(prompts: Path) -> None:
    output = prompts.with_name("output")
    output.write_text("before")
    assert check_flags(
        GenerationTaskFlags(sample_input_file=str(prompts), sample_output_file=str(output)), SamplingFlags()
    ) == ["1 2", "3"]
    assert output.read_text() == "before"
    assert len(list(prompts.parent.iterdir())) == 2


@pytest.mark.parametrize("name", ["prompts", "link", "../{}/prompts"])
def test_the_prompts_are_not_overwritten(name: str, prompts: Path) -> None:
    (prompts.parent / "link").symlink_to(prompts)
    output = prompts.parent / name.format(prompts.parent.name)
    assert "holds the prompts" in refusal(sample_input_file=str(prompts), sample_output_file=str(output))


def test_the_line_with_invalid_utf8_is_named(prompts: Path) -> None:
    prompts.write_bytes(b"1\r\n2\n\xff\n4\n")
    assert refusal(sample_input_file=str(prompts)) == f"--sample-input-file {prompts}, line 3: is not UTF-8 text"


def test_a_byte_order_mark_is_stripped_from_a_prompt(prompts: Path) -> None:
    prompts.write_bytes("\ufeff1 2\r\n\u2028 3\n".encode())
    assert check_flags(GenerationTaskFlags(sample_input_file=str(prompts)), SamplingFlags()) == ["1 2", "\u2028 3"]


def test_a_byte_order_mark_is_stripped_from_typed_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for mark in ("", "\ufeff"):
        typed = io.TextIOWrapper(io.BytesIO(f"{mark}5 6\n\n".encode()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", typed)
        Session(trained_model(), SamplingFlags(out_seq_length=2), 1).continue_typed_prompts(60)
        printed.append(capsys.readouterr().out)
    assert "Megatron-LM:" in printed[0]
    assert printed[1] == printed[0]


def test_a_prompt_with_invalid_utf8_is_refused() -> None:
    assert "--prompt: is not valid UTF-8" in refusal(prompt=os.fsdecode(b"\xff\xfe bad"))


def test_a_full_disk_is_one_line_and_texts_are_printed(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def full(path: Path) -> Iterator[BinaryIO]:
        yield io.BytesIO()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(generate_command, "atomic_write", full)
    session = Session(trained_model(), SamplingFlags(out_seq_length=2), 4)
    with pytest.raises(UserError, match=r"--genfile .*: No space left on device"):
        session.write_samples(GenerationTaskFlags(genfile=str(prompts.with_name("texts")), num_samples=3))
    assert capsys.readouterr().out.count('"text"') == 3
    with pytest.raises(UserError, match=r"--sample-output-file .*: No space left on device"):
        session.write_continuations(GenerationTaskFlags(sample_input_file=str(prompts)), ["1 2", "3"])
    assert capsys.readouterr().out.count("Context:") == 2


def test_flags_of_penalties_and_stop_tokens_reach_the_generation() -> None:
    model = trained_model()
    penalties: dict[str, Any] = {"min_p": 0.1, "repetition_penalty": 1.5}
    penalties |= {"presence_penalty": 0.25, "frequency_penalty": 0.5}
    flags = SamplingFlags(**penalties, out_seq_length=6)
    assert flags.sampling() == Sampling(**penalties)
    (sample,) = Session(model, SamplingFlags(greedy=True, out_seq_length=6), 1).continue_texts(["1 2"])
    stop = sample.tokens[4]
    flags = SamplingFlags(greedy=True, out_seq_length=6, stop_token_ids=[stop])
    (stopped,) = Session(model, flags, 1).continue_texts(["1 2"])
    assert stopped.finished
    assert stopped.tokens == sample.tokens[: sample.tokens.index(stop, 2)]


def test_prompts_that_arrive_together_are_all_read_beside_waiting_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that drives the command through a pipe may write several lines at once and wait for the texts."""
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(reader, encoding="utf-8"))
    heard: list[str | None] = []

    def broadcast_json(value: str | None, src: int) -> str | None:
        heard.append(value)
        assert len(heard) < 20
        if heard.count(None) == 1 and value is None:
            os.write(writer, b"\n")
        return value

    class RecordingSession(Session):
        def continue_texts(self, texts: Sequence[str], live: bool = False) -> list[Generated]:
            return []

    topology = SimpleNamespace(rank=0, layout=SimpleNamespace(world_size=2))
    model: Any = SimpleNamespace(topology=topology, is_sampling_rank=False, broadcast_json=broadcast_json)
    os.write(writer, b"5 6\r\n7 8\n")
    RecordingSession(model, SamplingFlags(), 1).continue_typed_prompts(0.3)
    os.close(writer)
    assert heard == ["5 6", "7 8", None, ""]


def test_a_typed_line_with_invalid_utf8_is_requested_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = io.TextIOWrapper(io.BytesIO(b"\xff\xfe bad\n5 6\n\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", typed)
    Session(trained_model(), SamplingFlags(out_seq_length=2), 1).continue_typed_prompts(60)
    out = capsys.readouterr().out
    assert out.count("is not valid UTF-8") == 1
    assert out.count("Megatron-LM:") == 1

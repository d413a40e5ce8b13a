"""Errors of an evaluation by lm-evaluation-harness, without the harness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.base.errors import UserError
from megatron.evaluation import harness_command
from megatron.evaluation.harness_command import EvaluationFlags, via_hf
from tests.unit.convert.support import saved_model

FLAGS = EvaluationFlags(tasks=["a"])


def test_the_task_with_bad_data_is_named() -> None:
    calls: list[list[str]] = []

    def load(tasks: list[str]) -> list[str]:
        calls.append(tasks)
        if "bad" in tasks:
            raise ValueError("no such file\nand more")
        return tasks

    assert harness_command._load_tasks(load, ["a", "b"]) == ["a", "b"]
    assert calls == [["a", "b"]]
    with pytest.raises(UserError, match=r"^--tasks bad: its data cannot be loaded \(no such file\)$"):
        harness_command._load_tasks(load, ["a", "bad", "b"])


def test_the_reason_of_a_refused_export_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = saved_model(tmp_path / "saved", {"squared_relu": True})
    with pytest.raises(UserError, match="--squared-relu"):
        via_hf(str(saved), None, FLAGS)
    assert "error" not in capsys.readouterr().err


def test_an_interrupted_export_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(harness_command, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        via_hf(str(tmp_path), None, FLAGS)


@pytest.mark.parametrize("cut", [0, 3])
def test_truncated_contexts_are_reported(cut: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contexts = {"requests": 48, "cut": cut, "tokens_cut": 19 * cut, "most_tokens_cut": 30, "window": 64}
    flags = EvaluationFlags(tasks=["a"], output=str(tmp_path / "out"))
    harness_command.report({"results": {}, "versions": {}, "n-shot": {}, "contexts": contexts}, flags)
    assert json.loads((tmp_path / "out").read_text())["contexts"] == contexts
    line = (
        "note: the contexts of 3 of 48 requests are longer than the model reads (64 tokens): their first tokens "
        "were dropped, 57 in total, at most 30 per context\n"
    )
    assert capsys.readouterr().out.endswith(line) == bool(cut)

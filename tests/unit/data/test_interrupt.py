"""Ends of commands that write complete files or none: a line, and a status that tells the reason."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.convert import command as convert_command
from megatron.data import merge_command
from megatron.data.interrupt import SIGNALS, delay_signals, interrupt_on_signals
from megatron.data.preprocess import command as preprocess_command
from megatron.data.preprocess import vocab_command

COMMANDS = {
    "merge_datasets": (merge_command, "merge", ["--prefixes", "a", "--output-prefix", "b"]),
    "preprocess_data": (
        preprocess_command,
        "preprocess",
        ["--input", "a", "--output-prefix", "b", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"],
    ),
    "train_vocab": (vocab_command, "run", ["--input", "a", "--output-dir", "b"]),
    "ckpt_convert": (convert_command, "convert", ["--load", "a", "--save", "b", "--to", "hf"]),
}


def _raise(error: BaseException) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> None:
        raise error

    return run


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted; nothing was written"),
        (UserError("--input a: is not a file"), 2, "error: --input a: is not a file"),
        (
            OSError(28, "No space left on device", "b.bin"),
            2,
            "error: b.bin: No space left on device. Nothing was written",
        ),
        (OSError(5, "Input/output error"), 2, "error: output: Input/output error. Nothing was written"),
    ],
    ids=["interrupted", "bad input", "full disk", "no name"],
)
def test_each_end_is_one_line_and_a_status(
    name: str, error: BaseException, status: int, line: str, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    module, function, words = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, function, _raise(error))
    assert module.main(words) == status
    out, err = capsys.readouterr()
    assert (out, err.removeprefix(f"{name}: ")) == ("", line + "\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_delayed_signals_arrive_after_the_context_and_only_if_heeded(number: signal.Signals) -> None:
    finished = list[str]()

    def signal_in_context(text: str, error: Exception | None = None) -> None:
        with delay_signals():
            signal.raise_signal(number)
            finished.append(text)
            if error is not None:
                raise error

    with interrupt_on_signals(even_ignored=True):
        for error in (None, ValueError()):
            with pytest.raises(KeyboardInterrupt):
                signal_in_context("heeded", error)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.signal(number, signal.SIG_IGN)
        signal_in_context("ignored")
    assert finished == ["heeded", "heeded", "ignored"]

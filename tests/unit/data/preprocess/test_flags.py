"""Flags of the preprocessing command."""

from __future__ import annotations

import pytest

from megatron.base.errors import UserError
from megatron.data.preprocess.command import parse_flags

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--worker", "2"], "the nearest is --workers"),
        (["--workers", "0"], "--workers 0 must be at least 1"),
        (["--workers", "two"], "invalid int value: 'two'"),
        (["--json-keys", "a", "a"], "each key once"),
        (["--json-keys", "a/b"], "cannot be part of a file name"),
        (["--keep-newlines"], "needs --split-sentences"),
        (["--on-error", "ignore"], "invalid choice: 'ignore'"),
    ],
)
def test_invalid_flags_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_flags(["--input", "x", "--output-prefix", "y", *NULL, *words])
    assert "\n" not in str(caught.value)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    text = capsys.readouterr().out
    for word in ("examples:", "--data-path", "GPT2BPETokenizer", "--on-error", "PREFIX_KEY_document"):
        assert word in text


def test_the_vocab_alias() -> None:
    args = parse_flags(["--input", "x", "--output_prefix=y", "--tokenizer-type", "GPT2BPETokenizer", "--vocab", "v"])
    assert (args.vocab_file, args.output_prefix) == ("v", "y")

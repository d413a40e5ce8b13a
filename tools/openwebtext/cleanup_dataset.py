#!/usr/bin/env python
"""Repairs the texts' encoding, and keeps those in English that are long enough.

    python tools/openwebtext/cleanup_dataset.py scraped.jsonl.zst cleaned.jsonl
    python tools/openwebtext/cleanup_dataset.py in.jsonl out.jsonl --vocab-file vocab.json --merge-file merges.txt

Texts are repaired with ftfy, their language is found by py3langid, and those of fewer than --min-tokens tokens are left
out. With GPT-2's vocabulary its tokens are counted; without, words and marks, which is about as many. Memory: each
process takes about 100 MB, and ten times the longest line that it is given.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.base.errors import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.build import build_tokenizer
from tools.openwebtext.filtering import Judged, judge_all
from tools.openwebtext.language import check_language, is_language
from tools.openwebtext.streams import Report, add_common, check_apart, command, encode, text_of, writing

_WORD, _MARK = re.compile(r"[^\W_]+"), re.compile(r"[^\w\s]+|_+")


class _Settings:
    """Of this process, which is one of several."""

    key = "text"
    language = "en"
    least = 128
    tokenizer: Tokenizer | None = None


@cache
def _tokenizer(vocab: str, merges: str) -> Tokenizer:
    """GPT-2's; the check of the flags and the work share it."""
    flags = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    return build_tokenizer(flags)


def prepare(key: str, language: str, least: int, vocabulary: tuple[str, str] | None) -> None:
    """Sets this process up."""
    _Settings.key, _Settings.language, _Settings.least = key, language, least
    _Settings.tokenizer = None if vocabulary is None else _tokenizer(*vocabulary)


def long_enough(text: str) -> bool:
    """Whether a text has the tokens that are asked for."""
    least, tokenizer = _Settings.least, _Settings.tokenizer
    # Every word is at least a token, so most texts need no tokenizer.
    words = sum(1 for _ in zip(_WORD.finditer(text), range(least), strict=False))
    if words >= least:
        return True
    if tokenizer is not None:
        return len(tokenizer.tokenize(text)) >= least
    return words + sum(1 for _ in _MARK.finditer(text)) >= least


def judge(found: dict[str, Any], line: bytes, where: str) -> Judged:
    """Keeps, repairs or drops a document."""
    import ftfy

    original = text_of(found, _Settings.key, where)
    text = ftfy.fix_text(original)
    fixed = ("fixed",) if text != original else ()
    if not is_language(text, _Settings.language):
        return Judged(reasons=(*fixed, "in another language"))
    if not long_enough(text):
        return Judged(reasons=(*fixed, "too short"))
    return Judged((encode({**found, _Settings.key: text}) if fixed else line,), reasons=fixed)


def settings_of(options: argparse.Namespace) -> tuple[Any, ...]:
    """What ``prepare`` is given."""
    vocabulary = (options.vocab_file, options.merge_file) if options.vocab_file is not None else None
    return options.key, options.language, options.min_tokens, vocabulary


def check(options: argparse.Namespace) -> None:
    """Checks the flags, and sets this process up.

    Raises:
        UserError: when they make no sense, or the vocabulary cannot be read.
    """
    if (options.vocab_file is None) != (options.merge_file is None):
        raise UserError("--vocab-file and --merge-file belong together: give both, or none")
    if options.min_tokens < 0:
        raise UserError(f"--min-tokens {options.min_tokens}: give 0 or more")
    check_language(options.language)
    prepare(*settings_of(options))


def run(options: argparse.Namespace) -> Report:
    """Cleans a file.

    Raises:
        UserError: for files that cannot be read or written.
    """
    check_apart([options.input, options.vocab_file, options.merge_file], [options.output, options.report])
    check(options)
    with writing(options.output) as write:
        return judge_all(
            judge,
            options.input,
            write,
            workers=options.workers,
            skip_bad=options.skip_bad_lines,
            what="cleanup",
            prepare=prepare,
            arguments=settings_of(options),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cleanup_dataset.py", description=__doc__)
    parser.add_argument("input", help="JSON lines")
    parser.add_argument("output", help="JSON lines")
    parser.add_argument("--key", default="text", help="field that holds the text (text)")
    parser.add_argument("--language", default="en", help="that is kept (en)")
    parser.add_argument("--min-tokens", type=int, default=128, metavar="N", help="of a text that is kept (128)")
    parser.add_argument("--vocab-file", metavar="FILE", help="GPT-2's vocab.json")
    parser.add_argument("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    add_common(parser)
    return command(parser, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())

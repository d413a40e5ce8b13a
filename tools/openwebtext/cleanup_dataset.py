#!/usr/bin/env python
"""Repairs the encoding of texts, and keeps English texts that are long enough.

    python tools/openwebtext/cleanup_dataset.py scraped.jsonl.zst cleaned.jsonl
    python tools/openwebtext/cleanup_dataset.py in.jsonl out.jsonl --vocab-file vocab.json --merge-file merges.txt

Texts are repaired by ftfy, their language is detected by py3langid, and those of fewer than --min-tokens tokens are
dropped. Tokens are GPT-2's if its vocabulary is given, else words and punctuation marks, of which there are about as
many. Memory: each process takes about 100 MB, and ten times its longest line.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.cleanup_dataset")

from megatron.base.errors import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.data.lines import writing
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.build import build_tokenizer
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart, check_at_least
from tools.openwebtext.cleaning.filtering import Judged, encode, judge_all
from tools.openwebtext.cleaning.language import check_language, is_language

_WORD, _MARK = re.compile(r"[^\W_]+"), re.compile(r"[^\w\s]+|_+")


@cache
def _tokenizer(vocab: str, merges: str) -> Tokenizer:
    """GPT-2's tokenizer, shared by the check of the flags and the work."""
    flags = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    return build_tokenizer(flags)


@dataclass(frozen=True)
class Cleanup:
    """Repairs the encoding of a document's text, and keeps it if it is long enough and in a language.

    Args:
        key: field that holds the text.
        language: its ISO 639-1 code.
        min_tokens: minimum number of tokens.
        tokenizer: builds the tokenizer that counts them; None: count words and punctuation marks.
    """

    key: str
    language: str
    min_tokens: int
    tokenizer: Callable[[], Tokenizer] | None

    def long_enough(self, text: str) -> bool:
        """Return whether a text has the minimum number of tokens."""
        num_words = len(_WORD.findall(text))
        if num_words >= self.min_tokens:  # every word is at least a token, so most texts need no tokenizer
            return True
        if self.tokenizer is not None:
            return len(self.tokenizer().tokenize(text)) >= self.min_tokens
        return num_words + len(_MARK.findall(text)) >= self.min_tokens

    def __call__(self, row: dict[str, Any], line: bytes, where: str) -> Judged:
        import ftfy

        text = ftfy.fix_text(row[self.key])
        fixed = ("fixed",) if text != row[self.key] else ()
        if not is_language(text, self.language):
            return Judged(reasons=(*fixed, "in another language"))
        if not self.long_enough(text):
            return Judged(reasons=(*fixed, "too short"))
        return Judged((encode({**row, self.key: text}) if fixed else line,), reasons=fixed)


def check(options: argparse.Namespace) -> None:
    """Check the flags, and that the vocabulary can be read."""
    check_apart([options.input, options.vocab_file, options.merge_file], [options.output, options.report])
    if (options.vocab_file is None) != (options.merge_file is None):
        raise UserError("--vocab-file and --merge-file belong together: give both or neither")
    check_at_least(options, min_tokens=0)
    check_language(options.language)
    if options.vocab_file is not None:
        _tokenizer(options.vocab_file, options.merge_file)


def run(options: argparse.Namespace) -> Report:
    """Clean a file."""
    tokenizer = partial(_tokenizer, options.vocab_file, options.merge_file) if options.vocab_file is not None else None
    cleanup = Cleanup(options.key, options.language, options.min_tokens, tokenizer)
    settings: dict[str, Any] = {"workers": options.workers, "skip_bad": options.skip_bad_lines, "label": "cleanup"}
    with writing(options.output) as write:
        return judge_all(cleanup, [options.input], write, keys=[options.key], **settings)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="JSON lines")
    parser.add_argument("output", help="JSON lines")
    parser.add_argument("--key", default="text", help="field that holds the text (text)")
    parser.add_argument("--language", default="en", help="language to keep (en)")
    parser.add_argument("--min-tokens", type=int, default=128, metavar="N", help="minimum tokens of a text (128)")
    parser.add_argument("--vocab-file", metavar="FILE", help="GPT-2's vocab.json")
    parser.add_argument("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    add_common(parser)


main = Tool("cleanup_dataset.py", __doc__, add_flags, run, check)

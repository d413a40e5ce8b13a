#!/usr/bin/env python
"""Removes the texts of evaluation tasks from training texts.

    python tools/openwebtext/filter_ngrams.py --tasks lambada --lambada-path lambada_test.jsonl \\
        --dedup-dataset data.jsonl text --output clean.jsonl
    python tools/openwebtext/filter_ngrams.py --task-files my_questions.jsonl question \\
        --dedup-dataset data.jsonl text --output clean.jsonl

Searches for every run of 13 words (letters and digits, lower case) of a task's texts, and for shorter texts of at least
8 words as a whole. Runs that occur in the data --key-threshold times or more are phrases rather than leaks, and stay.
Other runs are cut out with 200 characters on each side, up to the ends of sentences; remaining pieces of 200 characters
or fewer are dropped, too. A document that falls into more than 10 pieces is dropped; the pieces of others become
separate documents with a field split_id. This takes two passes over the data, which must therefore be a file; with
--load-dictionary it takes one, and the data may be a pipe. Memory: the tasks' runs, and about 25 bytes for each
character of the longest text.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.filter_ngrams")

from megatron.base.errors import UserError
from megatron.data.lines import lines, writing
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart, check_at_least
from tools.openwebtext.cleaning.evaluation_texts import TASKS, texts_of_file, texts_of_task
from tools.openwebtext.cleaning.filtering import Judged, encode, judge_all

_WORD = re.compile(r"\w+")
_ENDS = ".!?"


def split_words(text: str) -> tuple[list[str], list[int]]:
    """Words of a text in lower case, and their positions."""
    matches = list(_WORD.finditer(text))
    return [match.group().lower() for match in matches], [match.start() for match in matches]


def ngrams_of(texts: Iterable[str], max_words: int, min_words: int) -> dict[str, int]:
    """Runs of words of tasks' texts, with counts of 0."""
    ngrams: dict[str, int] = {}
    for text in texts:
        words, _ = split_words(text)
        size = min(max_words, len(words))
        if size >= min_words:
            ngrams.update((" ".join(words[i : i + size]), 0) for i in range(len(words) - size + 1))
    return ngrams


@dataclass(frozen=True)
class Search:
    """Search for runs of words in documents' texts; ``key`` is the field of the texts.

    As a judge, it is the first pass over the data; its output lines are the runs in the documents.
    """

    key: str
    ngrams: frozenset[str]

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of words of the runs, in descending order."""
        return sorted({ngram.count(" ") + 1 for ngram in self.ngrams}, reverse=True)

    def hits(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Runs of words in a text, each with its start and end; longer runs with the same start come first."""
        words, starts = split_words(text)
        for first in range(len(words)):
            for size in self.sizes:
                ngram = " ".join(words[first : first + size])
                if first + size <= len(words) and ngram in self.ngrams:
                    last = first + size - 1
                    yield ngram, starts[first], starts[last] + len(words[last])

    def __call__(self, row: dict[str, Any], line: bytes, where: str) -> Judged:
        return Judged(tuple(ngram.encode() for ngram, _, _ in self.hits(row[self.key])))


@dataclass(frozen=True)
class NgramCut(Search):
    """Second pass over the data: keeps, cuts or drops a document.

    Args:
        each_side: characters cut on each side of a run.
        min_length: number of characters that a remaining piece must exceed.
        max_pieces: maximum number of pieces of a document.
    """

    each_side: int
    min_length: int
    max_pieces: int

    def pieces(self, text: str) -> list[str] | None:
        """Pieces of a text that remain without the runs and their surroundings; None if it contains no run."""
        pieces: list[str] = []
        start, has_hit = 0, False
        for _, begin, end in self.hits(text):
            has_hit = True
            before = begin - self.each_side
            while before > start and text[before] not in _ENDS:
                before -= 1
            if before > start:
                pieces.append(text[start : before + 1])
            # A run that begins in the surroundings of the last run extends them.
            after = end + self.each_side
            while after < len(text) and text[after] not in _ENDS:
                after += 1
            start = max(start, after + 1)
        pieces.append(text[start:])
        return [piece for piece in pieces if len(piece) > self.min_length] if has_hit else None

    def __call__(self, row: dict[str, Any], line: bytes, where: str) -> Judged:
        pieces = self.pieces(row[self.key])
        if pieces is None:
            return Judged((line,))
        if len(pieces) > self.max_pieces:
            return Judged(reasons=("in too many pieces",))
        if not pieces:
            return Judged(reasons=("without a piece left",))
        rows = ({**row, self.key: piece.strip(), "split_id": number} for number, piece in enumerate(pieces))
        return Judged(tuple(map(encode, rows)), reasons=("cut",))


def _load_dictionary(path: str) -> dict[str, int]:
    """Read a file written by --save-dictionary."""
    try:
        ngrams = json.loads(b"\n".join(lines(path)))
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, UserError) else f"{path}: is not JSON ({error})"
        raise UserError(f"--load-dictionary {reason}") from error
    if not isinstance(ngrams, dict) or not all(type(times) is int and times >= 0 for times in ngrams.values()):
        raise UserError(f"--load-dictionary {path}: is not a file of --save-dictionary, of runs and their counts")
    return ngrams


def dictionary(options: argparse.Namespace) -> dict[str, int]:
    """Runs of all tasks, with their counts if they come from a file."""
    saved_ngrams = _load_dictionary(options.load_dictionary) if options.load_dictionary else {}
    texts = [
        texts_of_file(options.lambada_path, "text") if name == "lambada" else texts_of_task(name)
        for name in options.tasks
    ]
    texts += map(texts_of_file, options.task_files[::2], options.task_files[1::2])
    ngrams = ngrams_of(chain.from_iterable(texts), options.max_ngram_size, options.min_ngram_size) | saved_ngrams
    if not ngrams:
        raise UserError("nothing to look for: give --tasks, --task-files or --load-dictionary")
    return ngrams


def check(options: argparse.Namespace) -> None:
    """Check the flags, and read the runs into ``options.dictionary``."""
    if not 1 <= options.min_ngram_size <= options.max_ngram_size:
        raise UserError(
            f"--min-ngram-size {options.min_ngram_size}: give 1 to --max-ngram-size {options.max_ngram_size}"
        )
    check_at_least(options, filter_text_char_len=0, key_threshold=1, splits_count=0, remove_char_each_side=0)
    if "lambada" in options.tasks and not options.lambada_path:
        raise UserError("--tasks lambada needs --lambada-path FILE")
    if len(options.task_files) % 2:
        raise UserError("--task-files: give a file and its field of texts, then the next file and its field")
    inputs = [options.dedup_dataset[0], options.lambada_path, options.load_dictionary, *options.task_files[::2]]
    check_apart(inputs, [options.output, options.save_dictionary, options.report])
    data = Path(options.dedup_dataset[0])
    if not options.load_dictionary and data.exists() and not data.is_file():
        raise UserError(f"--dedup-dataset {data}: is not a file, and can be read only once; save it as a file first")
    options.dictionary = dictionary(options)


def run(options: argparse.Namespace) -> Report:
    """Filter a file."""
    path, key = options.dedup_dataset
    ngrams = options.dictionary
    shared: dict[str, Any] = {"keys": [key], "workers": options.num_threads, "skip_bad": options.skip_bad_lines}
    if not options.load_dictionary:
        counts: Counter[bytes] = Counter()
        search = Search(key, frozenset(ngrams))
        judge_all(search, [path], lambda ngram: counts.update([ngram]), label="counting", **shared)
        ngrams = {ngram: counts[ngram.encode()] for ngram in ngrams}
    if options.save_dictionary:
        with writing(options.save_dictionary) as write:
            write(json.dumps(ngrams, ensure_ascii=False).encode())
    rare = frozenset(ngram for ngram, times in ngrams.items() if times < options.key_threshold)
    cut = NgramCut(key, rare, options.remove_char_each_side, options.filter_text_char_len, options.splits_count)
    with writing(options.output) as write:
        report = judge_all(cut, [path], write, label="filtering", **shared)
    report["runs of words looked for"] += len(rare)
    report["phrases that stay"] += len(ngrams) - len(rare)
    return report


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="*", default=[], choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--lambada-path", metavar="FILE", help="LAMBADA's JSON lines")
    parser.add_argument(
        "--task-files", nargs="*", default=[], metavar="X", help="FILE FIELD FILE FIELD ...: other tasks"
    )
    parser.add_argument(
        "--dedup-dataset", nargs=2, required=True, metavar=("FILE", "FIELD"), help="the data, and the field of texts"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON lines")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--num-threads", "--workers", type=int, default=min(40, cores), metavar="N", help="processes (40, or all cores)"
    )
    parser.add_argument("--max-ngram-size", type=int, default=13, metavar="N", help="words of a run (13)")
    parser.add_argument("--min-ngram-size", type=int, default=8, metavar="N", help="minimum words of a task's text (8)")
    parser.add_argument(
        "--filter-text-char-len", type=int, default=200, metavar="N", help="drop pieces of at most N characters (200)"
    )
    parser.add_argument("--key-threshold", type=int, default=10, metavar="N", help="count that makes a phrase (10)")
    parser.add_argument("--save-dictionary", metavar="FILE", help="write the runs and their counts in the data")
    parser.add_argument("--load-dictionary", metavar="FILE", help="read the runs and their counts instead of counting")
    parser.add_argument("--splits-count", type=int, default=10, metavar="N", help="maximum pieces of a document (10)")
    parser.add_argument(
        "--remove-char-each-side", type=int, default=200, metavar="N", help="characters to cut around a run (200)"
    )
    add_common(parser, workers=False)


main = Tool("filter_ngrams.py", __doc__, add_flags, run, check)

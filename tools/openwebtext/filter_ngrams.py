#!/usr/bin/env python
"""Removes what evaluation tasks are made of from training texts.

    python tools/openwebtext/filter_ngrams.py --tasks lambada --lambada-path lambada_test.jsonl \\
        --dedup-dataset data.jsonl text --output clean.jsonl
    python tools/openwebtext/filter_ngrams.py --task-files my_questions.jsonl question \\
        --dedup-dataset data.jsonl text --output clean.jsonl

Every run of 13 words (letters and digits, lower case) of a task's texts is looked for; of shorter texts, down to 8
words, the whole. Runs that the data hold --key-threshold times or more are phrases rather than leaks, and stay. Where
another is found, it is cut out with 200 characters on each side, up to the ends of sentences; pieces of 200 characters
or fewer go as well. A document that falls into more than 10 pieces is left out; the pieces of others become documents
of their own with a field split_id. Two passes over the data, which must therefore be a file; with --load-dictionary
there is one, also over a pipe. Memory: the tasks' runs, and about 25 bytes for each character of the longest text.
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


def words_of(text: str) -> tuple[list[str], list[int]]:
    """Words of a text in lower case, and their positions."""
    matches = list(_WORD.finditer(text))
    return [match.group().lower() for match in matches], [match.start() for match in matches]


def ngrams_of(texts: Iterable[str], max_words: int, min_words: int) -> dict[str, int]:
    """Runs of words of tasks' texts, with counts of 0."""
    ngrams: dict[str, int] = {}
    for text in texts:
        words, _ = words_of(text)
        size = min(max_words, len(words))
        if size >= min_words:
            ngrams.update((" ".join(words[i : i + size]), 0) for i in range(len(words) - size + 1))
    return ngrams


@dataclass(frozen=True)
class Search:
    """Finds runs of words in documents' texts; ``key`` is the field that holds them.

    As a judge it is the first pass over the data; its output lines are the runs in the documents.
    """

    key: str
    ngrams: frozenset[str]

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of words of the runs, in descending order."""
        return sorted({ngram.count(" ") + 1 for ngram in self.ngrams}, reverse=True)

    def hits(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Runs of words in a text, each with its start and end; of those with one start, longer ones first."""
        words, starts = words_of(text)
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
    """The second pass: keeps, cuts or drops a document.

    Args:
        each_side: characters that are cut with a run.
        min_length: characters that a remaining piece must exceed.
        max_pieces: maximum number of pieces of a document.
    """

    each_side: int
    min_length: int
    max_pieces: int

    def pieces(self, text: str) -> list[str] | None:
        """Remaining pieces of a text without the runs and their surroundings; None if it holds no run."""
        pieces: list[str] = []
        start, has_hit = 0, False
        for _, begin, end in self.hits(text):
            has_hit = True
            before = begin - self.each_side
            while before > start and text[before] not in _ENDS:
                before -= 1
            if before > start:
                pieces.append(text[start : before + 1])
            # A run that begins where the last one's surroundings end makes them longer.
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
        reason = error if isinstance(error, UserError) else f"{path}: is no JSON ({error})"
        raise UserError(f"--load-dictionary {reason}") from error
    if not isinstance(ngrams, dict) or not all(type(times) is int and times >= 0 for times in ngrams.values()):
        raise UserError(f"--load-dictionary {path}: is no output of --save-dictionary, of runs and their numbers")
    return ngrams


def dictionary(options: argparse.Namespace) -> dict[str, int]:
    """Runs of all tasks, counted when they come from a file."""
    saved_ngrams = _load_dictionary(options.load_dictionary) if options.load_dictionary else {}
    texts = [
        texts_of_file(options.lambada_path, "text") if name == "lambada" else texts_of_task(name)
        for name in options.tasks
    ]
    texts += map(texts_of_file, options.task_files[::2], options.task_files[1::2])
    ngrams = ngrams_of(chain.from_iterable(texts), options.max_ngram_size, options.min_ngram_size) | saved_ngrams
    if not ngrams:
        raise UserError("there is nothing to look for: give --tasks, --task-files or --load-dictionary")
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
        raise UserError(f"--dedup-dataset {data}: is no file and could be read only once; save it as a file first")
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
        "--dedup-dataset", nargs=2, required=True, metavar=("FILE", "FIELD"), help="the data, its texts"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON lines")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--num-threads", "--workers", type=int, default=min(40, cores), metavar="N", help="processes (40, or all cores)"
    )
    parser.add_argument("--max-ngram-size", type=int, default=13, metavar="N", help="words of a run (13)")
    parser.add_argument("--min-ngram-size", type=int, default=8, metavar="N", help="words of a text that counts (8)")
    parser.add_argument("--filter-text-char-len", type=int, default=200, metavar="N", help="pieces are longer (200)")
    parser.add_argument("--key-threshold", type=int, default=10, metavar="N", help="times that make a phrase (10)")
    parser.add_argument("--save-dictionary", metavar="FILE", help="write the runs and how often the data hold them")
    parser.add_argument("--load-dictionary", metavar="FILE", help="take those, and leave the counting out")
    parser.add_argument("--splits-count", type=int, default=10, metavar="N", help="pieces of a document, at most (10)")
    parser.add_argument("--remove-char-each-side", type=int, default=200, metavar="N", help="that go with a run (200)")
    add_common(parser, workers=False)


main = Tool("filter_ngrams.py", __doc__, add_flags, run, check)

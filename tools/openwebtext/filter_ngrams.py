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
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.filter_ngrams")

from megatron.base.errors import UserError
from megatron.data.cleaning.command import Report, Tool, add_common, check_apart, check_at_least
from megatron.data.cleaning.evaluation_texts import TASKS, texts_of_file, texts_of_task
from megatron.data.cleaning.filtering import Judged, encode, judge_all
from megatron.data.lines import lines, writing

_WORD = re.compile(r"\w+")
_ENDS = ".!?"


def words_of(text: str) -> tuple[list[str], list[int]]:
    """The words of a text in lower case, and where each begins."""
    words, starts = [], []
    for match in _WORD.finditer(text):
        words.append(match.group().lower())
        starts.append(match.start())
    return words, starts


def ngrams_of(texts: Iterable[str], longest: int, shortest: int) -> dict[str, int]:
    """Runs of words of tasks' texts, none counted yet."""
    found: dict[str, int] = {}
    for text in texts:
        words, _ = words_of(text)
        size = min(longest, len(words))
        if size >= shortest:
            found.update((" ".join(words[i : i + size]), 0) for i in range(len(words) - size + 1))
    return found


@dataclass(frozen=True)
class Search:
    """A search for runs of words in documents' texts; ``key`` is the field that holds them.

    As a judge it is the first pass over the data, which keeps the runs that were found.
    """

    key: str
    ngrams: frozenset[str]

    @cached_property
    def sizes(self) -> list[int]:
        """Words of the runs, longer ones first."""
        return sorted({ngram.count(" ") + 1 for ngram in self.ngrams}, reverse=True)

    def hits(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Runs of words that are looked for: each with where it begins and ends in the text; longer ones first."""
        (words, starts), ngrams, sizes = words_of(text), self.ngrams, self.sizes
        for first in range(len(words)):
            for size in sizes:
                ngram = " ".join(words[first : first + size])
                if first + size <= len(words) and ngram in ngrams:
                    last = first + size - 1
                    yield ngram, starts[first], starts[last] + len(words[last])

    def __call__(self, found: dict[str, Any], line: bytes, where: str) -> Judged:
        return Judged(tuple(ngram.encode() for ngram, _, _ in self.hits(found[self.key])))


@dataclass(frozen=True)
class NgramCut(Search):
    """The second pass: keeps, cuts or drops a document.

    Args:
        each_side: characters that go with a run.
        least: characters of a piece, of which those that are kept have more.
        most_pieces: of a document that is kept.
    """

    each_side: int
    least: int
    most_pieces: int

    def pieces(self, text: str) -> list[str] | None:
        """What is left of a text without the runs and their surroundings; None when nothing has to go."""
        left: list[str] = []
        start, touched = 0, False
        for _, begin, end in self.hits(text):
            touched = True
            before = begin - self.each_side
            while before > start and text[before] not in _ENDS:
                before -= 1
            if before > start:
                left.append(text[start : before + 1])
            # A run that begins where the last one's surroundings end makes them longer.
            after = end + self.each_side
            while after < len(text) and text[after] not in _ENDS:
                after += 1
            start = max(start, after + 1)
        if not touched:
            return None
        left.append(text[start:])
        return [piece for piece in left if len(piece) > self.least]

    def __call__(self, found: dict[str, Any], line: bytes, where: str) -> Judged:
        left = self.pieces(found[self.key])
        if left is None:
            return Judged((line,))
        if len(left) > self.most_pieces:
            return Judged(reasons=("in too many pieces",))
        if not left:
            return Judged(reasons=("without a piece left",))
        rows = ({**found, self.key: piece.strip(), "split_id": number} for number, piece in enumerate(left))
        return Judged(tuple(map(encode, rows)), reasons=("cut",))


def _saved(path: str) -> dict[str, int]:
    """What --save-dictionary wrote."""
    try:
        found = json.loads(b"\n".join(lines(path)))
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, UserError) else f"{path}: is no JSON ({error})"
        raise UserError(f"--load-dictionary {reason}") from error
    if not isinstance(found, dict) or not all(type(times) is int and times >= 0 for times in found.values()):
        raise UserError(f"--load-dictionary {path}: is no output of --save-dictionary, of runs and their numbers")
    return found


def dictionary(options: argparse.Namespace) -> dict[str, int]:
    """The runs of all tasks, counted when they come from a file.

    Raises:
        UserError: for tasks and files that cannot be had.
    """
    sizes = (options.max_ngram_size, options.min_ngram_size)
    found = _saved(options.load_dictionary) if options.load_dictionary else {}
    for name in options.tasks:
        texts = texts_of_file(options.lambada_path, "text") if name == "lambada" else texts_of_task(name)
        found |= {k: v for k, v in ngrams_of(texts, *sizes).items() if k not in found}
    for path, key in zip(options.task_files[::2], options.task_files[1::2], strict=True):
        found |= {k: v for k, v in ngrams_of(texts_of_file(path, key), *sizes).items() if k not in found}
    if not found:
        raise UserError("there is nothing to look for: give --tasks, --task-files or --load-dictionary")
    return found


def check(options: argparse.Namespace) -> None:
    """Checks the flags, and reads what is looked for into ``options.dictionary``.

    Raises:
        UserError: when they make no sense, or the texts of a task cannot be had.
    """
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
    """Filters a file.

    Raises:
        UserError: for files that cannot be read or written.
    """
    path, key = options.dedup_dataset
    found = options.dictionary
    shared: dict[str, Any] = {"keys": [key], "workers": options.num_threads, "skip_bad": options.skip_bad_lines}
    if not options.load_dictionary:
        counts: Counter[bytes] = Counter()
        search = Search(key, frozenset(found))
        judge_all(search, [path], lambda ngram: counts.update([ngram]), what="counting", **shared)
        found = {ngram: counts[ngram.encode()] for ngram in found}
    if options.save_dictionary:
        with writing(options.save_dictionary) as write:
            write(json.dumps(found, ensure_ascii=False).encode())
    wanted = frozenset(ngram for ngram, seen in found.items() if seen < options.key_threshold)
    cut = NgramCut(key, wanted, options.remove_char_each_side, options.filter_text_char_len, options.splits_count)
    with writing(options.output) as write:
        report = judge_all(cut, [path], write, what="filtering", **shared)
    report.add("runs of words looked for", len(wanted))
    report.add("phrases that stay", len(found) - len(wanted))
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

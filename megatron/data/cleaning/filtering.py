"""Per-document filtering of JSON lines: every line is kept, changed or dropped."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron.base.errors import UserError
from megatron.base.text_file import Numeral, parse_json
from megatron.data.cleaning.command import Report, progress
from megatron.data.lines import numbered_lines
from megatron.data.processes import in_processes

T = TypeVar("T")

BAD_LINE = "bad lines skipped"
"""Report entry for lines that are not documents."""

_CHUNK, _CHUNK_BYTES = 64, 1 << 20
"""Maximum lines and bytes per work item of a process."""


def document(line: bytes, where: str, *keys: str, skippable: bool = True) -> dict[str, Any]:
    """Parses the JSON object of a line.

    Args:
        line: line of a file.
        where: position of the line, for messages.
        keys: fields that must be strings.
        skippable: whether to suggest --skip-bad-lines in the message.

    Raises:
        UserError: when the line is not a valid document.
    """
    advice = "remove the line" + (", or give --skip-bad-lines" if skippable else "")
    try:
        record = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is no JSON ({error}); {advice}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: is no JSON object; {advice}")
    for key in keys:
        if isinstance(record.get(key), (int, float, Numeral)):
            raise UserError(f"{where}: {key!r} is a number and no text (add_id.py makes names that are); {advice}")
        if not isinstance(record.get(key), str):
            raise UserError(f"{where}: has no text {key!r}; {advice}")
    return record


class _StandIns:
    """Placeholders in JSON for numbers that are inserted afterwards in their original form.

    Args:
        default: converts other values that JSON cannot represent.
    """

    def __init__(self, default: Callable[[Any], Any] | None) -> None:
        self._default = default
        self._mark = secrets.token_hex(16)  # random, so it occurs in no text
        self._numerals: list[str] = []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Numeral):
            self._numerals.append(value.text)
            return f"{self._mark}{len(self._numerals) - 1}"
        if self._default is None:
            raise TypeError(f"values of type {type(value).__name__}")
        return self._default(value)

    def replace(self, text: str) -> str:
        """Replaces the placeholders in a text by the numbers."""
        if not self._numerals:
            return text
        return re.sub(f'"{self._mark}([0-9]+)"', lambda match: self._numerals[int(match[1])], text)


def encode(found: dict[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """Encodes a JSON line in UTF-8; lone surrogates stay escaped.

    Args:
        found: object of the line; a ``Numeral`` in it is written in its original form.
        default: converts values that JSON cannot represent.
    """
    stand_ins = _StandIns(default)
    text = stand_ins.replace(json.dumps(found, ensure_ascii=False, default=stand_ins))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return stand_ins.replace(json.dumps(found, default=stand_ins)).encode()


def _size(item: object) -> int:
    if isinstance(item, tuple):
        return sum(map(_size, item))
    return len(item) if isinstance(item, bytes) else 0


def in_chunks(items: Iterable[T], size: int = _CHUNK) -> Iterator[list[T]]:
    """Groups consecutive items into lists of at most ``size`` items, which hold about a megabyte of lines at most."""
    chunk: list[T] = []
    chunk_bytes = 0
    for item in items:
        chunk.append(item)
        chunk_bytes += _size(item)
        if len(chunk) == size or chunk_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, chunk_bytes = [], 0
    if chunk:
        yield chunk


@dataclass(frozen=True)
class Judged:
    """Verdict on a document.

    Args:
        kept: output lines.
        dropped: line for the file of dropped documents, if any.
        reasons: names of the counters to increment.
    """

    kept: tuple[bytes, ...] = ()
    dropped: bytes | None = None
    reasons: tuple[str, ...] = ()


Judge = Callable[[dict[str, Any], bytes, str], Judged]
"""Judges a document, given its object, its line, and its position for errors."""


@dataclass(frozen=True)
class FilePart:
    """A chunk of numbered lines of a file; ``keys`` are fields that must be strings."""

    path: str
    keys: tuple[str, ...]
    lines: Sequence[tuple[int, bytes]]


def parts_of(path: str | Path, *keys: str) -> Iterator[FilePart]:
    """Splits the lines of a file into chunks.

    Raises:
        UserError: when the file cannot be read.
    """
    return (FilePart(str(path), keys, chunk) for chunk in in_chunks(numbered_lines(path)))


def of_each(function: Callable[[dict[str, Any], bytes, str], T], part: FilePart, skip_bad: bool) -> tuple[list[T], int]:
    """Applies a function to the documents of a chunk of lines.

    Args:
        function: function of a document, its line and its position; may raise a UserError for invalid documents.
        part: the lines.
        skip_bad: whether to skip lines that are not documents.

    Returns:
        Results, and number of skipped lines.

    Raises:
        UserError: naming the first line that is not a document.
    """
    results = []
    for number, line in part.lines:
        location = f"{part.path}, line {number}"
        try:
            results.append(function(document(line, location, *part.keys), line, location))
        except UserError:
            if not skip_bad:
                raise
    return results, len(part.lines) - len(results)


@dataclass(frozen=True)
class _JudgePart:
    """Picklable function that judges a chunk of lines."""

    judge: Judge
    skip_bad: bool

    def __call__(self, part: FilePart) -> tuple[list[Judged], int]:
        return of_each(self.judge, part, self.skip_bad)


def judge_all(
    judge: Judge,
    paths: Iterable[str | Path],
    write: Callable[[bytes], None],
    drop: Callable[[bytes], None] | None = None,
    *,
    keys: Sequence[str] = (),
    workers: int = 1,
    skip_bad: bool,
    what: str = "documents",
    report: Report | None = None,
) -> Report:
    """Judges every line of files and writes the results in order.

    Args:
        judge: judge of documents; picklable with several workers.
        paths: JSON-lines files.
        write, drop: write kept and dropped lines.
        keys: fields that must be strings.
        workers: number of processes.
        skip_bad: count lines that are not documents instead of raising an error.
        what: label of the progress bar.
        report: report to add the counts to (default: a new report).

    Raises:
        UserError: naming the file and the line that is not a document.
    """
    report = Report() if report is None else report
    report.update(documents=0, written=0)
    file_parts = (file_part for path in paths for file_part in parts_of(path, *keys))
    with progress((), what) as bar:
        for results, num_bad in in_processes(_JudgePart(judge, skip_bad), file_parts, workers):
            report.add("documents", len(results) + num_bad)
            if num_bad:
                report.add(BAD_LINE, num_bad)
            for result in results:
                for reason in result.reasons:
                    report.add(reason)
                for kept_line in result.kept:
                    report.add("written")
                    write(kept_line)
                if drop is not None and result.dropped is not None:
                    drop(result.dropped)
            bar.update(len(results) + num_bad)
    return report

"""Per-document filtering of JSON lines: every line is kept, changed or dropped."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron.base.errors import UserError
from megatron.base.text_file import Numeral, parse_json
from megatron.data.lines import numbered_lines
from megatron.data.processes import map_in_processes
from tools.openwebtext.cleaning.command import Report, progress

T = TypeVar("T")

BAD_LINE = "bad lines skipped"
"""Report entry for lines that are not documents."""

_CHUNK, _CHUNK_BYTES = 64, 1 << 20
"""Maximum lines and bytes per work item of a process."""


def document(line: bytes, where: str, *keys: str, skippable: bool = True) -> dict[str, Any]:
    """Parse the JSON object of a line, of which some keys must hold strings.

    Raises:
        UserError: when the line is not a valid document; the message starts with ``where``, its position, and suggests
            --skip-bad-lines if it is ``skippable``.
    """
    advice = "remove the line" + (", or give --skip-bad-lines" if skippable else "")
    try:
        record = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON ({error}); {advice}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: is not a JSON object; {advice}")
    for key in keys:
        if isinstance(record.get(key), (int, float, Numeral)):
            raise UserError(f"{where}: {key!r} is a number, not a text (add_id.py creates text names); {advice}")
        if not isinstance(record.get(key), str):
            raise UserError(f"{where}: has no text {key!r}; {advice}")
    return record


def encode(record: dict[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """Encode a JSON line in UTF-8; lone surrogates stay escaped, and a ``Numeral`` keeps its original form.

    ``default`` converts values that JSON cannot represent.
    """
    mark = secrets.token_hex(16)  # random, so it occurs in no text
    numerals: list[str] = []

    def replace_numeral(value: Any) -> Any:
        if isinstance(value, Numeral):
            numerals.append(value.text)
            return f"{mark}{len(numerals) - 1}"
        if default is None:
            raise TypeError(f"values of type {type(value).__name__}")
        return default(value)

    text = json.dumps(record, ensure_ascii=False, default=replace_numeral)
    if numerals:
        text = re.sub(f'"{mark}([0-9]+)"', lambda match: numerals[int(match[1])], text)
    return text.encode("utf-8", "backslashreplace")


def in_chunks(items: Iterable[T], size: int = _CHUNK) -> Iterator[list[T]]:
    """Group consecutive items into lists of at most ``size`` items, or about a megabyte of numbered lines."""
    chunk: list[T] = []
    chunk_bytes = 0
    for item in items:
        chunk.append(item)
        chunk_bytes += len(item[1]) if isinstance(item, tuple) else 0
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


def split_file(path: str | Path, *keys: str) -> Iterator[FilePart]:
    """Split the lines of a file into chunks."""
    return (FilePart(str(path), keys, chunk) for chunk in in_chunks(numbered_lines(path)))


def apply_to_lines(
    function: Callable[[dict[str, Any], bytes, str], T], part: FilePart, skip_bad: bool
) -> tuple[list[T], int]:
    """Apply a function to the documents of a chunk of lines.

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


def judge_all(
    judge: Judge,
    paths: Iterable[str | Path],
    write: Callable[[bytes], None],
    drop: Callable[[bytes], None] = lambda line: None,
    *,
    keys: Sequence[str] = (),
    workers: int = 1,
    skip_bad: bool,
    label: str = "documents",
) -> Report:
    """Judge every line of files and write the results in order.

    Args:
        judge: judge of documents; picklable with several workers.
        paths: JSON-lines files.
        write, drop: write kept and dropped lines.
        keys: fields that must be strings.
        workers: number of processes.
        skip_bad: count lines that are not documents instead of raising an error.
        label: label of the progress bar.

    Raises:
        UserError: naming the file and the line that is not a document.
    """
    report = Report(documents=0, written=0)
    file_parts = (file_part for path in paths for file_part in split_file(path, *keys))
    with progress((), label) as bar:
        for results, num_bad in map_in_processes(
            partial(apply_to_lines, judge, skip_bad=skip_bad), file_parts, workers
        ):
            report.update({"documents": len(results) + num_bad})
            if num_bad:
                report.update({BAD_LINE: num_bad})
            for result in results:
                report.update(result.reasons)
                report["written"] += len(result.kept)
                for kept_line in result.kept:
                    write(kept_line)
                if result.dropped is not None:
                    drop(result.dropped)
            bar.update(len(results) + num_bad)
    return report

"""Documents, which are lines of JSON, and steps that look at one at a time: every line is kept, changed or dropped."""

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
"""What a report calls lines that are no documents."""

_CHUNK, _CHUNK_BYTES = 64, 1 << 20
"""Lines that a process is given at a time; fewer where they are long."""


def document(line: bytes, where: str, *keys: str, skippable: bool = True) -> dict[str, Any]:
    """A line's JSON object.

    Args:
        line: of a file.
        where: it is.
        keys: fields that must be text.
        skippable: whether --skip-bad-lines would leave it out.

    Raises:
        UserError: when it is none.
    """
    advice = "remove the line" + (", or give --skip-bad-lines" if skippable else "")
    try:
        found = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is no JSON ({error}); {advice}") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: is no JSON object; {advice}")
    for key in keys:
        if isinstance(found.get(key), (int, float, Numeral)):
            raise UserError(f"{where}: {key!r} is a number and no text (add_id.py makes names that are); {advice}")
        if not isinstance(found.get(key), str):
            raise UserError(f"{where}: has no text {key!r}; {advice}")
    return found


class _StandIns:
    """Strings that stand in JSON for what is put there afterwards, or that it has no form for.

    Args:
        default: function of a value that JSON has no form for.
    """

    def __init__(self, default: Callable[[Any], Any] | None) -> None:
        self._default = default
        self._mark = secrets.token_hex(16)  # in no text
        self._numerals: list[str] = []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Numeral):
            self._numerals.append(value.text)
            return f"{self._mark}{len(self._numerals) - 1}"
        if self._default is None:
            raise TypeError(f"values of type {type(value).__name__}")
        return self._default(value)

    def replace(self, text: str) -> str:
        """The text with the numbers in their places."""
        if not self._numerals:
            return text
        return re.sub(f'"{self._mark}([0-9]+)"', lambda found: self._numerals[int(found[1])], text)


def encode(found: dict[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """A line of JSON in UTF-8; halves of characters, which have no UTF-8, stay escaped.

    Args:
        found: the line's object; a ``Numeral`` in it is written as it was read.
        default: what stands for a value that JSON has no form for.
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
    """Lists of consecutive items; lines, numbered or not, are in lists of about a megabyte at most, or alone."""
    chunk: list[T] = []
    held = 0
    for item in items:
        chunk.append(item)
        held += _size(item)
        if len(chunk) == size or held >= _CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


@dataclass(frozen=True)
class Judged:
    """What became of a document.

    Args:
        kept: lines to be written.
        dropped: a line for the file of what was left out, where there is one.
        reasons: what is counted.
    """

    kept: tuple[bytes, ...] = ()
    dropped: bytes | None = None
    reasons: tuple[str, ...] = ()


Judge = Callable[[dict[str, Any], bytes, str], Judged]
"""Of a document, its line, and where it is (for errors)."""


@dataclass(frozen=True)
class FilePart:
    """Some lines of a file, each with its number; ``keys`` are fields that must be text."""

    path: str
    keys: tuple[str, ...]
    lines: Sequence[tuple[int, bytes]]


def parts_of(path: str | Path, *keys: str) -> Iterator[FilePart]:
    """The lines of a file, some at a time.

    Raises:
        UserError: when it cannot be read.
    """
    return (FilePart(str(path), keys, chunk) for chunk in in_chunks(numbered_lines(path)))


def of_each(function: Callable[[dict[str, Any], bytes, str], T], part: FilePart, skip_bad: bool) -> tuple[list[T], int]:
    """What a function of a document, its line and where it is says of some lines.

    Args:
        function: may raise a UserError for what is no document.
        part: the lines.
        skip_bad: whether lines that are no documents are left out.

    Returns:
        The results, and the number of lines that are left out.

    Raises:
        UserError: naming a line that is no document.
    """
    results = []
    for number, line in part.lines:
        where = f"{part.path}, line {number}"
        try:
            results.append(function(document(line, where, *part.keys), line, where))
        except UserError:
            if not skip_bad:
                raise
    return results, len(part.lines) - len(results)


@dataclass(frozen=True)
class _JudgePart:
    """Judges some lines; this is what processes are sent."""

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
    """Judges every line of some files and writes the results in order.

    Args:
        judge: with several workers, what can be sent to them.
        paths: of JSON lines.
        write, drop: take the lines that are kept, and those of what is left out.
        keys: fields that must be text.
        workers: processes.
        skip_bad: count what is no document instead of ending there.
        what: for the progress bar.
        report: to which the counts are added (default: a new one).

    Raises:
        UserError: naming the file and the line that is no document.
    """
    report = Report() if report is None else report
    report.update(documents=0, written=0)
    parts = (part for path in paths for part in parts_of(path, *keys))
    with progress((), what) as bar:
        for results, bad in in_processes(_JudgePart(judge, skip_bad), parts, workers):
            report.add("documents", len(results) + bad)
            if bad:
                report.add(BAD_LINE, bad)
            for result in results:
                for reason in result.reasons:
                    report.add(reason)
                for kept in result.kept:
                    report.add("written")
                    write(kept)
                if drop is not None and result.dropped is not None:
                    drop(result.dropped)
            bar.update(len(results) + bad)
    return report

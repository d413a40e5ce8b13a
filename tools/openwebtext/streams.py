"""JSON lines in and out, a few in memory at a time, what is counted of them, and what all tools have in common."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from megatron.base.errors import UserError
from megatron.data.interrupt import stopped_in_order
from tools.openwebtext.files import check_apart, check_output, lines, numbered_lines, writing

T = TypeVar("T")

BAD_LINE = "bad lines skipped"
"""What a report calls lines that are no documents."""

_CHUNK, _CHUNK_BYTES = 64, 1 << 20
"""Lines that a process is given at a time; fewer where they are long."""

_PARTS = 64
"""Of a file that is shuffled."""

_WRITTEN = ("output", "output_file", "save_fingerprints", "save_dictionary", "report")
"""Flags that name a file to be written, of whichever tool."""


def _advice(skippable: bool) -> str:
    return "remove the line" + (", or give --skip-bad-lines" if skippable else "")


def document(line: bytes, where: str, skippable: bool = True) -> dict[str, Any]:
    """A line's JSON object.

    Args:
        line: of a file.
        where: it is.
        skippable: whether --skip-bad-lines would leave it out.

    Raises:
        UserError: when it is none.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is no JSON ({error}); {_advice(skippable)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: is no JSON object; {_advice(skippable)}")
    return found


def text_of(found: dict[str, Any], key: str, where: str, skippable: bool = True) -> str:
    """A field that must be text.

    Args:
        found: a line's object.
        key: of the field.
        where: the line is.
        skippable: whether --skip-bad-lines would leave it out.

    Raises:
        UserError: when it is not.
    """
    text = found.get(key)
    if not isinstance(text, str):
        raise UserError(f"{where}: has no text {key!r}; {_advice(skippable)}")
    return text


def documents(
    path: str | Path, report: Report, skip_bad: bool, key: str | None = None
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The documents of a file, each with its line, counted; with a bar.

    Args:
        path: of JSON lines.
        report: counts documents, and lines that are none.
        skip_bad: whether those are left out.
        key: a field that must be text.

    Raises:
        UserError: naming a line that is no document, unless such are left out.
    """
    for number, line in progress(numbered_lines(path), Path(path).name):
        report.add("documents")
        where = f"{path}, line {number}"
        try:
            found = document(line, where)
            if key is not None:
                text_of(found, key, where)
        except UserError:
            if not skip_bad:
                raise
            report.add(BAD_LINE)
            continue
        yield line, found


def encode(found: dict[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """A line of JSON in UTF-8; halves of characters, which have no UTF-8, stay escaped.

    Args:
        found: the line's object.
        default: what stands for a value that JSON has no form for.
    """
    try:
        return json.dumps(found, ensure_ascii=False, default=default).encode()
    except UnicodeEncodeError:
        return json.dumps(found, default=default).encode()


@dataclass
class Report:
    """What a step did.

    Args:
        counts: by what was counted, in the order in which it was first seen.
    """

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, count: int = 1) -> None:
        self.counts[what] += count

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {what}" for what, count in self.counts.items())


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


def progress(items: Iterable[T], what: str, unit: str = "document") -> Any:
    """The items, with a bar on a terminal and a line now and then elsewhere."""
    return tqdm(items, unit=unit, desc=what, mininterval=1.0 if sys.stderr.isatty() else 30.0)


def add_common(parser: argparse.ArgumentParser, *, workers: bool = True, bad_lines: bool = True) -> None:
    """Flags that most tools have."""
    if workers:
        default = len(os.sched_getaffinity(0))
        parser.add_argument(
            "--workers", type=int, default=default, metavar="N", help=f"processes ({default}: all cores)"
        )
    if bad_lines:
        parser.add_argument(
            "--skip-bad-lines", action="store_true", help="count lines that are no documents, and go on"
        )
    parser.add_argument("--report", metavar="FILE", help="write the counts there as JSON")


def _check_common(options: argparse.Namespace) -> None:
    """Checks, before any work, what all tools have: numbers of processes, and the files that they write."""
    most = 4 * len(os.sched_getaffinity(0))
    for flag in ("workers", "num_threads"):
        value = getattr(options, flag, 1)
        if value < 1:
            raise UserError(f"--{flag.replace('_', '-')} {value}: give at least 1")
        if value > most:
            raise UserError(f"--{flag.replace('_', '-')} {value}: give at most {most}, four for each core")
    written = [getattr(options, flag) for flag in _WRITTEN if getattr(options, flag, None) is not None]
    check_apart([], written)
    made = getattr(options, "output_path", None)  # the cleaning makes its folder itself
    for path in written:
        if made is None or Path(made).exists() or Path(path).parent != Path(made):
            check_output(path)


def command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], Report],
    arguments: Sequence[str] | None,
    interrupted: str = "no unfinished file is left",
) -> int:
    """A tool: 0 and its counts, or 2 and one line.

    Args:
        parser, run, arguments: the tool.
        interrupted: what has become of its work when the user stops it.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    options = parser.parse_args(arguments)
    name = parser.prog.removesuffix(".py")
    try:
        with stopped_in_order():
            _check_common(options)
            report = run(options)
            if getattr(options, "report", None) is not None:
                with writing(options.report) as write:
                    write(json.dumps(report.counts, indent=1).encode())
    except UserError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"{name}: error: {error.name} is missing: pip install -e '.[cleaning]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; {interrupted}", file=sys.stderr)
        return 130
    print(f"{name}: {report}")
    return 0


def external_shuffle(source: str | Path, write: Callable[[bytes], None], seed: int) -> None:
    """Writes the lines of a file in random order. Each goes to a random part of many; one is in memory at a time.

    Args:
        source: read once.
        write: takes the lines.
        seed: of the order.
    """
    generator = random.Random(seed)
    with ExitStack() as opened:
        # Without names, so that none is left whatever ends this.
        parts = [opened.enter_context(tempfile.TemporaryFile(dir=Path(source).parent)) for _ in range(_PARTS)]
        for line in lines(source):
            parts[generator.randrange(_PARTS)].write(line + b"\n")
        for part in parts:
            part.seek(0)
            own = part.read().split(b"\n")[:-1]
            generator.shuffle(own)
            for line in own:
                write(line)

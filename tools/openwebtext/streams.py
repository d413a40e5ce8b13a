"""JSON lines in and out: plain, gzip or zstd, one line in memory at a time, several processes, whole files or none."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import random
import sys
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import zstandard
from tqdm import tqdm

from megatron.config.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

_LONGEST_WINDOW = 1 << 31
"""Of zstd files; large dumps are packed with more than the library's usual limit."""

_CHUNK = 64
"""Lines that a process is given at a time."""


class _Zstd(io.RawIOBase):
    """The contents of a zstd file of one frame or several, whose end is checked (zstandard's own reader does not)."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            unused = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            packed = unused or self._file.read(1 << 18)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("it ends within a frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj()
            self._ready = self._frame.decompress(packed)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _reading(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstd(path), 1 << 20)
    return path.open("rb")


def lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a file that are not empty, without their ends; compressed as its name says.

    Raises:
        UserError: when it cannot be read, or is damaged.
    """
    path = Path(path)
    try:
        with _reading(path) as stream:
            for line in stream:
                stripped = line.strip()
                if stripped:
                    yield stripped
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        reason = getattr(error, "strerror", None) or f"is damaged ({error})"
        raise UserError(f"{path}: {reason}") from error


def document(line: bytes, where: str) -> dict[str, Any]:
    """A line's JSON object.

    Raises:
        UserError: when it is none.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is no JSON ({error}); remove the line, or give --skip-bad-lines") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: is no JSON object; remove the line, or give --skip-bad-lines")
    return found


def text_of(found: dict[str, Any], key: str, where: str) -> str:
    """A field that must be text.

    Raises:
        UserError: when it is not.
    """
    text = found.get(key)
    if not isinstance(text, str):
        raise UserError(f"{where}: has no text {key!r}; remove the line, or give --skip-bad-lines")
    return text


def encode(found: dict[str, Any]) -> bytes:
    """A line of JSON in UTF-8; halves of characters, which have no UTF-8, stay escaped."""
    try:
        return json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(found).encode()


@contextmanager
def writing(path: str | Path) -> Iterator[Callable[[bytes], None]]:
    """Writes lines to a file, compressed as its name says, which is there when all are written and not before.

    Raises:
        UserError: when it cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        raw = partial.open("wb")
        try:
            packed: Any = raw
            if path.suffix == ".gz":
                packed = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)
            elif path.suffix == ".zst":
                packed = zstandard.ZstdCompressor().stream_writer(raw, closefd=False)

            def write(line: bytes) -> None:
                packed.write(line + b"\n")

            yield write
            if packed is not raw:
                packed.close()
            raw.flush()
            os.fsync(raw.fileno())
        finally:
            raw.close()
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


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


def in_chunks(items: Iterable[T], size: int = _CHUNK) -> Iterator[list[T]]:
    """Lists of consecutive items."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def in_processes(
    function: Callable[[T], R],
    items: Iterable[T],
    workers: int,
    prepare: Callable[..., None] | None = None,
    arguments: Sequence[Any] = (),
) -> Iterator[R]:
    """Results in the order of the items, of which a few at a time are on their way, however many there are.

    Args:
        function: of a module.
        items: its arguments.
        workers: processes; with 1, all is done in this one.
        prepare, arguments: called once in every process.
    """
    if workers == 1:
        if prepare is not None:
            prepare(*arguments)
        yield from map(function, items)
        return
    with ProcessPoolExecutor(workers, get_context("forkserver"), prepare, tuple(arguments)) as pool:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 4 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def progress(items: Iterable[T], what: str) -> Any:
    """The items, with a bar on a terminal and a line now and then elsewhere."""
    return tqdm(items, unit="document", desc=what, mininterval=1.0 if sys.stderr.isatty() else 30.0)


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


def command(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Report], arguments: Sequence[str] | None
) -> int:
    """A tool: 0 and its counts, or 2 and one line."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    options = parser.parse_args(arguments)
    name = parser.prog.removesuffix(".py")
    try:
        for flag in ("workers", "num_threads"):
            if getattr(options, flag, 1) < 1:
                raise UserError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: give at least 1")
        report = run(options)
        if getattr(options, "report", None):
            with writing(options.report) as write:
                write(json.dumps(report.counts, indent=1).encode())
    except UserError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{name}: {report}")
    return 0


def check_apart(inputs: Iterable[str | Path], outputs: Iterable[str | Path]) -> None:
    """Checks that nothing that is read is written.

    Raises:
        UserError: naming what is.
    """
    both = {Path(path).resolve() for path in inputs} & {Path(path).resolve() for path in outputs}
    if both:
        raise UserError(f"{min(both)} would be read and overwritten; name another folder, or another file")


def external_shuffle(source: str | Path, write: Callable[[bytes], None], seed: int, buckets: int = 64) -> int:
    """Writes the lines of a file in random order, with one part of many in memory at a time; their number.

    Args:
        source: read once.
        write: takes the lines.
        seed: of the order.
        buckets: parts; each line goes to a random one, and each part is shuffled.
    """
    generator = random.Random(seed)
    count = 0
    with tempfile.TemporaryDirectory(prefix="shuffle-", dir=Path(source).parent) as name:
        parts = [(Path(name) / str(number)).open("w+b") for number in range(buckets)]
        try:
            for line in lines(source):
                parts[generator.randrange(buckets)].write(line + b"\n")
                count += 1
            for part in parts:
                part.seek(0)
                own = part.read().split(b"\n")[:-1]
                generator.shuffle(own)
                for line in own:
                    write(line)
        finally:
            for part in parts:
                part.close()
    return count

"""Reads the lines of input files in blocks."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.base.errors import UserError
from megatron.data.lines import READ_ERRORS, is_compressed, open_decompressed

STDIN = "-"
BLOCK_BYTES = 1 << 20
BLOCK_LINES = 1000


@dataclass(frozen=True)
class InputRange:
    """An input file, or the lines of a plain file that start at bytes [start, end)."""

    name: str
    start: int = 0
    end: int | None = None

    @property
    def label(self) -> str:
        """Name in messages."""
        return "<stdin>" if self.name == STDIN else self.name

    def line_number(self, index: int) -> int:
        """Line number in the file, from 1, of line ``index`` of this range, from 0."""
        preceding_lines = 0
        if self.start:
            with open(self.name, "rb") as stream:
                # The line that crosses the cut, or ends at it, is the last line of the previous range.
                remaining_bytes, preceding_lines = self.start - 1, 1
                while remaining_bytes and (data := stream.read(min(remaining_bytes, 1 << 24))):
                    preceding_lines += data.count(b"\n")
                    remaining_bytes -= len(data)
        return preceding_lines + index + 1


@dataclass(frozen=True)
class Block:
    """Consecutive lines of a source; ``first`` is the index of the first line in the source, from 0."""

    source: InputRange
    first: int
    lines: list[bytes]
    size: int


def expand_inputs(values: list[str]) -> list[str]:
    """Expand paths and glob patterns to files: matches of a pattern are sorted, and the input order is preserved.

    Raises:
        UserError: when a path does not exist, a pattern matches nothing, or stdin occurs twice.
    """
    files: list[str] = []
    for value in values:
        if value == STDIN or os.path.isfile(value):
            files.append(value)
            continue
        matches = [name for name in sorted(glob.glob(value, recursive=True)) if os.path.isfile(name)]
        if not matches:
            reason = "matches no file" if glob.has_magic(value) else "is not a file"
            raise UserError(f"--input {value}: {reason}. Check the path, or give - to read standard input")
        files += matches
    if files.count(STDIN) > 1:
        raise UserError("--input: standard input (-) can be read only once")
    return files


def divide(files: list[str], count: int) -> list[list[InputRange]]:
    """Divide the input into at most ``count`` consecutive pieces of similar size.

    Plain files are cut at line starts; compressed files and standard input are not cut. Reading the pieces in sequence
    yields the lines of the files in order.
    """
    sizes = [0 if name == STDIN else os.path.getsize(name) for name in files]
    share = max(1, -(-sum(sizes) // count))
    pieces: list[list[InputRange]] = [[]]
    room = share  # remaining bytes of the last piece
    for name, size in zip(files, sizes, strict=True):
        if name == STDIN or is_compressed(name):
            pieces[-1].append(InputRange(name))
            room -= size
        else:
            start = 0
            while size - start > room > 0 and len(pieces) < count:
                pieces[-1].append(InputRange(name, start, start + room))
                start, room = start + room, share
                pieces.append([])
            pieces[-1].append(InputRange(name, start, None))
            room -= size - start
        if room <= 0 and len(pieces) < count:
            pieces.append([])
            room = share
    return [piece for piece in pieces if piece]


def read_blocks(sources: list[InputRange]) -> Iterator[Block]:
    """Read the lines of all sources in blocks of about a megabyte.

    Raises:
        UserError: when a file cannot be read or decompressed; the message names the line reached.
    """
    for source in sources:
        first, lines, size = 0, [], 0
        try:
            for line in _lines(source):
                lines.append(line)
                size += len(line)
                if size >= BLOCK_BYTES or len(lines) >= BLOCK_LINES:
                    yield Block(source, first, lines, size)
                    first, lines, size = first + len(lines), [], 0
        except ModuleNotFoundError as error:
            raise UserError(f"{source.label}: {error.name} is missing: pip install {error.name}") from None
        except READ_ERRORS as error:
            line_number = source.line_number(first + len(lines))
            raise UserError(f"{source.label}:{line_number}: cannot be read further ({error}). Check the file") from None
        if lines:
            yield Block(source, first, lines, size)


def _lines(source: InputRange) -> Iterator[bytes]:
    if source.name == STDIN:
        yield from sys.stdin.buffer
        return
    with open_decompressed(source.name) as stream:
        offset = 0
        if source.start:
            # The line that crosses the cut belongs to the previous range.
            stream.seek(source.start - 1)
            offset = source.start - 1 + len(stream.readline())
        for line in stream:
            if source.end is not None and offset >= source.end:
                return
            offset += len(line)
            yield line

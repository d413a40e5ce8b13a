"""Standard output and error that may fail: a full disk or a closed pipe does not end training."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class LastingStream(io.TextIOBase):
    """A stream that writes until an error occurs, and then discards its input.

    Characters that the stream's encoding does not have are written as escapes.

    Args:
        stream: an open file of the process.
        warn: where to write a warning about the failure.
        name: name of the stream, for the warning.
    """

    def __init__(self, stream: TextIO, warn: TextIO, name: str) -> None:
        self._stream = stream
        self._warn = warn
        self._name = name
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Replace the stream by the null device, so that its buffer can be flushed."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._warn.write(f"warning: {self._name} cannot be written any more, left out: {error}\n")
        self._warn.flush()


def make_output_last() -> None:
    """Make failures of standard output and error harmless."""
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = LastingStream(sys.stderr, io.StringIO(), "the standard error")
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = LastingStream(sys.stdout, sys.stderr, "the standard output")

"""The error type for user-facing messages, and helpers to quote and collect errors."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_LENGTH = 20_000


class UserError(ValueError):
    """Bad input: a flag, a file, a checkpoint, a peer.

    The message is a single line that names the problem, its place and the remedy. Entry points print it without a
    traceback and exit non-zero on every rank.
    """

    def __init__(self, message: str = "") -> None:
        text = " ".join(message.splitlines())  # quoted text may have several lines
        half = _MAX_LENGTH // 2
        super().__init__(text if len(text) <= _MAX_LENGTH else f"{text[:half]} ... {text[-half:]}")


def first_line(error: BaseException) -> str:
    """First non-blank line of an error's text, stripped; the error's type if the text is blank."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip()


def describe_failure(error: BaseException, file: str | None = None) -> str:
    """Type, first line and place of an unexpected error, as in ``ValueError: bad (mine.py, line 12)``.

    Args:
        error: the error.
        file: a user's file. The place is the last line run in it, or where the error was raised if none was.
    """
    name, line = type(error).__name__, first_line(error)
    text = name if line == name else f"{name}: {line}"
    # The place of a failed import is the statement, not importlib.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and Path(frame.filename).parent.name != "importlib"
    ]
    if file is not None:
        path = Path(file).resolve()
        frames = [frame for frame in frames if Path(frame.filename).resolve() == path] or frames
    if not frames or isinstance(error, SyntaxError):  # its text includes the place
        return text
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


class ErrorList:
    """Collects user errors of several settings into a single message."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect the message of a UserError that the block raises."""
        try:
            yield
        except UserError as error:
            self.messages.append(str(error))

    def raise_all(self) -> None:
        """Raise a UserError with every message; do nothing if there is none."""
        messages = list(dict.fromkeys(self.messages))
        if len(messages) == 1:
            raise UserError(messages[0])
        if messages:
            numbered = "; ".join(f"({number}) {message}" for number, message in enumerate(messages, 1))
            raise UserError(f"{len(messages)} settings cannot be used: {numbered}")

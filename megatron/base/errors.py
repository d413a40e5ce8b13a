"""The error type for user-facing messages, and helpers to quote and collect errors."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 20_000


class UserError(ValueError):
    """Bad input: a flag, a file, a checkpoint, a peer.

    The message is a single line that names the problem, its place and the remedy. Entry points print it without a
    traceback and exit non-zero on every rank.
    """

    def __init__(self, message: str = "") -> None:
        text = " ".join(message.splitlines())  # quoted text may have several lines
        super().__init__(text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}")


def first_line(error: BaseException) -> str:
    """First line of an error's text that is not blank, without spaces around it, or its type if there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip()


def describe_failure(error: BaseException, file: str | None = None) -> str:
    """Type, first line and place of an unexpected error, as in ``ValueError: bad (mine.py, line 12)``.

    Args:
        error: the error.
        file: a file of the user's, whose last line that was run is the place, if any was; otherwise the place is where
            the error was raised.
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
    if not frames or isinstance(error, SyntaxError):  # which says its place
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

"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def error_line(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Read standard error, which must hold a single line."""

    def read() -> str:
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return read

"""Fixtures of the download tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.downloads.server import Published, serving


@pytest.fixture
def published() -> Iterator[Published]:
    with serving() as server:
        yield server

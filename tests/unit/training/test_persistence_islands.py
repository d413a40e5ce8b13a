"""Number of checkpoints that an island keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.island_threads import SMALL
from tests.support.tiny import merge, tiny_checkpoints, tiny_engines


@pytest.mark.parametrize(("islands", "keep_last", "expected"), [(1, 1, 1), (2, 1, 2), (2, 3, 3), (2, None, None)])
def test_islands_keep_the_checkpoint_before_the_last(
    tmp_path: Path, islands: int, keep_last: int | None, expected: int | None
) -> None:
    """An island killed during its last save resumes from the checkpoint before, and so must the others."""
    several: dict[str, Any] = {"islands": islands, "island": 0, "islands_address": "127.0.0.1:1"} if islands > 1 else {}
    changes = {
        "checkpoint": {"save": str(tmp_path), "keep_last": keep_last},
        "islands": several,
        "compression": {"compress": ["outer=identity,every=4,warmup=0"]},
    }
    saver = tiny_checkpoints(tiny_engines(merge(SMALL, changes))).saver
    assert saver is not None
    assert saver.keep_last == expected

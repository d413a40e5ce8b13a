"""The diagrams of the documents show what the code does."""

from __future__ import annotations

import itertools
from pathlib import Path

from megatron.compression.points import Point
from tools.draw_diagrams import COLOR, DIAGRAMS, MICRO_BATCHES, REPO, STAGES, main, placed


def test_all_are_drawn_and_kept(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.iterdir()} == set(DIAGRAMS)
    pages = "".join(path.read_text() for path in (REPO / "docs").rglob("*.md"))
    for path in tmp_path.iterdir():
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert (REPO / "docs" / "images" / path.name).is_file()
        assert f"images/{path.name}" in pages


def test_every_compressible_point_is_shown() -> None:
    assert set(COLOR) == {point for point in Point if point.compressible}


def test_the_schedule_is_1f1b() -> None:
    """A stage is at one operation at a time, gradients come after those of the next stage, and the whole takes
    (micro-batches + stages - 1) forwards and backwards."""
    found = placed(STAGES, MICRO_BATCHES)
    assert len(found) == 2 * STAGES * MICRO_BATCHES
    ends = {(one.op.is_forward, one.stage, one.op.micro_batch): one.end for one in found}
    for one in found:
        before = (one.op.is_forward, one.stage - 1 if one.op.is_forward else one.stage + 1, one.op.micro_batch)
        assert one.start >= ends.get(before, 0.0)
    for stage in range(STAGES):
        own = [one for one in found if one.stage == stage]
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
        late = [one.op.micro_batch for one in own if one.late]
        assert late == (list(range(MICRO_BATCHES - STAGES + stage, MICRO_BATCHES)) if stage else [])
    assert max(one.end for one in found) == 3 * (MICRO_BATCHES + STAGES - 1)

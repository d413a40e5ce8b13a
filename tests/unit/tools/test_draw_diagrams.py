"""The diagrams of the documents match the code."""

from __future__ import annotations

import itertools
from pathlib import Path

from megatron.compression.points import Point
from tools.draw_diagrams import COLOR, DIAGRAMS, MICRO_BATCHES, REPO, STAGES, main, placed


def test_all_diagrams_are_current(tmp_path: Path) -> None:
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
    """A stage runs one operation at a time, gradients come after those of the next stage, and the pass takes
    (micro-batches + stages - 1) forwards and backwards."""
    operations = placed(STAGES, MICRO_BATCHES)
    assert len(operations) == 2 * STAGES * MICRO_BATCHES
    ends = {(slot.op.is_forward, slot.stage, slot.op.micro_batch): slot.end for slot in operations}
    for slot in operations:
        before = (slot.op.is_forward, slot.stage - 1 if slot.op.is_forward else slot.stage + 1, slot.op.micro_batch)
        assert slot.start >= ends.get(before, 0.0)
    for stage in range(STAGES):
        stage_operations = [slot for slot in operations if slot.stage == stage]
        assert all(a.end <= b.start for a, b in itertools.pairwise(stage_operations))
        late = [slot.op.micro_batch for slot in stage_operations if slot.late]
        assert late == (list(range(MICRO_BATCHES - STAGES + stage, MICRO_BATCHES)) if stage else [])
    assert max(slot.end for slot in operations) == 3 * (MICRO_BATCHES + STAGES - 1)

"""The diagrams of the documents match the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.base.figures import save_figure
from megatron.compression.points import Point
from tests.support.svg import KINDS, read_rows, read_texts
from tools.draw_diagrams import COLOR, DIAGRAMS, MICRO_BATCHES, REPO, STAGES, draw_bubbles, draw_epilogue, main


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


def test_the_epilogue_is_marked(tmp_path: Path) -> None:
    """A stage's last backward passes are marked, as many as there are stages from it on; the first stage sends none."""
    rows = read_rows(save_figure(draw_epilogue(), tmp_path / "s.svg"))
    passes, marks = [row for row in rows if len(row) == 2 * MICRO_BATCHES], [row for row in rows if len(row) < STAGES]
    assert len(passes) == STAGES
    assert [len(row) for row in marks] == list(range(STAGES - 1, 0, -1))
    for row, marked in zip(passes[1:], marks, strict=True):
        assert all(KINDS[box.color] == "backward" for box in row[-len(marked) :])
        assert [box.left for box in marked] == pytest.approx([box.left for box in row[-len(marked) :]])
        assert [box.right for box in marked] == pytest.approx([box.right for box in row[-len(marked) :]])


def test_the_bubbles_are_those_of_the_papers(tmp_path: Path) -> None:
    """Forward, input gradients and weight gradients take the same time: 3 (p - 1) of it, or a third of that."""
    texts = read_texts(save_figure(draw_bubbles(), tmp_path / "s.svg"))
    busy, ranks = 3 * MICRO_BATCHES, STAGES - 1
    assert f"1f1b: passes {busy + 3 * ranks} ms, bubble {3 * ranks / (busy + 3 * ranks):.1%}" in texts
    assert f"zb-h1: passes {busy + ranks} ms, bubble {ranks / (busy + ranks):.1%}" in texts

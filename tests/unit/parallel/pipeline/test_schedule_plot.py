"""Pictures of pipeline schedules."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.base.errors import UserError
from megatron.base.figures import check_picture, save_figure
from megatron.parallel.pipeline.schedule import Pass, PipelineOp, TimedPass, make_schedule
from megatron.parallel.pipeline.schedule_plot import (
    MAX_PASSES,
    MAX_RANKS,
    Timeline,
    check_size,
    compute_bubble,
    draw_schedule,
    find_span,
    summarize_times,
)
from tests.support.svg import KINDS, read_rows, read_texts

pytest.importorskip("matplotlib")

SECONDS = {Pass.FORWARD: 0.010, Pass.BACKWARD: 0.015, Pass.WEIGHT: 0.005}


def _in_sequence(kind: str, stages: int, chunks: int, count: int) -> list[list[TimedPass]]:
    """A schedule without its dependencies: the passes of each rank with gaps of a millisecond, from 7 s on."""
    rows = []
    for stage in range(stages):
        row, clock = [], 7.0 + 0.002 * stage
        for op in make_schedule(kind, stages, stage, chunks, count):
            row.append(TimedPass(op, clock, clock + SECONDS[op.computation]))
            clock += SECONDS[op.computation] + 0.001
        rows.append(row)
    return rows


def _draw(path: Path, *rows: list[list[TimedPass]], title: str = "a step") -> Path:
    timelines = [Timeline(title, each, [f"stage {stage}" for stage in range(len(each))]) for each in rows]
    return save_figure(draw_schedule(timelines), path)


@pytest.mark.parametrize(("kind", "stages", "count"), [("1f1b", 4, 8), ("zb-h1", 3, 12), ("gpipe", 1, 2)])
def test_every_pass_is_a_numbered_box_at_its_time(kind: str, stages: int, count: int, tmp_path: Path) -> None:
    expected = _in_sequence(kind, stages, 1, count)
    drawn = read_rows(_draw(tmp_path / "s.svg", expected))
    start_s, end_s = find_span(expected)
    left, right = min(row[0].left for row in drawn), max(row[-1].right for row in drawn)
    scale = (right - left) / (end_s - start_s)
    assert len(drawn) == stages
    for boxes, passes in zip(drawn, expected, strict=True):
        for box, timed in zip(boxes, passes, strict=True):
            assert KINDS[box.color] == timed.op.computation.name.lower()
            assert box.text == str(timed.op.micro_batch + 1)
            assert box.left == pytest.approx(left + (timed.start_s - start_s) * scale, abs=0.01)
            assert box.right == pytest.approx(left + (timed.end_s - start_s) * scale, abs=0.01)
        assert all(before.right < after.left for before, after in pairwise(boxes))


def test_chunks_differ_in_shade(tmp_path: Path) -> None:
    rows = _in_sequence("1f1b", 2, 3, 4)
    drawn = read_rows(_draw(tmp_path / "s.svg", rows))
    colors: dict[str, set[PipelineOp]] = {}
    for boxes, passes in zip(drawn, rows, strict=True):
        for box, timed in zip(boxes, passes, strict=True):
            colors.setdefault(box.color, set()).add(PipelineOp(timed.op.computation, timed.op.chunk, 0))
    assert len(colors) == 6
    assert all(len(ops) == 1 for ops in colors.values())
    texts = read_texts(tmp_path / "s.svg")
    assert {"forward, chunk 1", "forward, chunk 3", "backward, chunk 2", "no pass"} <= set(texts)
    assert "weight gradients" not in " ".join(texts)


def test_schedules_below_each_other_share_the_time_axis(tmp_path: Path) -> None:
    short, long = _in_sequence("1f1b", 2, 1, 2), _in_sequence("zb-h1", 2, 1, 8)
    drawn = read_rows(_draw(tmp_path / "s.svg", short, long, title="one\ntwo"))
    assert [len(row) for row in drawn] == [4, 4, 16, 24]
    widths = {round(row[0].right - row[0].left, 3) for row in drawn}
    assert len(widths) == 1
    texts = Counter(read_texts(tmp_path / "s.svg"))
    assert texts["stage 1"] == 2
    assert {"forward", "backward", "weight gradients", "ms"} <= texts.keys()
    assert "two" in " ".join(texts)


def test_narrow_passes_have_a_small_number_or_none(tmp_path: Path) -> None:
    ops = [PipelineOp(Pass.FORWARD, 0, number) for number in range(6)]
    starts = [0.0, 1e-4, 2e-4, 3e-4, 1.0, 9.0]
    row = [TimedPass(op, start, start + 1e-4) for op, start in zip(ops, starts, strict=True)]
    (boxes,) = read_rows(_draw(tmp_path / "s.svg", [row]))
    assert [box.text for box in boxes] == ["", "", "", "", "5", "6"]


def test_a_pass_without_duration_is_drawn(tmp_path: Path) -> None:
    """Clocks have a resolution."""
    row = [
        TimedPass(PipelineOp(Pass.FORWARD, 0, 0), 0.0, 0.0),
        TimedPass(PipelineOp(Pass.BACKWARD, 0, 0), 0.0, 0.5),
    ]
    assert "1" in read_texts(_draw(tmp_path / "s.svg", [row]))


def test_the_bubble_is_the_share_without_passes() -> None:
    ops = [PipelineOp(computation, 0, 0) for computation in (Pass.FORWARD, Pass.BACKWARD)]
    rows = [
        [TimedPass(ops[0], 1.0, 2.0), TimedPass(ops[1], 3.0, 5.0)],
        [TimedPass(ops[0], 2.0, 2.5), TimedPass(ops[1], 2.5, 3.0)],
    ]
    assert find_span(rows) == (1.0, 5.0)
    assert compute_bubble(rows) == pytest.approx(1 - (3 + 1) / (2 * 4))


def test_times_are_rounded() -> None:
    assert summarize_times(0.0123456, 0.2727) == "passes 12.3 ms, bubble 27.3%"
    assert summarize_times(1.2344, 0.5, 2.0) == "step 2,000 ms, passes 1,234 ms, bubble 50.0%"


def test_long_titles_are_wrapped(tmp_path: Path) -> None:
    title = " ".join(["tp 1, pp 2, dp 1"] * 12)
    texts = read_texts(_draw(tmp_path / "s.svg", _in_sequence("1f1b", 2, 1, 4), title=title))
    assert " ".join(title.split()) in " ".join(texts)
    assert max(map(len, texts)) < 110


def test_large_pictures_are_refused() -> None:
    check_size("--draw-schedule", MAX_RANKS, MAX_PASSES)
    for ranks, passes in ((MAX_RANKS + 1, MAX_RANKS + 1), (2, MAX_PASSES + 1)):
        with pytest.raises(UserError, match=r"^--draw-schedule: .* are too many for a picture; draw a step of at most"):
            check_size("--draw-schedule", ranks, passes)


def test_bad_files_are_named_before_drawing(tmp_path: Path) -> None:
    check_picture(tmp_path / "s.svg", "--draw-schedule")
    assert not list(tmp_path.iterdir())
    (tmp_path / "folder.svg").mkdir()
    cases = [
        ("s.gif", "s.gif: not a picture format; use .png"),
        ("none/s.svg", "none/s.svg: there is no folder"),
        ("folder.svg", "folder.svg: is a folder; name a file"),
    ]
    for name, message in cases:
        with pytest.raises(UserError, match=f"^--draw-schedule .*{message}"):
            check_picture(tmp_path / name, "--draw-schedule")

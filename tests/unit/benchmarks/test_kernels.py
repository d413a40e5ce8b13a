"""The kernels' benchmark: what it compares, its tables and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import kernel_cases, kernel_table, tile_cases
from benchmarks.device_clock import Call, Time
from benchmarks.kernel_cases import MESSAGE_RANKS, KernelCase, Runs, float8_cases, message_cases
from benchmarks.kernel_table import OpSummary, Row, draw, kinds_of, summary
from benchmarks.kernels import measure
from benchmarks.row_cases import row_cases

ROWS = [
    Row("quantize", "2.5B", "4 x 4", "2 bits, group", 30.0, 60.0, 0.5, 10.0, 0.0, ""),
    Row("quantize", "8.3B", "8 x 8", "2 bits, group", 36.0, 60.0, 0.6, 20.0, 0.0, ""),
    Row("abs_topk", "8.3B", "8 x 8", "1%", 7.0, 60.0, 0.1, 30.0, 15.0, "torch.topk"),
    Row("finite_norm", "8.3B", "8 x 8", "", 40.0, 60.0, 0.9, 30.0, 0.0, ""),
]


def test_low_rank_messages_and_their_twins_are_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank-8 matrix comes back from the message, and from what plain torch makes of it."""
    monkeypatch.setitem(kernel_cases.MODELS, "tiny", 96)
    torch.manual_seed(0)
    matrix = torch.randn(1024, 8) @ torch.randn(8, 96)
    drawn = kernel_cases.drawn
    monkeypatch.setattr(
        kernel_cases, "drawn", lambda size, device: matrix.clone() if size == (1024, 96) else drawn(size, device)
    )
    cases = list(message_cases("tiny", "cpu", quick=False))
    assert [case.op for case in cases] == ["low-rank compress", "low-rank decompress"] * len(MESSAGE_RANKS)
    compress, decompress = (case.build() for case in cases[:2])
    assert (compress.input_bytes, compress.traffic) == (1024 * 96 * 4, 1024 * 96 * 4 + 8 * (1024 + 96) * 4)
    scale = matrix.abs().max()
    assert compress.rival is not None
    for message in (compress.run().wire, compress.twin(), compress.rival()):
        back = kernel_cases.product(message, matrix.shape, 8)
        assert (back - matrix).abs().max() < 1e-4 * scale
    for back in (decompress.run(), decompress.twin()):
        assert (back - matrix).abs().max() < 1e-4 * scale
    assert len(list(message_cases("tiny", "cpu", quick=True))) == 2


def test_rows_are_combined_and_count_their_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 rows of 64 bf16 numbers and their places and weights in; 1,024 sums out. Back: the sums' gradients and the
    rows in, those of the rows and weights out."""
    monkeypatch.setitem(kernel_cases.MODELS, "tiny", 64)
    combine, back = (case.build() for case in row_cases("tiny", "cpu", dtype=torch.bfloat16))
    rows, sums, places, weights = 2048 * 64 * 2, 1024 * 64 * 2, 2048 * 8, 2048 * 4
    assert (combine.input_bytes, combine.traffic) == (rows, rows + places + weights + sums)
    assert (back.input_bytes, back.traffic) == (rows, 2 * rows + sums + places + 2 * weights)
    for own, twin in zip(back.run(), back.twin(), strict=True):
        torch.testing.assert_close(own, twin, rtol=0.01, atol=1e-4)


class _Clock:
    """Gives the times it was made with, one after another."""

    def __init__(self, *seconds: float, sets: int = 1) -> None:
        self.seconds, self.count, self.asked = list(seconds), sets, list[int]()

    def sets(self, nbytes: int) -> int:
        return self.count

    def time(self, calls: Sequence[Call]) -> Time:
        self.asked.append(len(calls))
        return Time(self.seconds.pop(0), "clock")


def test_what_is_changed_in_place_has_a_limit_of_its_own() -> None:
    """A copy's speed for what is copied, the speed of scaling for the rest."""
    clock = _Clock(2.0, 1.0, 4.0, 8.0, sets=3)
    runs = Runs(lambda: None, lambda: None, 10**9, 3 * 10**3, in_place=10**3)
    row = measure(KernelCase("op", "m", "s", "", lambda: runs), clock, "cpu")
    assert row.of_limit == pytest.approx((2.0 + 1.0) / 4.0)
    assert (row.gbps, row.times_twin) == (0.25, 2.0)
    assert (row.seconds, row.traffic, row.how) == (4.0, 3000, "clock")
    assert clock.asked == [3, 3, 3, 3]  # each over as many sets of inputs as the clock wants


def test_every_operation_counts_its_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, for 8 bits of 64 x 64 numbers: 4 bytes read, 1 written and a scale for each 64, and what moves."""
    monkeypatch.setitem(kernel_cases.MODELS, "tiny", 64)
    n, message = 64 * 64, 64 * 64 + 64 * 4
    counted = {}
    for dtype in (torch.float32, torch.bfloat16):
        for case in kernel_cases.grid_cases("tiny", (64, 64), 8, "cpu", dtype):
            runs = case.build()
            runs.run()
            runs.twin()
            counted[case.op, case.setting] = (runs.input_bytes, runs.traffic, runs.in_place)
    assert counted == {
        ("quantize", "8 bits, group"): (4 * n, 4 * n + message, 0),
        ("dequantize", "8 bits, group"): (4 * n, 4 * n + message, 0),
        ("quantize, delta", "8 bits, group"): (4 * n, 12 * n + message, 8 * n),
        ("quantize, feedback", "8 bits, group"): (4 * n, 12 * n + message, 8 * n),
        ("dequantize, add", "8 bits, group"): (4 * n, 8 * n + message, 8 * n),
        ("quantize", "8 bits bf16, group"): (2 * n, 2 * n + message, 0),
        ("dequantize", "8 bits bf16, group"): (2 * n, 2 * n + message, 0),
        ("quantize, delta", "8 bits bf16, group"): (2 * n, 6 * n + message, 4 * n),
        ("quantize, feedback", "8 bits bf16, group"): (2 * n, 6 * n + message, 4 * n),
    }
    counted.clear()
    for case in float8_cases("tiny", (64, 128), "cpu"):
        runs = case.build()
        runs.run()
        runs.twin()
        counted[case.op, case.setting] = (runs.input_bytes, runs.traffic, runs.in_place)
    m = 64 * 128
    once, twice = (4 * m, 5 * m + 64 * 4, 0), (4 * m, 9 * m + 64 * 4, 8 * m)
    assert counted == {
        **{(op, f"{kind}, tile"): once for op in ("quantize", "dequantize") for kind in ("e4m3", "e5m2")},
        **{("quantize, stochastic", f"{kind}, tile"): once for kind in ("e4m3", "e5m2")},
        **{("dequantize, add", f"{kind}, tile"): twice for kind in ("e4m3", "e5m2")},
        **{(op, "e4m3, row"): once for op in ("quantize", "dequantize")},
        **{(op, "e4m3, tensor"): (4 * m, 5 * m + 4, 0) for op in ("quantize", "dequantize")},
    }
    monkeypatch.setitem(kernel_cases.MODELS, "tiny", 384)
    for case in kernel_cases.gradient_cases("tiny", "cpu", quick=True):
        runs = case.build()
        runs.run()
        runs.twin()
        if runs.rival is not None:
            runs.rival()
    norm, histogram = kernel_cases.norm_cases("tiny", "64 x 64", (64, 64), "cpu")
    assert (norm.build().traffic, histogram.build().traffic) == (4 * n, 4 * n)  # every 4th number is in every sector


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    kinds = kinds_of(ROWS)
    assert kinds[0] == OpSummary("quantize", "2 bits, group", (30.0, 36.0), (0.5, 0.6), (10.0, 20.0), (0.0, 0.0), "")
    text = summary(kinds)
    assert "| quantize | 2 bits, group | 30.0 to 36.0 | 0.50 to 0.60 | 10.0 to 20.0 |  |" in text
    assert "| abs_topk | 1% | 7.0 | 0.10 | 30.0 | 15.0 x torch.topk |" in text


def test_the_picture_shows_every_kind_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(kernel_table, "save_figure", lambda figure, path: figures.append(figure))
    draw(kinds_of(ROWS), tmp_path / "a.png", "title")
    speed, share = figures[0].axes
    names = [label.get_text() for label in speed.get_yticklabels()]
    assert names == [
        "fixed point, a scale for each group", "quantize, 2 bits, group", "Top-K", "abs_topk, 1%", "others",
        "finite_norm",
    ]  # fmt: skip
    assert [list(line.get_xdata()) for line in share.get_lines()[:2]] == [[0.5, 0.6], [pytest.approx(0.55)]]


def test_messages_that_decide_by_tiles_count_their_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, for 1,024 x 8 numbers in 128 tiles: with 3.8 bits, 100 tiles have 4 and 28 have 3."""
    monkeypatch.setitem(tile_cases.MODELS, "tiny", 8)
    counted = {}
    for case in tile_cases.tile_cases("tiny", "cpu", quick=False):
        runs = case.build()
        runs.run()
        runs.twin()
        counted[case.op, case.setting] = (runs.input_bytes, runs.traffic, runs.in_place)
    n = 1024 * 8
    outliers, minmax = n // 2 + 128 * 4 + 16, n // 2 + 128 * 8
    mixed = 100 * 32 + 28 * 24 + 16 + 128 * 4
    assert {key: value for key, value in counted.items() if "2 bits" not in key[1] and "8 bits m" not in key[1]} == {
        ("quantize", "4 bits minmax, group"): (4 * n, 4 * n + minmax, 0),
        ("dequantize", "4 bits minmax, group"): (4 * n, 4 * n + minmax, 0),
        ("quantize", "4 bits outliers, group"): (4 * n, 4 * n + outliers, 0),
        ("dequantize", "4 bits outliers, group"): (4 * n, 4 * n + outliers, 0),
        ("quantize, feedback", "4 bits outliers, group"): (4 * n, 12 * n + outliers, 8 * n),
        ("dequantize, add", "4 bits outliers, group"): (4 * n, 8 * n + outliers, 8 * n),
        ("quantize", "3.8 bits, group"): (4 * n, 8 * n + mixed, 0),
        ("dequantize", "3.8 bits, group"): (4 * n, 4 * n + mixed, 0),
        ("quantize, feedback", "3.8 bits, group"): (4 * n, 20 * n + mixed, 8 * n),
        ("dequantize, add", "3.8 bits, group"): (4 * n, 8 * n + mixed, 8 * n),
    }

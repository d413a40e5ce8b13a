"""The kernels' benchmark: its operations, their traffic, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch

from benchmarks import kernel_cases, quantizer_cases
from benchmarks.device_clock import Call, Time
from benchmarks.kernel_cases import MESSAGE_RANKS, BuiltCase, KernelCase, combine_cases, message_cases
from benchmarks.kernels import KernelRow, measure, summarize
from benchmarks.quantizer_cases import float8_cases, grid_cases, tile_cases

ROWS = [
    KernelRow("quantize", "2.5B", "4 x 4", "2 bits, group", 30.0, 60.0, 0.5, 10.0, 0.0, ""),
    KernelRow("quantize", "8.3B", "8 x 8", "2 bits, group", 36.0, 60.0, 0.6, 20.0, 0.0, ""),
    KernelRow("abs_topk", "8.3B", "8 x 8", "1%", 7.0, 60.0, 0.1, 30.0, 15.0, "torch.topk"),
]
Counts = dict[tuple[str, str], tuple[int, int, int]]


def _counts(cases: Iterable[KernelCase]) -> Counts:
    """Runs operations with their reference implementations; returns their bytes of input, traffic and in place."""
    counts = {}
    for case in cases:
        runs = case.build()
        runs.run()
        runs.reference()
        if runs.rival is not None:
            runs.rival()
        counts[case.op, case.setting] = (runs.input_bytes, runs.traffic, runs.in_place)
    return counts


def test_low_rank_messages_and_their_references_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank-8 matrix comes back from the message, and from that of pure torch."""
    monkeypatch.setitem(kernel_cases.MODELS, "tiny", 96)
    torch.manual_seed(0)
    matrix = torch.randn(1024, 8) @ torch.randn(8, 96)
    draw_normal = kernel_cases.draw_normal
    monkeypatch.setattr(
        kernel_cases,
        "draw_normal",
        lambda size, device: matrix.clone() if size == (1024, 96) else draw_normal(size, device),
    )
    cases = list(message_cases("tiny", "cpu", quick=False))
    assert [case.op for case in cases] == ["low-rank compress", "low-rank decompress"] * len(MESSAGE_RANKS)
    compress, decompress = (case.build() for case in cases[:2])
    assert (compress.input_bytes, compress.traffic) == (1024 * 96 * 4, 1024 * 96 * 4 + 8 * (1024 + 96) * 4)
    scale = matrix.abs().max()
    assert compress.rival is not None
    messages = (compress.run().wire, compress.reference(), compress.rival())
    products = [kernel_cases.product(message, matrix.shape, 8) for message in messages]
    for restored in (*products, decompress.run(), decompress.reference()):
        assert (restored - matrix).abs().max() < 1e-4 * scale
    assert len(list(message_cases("tiny", "cpu", quick=True))) == 2


def test_rows_are_combined_and_count_their_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 rows of 64 bf16 numbers with indices and weights in, 1,024 sums out; backward: the gradients of the sums
    and the rows in, the gradients of the rows and weights out."""
    monkeypatch.setitem(kernel_cases.MODELS, "tiny", 64)
    forward, backward = (case.build() for case in combine_cases("tiny", "cpu", dtype=torch.bfloat16))
    rows, sums, indices, weights = 2048 * 64 * 2, 1024 * 64 * 2, 2048 * 8, 2048 * 4
    assert (forward.input_bytes, forward.traffic) == (rows, rows + indices + weights + sums)
    assert (backward.input_bytes, backward.traffic) == (rows, 2 * rows + sums + indices + 2 * weights)
    for gradient, reference in zip(backward.run(), backward.reference(), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0.01, atol=1e-4)


class ScriptedClock:
    """A clock that returns given times, in order."""

    def __init__(self, *seconds: float, sets: int) -> None:
        self.seconds, self.set_count, self.call_counts = list(seconds), sets, list[int]()

    def sets(self, nbytes: int) -> int:
        return self.set_count

    def time(self, calls: Sequence[Call]) -> Time:
        self.call_counts.append(len(calls))
        return Time(self.seconds.pop(0), "clock")


def test_operations_in_place_have_a_limit_of_their_own() -> None:
    """A copy's speed for copied bytes, the speed of scaling for the others."""
    clock = ScriptedClock(2.0, 1.0, 4.0, 8.0, sets=3)
    runs = BuiltCase(lambda: None, lambda: None, 10**9, 3 * 10**3, in_place=10**3)
    row = measure(KernelCase("op", "m", "s", "", lambda: runs), clock, "cpu")
    assert row.of_limit == pytest.approx((2.0 + 1.0) / 4.0)
    assert (row.gbps, row.times_reference) == (0.25, 2.0)
    assert (row.seconds, row.traffic, row.how) == (4.0, 3000, "clock")
    assert clock.call_counts == [3, 3, 3, 3]


def test_grids_count_their_traffic() -> None:
    """By hand, for 8 bits of 64 x 64 numbers: 4 bytes read, 1 written and a scale for each 64, and bytes in place."""
    n, message = 64 * 64, 64 * 64 + 64 * 4
    counts: Counts = {}
    for dtype in (torch.float32, torch.bfloat16):
        counts |= _counts(grid_cases("tiny", (64, 64), 8, "cpu", dtype))
    assert counts == {
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


def test_8_bit_floats_count_their_traffic() -> None:
    n = 64 * 128
    once, twice = (4 * n, 5 * n + 64 * 4, 0), (4 * n, 9 * n + 64 * 4, 8 * n)
    assert _counts(float8_cases("tiny", (64, 128), "cpu")) == {
        **{(op, f"{form}, tile"): once for op in ("quantize", "dequantize") for form in ("e4m3", "e5m2")},
        **{("quantize, stochastic", f"{form}, tile"): once for form in ("e4m3", "e5m2")},
        **{("dequantize, add", f"{form}, tile"): twice for form in ("e4m3", "e5m2")},
        **{(op, "e4m3, row"): once for op in ("quantize", "dequantize")},
        **{(op, "e4m3, tensor"): (4 * n, 5 * n + 4, 0) for op in ("quantize", "dequantize")},
    }


def test_gradient_cases_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernel_cases.MODELS, "tiny", 384)
    assert _counts(kernel_cases.gradient_cases("tiny", "cpu", quick=True))
    n = 64 * 64
    norm, histogram = kernel_cases.norm_cases("tiny", "64 x 64", (64, 64), "cpu")
    assert (norm.build().traffic, histogram.build().traffic) == (4 * n, 4 * n)  # every 4th number is in every sector


def test_messages_with_options_by_tile_count_their_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, for 1,024 x 8 numbers in 128 tiles: with 3.8 bits, 100 tiles have 4 and 28 have 3."""
    monkeypatch.setitem(quantizer_cases.MODELS, "tiny", 8)
    counts = _counts(tile_cases("tiny", "cpu", quick=False))
    n = 1024 * 8
    outliers, minmax = n // 2 + 128 * 4 + 16, n // 2 + 128 * 8
    mixed = 100 * 32 + 28 * 24 + 16 + 128 * 4
    assert {key: value for key, value in counts.items() if "2 bits" not in key[1] and "8 bits m" not in key[1]} == {
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


def test_the_summary_has_ranges_over_models_and_shapes() -> None:
    text = summarize(ROWS)
    assert "| quantize | 2 bits, group | 30.0 to 36.0 | 0.50 to 0.60 | 10.0 to 20.0 |  |" in text
    assert "| abs_topk | 1% | 7.0 | 0.10 | 30.0 | 15.0 x torch.topk |" in text

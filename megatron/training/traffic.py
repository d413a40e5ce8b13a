"""Traffic of the communication points in a window of iterations, over all ranks, and health of the residuals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.distributed.agreement import gather_texts
from megatron.distributed.group import Group
from megatron.distributed.ledger import gather_rows
from megatron.training.assembly import Engines
from megatron.training.metrics import PointTraffic

_ROWS = ("raw_bytes", "wire_bytes", "coded_s", "waited_s", "inside_bytes")
_REPORTS_BEFORE_WARNING = 3
_AMPLIFIED = 1.1
"""Norm of a residual over that of the compressor's input above which the residual counts as amplified."""
_EXPANDED = 1.01
"""Bytes sent over uncompressed bytes above which a compressor counts as expanding its input."""
_OLD_STEPS = 1000.0
"""Mean age in steps above which a residual counts as never sent."""


def format_comm_line(iteration: int, traffic: Mapping[str, PointTraffic], computed_s: float) -> str:
    """Format the line of ``--log-comm``: seconds of computing, and a field for each point."""
    fields = [f" communication at iteration {iteration:8d} | per iteration | computed {computed_s * 1e3:.1f} ms"]
    for name, point in traffic.items():
        words = [f"{name}: {_bytes(point.wire_bytes)} of {_bytes(point.raw_bytes)} ({point.ratio:.2f}x)"]
        if point.inside_bytes is not None:
            words.append(f"{_bytes(point.inside_bytes)} of it inside nodes")
        words.append(f"coded {point.coded_s * 1e3:.1f} ms, waited {point.waited_s * 1e3:.1f} ms")
        if point.residual is not None:
            words.append(f"residual {point.residual:.3g} of the gradient, {point.staleness:.1f} steps old")
        fields.append(", ".join(words))
    return " | ".join(fields) + " |"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError


class TrafficMeter:
    """Meter of the traffic and the residuals of all ranks. Every rank has one and calls ``collect``.

    Args:
        engines: engines of this rank.
    """

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self._streaks: dict[str, int] = {}
        self._warned: set[str] = set()
        self._windows = 0
        self._sent_before = dict.fromkeys(Point, (0.0, 0.0))

    def collect(self, iterations: int) -> tuple[dict[str, PointTraffic], list[str], float]:
        """Close a window.

        Returns:
            The points with traffic, by name; a warning for each residual that grows without bound and for each
            compressor that expands its input; seconds of computing per iteration, averaged over the ranks. The same on
            every rank.
        """
        topology = self.engines.topology
        accounts = self.engines.ledger.take_totals()
        # This rank's sums of squared norms: gradient, residual, age x residual.
        sums = {point: [0.0, 0.0, 0.0] for point in Point}
        warnings: list[str] = []
        for point, group, residuals in self._residuals_by_group():
            figures = torch.cat([state.health.stacked() for _, state in residuals if state.health is not None], dim=1)
            names = [name for labels, _ in residuals for name in labels]
            for row, value in enumerate(figures[[0, 2, 3]].nan_to_num(nan=math.inf).sum(dim=1).tolist()):
                sums[point][row] += value
            if group is not None:
                pending = group.all_reduce(figures)
                self.engines.ledger.count_message(Point.CONTROL, pending.sent_bytes)
                pending.wait()
            warnings += self._residual_warnings(point, names, figures)
        own_row = [float(accounts.get(p.value, {}).get(row, 0.0)) for row in _ROWS for p in Point]
        own_row += [sums[p][row] for row in range(3) for p in Point]
        own_row.append(self.engines.ledger.take_computed())
        *columns, computed = zip(*gather_rows(topology.control, self.engines.ledger, own_row), strict=True)
        count = len(Point)
        table = [columns[start : start + count] for start in range(0, len(columns), count)]
        traffic = {}
        for at, point in enumerate(Point):
            raw, wire = (sum(table[row][at]) / iterations for row in (0, 1))
            coded, waited = (sum(table[row][at]) / len(table[row][at]) / iterations for row in (2, 3))
            inside = sum(table[4][at]) / iterations
            gradient, residual, aged = (sum(table[row][at]) for row in (5, 6, 7))
            measured = gradient > 0
            before = self._sent_before[point]
            self._sent_before[point] = (before[0] + raw * iterations, before[1] + wire * iterations)
            if wire:
                traffic[point.value] = PointTraffic(
                    raw,
                    wire,
                    coded,
                    waited,
                    math.sqrt(residual / gradient) if measured else None,
                    (aged / residual if residual else 0.0) if measured else None,
                    inside or None,
                )
        # Each compressor that has sent more than its tensors' bytes since the run began is named once.
        self._windows += 1
        for point, spec in self.engines.plan.specs.items():
            raw, wire = self._sent_before[point]
            label = f"{point.value}={spec.name}"
            if label in self._warned or self._windows < _REPORTS_BEFORE_WARNING or wire <= _EXPANDED * raw:
                continue
            self._warned.add(label)
            warnings.append(
                f"--compress {label} sends {wire / raw:.2f} times what {point.value} would send uncompressed; "
                "compress it further, or not at all"
            )
        texts = gather_texts(topology.control.pg, json.dumps(warnings))
        all_warnings = sorted({warning for text in texts for warning in json.loads(text)})
        return traffic, all_warnings, sum(computed) / len(computed) / iterations

    def _residuals_by_group(self) -> Iterator[tuple[Point, Group | None, Sequence[tuple[list[str], CompressorState]]]]:
        """Measured residuals, by the group over which their figures are summed."""
        sync, channel = self.engines.sync, self.engines.channel
        for reducer in sync.reducers:
            reduced = [entry for entry in reducer.residuals() if entry[1].health is not None]
            if reduced:
                yield Point.DP_GRAD, reducer.group, reduced
        for tied in sync.ties:
            if tied.sync.state.health is not None:
                yield Point.EMBED_GRAD, tied.sync.group, [([tied.slot.logical_name], tied.sync.state)]
        for fragment in self.engines.outer.fragments if self.engines.outer is not None else ():
            for labels, state in fragment.reducer.residuals():
                if state.health is not None:
                    yield Point.OUTER, None, [(labels, state)]
        if channel is not None:
            for point, name, state in channel.residuals():
                if state.health is not None:
                    yield point, None, [([name], state)]

    def _residual_warnings(self, point: Point, names: Sequence[str], totals: Tensor) -> list[str]:
        """Warnings, each once, for residuals that are not finite, are amplified, or are never sent."""
        warnings = []
        for name, (gradient, compressor_input, residual, aged) in zip(names, totals.t().tolist(), strict=True):
            label = f"{point.value} {name}"
            age = aged / residual if residual else 0.0
            finite = math.isfinite(residual)
            growing = residual > _AMPLIFIED**2 * compressor_input and residual > gradient
            streak = self._streaks[label] = self._streaks.get(label, 0) + 1 if growing or age > _OLD_STEPS else 0
            if label in self._warned or (finite and streak < _REPORTS_BEFORE_WARNING):
                continue
            self._warned.add(label)
            size = math.sqrt(residual / gradient) if gradient and finite else math.inf
            why = "what it holds is never sent" if age > _OLD_STEPS else "the compressor leaves more than it is given"
            warnings.append(
                f"the residual of {label} grows without bound: {size:.3g} times the gradient, {age:.0f} steps old "
                f"({why if finite else 'it is not finite'}); compress less there, or turn error-feedback off"
            )
        return warnings

"""Search for the compressor that makes a run diverge."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from torch import Tensor

from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.audit import Sample, audit, why_not_sampled
from megatron.compression.identity import IdentityRounds
from megatron.compression.points import Point
from megatron.distributed.agreement import gather_texts
from megatron.distributed.observer import StepSampler
from megatron.training.assembly import Engines

C = TypeVar("C", Codec, RoundCompressor)


class CompressorProbe(StepSampler):
    """Samples of compressed finite numbers, in steps that follow a skipped step.

    Args:
        engines: engines of this rank.
    """

    def __init__(self, engines: Engines) -> None:
        super().__init__(engines.ledger.observers)
        self._plan, self._group = engines.plan, engines.topology.control.pg
        self._samples = 0
        self._faults: dict[Point, Tensor] = {}
        self._faulty_point: Point | None = None

    @property
    def compressed_points(self) -> list[str]:
        """Points with a compressor."""
        return [point.value for point in self._plan.specs if self._plan.is_compressed(point)]

    def find_faulty_spec(self) -> str | None:
        """Find the compressor that turned finite numbers into others on any rank, as POINT=NAME. A collective call."""
        point = self._faulty_point
        spec = "" if point is None else f"{point.value}={self._plan.specs[point].name}"
        return next(filter(None, gather_texts(self._group, spec)), None)

    def audit(self, point: Point, compressor: C) -> C:
        if isinstance(compressor, IdentityRounds) or why_not_sampled(compressor) is not None:
            return compressor
        self._samples += 1  # the next sample is of another part
        # All ranks know that these gradients are finite; a residual that is not is the compressor's fault, too.
        is_final_sum = isinstance(compressor, RoundCompressor) and compressor.finalizes
        knows_input = is_final_sum and point in (Point.DP_GRAD, Point.EMBED_GRAD)
        return audit(compressor, self._samples, partial(self._record, point, knows_input))

    def _record(self, point: Point, knows_input: bool, sample: Sample) -> None:
        fault = ~sample.sent.isfinite().all()
        if not knows_input:
            fault &= sample.intended.isfinite().all()
        self._faults[point] = self._faults.get(point, fault) | fault

    def end_step(self) -> None:
        for point, fault in self._faults.items():
            if self._faulty_point is None and bool(fault):
                self._faulty_point = point
        self._faults = {}

"""Choice of the pipeline schedule by the times of passes and messages in the first steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron.compression.points import Point
from megatron.distributed.observer import Observer, SentMessage
from megatron.parallel.pipeline.list_schedule import AUTO, FIRST, MeasuredPipeline
from megatron.parallel.pipeline.simulate import Hop, Pipeline
from megatron.training.assembly import Engines

_SETTLING_STEPS = 2
"""Steps after the start that are not measured: kernels are loaded, and memory is allocated."""
_MEASURED_STEPS = 3
STEPS = _SETTLING_STEPS + _MEASURED_STEPS
"""Steps before the choice, if no compressor of pipeline messages has a warm-up."""
_PROBES = 3
_SMALL_BYTES = 64
_PROBE_TAG = 1 << 21
"""Tag of the messages that measure a link, distinct from all others."""
_POINTS = (Point.PP_FWD, Point.PP_BWD)
_PASSES = ("forward", "backward", "weight")
_BYTES_FORWARD, _BYTES_BACKWARD, _LATENCY, _ROUND_TRIP, _COLUMNS = 7, 8, 9, 10, 11
"""Columns of the measured rows; see ``_pipeline``."""


class ScheduleChoice(Observer):
    """Measurement of a run's first steps, and choice of its pipeline schedule, the same on all ranks.

    The order of the passes changes no result: on every stage, micro-batches pass in their order, and each weight takes
    its gradients from one kind of pass (``check_layout`` refuses other models). So a resumed run may measure other
    times and choose another schedule.

    Args:
        engines: this rank's engines.
        settling_steps, measured_steps: number of steps before those that are measured, and of these.

    Steps are measured after the warm-ups of the compressors of pipeline messages.
    """

    def __init__(
        self, engines: Engines, settling_steps: int = _SETTLING_STEPS, measured_steps: int = _MEASURED_STEPS
    ) -> None:
        self._engines, self._measured_steps = engines, measured_steps
        self._steps_left = settling_steps + measured_steps
        self._measures = False
        self._seconds: dict[str, list[float]] = {name: [] for name in _PASSES}
        self._coding: dict[tuple[str, str], list[float]] = {
            (name, point.value): [] for name in ("encode", "decode") for point in _POINTS
        }
        self._bytes: dict[Point, list[int]] = {point: [] for point in _POINTS}
        engines.ledger.observers.append(self)

    @staticmethod
    def is_needed(engines: Engines) -> bool:
        """Whether the run leaves the schedule to this choice."""
        return engines.channel is not None and engines.config.parallel.pipeline_schedule == AUTO

    @property
    def is_due(self) -> bool:
        """Whether all steps are measured; the same on all ranks."""
        return self._steps_left == 0

    def begin_step(self, iteration: int) -> None:
        plan = self._engines.plan
        is_steady = iteration >= 0 and all(plan.activation(point).is_active(iteration) for point in _POINTS)
        self._measures = is_steady and self._steps_left <= self._measured_steps
        self._steps_left -= is_steady

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        if not self._measures:
            return nullcontext()
        if name in _PASSES:
            return self._timed(self._seconds[name])
        seconds = self._coding.get((name, args.get("point", "")))
        return nullcontext() if seconds is None else self._timed(seconds)

    @contextmanager
    def _timed(self, seconds: list[float]) -> Iterator[None]:
        clock = self._engines.ledger.clock
        start = clock.mark()
        yield
        clock.between(start, clock.mark(), seconds.append)

    def on_send(self, sent: SentMessage) -> None:
        if self._measures:
            self._bytes[sent.point].append(sent.payload.nbytes)

    def decide(self, micro_batches: int) -> str:
        """Choose the schedule of the next steps. A collective call.

        Args:
            micro_batches: number of micro-batches in a step, for the report.

        Returns:
            A report of what was measured and chosen.
        """
        engines, topology = self._engines, self._engines.topology
        engines.ledger.observers.remove(self)
        engines.ledger.clock.synchronize()
        stage, stages = topology.coordinates.pp, topology.layout.pp
        rows = torch.zeros(stages, _COLUMNS, dtype=torch.float64)
        passes_s = [_median(self._seconds[name]) for name in _PASSES]
        coding_s = [_median(seconds) for seconds in self._coding.values()]
        nbytes = [float(_median(self._bytes[point])) for point in _POINTS]
        rows[stage, :_LATENCY] = torch.tensor([*passes_s, *coding_s, *nbytes])
        rows = self._max_over_ranks(rows)
        sizes = [(int(rows[b, _BYTES_FORWARD]), int(rows[b + 1, _BYTES_BACKWARD])) for b in range(stages - 1)]
        for parity in (0, 1):
            for boundary in range(parity, stages - 1, 2):
                if boundary in (stage, stage - 1):
                    small_s = self._round_trip(boundary, (_SMALL_BYTES, _SMALL_BYTES))
                    rows[boundary, _LATENCY] = small_s / 2
                    rows[boundary, _ROUND_TRIP] = max(self._round_trip(boundary, sizes[boundary]) - small_s, 0.0)
            rows = self._max_over_ranks(rows)
        measured = MeasuredPipeline(
            replace(_pipeline(rows), max_in_flight=engines.config.parallel.pipeline_max_in_flight)
        )
        engines.pipeline.measured = measured
        candidates = measured.candidates(micro_batches)
        for observer in engines.ledger.observers:
            observer.on_schedule(str(candidates[0]))
        fixed = [f"{candidate} {candidate.seconds:.3g} s" for candidate in candidates[1:] if candidate.kind != AUTO]
        slowest_s = [
            f"{name} {seconds:.3g} s" for name, seconds in zip(_PASSES, rows[:, :3].amax(0).tolist(), strict=True)
        ]
        return (
            f"pipeline schedule: {candidates[0]}; predicted {candidates[0].seconds:.3g} s for the passes of a step "
            f"({', '.join(fixed)}); measured on the slowest stage {', '.join(slowest_s)}, and on the slowest link "
            f"{float(rows[:, _ROUND_TRIP].max()):.3g} s there and back"
        )

    def _max_over_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """Maximum over all ranks."""
        topology = self._engines.topology
        rows = rows.to(topology.device)
        self._engines.ledger.complete(Point.CONTROL, topology.world.all_reduce(rows, dist.ReduceOp.MAX))
        return rows.cpu()

    def _round_trip(self, boundary: int, sizes: tuple[int, int]) -> float:
        """Seconds of a message over a boundary and its answer, as measured by the sender; 0 on the other rank."""
        engines, seconds = self._engines, []
        channel, ledger = engines.channel, engines.ledger
        assert channel is not None
        first = engines.topology.coordinates.pp == boundary
        message, answer = (torch.zeros(size, dtype=torch.uint8, device=channel.device) for size in sizes)
        forward, backward = channel.forward.group, channel.backward.group
        transfers = (
            ((forward.send, message, boundary + 1), (backward.recv, answer, boundary + 1))
            if first
            else ((forward.recv, message, boundary), (backward.send, answer, boundary))
        )
        for _ in range(_PROBES):
            start = time.perf_counter()
            for transfer, x, peer in transfers:
                ledger.complete(Point.CONTROL, transfer(x, peer, _PROBE_TAG))
            ledger.clock.synchronize()
            seconds.append(time.perf_counter() - start)
        return _median(seconds) if first else 0.0


def _median(values: list[float] | list[int]) -> float:
    return statistics.median(values) if values else 0.0


def _pipeline(rows: torch.Tensor) -> Pipeline:
    """Times of a pipeline from a row of each stage.

    The columns: seconds of forward, backward and weight pass; of encoding a message forward and backward, and of
    decoding it; bytes of a message to the next and to the previous stage; latency of the link to the next stage, and
    seconds of a message and its answer over it.
    """
    forward_s, backward_s, weight_s, *coding_s = rows[:, :_BYTES_FORWARD].t().tolist()
    encode_forward_s, encode_backward_s, decode_forward_s, decode_backward_s = coding_s
    hops: dict[tuple[bool, int], Hop] = {}
    for boundary in range(len(rows) - 1):
        bytes_forward = float(rows[boundary, _BYTES_FORWARD])
        bytes_backward = float(rows[boundary + 1, _BYTES_BACKWARD])
        latency_s = float(rows[boundary, _LATENCY])
        s_per_byte = float(rows[boundary, _ROUND_TRIP]) / max(bytes_forward + bytes_backward, 1.0)
        send_forward_s, send_backward_s = bytes_forward * s_per_byte, bytes_backward * s_per_byte
        encode_s, decode_s = encode_forward_s[boundary], decode_forward_s[boundary + 1]
        hops[True, boundary] = Hop(encode_s, send_forward_s, latency_s, decode_s)
        encode_s, decode_s = encode_backward_s[boundary + 1], decode_backward_s[boundary]
        hops[False, boundary] = Hop(encode_s, send_backward_s, latency_s, decode_s)
    joint_s = [inputs + weights for inputs, weights in zip(backward_s, weight_s, strict=True)]
    return Pipeline(
        FIRST, forward_s, joint_s, weight_s, len(rows), lambda forward, boundary, _: hops[forward, boundary]
    )

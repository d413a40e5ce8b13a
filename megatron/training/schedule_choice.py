"""Choice of the pipeline schedule by the times of passes and messages in the first steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.compression.points import Point
from megatron.distributed.agreement import gather_texts
from megatron.distributed.clock import Mark
from megatron.distributed.observer import Observer, SentMessage
from megatron.parallel.pipeline.list_schedule import AUTO, FIRST, MeasuredPipeline
from megatron.parallel.pipeline.schedule import ScheduleLimits
from megatron.parallel.pipeline.simulate import Hop, Pipeline
from megatron.training.assembly import Engines

_SETTLING_STEPS = 2
"""Steps after the start that are not measured: kernels are loaded, and memory is allocated."""
_MEASURED_STEPS = 3
_TRIAL_ROUNDS, _TRIAL_STEPS = 3, 2
"""Number of rounds in which two schedules are timed in turn, and steps of a turn, of which the last is timed."""
STEPS = _SETTLING_STEPS + _MEASURED_STEPS + 2 * _TRIAL_ROUNDS * _TRIAL_STEPS
"""Maximum number of steps before the choice, if no compressor of pipeline messages has a warm-up."""
_PROBES = 3
_SMALL_BYTES = 64
_PROBE_TAG = 1 << 21
"""Tag of the messages that measure a link, distinct from all others."""
_POINTS = (Point.PP_FWD, Point.PP_BWD)
_PASSES = ("forward", "backward", "weight")
_FORWARD_MESSAGE, _BACKWARD_MESSAGE, _LATENCY, COLUMNS = 7, 8, 9, 10
"""Columns of ``StageTimes``, and their number."""

MAX_SECONDS = 1e6
"""Largest time of a stage."""

StageTimes = Sequence[Sequence[float]]
"""A row of times of each stage of a pipeline with a chunk on each, in seconds.

The columns: forward pass, backward pass with its weight pass, and weight pass; encoding a message to the next stage,
and one to the previous stage; decoding a message from the previous stage, and one from the next stage; transfer of a
message to the next stage, and of one to the previous stage; latency of the link to the next stage.
"""


class ScheduleChoice(Observer):
    """Measurement of a run's first steps, and choice of its pipeline schedule, the same on all ranks.

    The order of the passes changes no result: on every stage, micro-batches pass in their order, and each weight takes
    its gradients from one kind of pass (``check_layout`` refuses other models). A resumed run keeps the choice, or
    measures again where it would not hold (``saved_schedule``).

    If a list is predicted to be fastest, steps are timed with it and with the fastest fixed schedule, in turn, and the
    faster of the two is kept: a list fits the measured times, so it gains less, or loses, where these do not hold. Only
    steps of the same size are compared: when the size changes, the rounds start over, or end if a fixed schedule is now
    predicted to be fastest.

    Args:
        engines: this rank's engines.
        settling_steps, measured_steps: number of steps before those that are measured, and of these.
        trial_rounds: number of rounds in which the two are timed; 0 to take the fastest by prediction.

    Steps are measured after the warm-ups of the compressors of pipeline messages.
    """

    def __init__(
        self,
        engines: Engines,
        settling_steps: int = _SETTLING_STEPS,
        measured_steps: int = _MEASURED_STEPS,
        trial_rounds: int = _TRIAL_ROUNDS,
    ) -> None:
        self._engines, self._measured_steps, self._trial_rounds = engines, measured_steps, trial_rounds
        self._steps_left = settling_steps + measured_steps
        self._measures = self._is_done = False
        self._trials: list[tuple[MeasuredPipeline, list[float]]] = []  # schedules, and seconds of steps with each
        self._turn = 0
        self._size = (0, 0)
        self._step_start: Mark | None = None
        self._seconds: dict[str, list[float]] = {name: [] for name in _PASSES}
        self._coding: dict[tuple[str, str], list[float]] = {
            (name, point.value): [] for name in ("encode", "decode") for point in _POINTS
        }
        self._bytes: dict[Point, list[int]] = {point: [] for point in _POINTS}
        engines.ledger.observers.append(self)

    @staticmethod
    def is_needed(engines: Engines) -> bool:
        """Whether the run leaves the schedule to this choice, and has none from its checkpoint."""
        is_auto = engines.channel is not None and engines.config.parallel.pipeline_schedule == AUTO
        return is_auto and engines.pipeline.measured is None

    @property
    def is_due(self) -> bool:
        """Whether the steps before the next decision are done; the same on all ranks. Never after the last decision."""
        return self._steps_left == 0 and not self._is_done

    def begin_step(self, iteration: int) -> None:
        plan = self._engines.plan
        is_steady = iteration >= 0 and all(plan.activation(point).is_active(iteration) for point in _POINTS)
        self._measures = is_steady and not self._trials and self._steps_left <= self._measured_steps
        self._steps_left -= is_steady
        if self._trials and is_steady and self._steps_left == 0:
            self._step_start = self._engines.ledger.clock.mark()

    def end_step(self) -> None:
        if self._step_start is not None:
            clock = self._engines.ledger.clock
            clock.between(self._step_start, clock.mark(), self._trials[self._turn % 2][1].append)
            self._step_start = None

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

    def decide(self, micro_batches: int, length: int, log: Callable[[str], None]) -> None:
        """Choose the schedule of the next steps, or begin to time one. A collective call, when it ``is_due``.

        Args:
            micro_batches: number of micro-batches in the last step.
            length: tokens of each of its samples.
            log: prints lines on what was measured and chosen.

        Raises:
            UserError: on every rank, when ranks order the passes differently.
        """
        self._engines.ledger.clock.synchronize()
        if not self._trials:
            measured, report = self._measure(micro_batches)
            log(report)
            if not self._trial_rounds or measured.candidates(micro_batches)[0].kind != AUTO:
                self._finish(measured, micro_batches)
                return
            self._trials = [(measured, []), (MeasuredPipeline(measured.pipeline, with_lists=False), [])]
        elif self._size != (micro_batches, length):
            measured = self._trials[0][0]
            if measured.candidates(micro_batches)[0].kind != AUTO:
                self._finish(measured, micro_batches)
                return
            self._turn = 0
            for _, seconds in self._trials:
                seconds.clear()
        else:
            self._turn += 1
        self._size = micro_batches, length
        if self._turn < 2 * self._trial_rounds:
            use_schedule(self._engines, self._trials[self._turn % 2][0], micro_batches)
            self._steps_left = _TRIAL_STEPS
            return
        step_s = torch.tensor([[_median(seconds) for _, seconds in self._trials]], dtype=torch.float64)
        list_s, fixed_s = self._max_over_ranks(step_s)[0].tolist()
        (measured, _), (fixed, _) = self._trials
        fixed_name, keeps_list = str(fixed.candidates(micro_batches)[0]), list_s <= fixed_s
        log(
            f"pipeline schedule: steps take {list_s:.3g} s with the list, {fixed_s:.3g} s with {fixed_name}; "
            f"{'the list' if keeps_list else fixed_name} stays"
        )
        self._finish(measured if keeps_list else fixed, micro_batches)

    def _finish(self, schedule: MeasuredPipeline, micro_batches: int) -> None:
        """Run all further steps with a schedule."""
        schedule.is_final = True
        use_schedule(self._engines, schedule, micro_batches)
        self._engines.ledger.observers.remove(self)
        self._is_done = True

    def _measure(self, micro_batches: int) -> tuple[MeasuredPipeline, str]:
        """Measure the links, and return the pipeline with all measured times, and a report."""
        engines, topology = self._engines, self._engines.topology
        stage, stages = topology.coordinates.pp, topology.layout.pp
        rows = torch.zeros(stages, COLUMNS, dtype=torch.float64)
        forward_s, backward_s, weight_s = [_median(self._seconds[name]) for name in _PASSES]
        coding_s = [_median(seconds) for seconds in self._coding.values()]
        nbytes = [float(_median(self._bytes[point])) for point in _POINTS]
        measured_row = [forward_s, backward_s + weight_s, weight_s, *coding_s, *nbytes]
        rows[stage, :_LATENCY] = torch.tensor(measured_row, dtype=torch.float64)
        rows = self._max_over_ranks(rows)
        sizes = [(int(rows[b, _FORWARD_MESSAGE]), int(rows[b + 1, _BACKWARD_MESSAGE])) for b in range(stages - 1)]
        round_trips_s = torch.zeros(stages - 1, dtype=torch.float64)
        for parity in (0, 1):
            for boundary in range(parity, stages - 1, 2):
                if boundary in (stage, stage - 1):
                    small_s = self._round_trip(boundary, (_SMALL_BYTES, _SMALL_BYTES))
                    rows[boundary, _LATENCY] = small_s / 2
                    round_trips_s[boundary] = max(self._round_trip(boundary, sizes[boundary]) - small_s, 0.0)
            rows, round_trips_s = self._max_over_ranks(rows), self._max_over_ranks(round_trips_s)
        _divide_round_trips(rows, round_trips_s)
        measured = MeasuredPipeline(make_pipeline(rows.tolist(), engines.pipeline.limits))
        passes_s = torch.stack([rows[:, 0], rows[:, 1] - rows[:, 2], rows[:, 2]]).amax(1)
        slowest_s = [f"{name} {seconds:.3g} s" for name, seconds in zip(_PASSES, passes_s.tolist(), strict=True)]
        return measured, (
            f"pipeline schedule: {describe_candidates(measured, micro_batches)}; measured on the slowest stage "
            f"{', '.join(slowest_s)}, and on the slowest link {float(round_trips_s.max()):.3g} s there and back"
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


def describe_candidates(measured: MeasuredPipeline, micro_batches: int) -> str:
    """Describe the fastest schedule of a step, and the predicted times of the fixed ones."""
    fastest, *others = measured.candidates(micro_batches)
    fixed = [f"{candidate} {candidate.seconds:.3g} s" for candidate in others if candidate.kind != AUTO]
    return f"{fastest}; predicted {fastest.seconds:.3g} s for the passes of a step ({', '.join(fixed)})"


def use_schedule(engines: Engines, schedule: MeasuredPipeline, micro_batches: int, expected_digest: str = "") -> bool:
    """Run the next steps with the fastest schedule of a measured pipeline. A collective call.

    Args:
        engines: this rank's engines.
        schedule: the measured pipeline.
        micro_batches: number of micro-batches, for which the ranks compare their order of the passes.
        expected_digest: hash of the order on all ranks; empty if it is not known.

    Returns:
        Whether the order has the expected hash; otherwise the steps have the first schedule again.

    Raises:
        UserError: on every rank, when ranks order the passes differently.
    """
    engines.pipeline.measured = schedule
    digests = gather_texts(engines.topology.control.pg, engines.pipeline.get_timetable(AUTO, micro_batches).digest)
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise UserError(
            f"--pipeline-schedule auto: rank {differing[0]} orders the passes of {micro_batches} micro-batches "
            "differently from rank 0; install the same versions on all nodes, or name a schedule"
        )
    if expected_digest not in ("", digests[0]):
        engines.pipeline.measured = None
        return False
    for observer in engines.ledger.observers:
        observer.on_schedule(str(schedule.candidates(micro_batches)[0]))
    return True


def _median(values: list[float] | list[int]) -> float:
    return statistics.median(values) if values else 0.0


def _divide_round_trips(rows: torch.Tensor, round_trips_s: torch.Tensor) -> None:
    """Replace the bytes of messages by the seconds of their transfers: shares of those there and back."""
    for boundary, round_trip_s in enumerate(round_trips_s):
        forward, backward = (boundary, _FORWARD_MESSAGE), (boundary + 1, _BACKWARD_MESSAGE)
        s_per_byte = round_trip_s / max(float(rows[forward] + rows[backward]), 1.0)
        rows[forward] *= s_per_byte
        rows[backward] *= s_per_byte


def make_pipeline(rows: StageTimes, limits: ScheduleLimits) -> Pipeline:
    """Make a pipeline from the times of its stages, with limits on what a stage stores."""
    hops: dict[tuple[bool, int], Hop] = {}
    for boundary, (row, next_row) in enumerate(pairwise(rows)):
        latency_s = row[_LATENCY]
        hops[True, boundary] = Hop(row[3], row[_FORWARD_MESSAGE], latency_s, next_row[5])
        hops[False, boundary] = Hop(next_row[4], next_row[_BACKWARD_MESSAGE], latency_s, row[6])
    forward_s, backward_s, weight_s = ([row[column] for row in rows] for column in range(3))
    return Pipeline(
        FIRST, forward_s, backward_s, weight_s, len(rows), lambda forward, boundary, _: hops[forward, boundary],
        limits,
    )  # fmt: skip


def list_times(pipeline: Pipeline) -> list[list[float]]:
    """List the times of a pipeline, the ``StageTimes`` of ``make_pipeline``."""
    rows = []
    for stage in range(pipeline.stages):
        before, after = (
            [pipeline.hops(forward, boundary, False) for forward in (True, False)]
            if 0 <= boundary < pipeline.stages - 1
            else [Hop(), Hop()]
            for boundary in (stage - 1, stage)
        )
        rows.append(
            [
                pipeline.forward_s[stage], pipeline.backward_s[stage], pipeline.weight_s[stage],
                after[0].encode_s, before[1].encode_s, before[0].decode_s, after[1].decode_s,
                after[0].transfer_s, before[1].transfer_s, after[0].latency_s,
            ]
        )  # fmt: skip
    return rows

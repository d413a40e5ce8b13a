"""Pipeline schedules as data: the list of passes of each rank, in order."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from megatron.config.parallel import ParallelConfig
from megatron.distributed.layout import Layout


class Pass(enum.Enum):
    """Kind of computation of an operation."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    """Gradients of the inputs; also those of the weights, if the schedule has no weight pass for the micro-batch."""
    WEIGHT = enum.auto()
    """Gradients of the weights, after the backward of the same chunk and micro-batch. Sends nothing."""


@dataclass(frozen=True)
class PipelineOp:
    """A pass of a micro-batch through a chunk."""

    computation: Pass
    chunk: int
    micro_batch: int

    @property
    def is_forward(self) -> bool:
        return self.computation is Pass.FORWARD

    @property
    def is_backward(self) -> bool:
        return self.computation is Pass.BACKWARD


@dataclass(frozen=True)
class TimedPass:
    """A pass that ran, or would run, from ``start_s`` to ``end_s`` on the clock of its pipeline."""

    op: PipelineOp
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class ScheduleLimits:
    """Limits on what a stage stores.

    Args:
        in_flight: maximum number of micro-batches that a stage of eager-1f1b or auto stores; None for 2 pp - 1.
        weight_records: maximum number of backward passes of a stage whose weight gradients are still to be computed;
            None for as many as the schedule takes.
    """

    in_flight: int | None = None
    weight_records: int | None = None

    @staticmethod
    def from_config(parallel: ParallelConfig) -> ScheduleLimits:
        """Limits of a configuration."""
        return ScheduleLimits(parallel.pipeline_max_in_flight, parallel.pipeline_max_weight_records)


NO_LIMITS = ScheduleLimits()


def make_forward_schedule(chunks: int, pp: int, num_micro_batches: int) -> list[PipelineOp]:
    """Schedule of an evaluation: groups of at most ``pp`` micro-batches run through one chunk after another."""
    groups = [range(m, min(m + pp, num_micro_batches)) for m in range(0, num_micro_batches, pp)]
    return [PipelineOp(Pass.FORWARD, c, m) for group in groups for c in range(chunks) for m in group]


def gpipe(num_micro_batches: int) -> list[PipelineOp]:
    """All forward passes, then all backward passes (Huang et al. 2019)."""
    order = range(num_micro_batches)
    return [PipelineOp(Pass.FORWARD, 0, m) for m in order] + [PipelineOp(Pass.BACKWARD, 0, m) for m in order]


def one_f_one_b(warm_up: int, num_micro_batches: int) -> list[PipelineOp]:
    """1F1B: warm-up forwards, then alternating forwards and backwards, then the remaining backwards.

    A stage stores at most one activation more than it has warm-up forwards.
    """
    return _alternate(
        warm_up=min(num_micro_batches, warm_up),
        forwards=[PipelineOp(Pass.FORWARD, 0, m) for m in range(num_micro_batches)],
        backwards=[PipelineOp(Pass.BACKWARD, 0, m) for m in range(num_micro_batches)],
    )


def most_in_flight(kind: str, pp: int, requested: int | None) -> int:
    """Maximum number of micro-batches that a stage stores: pp with 1f1b; with eager-1f1b and auto as requested, or
    2 pp - 1."""
    return pp if kind == "1f1b" else requested or 2 * pp - 1


def count_warm_up(pp: int, stage: int, in_flight: int) -> int:
    """Count the warm-up forwards of a stage of 1F1B.

    The first stage stores at most ``in_flight`` activations, later stages evenly fewer, and the last stage one. With pp
    of them this is PipeDream-Flush (Narayanan et al. 2021, section 2.2.1). With 2 pp - 1, eager 1F1B, each message has
    the time of a micro-batch to arrive over a slow link (Zhuang et al. 2023, On Optimizing the Communication of Model
    Parallelism, section 4); with more activations, it has more time.
    """
    return math.ceil((in_flight - 1) * (pp - stage - 1) / max(pp - 1, 1))


def warm_ups_without_flush(kind: str, pp: int, num_micro_batches: int, limits: ScheduleLimits = NO_LIMITS) -> list[int]:
    """Count the warm-up forwards of every stage of 1f1b or eager-1f1b whose steps overlap.

    At most one micro-batch of the next step is in flight before the first backward of a step. If steps are that short,
    all stages store fewer activations, since a stage with no more of them than the next stage waits for each message.
    """
    in_flight = min(most_in_flight(kind, pp, limits.in_flight), num_micro_batches + 1)
    return [count_warm_up(pp, stage, in_flight) for stage in range(pp)]


def add_weight_passes(ops: Sequence[PipelineOp], stage: int) -> list[PipelineOp]:
    """Add a weight pass after each backward pass, so that the previous stage receives its message earlier.

    On slow links, a message and its answer must arrive within the time of the micro-batches between them. The first
    stage sends no such message and has no weight passes.
    """
    added = []
    for op in ops:
        added.append(op)
        if op.is_backward and stage > 0:
            added.append(PipelineOp(Pass.WEIGHT, op.chunk, op.micro_batch))
    return added


def zero_bubble_h1(pp: int, stage: int, num_micro_batches: int, max_records: int | None = None) -> list[PipelineOp]:
    """1F1B whose weight gradients fill the gaps in which a stage waits for the next stage's backward.

    Qi et al. 2024 (Zero Bubble Pipeline Parallelism), section 2.3, schedule H1. The weight pass of a micro-batch comes
    ``stage`` backward passes after its own, so that on every stage at most pp micro-batches are between their forward
    and their weight pass, as on the first stage of 1F1B. It comes earlier if more than ``max_records`` backward passes
    would wait for theirs. No stage waits for the first, which has no weight passes.
    """
    joint_ops = one_f_one_b(count_warm_up(pp, stage, in_flight=pp), num_micro_batches)
    if stage == 0:
        return joint_ops
    ops, delay = [], stage if max_records is None else min(stage, max_records - 1)
    for op in joint_ops:
        ops.append(op)
        if op.is_backward and op.micro_batch >= delay:
            ops.append(PipelineOp(Pass.WEIGHT, 0, op.micro_batch - delay))
    return ops + [PipelineOp(Pass.WEIGHT, 0, m) for m in range(max(num_micro_batches - delay, 0), num_micro_batches)]


ZERO_BUBBLE_V = "zb-v"
"""Name of the schedule of ``zero_bubble_v``, whose stages are placed in V form (``Layout.v_shaped``)."""
_V_URGENCY = (
    (Pass.BACKWARD, 0),
    (Pass.FORWARD, 1),
    (Pass.BACKWARD, 1),
    (Pass.FORWARD, 0),
    (Pass.WEIGHT, 1),
    (Pass.WEIGHT, 0),
)
"""Passes of a rank with two chunks, the most urgent first: (computation, chunk)."""
_FRESH_UNITS = 3
"""Units of time for which an input of ``zero_bubble_v`` counts as fresh: half of a micro-batch's passes on a rank.

An input that is used as soon as it was sent must not arrive late. With 0, each late message delays all later passes;
with 3, every cycle of passes and messages has slack."""


@lru_cache(maxsize=16)
def zero_bubble_v(
    pp: int, num_micro_batches: int, max_records: int | None = None
) -> tuple[tuple[PipelineOp, ...], ...]:
    """Two chunks on each rank in V form, whose weight gradients leave no gaps between the passes of a steady state.

    Qi et al. 2024 (Pipeline Parallelism with Controllable Memory), schedule V-ZB. These are the operations that ranks
    choose if each pass of a chunk takes a unit of time, and messages take none. In each unit, every rank takes the most
    urgent pass (``_V_URGENCY``) that has its input: the passes of the older micro-batches first, and weight passes in
    the gaps. A pass whose input another rank has sent less than ``_FRESH_UNITS`` before is less urgent than the others,
    but more urgent than weight passes, except on a pair of ranks, which have little else to do. So passes begin as
    early as they can, and in the steady state messages still have time to arrive.

    A rank holds at most 2 pp chunks' activations between their forward and their weight pass, as many layers' as the
    first stage of 1F1B holds of pp micro-batches. A first chunk never takes the last of these places, so that there is
    always room for the second forward of the oldest micro-batch, and no rank waits forever. At most ``max_records``
    backward passes of both chunks wait for their weight passes.

    Returns:
        The operations of every rank.
    """
    layout = Layout(pp=pp, chunks=2, v_shaped=True)
    last = layout.num_virtual_stages - 1
    # Times at which each virtual stage has completed its micro-batches, by kind of pass.
    ends: dict[Pass, list[list[int]]] = {computation: [[] for _ in range(last + 1)] for computation in Pass}
    schedules: list[list[PipelineOp]] = [[] for _ in range(pp)]

    def find_input(computation: Pass, stage: int) -> int | None:
        """Find the time from which the next pass of a virtual stage has its input; None if it has none yet."""
        if computation is Pass.WEIGHT:
            inputs = ends[Pass.BACKWARD][stage]
        elif computation is Pass.FORWARD:
            inputs = ends[Pass.FORWARD][stage - 1] if stage > 0 else [0] * num_micro_batches
        else:
            inputs = ends[Pass.BACKWARD][stage + 1] if stage < last else ends[Pass.FORWARD][stage]
        number = len(ends[computation][stage])
        return inputs[number] if number < len(inputs) else None

    def choose(rank: int, unit: int) -> tuple[Pass, int] | None:
        """Choose a rank's most urgent pass (computation, chunk) in a unit of time; None if none has its input."""
        stages = layout.virtual_stages(rank)
        in_flight, records = (
            sum(len(ends[computation][stage]) - len(ends[Pass.WEIGHT][stage]) for stage in stages)
            for computation in (Pass.FORWARD, Pass.BACKWARD)
        )
        possible: list[tuple[bool, bool, tuple[Pass, int]]] = []
        for computation, chunk in _V_URGENCY:
            stage, is_weight = stages[chunk], computation is Pass.WEIGHT
            ready = find_input(computation, stage)
            if ready is None or (computation is Pass.FORWARD and in_flight >= 2 * pp - (chunk == 0)):
                continue
            if computation is Pass.BACKWARD and max_records is not None and records >= max_records:
                continue
            boundary = stage - (computation is Pass.FORWARD)
            is_message = not is_weight and 0 <= boundary < last and layout.crosses(boundary)
            is_fresh = is_message and unit - ready < _FRESH_UNITS
            possible.append((is_weight and pp > 2, is_fresh, (computation, chunk)))
        return min(possible, key=lambda option: option[:2], default=(False, False, None))[2]

    for unit in count():
        chosen = [choose(rank, unit) for rank in range(pp)]
        for rank, choice in enumerate(chosen):
            if choice is not None:
                computation, chunk = choice
                completed = ends[computation][layout.virtual_stage(rank, chunk)]
                schedules[rank].append(PipelineOp(computation, chunk, len(completed)))
                completed.append(unit + 1)
        if all(len(schedule) == 6 * num_micro_batches for schedule in schedules):
            break
    return tuple(map(tuple, schedules))


def interleaved(pp: int, stage: int, chunks: int, num_micro_batches: int) -> list[PipelineOp]:
    """1F1B over several chunks per rank (Narayanan et al. 2021, section 2.2.2).

    Groups of ``pp`` micro-batches run through one chunk after another; ``pp`` divides ``num_micro_batches``.
    """
    total = num_micro_batches * chunks
    return _alternate(
        warm_up=min(total, (pp - stage - 1) * 2 + (chunks - 1) * pp),
        forwards=[_interleaved_op(k, pp, chunks, Pass.FORWARD) for k in range(total)],
        backwards=[_interleaved_op(k, pp, chunks, Pass.BACKWARD) for k in range(total)],
    )


def _interleaved_op(k: int, pp: int, chunks: int, computation: Pass) -> PipelineOp:
    group, position = divmod(k, pp * chunks)
    chunk = position // pp if computation is Pass.FORWARD else chunks - 1 - position // pp
    return PipelineOp(computation, chunk, group * pp + position % pp)


def _alternate(warm_up: int, forwards: list[PipelineOp], backwards: list[PipelineOp]) -> list[PipelineOp]:
    ops = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        ops += [forward, backward]
    return ops + backwards[len(forwards) - warm_up :]


SCHEDULES = ("1f1b", "eager-1f1b", "zb-h1", ZERO_BUBBLE_V, "gpipe")
WITH_WEIGHT_PASSES = frozenset({"zb-h1", ZERO_BUBBLE_V, "auto"})
"""Schedules that compute weight gradients separately, or may do so: zb-v on all stages, others not on the first."""


def has_weight_passes(kind: str, flush: bool, tp: int) -> bool:
    """Whether a schedule's stages compute weight gradients separately, or may do so; see ``WITH_WEIGHT_PASSES``.

    Args:
        kind: a name from ``SCHEDULES``, or auto.
        flush: whether the pipeline drains at the end of each step. Without a flush, 1f1b and eager-1f1b have weight
            passes, too; see ``add_weight_passes``.
        tp: tensor-parallel size. Tensor-parallel ranks compute weight gradients while they sum those of the inputs,
            rather than after it.
    """
    return kind in WITH_WEIGHT_PASSES or not (flush or tp > 1)


def make_schedule(
    kind: str, pp: int, stage: int, chunks: int, num_micro_batches: int, limits: ScheduleLimits = NO_LIMITS
) -> list[PipelineOp]:
    """Make the training schedule of a rank.

    Args:
        kind: a name from ``SCHEDULES``; with several chunks, 1f1b is interleaved. On a single rank, zb-v is 1f1b.
        pp, stage: pipeline-parallel size, and this rank's stage.
        chunks: virtual stages on each rank.
        num_micro_batches: number of micro-batches in the step.
        limits: limits on what a stage stores.

    Raises:
        ValueError: when there is no schedule for the arguments.
    """
    if kind not in SCHEDULES:
        raise ValueError(f"no pipeline schedule is named {kind!r}; the choices are {', '.join(SCHEDULES)}")
    if kind == ZERO_BUBBLE_V and pp > 1:
        if chunks != 2:
            raise ValueError(f"{kind} needs two virtual stages on each rank, not {chunks}")
        return list(zero_bubble_v(pp, num_micro_batches, limits.weight_records)[stage])
    if chunks > 1:
        if kind != "1f1b" or num_micro_batches % pp:
            raise ValueError(
                f"virtual stages need the 1f1b schedule and micro-batches in multiples of {pp}, "
                f"not {kind} and {num_micro_batches}"
            )
        return interleaved(pp, stage, chunks, num_micro_batches)
    if kind == "gpipe":
        return gpipe(num_micro_batches)
    if kind == "zb-h1":
        return zero_bubble_h1(pp, stage, num_micro_batches, limits.weight_records)
    return one_f_one_b(count_warm_up(pp, stage, most_in_flight(kind, pp, limits.in_flight)), num_micro_batches)


def find_epilogue(ops: Sequence[PipelineOp]) -> frozenset[PipelineOp]:
    """Find a stage's backward passes after its last forward. No computation hides their messages.

    In 1F1B with M micro-batches and P stages, these are the last min(M, P - s) backward passes of stage s (Optimus-CC,
    Song et al. 2023, section 5.1).
    """
    last = max((index for index, op in enumerate(ops) if op.is_forward), default=-1)
    return frozenset(op for op in ops[last + 1 :] if op.is_backward)

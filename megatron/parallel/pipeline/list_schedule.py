"""Pipeline schedules for given times: a list scheduler, beside the fixed schedules.

CrossPipe (2025) also chooses the order of passes by the times of passes and messages, at a given memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.parallel.pipeline.schedule import Pass, PipelineOp, make_schedule, most_in_flight
from megatron.parallel.pipeline.simulate import HasInput, ListedOrder, PassOrder, Pipeline, RankTimes

AUTO = "auto"
"""Name of the list scheduler among the values of ``--pipeline-schedule``."""
FIRST = "zb-h1"
"""Schedule of the steps in which the list scheduler's times are measured."""
_MAX_LIMITS = 12
"""Maximum number of limits on micro-batches that are tried."""
_MAX_FORWARDS = 1024
"""Number of forward passes above which only the beginning of a step is compared, with fewer limits."""


@dataclass(frozen=True)
class Candidate:
    """A schedule with its predicted time.

    Args:
        kind: name of a fixed schedule; ``AUTO`` for the list scheduler.
        limits: the list scheduler's limit on each stage, in micro-batches.
        seconds: predicted seconds of forward and backward passes of a step.
    """

    kind: str
    limits: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        if self.kind != AUTO:
            return self.kind
        return f"a list with at most {', '.join(map(str, self.limits))} micro-batches in flight"

    def schedules(self, pipeline: Pipeline, micro_batches: int) -> list[list[PipelineOp]]:
        """Operations of every stage, in order."""
        ranks = pipeline.simulate_orders(_make_orders(self.kind, self.limits, pipeline, micro_batches))
        return [[timed.op for timed in rank.passes] for rank in ranks]


class GreedyOrder:
    """The order of a rank that never waits while it has a pass to run: backward first, then forward, then weight.

    Args:
        micro_batches: number of micro-batches in the step.
        limit: maximum number of micro-batches between their forward and their last pass on this rank.
        separate: whether backward passes have weight passes.
        max_records: maximum number of backward passes whose weight passes are left; None for no limit.
    """

    def __init__(self, micro_batches: int, limit: int, separate: bool, max_records: int | None = None) -> None:
        self._micro_batches = micro_batches
        self._limit = limit
        self._separate = separate
        self._max_records = math.inf if max_records is None else max_records
        self._next = dict.fromkeys(Pass, 0)

    def choose(self, has_input: HasInput) -> PipelineOp | None:
        forwards, backwards, weights = (self._next[computation] for computation in Pass)
        in_flight = forwards - (weights if self._separate else backwards)
        possible = {
            Pass.BACKWARD: backwards < forwards and (not self._separate or backwards - weights < self._max_records),
            Pass.FORWARD: forwards < self._micro_batches and in_flight < self._limit,
            Pass.WEIGHT: self._separate and weights < backwards,
        }
        for computation, is_possible in possible.items():
            op = PipelineOp(computation, 0, self._next[computation])
            if is_possible and has_input(op):
                self._next[computation] += 1
                return op
        return None

    def separates(self, op: PipelineOp) -> bool:
        return self._separate

    @property
    def has_ended(self) -> bool:
        last = Pass.WEIGHT if self._separate else Pass.BACKWARD
        return self._next[last] == self._micro_batches

    @property
    def in_epilogue(self) -> bool:
        return self._next[Pass.FORWARD] == self._micro_batches


def _make_orders(kind: str, limits: Sequence[int], pipeline: Pipeline, micro_batches: int) -> list[PassOrder]:
    """Make the order of every stage under a ``Candidate``'s settings."""
    if kind == AUTO:
        return [
            GreedyOrder(micro_batches, limit, stage > 0, pipeline.limits.weight_records)
            for stage, limit in enumerate(limits)
        ]
    shape = 1, micro_batches, pipeline.limits
    return [ListedOrder(make_schedule(kind, pipeline.stages, stage, *shape)) for stage in range(pipeline.stages)]


def _num_simulated(stages: int, micro_batches: int) -> int:
    """Number of micro-batches of a step that are simulated."""
    return min(micro_batches, max(4 * stages, _MAX_FORWARDS // stages))


def rank_schedules(pipeline: Pipeline, micro_batches: int, with_lists: bool = True) -> list[Candidate]:
    """Predict a step under each schedule that holds few enough micro-batches; the fastest first.

    The list scheduler is tried with several limits, equal on all stages and falling from stage to stage, since a stage
    that runs further ahead is not always faster. If a step has many micro-batches (``_num_simulated``), only its
    beginning is simulated, and its time multiplied. The result is deterministic.

    Args:
        pipeline: times of passes and messages, with one chunk a stage; its kind does not matter.
        micro_batches: number of micro-batches in the step.
        with_lists: whether to try the list scheduler, beside the fixed schedules.
    """
    stages, count = pipeline.stages, _num_simulated(pipeline.stages, micro_batches)
    limit = most_in_flight(AUTO, stages, pipeline.limits.in_flight)
    settings: list[tuple[str, tuple[int, ...]]] = [("1f1b", ()), ("zb-h1", ()), ("eager-1f1b", ())]
    if micro_batches <= limit:
        settings.append(("gpipe", ()))
    highest, num_limits = min(limit, count), max(2, min(_MAX_LIMITS, _MAX_FORWARDS // (count * stages)))
    for first_limit in range(highest, 0, -math.ceil(highest / num_limits)) if with_lists else ():
        for decrease in (0, 1):
            settings.append((AUTO, tuple(max(first_limit - decrease * stage, 1) for stage in range(stages))))
    candidates = []
    for kind, limits in settings:
        times = pipeline.simulate_orders(_make_orders(kind, limits, pipeline, count))
        candidates.append(Candidate(kind, limits, max(rank.end for rank in times) * micro_batches / count))
    return sorted(candidates, key=lambda candidate: candidate.seconds)


@dataclass(frozen=True)
class ListPipeline(Pipeline):
    """A pipeline whose ranks take the fastest order of ``rank_schedules``."""

    def run(self, micro_batches: int) -> list[RankTimes]:
        count = _num_simulated(self.stages, micro_batches)
        share = micro_batches / count
        times = self.simulate_in_full(count)
        return [RankTimes(rank.end * share, rank.busy * share, rank.coding * share, rank.passes) for rank in times]

    def simulate_in_full(self, micro_batches: int, flush: bool = True) -> list[RankTimes]:
        assert flush, "the list scheduler flushes each step"
        fastest = rank_schedules(self, micro_batches)[0]
        return self.simulate_orders(_make_orders(fastest.kind, fastest.limits, self, micro_batches))


class MeasuredPipeline:
    """The list scheduler's choice for the measured times of a pipeline.

    Args:
        pipeline: measured times, the same on all ranks.
        with_lists: whether to consider schedules of the list scheduler, beside the fixed ones.
        is_final: whether all further steps of the run use it.
        cluster: description of the cluster for which the times were predicted; None if they were measured.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        with_lists: bool = True,
        is_final: bool = False,
        cluster: Mapping[str, Any] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.with_lists = with_lists
        self.is_final = is_final
        self.cluster = cluster
        self._candidates: dict[int, list[Candidate]] = {}

    def schedules(self, micro_batches: int) -> list[list[PipelineOp]]:
        """Operations of every stage in the fastest schedule of a step, in order."""
        return self.candidates(micro_batches)[0].schedules(self.pipeline, micro_batches)

    def candidates(self, micro_batches: int) -> list[Candidate]:
        if micro_batches not in self._candidates:
            self._candidates[micro_batches] = rank_schedules(self.pipeline, micro_batches, self.with_lists)
        return self._candidates[micro_batches]

"""Due messages: early enough for everything that may wait for them, and not much earlier."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given

from megatron.distributed.layout import Layout
from megatron.parallel.pipeline.engine import PipelineEngine
from megatron.parallel.pipeline.schedule import Pass, PipelineOp
from megatron.parallel.pipeline.timetable import MAX_POSTED_AHEAD, Route, Timetable, build_timetable
from megatron.parallel.tensor.main_grad import WeightGrads
from tests.unit.parallel.pipeline.test_schedule import Case, Message, cases


def _table(case: Case) -> Timetable:
    return build_timetable(case.layout, case.schedules())


@given(cases())
def test_messages_of_an_operation_are_due_and_few_others(case: Case) -> None:
    """At most as many as are posted ahead; twice as many with virtual stages, where both directions meet. In a list
    fewer than its limit."""
    table = _table(case)
    most = 3 * case.pp - 1 if case.kind == "list" else MAX_POSTED_AHEAD if case.chunks == 1 else 2 * MAX_POSTED_AHEAD
    if case.kind == "eager-1f1b":
        engine = PipelineEngine(
            case.layout, 0, None, lambda *_: None, lambda _: None, WeightGrads(), limits=case.limits
        )
        most = engine.get_timetable(case.kind, case.count).max_ahead
        # A sender runs ahead by its share of the micro-batches in flight.
        share = math.ceil(((case.limits.in_flight or 1) - 1) / (case.pp - 1)) if case.pp > 1 else 0
        assert most == max(MAX_POSTED_AHEAD, share)
    for stage, schedule in enumerate(table.schedules):
        received: Counter[Route] = Counter()
        for op, counts in zip(schedule, table.messages_due[stage], strict=True):
            pending = [count - received[route] for route, count in counts.items()]
            assert min(pending, default=0) >= 0
            assert max(pending, default=0) <= most
            if (message := case.incoming(stage, op)) is not None:
                route = case.route(message)
                received[route] += 1
                assert counts[route] >= received[route]


@given(cases())
def test_due_messages_can_be_sent_without_further_receives(case: Case) -> None:
    """In each level of execution, all due messages of the next operations have been sent."""
    table = _table(case)
    sent: set[Message] = set()
    position = [0] * case.pp
    while any(at < len(table.schedules[stage]) for stage, at in enumerate(position)):
        ready = [stage for stage in range(case.pp) if _all_due_sent(case, table, stage, position[stage], sent)]
        assert ready, "every rank waits for due messages"
        for stage in ready:
            message = case.outgoing(stage, table.schedules[stage][position[stage]])
            sent |= {message} if message is not None else set()
            position[stage] += 1


def _all_due_sent(case: Case, table: Timetable, stage: int, at: int, sent: set[Message]) -> bool:
    if at == len(table.schedules[stage]):
        return False
    incoming = [message for op in table.schedules[stage] if (message := case.incoming(stage, op)) is not None]
    return all(
        sent.issuperset([message for message in incoming if case.route(message) == route][:count])
        for route, count in table.messages_due[stage][at].items()
    )


def test_stages_that_wait_for_each_other_have_no_timetable() -> None:
    forward, backward = PipelineOp(Pass.FORWARD, 0, 0), PipelineOp(Pass.BACKWARD, 0, 0)
    with pytest.raises(ValueError, match="wait for each other"):
        build_timetable(Layout(pp=2), [[backward, forward], [forward, backward]])

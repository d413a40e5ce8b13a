"""First launches never deadlock: the real engine on simulated devices where messages and kernel loading block."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.compression.api import Codec, Payload
from megatron.compression.points import Point
from megatron.compression.registry import Registration
from megatron.compression.schedule import Activation
from megatron.compression.spec import Spec
from megatron.compression.state import CompressorState
from megatron.distributed.layout import Layout
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.pipeline import engine as engine_module
from megatron.parallel.pipeline.channel import PipelineChannel
from megatron.parallel.pipeline.engine import PipelineEngine
from megatron.parallel.pipeline.first_launches import MAX_SIGNATURES, CompletedLaunches
from megatron.parallel.pipeline.list_schedule import AUTO, FIRST, MeasuredPipeline, rank_schedules
from megatron.parallel.pipeline.messages import PostedReceives
from megatron.parallel.pipeline.schedule import SCHEDULES, Pass
from megatron.parallel.pipeline.simulate import Hop, Pipeline
from megatron.parallel.pipeline.timetable import DueReceives, Route, Timetable, build_timetable
from megatron.parallel.tensor.main_grad import WeightGrads
from tests.support.combinations import in_turn, mark_repeats
from tests.support.spinning import DeadlockError, SpinningDevice, SpinningLink, run_threads

SHAPE = torch.Size((2, 1, 2))
WARM_UP = 3
"""Iterations before codecs start."""


class Halving(Codec):
    """Launches other kernels for its first message, for every third message, and for each shape."""

    def __init__(self, device: SpinningDevice, point: Point) -> None:
        super().__init__()
        self.device, self.point = device, point

    def launch_signature(self, shape: torch.Size, state: CompressorState, keys: Any) -> Hashable:
        return state.layout(("calls",)), state.count("calls") % 3

    def _launch(self, operation: str, shape: torch.Size, state: CompressorState) -> None:
        self.device.launch((self.point, operation, shape, state.get("seen") is None, state.count("calls") % 3))
        state.stage("calls", state.count("calls") + 1)
        state.stage("seen", torch.zeros(1))

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return Payload(torch.empty(shape, dtype=dtype))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        self._launch("encode", x.shape, state)
        return Payload(x / 2)

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        self._launch("decode", shape, state)
        return payload.wire * 2


class _Layer(torch.autograd.Function):
    """Adds 1 forward, doubles backward, and launches a kernel for each, and for the weight pass if there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: SpinningDevice, kernel: Hashable, weight_grads: WeightGrads) -> Tensor:
        ctx.device, ctx.kernel, ctx.weight_grads = device, kernel, weight_grads
        device.launch((kernel, "forward"))
        return x + 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        device, kernel = ctx.device, ctx.kernel

        def compute(memory: object, inputs: object) -> list[Tensor]:
            device.launch((kernel, "weight"))
            return []

        device.launch((kernel, "backward"))
        if not ctx.weight_grads.record([], [], compute):
            device.launch((kernel, "joint"))
        return grads[0] * 2, None, None, None


@dataclass
class Program:
    """A chunk that launches other kernels for each kind of step and each length."""

    device: SpinningDevice
    chunk: int
    first: bool
    last: bool
    kind: Hashable
    shape: torch.Size
    losses: dict[int, float]
    weight_grads: WeightGrads

    def forward(self, micro_batch: int, x_sbh: Tensor | None) -> Tensor:
        x = torch.full(self.shape, float(micro_batch)) if x_sbh is None else x_sbh
        assert x.shape == self.shape
        if x_sbh is None and self.kind[0] == "training":  # type: ignore[index]
            x.requires_grad_()
        out: Tensor = _Layer.apply(x, self.device, (self.kind, self.chunk, self.shape), self.weight_grads)
        if self.last:
            out = out.sum()
            self.losses[micro_batch] = float(out.detach())
        return out

    def key(self, micro_batch: int, boundary: int) -> Hashable:
        return micro_batch


@dataclass(frozen=True)
class Case:
    """A pipeline and its steps: micro-batches, whether it is an evaluation, and growing lengths, if any."""

    kind: str
    pp: int
    chunks: int
    steps: tuple[tuple[int, bool], ...]
    lengths: tuple[int, ...] = ()

    def shape(self, step: int) -> torch.Size:
        return torch.Size((self.lengths[step], *SHAPE[1:])) if self.lengths else SHAPE

    @property
    def layout(self) -> Layout:
        return Layout(pp=self.pp, chunks=self.chunks, v_shaped=self.kind == "zb-v")


def case(kind: str, pp: int, chunks: int, count: int) -> Case:
    """Codecs begin at iteration ``WARM_UP``, the first evaluation comes before, and the batch grows twice."""
    train, larger, evaluation = (count, False), (count + pp, False), (count, True)
    return Case(
        kind, pp, chunks, (train, train, evaluation, train, train, train, train, larger, evaluation, larger, larger)
    )


CASES = [
    *(case("1f1b", pp, chunks, pp * groups) for chunks in (2, 3) for groups in (1, 2) for pp in (2, 3, 4)),
    *(
        case(kind, pp, 2 if kind == "zb-v" else 1, count)
        for kind in SCHEDULES
        for pp in (2, 4, 5)
        for count in (1, 3, 8)
    ),
]
GROWING = [
    replace(case(kind, pp, chunks, 2 * pp), lengths=(2, 2, 5, 2, 3, 3, 3, 3, 5, 5, 5))
    for kind, pp, chunks in (
        ("1f1b", 2, 1),
        ("1f1b", 2, 2),
        ("1f1b", 3, 3),
        ("eager-1f1b", 4, 1),
        ("zb-h1", 3, 1),
        ("zb-v", 3, 2),
        ("gpipe", 2, 1),
    )
]
"""Sequences grow before, with and after the first step of codecs, and with a batch."""
FEW = [
    *(case("1f1b", pp, chunks, count) for pp, chunks, count in ((2, 2, 4), (4, 2, 4), (3, 3, 6))),
    *(
        case(kind, pp, 2 if kind == "zb-v" else 1, count)
        for kind in SCHEDULES
        for pp, count in ((2, 3), (4, 1), (5, 8))
    ),
    *(GROWING[i] for i in (2, 3, 5)),
]
"""Of these, each schedule with few and with many micro-batches, the fewest and the most stages and virtual stages."""


def _always(codec: Codec) -> Callable[[Any], Codec]:
    return lambda options: codec


def _build(case: Case, device: SpinningDevice) -> PipelineEngine:
    specs = {}
    for point in (Point.PP_FWD, Point.PP_BWD):
        entry = Registration(type(None), codec=_always(Halving(device, point)))
        specs[point] = Spec(point, "halving", entry, None, Activation(warmup_iters=WARM_UP))
    forward, backward = (SpinningLink(device, case.pp, name) for name in ("forward", "backward"))
    plan = CompressionPlan(specs, device.rank, case.pp)
    shapes = [SHAPE] * (case.layout.num_virtual_stages - 1)
    channel = PipelineChannel(
        case.layout, forward, backward, plan, Ledger(), shapes, torch.float32, torch.device("cpu")
    )
    engine = PipelineEngine(
        case.layout, device.rank, channel, lambda iteration, micro_batch: None, lambda chunk: None, WeightGrads()
    )
    engine.loads_kernels_lazily = True
    return engine


Meddle = Callable[[PipelineEngine, SpinningDevice, int], None]


def _rank(
    case: Case, meddle: Meddle
) -> Callable[[SpinningDevice], tuple[list[str], list[int], list[dict[int, float]]]]:
    """Program of a rank: violations, receives pending during launches by step, and losses by step."""

    def main(device: SpinningDevice) -> tuple[list[str], list[int], list[dict[int, float]]]:
        engine, ahead, losses, iteration = _build(case, device), [], [], 0
        assert engine.channel is not None
        for step, (count, evaluates) in enumerate(case.steps):
            meddle(engine, device, step)
            device.ahead = 0
            kind = ("evaluation" if evaluates else "training", count)
            step_losses: dict[int, float] = {}
            programs = [
                Program(
                    device,
                    chunk,
                    first=chunk == 0 and device.rank == 0,
                    last=case.layout.virtual_stage(device.rank, chunk) == case.layout.num_virtual_stages - 1,
                    kind=kind,
                    losses=step_losses,
                    shape=case.shape(step),
                    weight_grads=engine.weight_grads,
                )
                for chunk in range(case.chunks)
            ]
            table = engine.get_timetable(None if evaluates else case.kind, count)
            engine.channel.shapes = [case.shape(step)] * (case.layout.num_virtual_stages - 1)
            grad = None if evaluates else torch.ones(())
            with torch.set_grad_enabled(not evaluates):
                engine.run(table, programs, -1 if evaluates else iteration, grad, [kind])
            separate = any(op.computation is Pass.WEIGHT for op in table.schedules[device.rank])
            if not evaluates:
                assert ((kind, 0, case.shape(step)), "weight" if separate else "joint") in device.loaded
            device.launch(("after the pipeline", step))
            for state in engine.channel.states():
                state.rollback() if evaluates or step == 5 else state.commit()
            iteration += not evaluates
            ahead.append(device.ahead)
            losses.append(step_losses)
        return device.violations, ahead, losses

    return main


def _nothing(engine: PipelineEngine, device: SpinningDevice, step: int) -> None:
    """Leave a run unchanged."""


@pytest.mark.parametrize("case", mark_repeats([*CASES, *GROWING], FEW), ids=str)
def test_kernels_are_not_loaded_during_receives_and_ranks_never_deadlock(case: Case) -> None:
    results = run_threads(case.pp, _rank(case, _nothing))
    for rank, (violations, ahead, losses) in enumerate(results):
        assert violations == []
        assert ahead[1] > 0, f"rank {rank} does not overlap in a step that it has run before: {ahead}"
        if losses[0]:
            expected = {m: (m + case.layout.num_virtual_stages) * SHAPE.numel() for m in range(case.steps[0][0])}
            assert losses[0] == expected


FORGETTING = in_turn([(case,) for case in (*CASES, *GROWING)], [1, 2])


@pytest.mark.parametrize(
    ("case", "ahead"), mark_repeats(FORGETTING, [row for row in FORGETTING if row[0] in FEW]), ids=str
)
def test_ranks_may_have_completed_different_launches(case: Case, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks forget their launches at different steps: they wait where others post receives ahead."""
    monkeypatch.setattr(engine_module, "MAX_POSTED_AHEAD", ahead)

    def forget(engine: PipelineEngine, device: SpinningDevice, step: int) -> None:
        if random.Random(f"{ahead} {device.rank} {step}").random() < 0.4:
            engine.completed = CompletedLaunches()
            device.loaded.clear()

    for violations, _, _ in run_threads(case.pp, _rank(case, forget)):
        assert violations == []


@pytest.mark.parametrize(("weight_s", "transfer_s"), [(1.0, 1.0), (0.0, 0.0)], ids=["list", "1f1b"])
@pytest.mark.parametrize("pp", [2, 4])
def test_a_schedule_that_is_chosen_after_some_steps_keeps_the_rule(pp: int, weight_s: float, transfer_s: float) -> None:
    """Whether or not weight gradients stay apart."""
    hop = Hop(transfer_s=transfer_s)
    pipeline = Pipeline(FIRST, [1.0] * pp, [1.0 + weight_s] * pp, [weight_s] * pp, pp, lambda *_: hop)

    def choose(engine: PipelineEngine, device: SpinningDevice, step: int) -> None:
        if step == 6:  # which repeats step 5
            engine.measured = MeasuredPipeline(pipeline)

    for stage, (violations, ahead, _) in enumerate(run_threads(pp, _rank(case(AUTO, pp, 1, 6), choose))):
        assert violations == []
        assert (ahead[6] > 0) == (weight_s > 0 or stage == 0), "receives are posted ahead among known kernels only"
    assert (rank_schedules(pipeline, 6)[0].kind == AUTO) == (weight_s > 0)


class Checked(PostedReceives):
    """Checks that due messages are posted before each operation."""

    def post(self, due: DueReceives) -> None:
        super().post(due)
        assert all(self._posted[route] >= count for route, count in due.items() if count)


def test_due_messages_are_posted_in_overlapping_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that loads a kernel relies on it."""
    monkeypatch.setattr(engine_module, "MAX_POSTED_AHEAD", 1)
    monkeypatch.setattr(engine_module, "PostedReceives", Checked)
    results = run_threads(4, _rank(case("1f1b", 4, 2, 8), _nothing))
    assert all(ahead[1] > 0 for _, ahead, _ in results)


def test_receives_that_are_always_posted_ahead_would_deadlock() -> None:
    def trust(engine: PipelineEngine, device: SpinningDevice, step: int) -> None:
        engine.loads_kernels_lazily = False

    with pytest.raises(DeadlockError, match="loads"):
        run_threads(2, _rank(case("1f1b", 2, 1, 4), trust))


def test_receives_that_are_posted_only_when_needed_would_deadlock() -> None:
    """With virtual stages, a message in flight may be needed later than a message still to be computed."""

    def needed(table: Timetable, stage: int, layout: Layout) -> tuple[DueReceives, ...]:
        counts: dict[Route, int] = dict.fromkeys(table.messages_due[stage][0], 0)
        dues = []
        for op in table.schedules[stage]:
            boundary = layout.virtual_stage(stage, op.chunk) - op.is_forward
            if 0 <= boundary < layout.num_virtual_stages - 1:
                counts[op.is_forward, layout.ends_of(boundary, op.is_forward)[0]] += 1
            dues.append(dict(counts))
        return tuple(dues)

    def late(layout: Layout, *arguments: Any) -> Timetable:
        table = build_timetable(layout, *arguments)
        return replace(table, messages_due=tuple(needed(table, stage, layout) for stage in range(layout.pp)))

    def forget_all(engine: PipelineEngine, device: SpinningDevice, step: int) -> None:
        engine.completed = CompletedLaunches()
        device.loaded.clear()

    with (
        mock.patch.object(engine_module, "build_timetable", late),
        pytest.raises(DeadlockError, match=r"loads .* send to"),
    ):
        run_threads(2, _rank(case("1f1b", 2, 2, 4), forget_all))


def test_forgotten_launches_are_unknown() -> None:
    kinds = CompletedLaunches()
    kinds.record(["first", None])
    assert kinds.covers(["first"])
    assert not kinds.covers(["first", None])
    kinds.record(range(MAX_SIGNATURES))
    assert not kinds.covers(["first"])
    assert kinds.covers([MAX_SIGNATURES - 1])

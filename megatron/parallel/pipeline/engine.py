"""Execution of pipeline schedules on a rank: receive, compute, send."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from megatron.config.check_parallel import SCHEDULES_WITHOUT_FLUSH
from megatron.distributed.layout import Layout
from megatron.parallel.pipeline.channel import PipelineChannel
from megatron.parallel.pipeline.first_launches import CompletedLaunches
from megatron.parallel.pipeline.list_schedule import AUTO, FIRST, MeasuredPipeline
from megatron.parallel.pipeline.messages import PostedReceives, StageProgram, StepMessages
from megatron.parallel.pipeline.schedule import (
    NO_LIMITS,
    Pass,
    PipelineOp,
    ScheduleLimits,
    add_weight_passes,
    count_warm_up,
    has_weight_passes,
    make_forward_schedule,
    make_schedule,
    most_in_flight,
    warm_ups_without_flush,
)
from megatron.parallel.pipeline.timetable import MAX_POSTED_AHEAD, Timetable, build_timetable
from megatron.parallel.tensor.main_grad import WeightGrads


@dataclass
class _Step:
    """A step on a rank, between its first forward and its last backward.

    Args:
        messages: addresses of its messages.
        ops: all its operations on this rank.
        loss_grad: gradient of each micro-batch's scalar; None without backward passes.

    ``separate`` holds the (chunk, micro-batch) pairs with weight passes, ``activations`` the inputs and outputs of
    forward passes that wait for their backward, ``num_backwards`` the number of remaining backward passes by chunk, and
    ``cool_down``, by micro-batch, the backward and weight passes that are left for the next step.
    """

    messages: StepMessages
    ops: InitVar[Sequence[PipelineOp]]
    loss_grad: Tensor | None
    activations: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    cool_down: deque[list[PipelineOp]] = field(default_factory=deque)

    def __post_init__(self, ops: Sequence[PipelineOp]) -> None:
        self.num_backwards = Counter(op.chunk for op in ops if op.is_backward)
        self.separate = {(op.chunk, op.micro_batch) for op in ops if op.computation is Pass.WEIGHT}


Span = Callable[[str, PipelineOp], AbstractContextManager[object]]
"""Factory of context managers that time a section of an operation, by the section's name."""


class PipelineEngine:
    """Execution of pipeline schedules; with a single stage, a loop over micro-batches.

    Args:
        layout: the mesh.
        stage: this rank's pipeline coordinate.
        channel: channel to the neighboring stages; None with a single stage.
        begin_pass: called with the iteration and the index of a micro-batch before its forward and before its backward.
        begin_last_backward: called with the index of a chunk before the chunk's last backward in the step.
        weight_grads: records of weight gradients between a backward and its weight pass.
        after_pass: called after every pass of a training step, while messages of other points may arrive.
        limits: limits on what a stage stores.

    Attributes:
        measured: measured times, for which ``AUTO`` chooses a schedule; None before they are measured. May be replaced
            between steps.
        loads_kernels_lazily: whether the device loads kernels at their first launch, as CUDA does; see
            ``first_launches``.
    """

    def __init__(
        self,
        layout: Layout,
        stage: int,
        channel: PipelineChannel | None,
        begin_pass: Callable[[int, int], None],
        begin_last_backward: Callable[[int], None],
        weight_grads: WeightGrads,
        after_pass: Callable[[], None] = lambda: None,
        limits: ScheduleLimits = NO_LIMITS,
    ) -> None:
        self.layout = layout
        self.stage = stage
        self.channel = channel
        self.begin_pass = begin_pass
        self.begin_last_backward = begin_last_backward
        self.weight_grads = weight_grads
        self.after_pass = after_pass
        self.limits = limits
        self.measured: MeasuredPipeline | None = None
        self.loads_kernels_lazily = channel is not None and channel.device.type == "cuda"
        self.completed = CompletedLaunches()
        self._timetables: dict[tuple[str | MeasuredPipeline | None, int], Timetable] = {}
        self._open_step: _Step | None = None

    def get_timetable(self, kind: str | None, num_micro_batches: int) -> Timetable:
        """Get the timetable of a schedule (``AUTO`` or from ``SCHEDULES``), or of forward passes only (None)."""
        if kind == AUTO:
            kind = FIRST if self.measured is None else self.measured.candidates(num_micro_batches)[0].kind
        key = (self.measured if kind == AUTO else kind, num_micro_batches)
        if key not in self._timetables:
            pp, chunks = self.layout.pp, self.layout.chunks
            max_ahead, warm_ups = MAX_POSTED_AHEAD, list[int]()
            if kind == AUTO and self.measured is not None:
                schedules = self.measured.schedules(num_micro_batches)
                # A list lets a sender run ahead by as many messages as it holds micro-batches.
                limits = self.measured.candidates(num_micro_batches)[0].limits
                max_ahead = max(max_ahead, max(limits, default=0) - 1)
            elif kind is None:
                schedules = [make_forward_schedule(chunks, pp, num_micro_batches)] * pp
            else:
                schedules = [
                    make_schedule(kind, pp, stage, chunks, num_micro_batches, self.limits) for stage in range(pp)
                ]
                if kind in SCHEDULES_WITHOUT_FLUSH and pp > 1:
                    warm_ups = warm_ups_without_flush(kind, pp, num_micro_batches, self.limits)
                    # A sender runs ahead by its additional warm-up forwards.
                    in_flight = most_in_flight(kind, pp, self.limits.in_flight)
                    max_ahead = max(max_ahead, count_warm_up(pp, pp - 2, in_flight))
            self._timetables[key] = build_timetable(self.layout, schedules, max_ahead, warm_ups)
        return self._timetables[key]

    def run(
        self,
        table: Timetable,
        programs: Sequence[StageProgram],
        iteration: int,
        loss_grad: Tensor | None,
        signatures: Sequence[Hashable],
        span: Span = lambda name, op: nullcontext(),
        scale: float = 1.0,
    ) -> None:
        """Run a step.

        Args:
            table: operations of all pipeline stages.
            programs: programs of this rank's chunks.
            iteration: training iteration; -1 in evaluation.
            loss_grad: gradient of each micro-batch's scalar; None without backward passes.
            signatures: launch signatures (``first_launches``) of the programs; the engine adds those of the messages.
            span: times the sections forward-recv, forward-compute and forward-send, likewise for backward, and
                weight-compute.
            scale: loss scale in ``loss_grad``.
        """
        assert self._open_step is None, "flush first"
        ops = table.schedules[self.stage]
        messages = StepMessages(self.layout, self.stage, self.channel, iteration, programs, table.epilogues, scale)
        step = _Step(messages, ops, loss_grad)
        self.weight_grads.begin_step(bool(step.separate))
        receives = PostedReceives(self.channel, table.max_ahead)
        received = receives.add(messages, sorted(ops, key=lambda op: not op.is_forward))
        launches: list[Hashable] = []  # none if the device loads all kernels at once
        if self.loads_kernels_lazily and self.channel is not None:
            sent = [message for op in ops if (message := messages.address(op, incoming=False)) is not None]
            # Backward passes launch different kernels if weight gradients are computed separately.
            separates = any(op.computation is Pass.WEIGHT for op in ops)
            launches = [None if signature is None else (signature, separates) for signature in signatures]
            launches += self.channel.launch_signature(sent, received)
        receives.posts_ahead = self.completed.covers(launches)
        if ops:
            messages.expect(ops[0])
        for op, following, due_receives in zip(ops, [*ops[1:], None], table.messages_due[self.stage], strict=True):
            receives.post(due_receives)
            if following is not None:
                messages.expect(following)
            self._run_pass(step, op, receives, span)
            if loss_grad is not None:
                self.after_pass()
        self._complete_sends()
        self.completed.record(launches)

    def run_without_flush(
        self,
        table: Timetable,
        programs: Sequence[StageProgram],
        iteration: int,
        loss_grad: Tensor,
        after_forwards: Callable[[int], None],
        span: Span = lambda name, op: nullcontext(),
        scale: float = 1.0,
    ) -> None:
        """Run a step of 1F1B whose last backward passes follow the first forward passes of the next step.

        1F1B begins with warm-up forwards and ends with as many backward passes, and stages wait for each other in both
        phases. Here, each of this step's warm-up forwards is followed by one of the last step's remaining backward
        passes, so that the pipeline stays full (PipeDream-2BW, Narayanan et al. 2021, section 3.1). Weight passes
        follow their backward pass (``add_weight_passes``), unless ranks are tensor-parallel. No message counts as part
        of an epilogue.

        Args:
            table, programs, iteration, loss_grad, span, scale: see ``run``.
            after_forwards: called before the first forward pass, and after each forward pass and the backward pass that
                follows it, with the number of forward passes so far. Once that is the number of warm-up forwards, the
                last step has run its last backward.
        """
        ops, warm_up = list(table.schedules[self.stage]), table.warm_ups[self.stage]
        if has_weight_passes("1f1b", flush=False, tp=self.layout.tp):
            ops = add_weight_passes(ops, self.stage)
        no_epilogues = [frozenset[PipelineOp]() for _ in table.epilogues]
        messages = StepMessages(self.layout, self.stage, self.channel, iteration, programs, no_epilogues, scale)
        step, last_step = _Step(messages, ops, loss_grad), self._open_step
        self.weight_grads.begin_step(bool(step.separate))
        if self.channel is not None and last_step is None:
            self.channel.open_mailboxes(buffers=table.warm_ups[0] + 1)
        forwards = [op for op in ops if op.is_forward]
        backwards: list[list[PipelineOp]] = [[] for _ in forwards]  # with their weight passes
        for op in ops:
            if not op.is_forward:
                backwards[op.micro_batch].append(op)
        passes: list[tuple[_Step, PipelineOp]] = []
        for number, forward in enumerate(forwards):
            passes.append((step, forward))
            if number >= warm_up:
                passes += [(step, op) for op in backwards[number - warm_up]]
            elif last_step is not None:
                passes += [(last_step, op) for op in last_step.cool_down.popleft()]
        self._run_passes(passes, table.warm_ups[0], span, after_forwards)
        after_forwards(len(forwards))
        step.cool_down.extend(backwards[len(forwards) - warm_up :])
        self._open_step = step

    def flush(self, span: Span = lambda name, op: nullcontext()) -> None:
        """Run the backward passes that ``run_without_flush`` has left."""
        step, self._open_step = self._open_step, None
        if step is None:
            return
        self._run_passes([(step, op) for ops in step.cool_down for op in ops], 0, span)
        self._complete_sends()
        if self.channel is not None:
            self.channel.close_mailboxes()

    def _run_passes(
        self,
        passes: Sequence[tuple[_Step, PipelineOp]],
        max_ahead: int,
        span: Span,
        begin_forward: Callable[[int], None] = lambda micro_batch: None,
    ) -> None:
        """Run passes of steps that overlap; ``begin_forward`` is called before each forward with its micro-batch."""
        receives = PostedReceives(self.channel, max_ahead)  # posts nothing: messages come through mailboxes
        for step, op in passes[:1]:
            step.messages.expect(op)
        for (step, op), following in zip(passes, [*passes[1:], None], strict=False):
            if op.is_forward:
                begin_forward(op.micro_batch)
            if following is not None:
                following[0].messages.expect(following[1])
            self._run_pass(step, op, receives, span)
            self.after_pass()

    def _run_pass(self, step: _Step, op: PipelineOp, receives: PostedReceives, span: Span) -> None:
        """Run an operation: receive, compute, send."""
        messages, slot, loss_grad = step.messages, (op.chunk, op.micro_batch), step.loss_grad
        if op.computation is Pass.WEIGHT:
            with span("weight-compute", op):
                self.weight_grads.compute(slot)
            return
        self.begin_pass(messages.iteration, op.micro_batch)
        if op.is_forward:
            with span("forward-recv", op):
                x_sbh = messages.receive(op, receives)
            if x_sbh is not None and loss_grad is not None:
                x_sbh.requires_grad_()
            with span("forward-compute", op):
                out = messages.programs[op.chunk].forward(op.micro_batch, x_sbh)
            with span("forward-send", op):
                messages.send(op, out, receives.max_ahead)
            if loss_grad is not None:
                step.activations[slot] = (x_sbh, out)
            return
        step.num_backwards[op.chunk] -= 1
        if step.num_backwards[op.chunk] == 0:
            self.begin_last_backward(op.chunk)
        x_sbh, out = step.activations.pop(slot)
        with span("backward-recv", op):
            grad = messages.receive(op, receives)
        recording = self.weight_grads.recording(slot) if slot in step.separate else nullcontext()
        with span("backward-compute", op), recording:
            torch.autograd.backward(out, loss_grad if grad is None else grad)
        if x_sbh is not None:
            assert x_sbh.grad is not None
            with span("backward-send", op):
                messages.send(op, x_sbh.grad, receives.max_ahead)

    def _complete_sends(self) -> None:
        """Wait until all sends have completed, and until all receives have completed on the device."""
        if self.channel is not None:
            self.channel.flush()
            self.channel.synchronize()

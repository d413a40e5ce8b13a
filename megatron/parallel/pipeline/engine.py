"""Execution of pipeline schedules on a rank: receive, compute, send."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from megatron.distributed.layout import Layout
from megatron.distributed.policy import Position
from megatron.parallel.pipeline.channel import Message, PipelineChannel
from megatron.parallel.pipeline.first_launches import CompletedLaunches
from megatron.parallel.pipeline.list_schedule import AUTO, FIRST, MeasuredPipeline
from megatron.parallel.pipeline.schedule import Pass, PipelineOp, make_forward_schedule, make_schedule
from megatron.parallel.pipeline.timetable import MAX_POSTED_AHEAD, Route, Timetable, build_timetable
from megatron.parallel.tensor.main_grad import WeightGrads


class StageProgram(Protocol):
    """The computation of a chunk."""

    def forward(self, micro_batch: int, x_sbh: Tensor | None) -> Tensor:
        """Compute the chunk's activation (s, b, h), or on the last virtual stage the scalar to differentiate.

        ``x_sbh`` is None on the first virtual stage.
        """

    def key(self, micro_batch: int, boundary: int) -> Hashable:
        """Key of a micro-batch's message over a boundary, for codecs that remember samples."""


Span = Callable[[str, PipelineOp], AbstractContextManager[object]]
"""Factory of context managers that time a section of an operation, by the section's name."""


class PipelineEngine:
    """Executes pipeline schedules; with a single stage, a loop over micro-batches.

    Args:
        layout: the mesh.
        stage: this rank's pipeline coordinate.
        channel: channel to the neighboring stages; None with a single stage.
        before_micro_batch: called with the index of a micro-batch before its forward and before its backward.
        begin_last_backward: called with the index of a chunk before the chunk's last backward in the step.
        weight_grads: records of weight gradients between a backward and its weight pass.
        after_pass: called after every pass of a training step, while messages of other points may arrive.

    Attributes:
        measured: times that schedule ``AUTO`` is made for; None before they are measured.
        loads_kernels_lazily: the device loads kernels at their first launch, as CUDA does; see ``first_launches``.
    """

    def __init__(
        self,
        layout: Layout,
        stage: int,
        channel: PipelineChannel | None,
        before_micro_batch: Callable[[int], None],
        begin_last_backward: Callable[[int], None],
        weight_grads: WeightGrads,
        after_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self.layout = layout
        self.stage = stage
        self.channel = channel
        self.before_micro_batch = before_micro_batch
        self.begin_last_backward = begin_last_backward
        self.weight_grads = weight_grads
        self.after_pass = after_pass
        self.measured: MeasuredPipeline | None = None
        self.loads_kernels_lazily = channel is not None and channel.device.type == "cuda"
        self.completed = CompletedLaunches()
        self._timetables: dict[tuple[str | None, int], Timetable] = {}

    def get_timetable(self, kind: str | None, num_micro_batches: int) -> Timetable:
        """Get the timetable of a schedule (``AUTO`` or from ``SCHEDULES``), or of forward passes only (None)."""
        kind = FIRST if kind == AUTO and self.measured is None else kind
        key = (kind, num_micro_batches)
        if key not in self._timetables:
            pp, chunks = self.layout.pp, self.layout.chunks
            max_ahead = MAX_POSTED_AHEAD
            if kind == AUTO and self.measured is not None:
                schedules = self.measured.schedules(num_micro_batches)
                # A list lets a sender run ahead by as many messages as it holds micro-batches.
                limits = self.measured.candidates(num_micro_batches)[0].limits
                max_ahead = max(max_ahead, max(limits, default=0) - 1)
            elif kind is None:
                schedules = [make_forward_schedule(chunks, pp, num_micro_batches)] * pp
            else:
                schedules = [make_schedule(kind, pp, stage, chunks, num_micro_batches) for stage in range(pp)]
            self._timetables[key] = build_timetable(self.layout, schedules, max_ahead)
        return self._timetables[key]

    def run(
        self,
        table: Timetable,
        programs: Sequence[StageProgram],
        iteration: int,
        num_micro_batches: int,
        loss_grad: Tensor | None,
        signatures: Sequence[Hashable],
        span: Span = lambda name, op: nullcontext(),
    ) -> None:
        """Runs a step.

        Args:
            table: operations of all pipeline stages.
            programs: programs of this rank's chunks.
            iteration: training iteration; -1 in evaluation.
            num_micro_batches: number of micro-batches in the step.
            loss_grad: gradient of each micro-batch's scalar; None without backward passes.
            signatures: launch signatures (``first_launches``) of the programs; the engine adds those of the messages.
            span: times the sections forward-recv, forward-compute and forward-send, likewise for backward, and
                weight-compute.
        """
        ops = table.schedules[self.stage]
        activations: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        backwards_left = [sum(op.is_backward and op.chunk == c for op in ops) for c in range(self.layout.chunks)]
        separate = {(op.chunk, op.micro_batch) for op in ops if op.computation is Pass.WEIGHT}
        self.weight_grads.begin_step(bool(separate))
        run = _StepMessages(self, table, iteration, num_micro_batches, programs, signatures)
        if ops:
            run.expect(ops[0])
        for number, (op, following) in enumerate(zip(ops, [*ops[1:], None], strict=True)):
            if number and loss_grad is not None:
                self.after_pass()
            run.post()
            if following is not None:
                run.expect(following)
            slot = (op.chunk, op.micro_batch)
            if op.computation is Pass.WEIGHT:
                with span("weight-compute", op):
                    self.weight_grads.compute(slot)
                continue
            self.before_micro_batch(op.micro_batch)
            if op.is_forward:
                with span("forward-recv", op):
                    x_sbh = run.receive(op)
                if x_sbh is not None and loss_grad is not None:
                    x_sbh.requires_grad_()
                with span("forward-compute", op):
                    out = programs[op.chunk].forward(op.micro_batch, x_sbh)
                with span("forward-send", op):
                    run.send(op, out)
                if loss_grad is not None:
                    activations[slot] = (x_sbh, out)
                continue
            backwards_left[op.chunk] -= 1
            if backwards_left[op.chunk] == 0:
                self.begin_last_backward(op.chunk)
            x_sbh, out = activations.pop(slot)
            with span("backward-recv", op):
                grad = run.receive(op)
            recording = self.weight_grads.recording(slot) if slot in separate else nullcontext()
            with span("backward-compute", op), recording:
                torch.autograd.backward(out, loss_grad if grad is None else grad)
            if x_sbh is not None:
                assert x_sbh.grad is not None
                with span("backward-send", op):
                    run.send(op, x_sbh.grad)
            del x_sbh, out, grad
        if loss_grad is not None:
            self.after_pass()
        run.end()


def max_pending_sends(layout: Layout) -> int:
    """Maximum number of pending sends in a direction before a rank waits for the oldest send.

    gloo does not report that a send has completed, so without a limit all messages of a step would stay in memory. No
    schedule lets a receiver fall further behind, so a wait for an older message is short.
    """
    return 2 * layout.num_virtual_stages


class _StepMessages:
    """Messages of a step: their addresses, and the times at which receives are posted."""

    def __init__(
        self,
        engine: PipelineEngine,
        table: Timetable,
        iteration: int,
        num_micro_batches: int,
        programs: Sequence[StageProgram],
        signatures: Sequence[Hashable],
    ) -> None:
        self.channel = engine.channel
        self.layout = engine.layout
        self.stage = engine.stage
        self.iteration = iteration
        self.num_micro_batches = num_micro_batches
        self.programs = programs
        self.epilogues = table.epilogues
        self._due = iter(table.messages_due[self.stage])
        ops = table.schedules[self.stage]
        self._incoming: dict[Route, deque[Message]] = {}
        for op in sorted(ops, key=lambda op: not op.is_forward):
            if (message := self._message(op, incoming=True)) is not None:
                self._incoming.setdefault(self._route(op), deque()).append(message)
        self._posted = dict.fromkeys(self._incoming, 0)
        self._received = dict.fromkeys(self._incoming, 0)
        self._handed_over: dict[tuple[bool, int, int], Tensor] = {}
        self._max_ahead = table.max_ahead
        self._completed = engine.completed
        self._signatures: list[Hashable] = []
        self._posts_ahead = True
        if engine.loads_kernels_lazily and self.channel is not None:
            sent = [message for op in ops if (message := self._message(op, incoming=False)) is not None]
            received = [message for messages in self._incoming.values() for message in messages]
            # Backward passes launch other kernels if weight gradients are computed apart.
            separates = any(op.computation is Pass.WEIGHT for op in ops)
            of_programs = [None if signature is None else (signature, separates) for signature in signatures]
            self._signatures = [*of_programs, *self.channel.launch_signature(sent, received)]
            self._posts_ahead = self._completed.covers(self._signatures)

    def _boundary(self, op: PipelineOp, incoming: bool) -> int | None:
        """Boundary of the input or the output of an operation.

        None at the model's first input and last output, and for weight passes.
        """
        if op.computation is Pass.WEIGHT:
            return None
        stage = self.layout.virtual_stage(self.stage, op.chunk)
        boundary = stage - 1 if op.is_forward == incoming else stage
        return boundary if 0 <= boundary < self.layout.num_virtual_stages - 1 else None

    def _route(self, op: PipelineOp) -> Route:
        """Route of the message with the input of an operation."""
        boundary = self._boundary(op, incoming=True)
        assert boundary is not None
        return op.is_forward, self.layout.ends_of(boundary, op.is_forward)[0]

    def _message(self, op: PipelineOp, incoming: bool) -> Message | None:
        """Message with the input or the output of an operation; None if there is none, or it stays on this rank."""
        boundary = self._boundary(op, incoming)
        if self.channel is None or boundary is None or not self.layout.crosses(boundary):
            return None
        late = False
        if not op.is_forward:
            rank, chunk = self.layout.place_of(boundary + 1)
            late = PipelineOp(Pass.BACKWARD, chunk, op.micro_batch) in self.epilogues[rank]
        position = Position(self.iteration, boundary, op.micro_batch, self.num_micro_batches, late)
        way = self.channel.forward if op.is_forward else self.channel.backward
        return Message(way, position, self.programs[op.chunk].key(op.micro_batch, boundary))

    def post(self) -> None:
        """Posts the receives that are due before the next operation, and later receives if all kernels are loaded."""
        due_receives = next(self._due)
        if self.channel is None:
            return
        posting = []
        for route, messages in self._incoming.items():
            ahead = self._received[route] + self._max_ahead if self._posts_ahead else 0
            while messages and self._posted[route] < max(due_receives[route], ahead):
                posting.append(messages.popleft())
                self._posted[route] += 1
        self.channel.post(posting)
        if not self._posts_ahead:
            self.channel.arrive()

    def expect(self, op: PipelineOp) -> None:
        """Announces the message that an operation will send, so that its codec can prefetch."""
        message = self._message(op, incoming=False)
        if self.channel is not None and message is not None:
            self.channel.expect(message)

    def receive(self, op: PipelineOp) -> Tensor | None:
        boundary, message = self._boundary(op, incoming=True), self._message(op, incoming=True)
        if self.channel is not None and message is not None:
            self._received[self._route(op)] += 1
            return self.channel.recv(message)
        return None if boundary is None else self._handed_over.pop((op.is_forward, boundary, op.micro_batch))

    def send(self, op: PipelineOp, x: Tensor) -> None:
        boundary, message = self._boundary(op, incoming=False), self._message(op, incoming=False)
        if self.channel is not None and message is not None:
            self.channel.send(message, x)
            self.channel.flush(keep=max(max_pending_sends(self.layout), self._max_ahead + 1))
        elif boundary is not None:
            # The next chunk is on this rank, too: there is no message, and no codec.
            self._handed_over[op.is_forward, boundary, op.micro_batch] = x.detach()

    def end(self) -> None:
        """Ends the step after all its sends have completed."""
        if self.channel is not None:
            self.channel.flush()
            self.channel.synchronize()
        self._completed.record(self._signatures)

"""Execution of pipeline schedules on a rank: receives, computes, sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from megatron.distributed.layout import Layout
from megatron.distributed.policy import Position
from megatron.parallel.pipeline.channel import Direction, Message, PipelineChannel
from megatron.parallel.pipeline.first_launches import CompletedLaunches
from megatron.parallel.pipeline.schedule import Pass, PipelineOp, forward_only, training_schedule
from megatron.parallel.pipeline.timetable import Timetable, timetable


class StageProgram(Protocol):
    """The computation of a chunk."""

    def forward(self, micro_batch: int, x_sbh: Tensor | None) -> Tensor:
        """Activation of the chunk, of the shape that crosses its boundary, (s, b, h); on the last virtual stage the
        scalar to be differentiated.

        ``x_sbh`` is None on the first virtual stage.
        """

    def key(self, micro_batch: int, boundary: int) -> Hashable:
        """Key of the data of a micro-batch that crosses a boundary, for codecs with memory."""


Span = Callable[[str, PipelineOp], AbstractContextManager[object]]
"""Context manager factory that times a part of an operation under a name."""


def untimed(name: str, op: PipelineOp) -> AbstractContextManager[object]:
    """A span that times nothing."""
    return nullcontext()


class PipelineEngine:
    """Executes schedules; with a single stage it is a plain loop over micro-batches.

    Args:
        layout: the mesh.
        stage: this rank's pipeline coordinate.
        channel: messages to the neighbors; None with a single stage.
        before_micro_batch: called with the number of a micro-batch before its forward and before its backward.
        begin_last_backward: called with a chunk before the backward of its last micro-batch, which completes its
            gradients.

    Attributes:
        loads_late: the device loads kernels at their first launch, as CUDA does; see ``first_launches``.
    """

    def __init__(
        self,
        layout: Layout,
        stage: int,
        channel: PipelineChannel | None,
        before_micro_batch: Callable[[int], None],
        begin_last_backward: Callable[[int], None],
    ) -> None:
        self.layout = layout
        self.stage = stage
        self.channel = channel
        self.before_micro_batch = before_micro_batch
        self.begin_last_backward = begin_last_backward
        self.loads_late = channel is not None and channel.device.type == "cuda"
        self.completed = CompletedLaunches()
        self._timetables: dict[tuple[str | None, int], Timetable] = {}

    def timetable(self, kind: str | None, num_micro_batches: int) -> Timetable:
        """The timetable of a training schedule (of ``SCHEDULES``), or of forwards alone (None)."""
        key = (kind, num_micro_batches)
        if key not in self._timetables:
            pp, chunks = self.layout.pp, self.layout.chunks
            schedules = [
                forward_only(chunks, pp, num_micro_batches)
                if kind is None
                else training_schedule(kind, pp, stage, chunks, num_micro_batches)
                for stage in range(pp)
            ]
            self._timetables[key] = timetable(self.layout, schedules)
        return self._timetables[key]

    def run(
        self,
        table: Timetable,
        programs: Sequence[StageProgram],
        iteration: int,
        num_micro_batches: int,
        loss_grad: Tensor | None,
        signatures: Sequence[Hashable],
        span: Span = untimed,
    ) -> None:
        """Runs a step.

        Args:
            table: the operations of every pipeline stage.
            programs: a program per chunk.
            iteration: training iteration; -1 in evaluation.
            num_micro_batches: micro-batches of the step.
            loss_grad: gradient of each micro-batch's scalar; None when nothing is differentiated.
            signatures: launch signatures (``first_launches``) of the programs and their callees; the engine adds those
                of the messages.
            span: times forward-compute, forward-recv, forward-send, and the same of backward.
        """
        ops = table.schedules[self.stage]
        activations: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        backwards_left = [sum(not op.is_forward and op.chunk == c for op in ops) for c in range(self.layout.chunks)]
        run = _StepMessages(self, table, iteration, num_micro_batches, programs, signatures)
        if ops:
            run.expect(ops[0])
        for op, following in zip(ops, [*ops[1:], None], strict=True):
            run.post()
            if following is not None:
                run.expect(following)
            slot = (op.chunk, op.micro_batch)
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
            with span("backward-compute", op):
                torch.autograd.backward(out, loss_grad if grad is None else grad)
            if x_sbh is not None:
                assert x_sbh.grad is not None
                with span("backward-send", op):
                    run.send(op, x_sbh.grad)
        run.end()


def max_sending(layout: Layout) -> int:
    """Maximum number of pending sends in a direction before a rank waits for the oldest.

    gloo cannot say that a send is done, so without a bound the messages of the whole step would stay in memory. No
    schedule lets a receiver fall behind by more than this, so waiting for an older message never blocks for long.
    """
    return 2 * layout.num_virtual_stages


POSTED_AHEAD = 2
"""Maximum number of receives posted ahead in each direction.

A send begins when its receive is posted: a late receive leaves the link idle while this rank computes. In 1F1B the
sender is at most one message ahead of the receiver, in eager 1F1B two.
"""


class _StepMessages:
    """A step's messages: their addresses, and when their receives are posted."""

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
        self._coming = {
            forward: deque(
                message
                for op in ops
                if op.is_forward is forward and (message := self._message(op, incoming=True)) is not None
            )
            for forward in (True, False)
        }
        self._posted = {True: 0, False: 0}
        self._received = {True: 0, False: 0}
        self._completed = engine.completed
        self._signatures: list[Hashable] = []
        self._ahead = True
        if engine.loads_late and self.channel is not None:
            sent = [message for op in ops if (message := self._message(op, incoming=False)) is not None]
            received = [message for messages in self._coming.values() for message in messages]
            self._signatures = [*signatures, *self.channel.launch_signature(sent, received)]
            self._ahead = self._completed.covers(self._signatures)

    def _message(self, op: PipelineOp, incoming: bool) -> Message | None:
        """The message of an operation's input, or of its output; None at the model's ends."""
        stage = self.layout.virtual_stage(self.stage, op.chunk)
        before = op.is_forward == incoming
        boundary = stage - 1 if before else stage
        if self.channel is None or not 0 <= boundary < self.layout.num_virtual_stages - 1:
            return None
        key = self.programs[op.chunk].key(op.micro_batch, boundary)
        return Message(self._way(op.is_forward), self._position(op, boundary, incoming), key)

    def _way(self, forward: bool) -> Direction:
        assert self.channel is not None
        return self.channel.forward if forward else self.channel.backward

    def _position(self, op: PipelineOp, boundary: int, incoming: bool) -> Position:
        late = False
        if not op.is_forward:
            sender = self.layout.virtual_stage(self.stage, op.chunk) + incoming
            sent = PipelineOp(Pass.BACKWARD, sender // self.layout.pp, op.micro_batch)
            late = sent in self.epilogues[sender % self.layout.pp]
        return Position(self.iteration, boundary, op.micro_batch, self.num_micro_batches, late)

    def post(self) -> None:
        """Posts the receives due before the next operation, and later receives if no kernel is loaded late."""
        due_receives = next(self._due)
        if self.channel is None:
            return
        posting = []
        for forward, count in ((True, due_receives.forward), (False, due_receives.backward)):
            ahead = self._received[forward] + POSTED_AHEAD if self._ahead else 0
            while self._coming[forward] and self._posted[forward] < max(count, ahead):
                posting.append(self._coming[forward].popleft())
                self._posted[forward] += 1
        self.channel.post(posting)
        if not self._ahead:
            self.channel.arrive()

    def expect(self, op: PipelineOp) -> None:
        """Announces the message that an operation will send."""
        message = self._message(op, incoming=False)
        if self.channel is not None and message is not None:
            self.channel.expect(message)

    def receive(self, op: PipelineOp) -> Tensor | None:
        message = self._message(op, incoming=True)
        if self.channel is None or message is None:
            return None
        self._received[op.is_forward] += 1
        return self.channel.recv(message)

    def send(self, op: PipelineOp, x: Tensor) -> None:
        message = self._message(op, incoming=False)
        if self.channel is not None and message is not None:
            self.channel.send(message, x)
            self.channel.flush(keep=max_sending(self.layout))

    def end(self) -> None:
        """Ends the step: waits until all of its sends have completed."""
        if self.channel is not None:
            self.channel.flush()
            self.channel.synchronize()
        self._completed.record(self._signatures)

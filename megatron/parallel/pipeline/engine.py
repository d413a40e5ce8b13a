"""Runs a list of pipeline operations on one rank: receives, computes, sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from megatron.comm.channel import PipelineChannel
from megatron.comm.policy import Position
from megatron.parallel.pipeline.schedule import PipelineOp, epilogue
from megatron.topology.layout import Layout


class StageProgram(Protocol):
    """What one chunk computes."""

    def forward(self, micro_batch: int, x_sbh: Tensor | None) -> Tensor:
        """Activation of the chunk, (s, b, h), or on the last virtual stage the scalar to be differentiated.

        ``x_sbh`` is None on the first virtual stage.
        """

    def key(self, micro_batch: int) -> Hashable:
        """Names the samples of a micro-batch, for codecs that remember them."""


Span = Callable[[str, PipelineOp], AbstractContextManager[object]]
"""Times a part of an operation under a name."""


def untimed(name: str, op: PipelineOp) -> AbstractContextManager[object]:
    """A span that times nothing."""
    return nullcontext()


class PipelineEngine:
    """Executes schedules; with one stage it is a plain loop over micro-batches.

    Args:
        layout: the mesh.
        stage: this rank's pipeline coordinate.
        channel: messages to the neighbors; None with a single stage.
        before_last_backward: called with a chunk before the backward of its last micro-batch, after which its
            gradients are final.
    """

    def __init__(
        self,
        layout: Layout,
        stage: int,
        channel: PipelineChannel | None,
        before_last_backward: Callable[[int], None],
    ) -> None:
        self.layout = layout
        self.stage = stage
        self.channel = channel
        self.before_last_backward = before_last_backward

    def run(
        self,
        schedules: Sequence[Sequence[PipelineOp]],
        programs: Sequence[StageProgram],
        iteration: int,
        num_micro_batches: int,
        loss_grad: Tensor | None,
        span: Span = untimed,
    ) -> None:
        """Runs one step.

        Args:
            schedules: the operations of every pipeline stage, in order.
            programs: one per chunk.
            iteration: training iteration; -1 in evaluation.
            num_micro_batches: micro-batches of the step.
            loss_grad: gradient of each micro-batch's scalar; None when nothing is differentiated.
            span: times forward-compute, forward-recv, forward-send, and the same of backward.
        """
        ops = schedules[self.stage]
        held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        backwards_left = [sum(not op.forward and op.chunk == c for op in ops) for c in range(self.layout.chunks)]
        run = _Run(self, schedules, iteration, num_micro_batches, programs)
        if ops:
            run.expect(ops[0])
        for op, following in zip(ops, [*ops[1:], None], strict=True):
            run.post()
            if following is not None:
                run.expect(following)
            slot = (op.chunk, op.micro_batch)
            if op.forward:
                with span("forward-recv", op):
                    x_sbh = run.receive(op)
                if x_sbh is not None and loss_grad is not None:
                    x_sbh.requires_grad_()
                with span("forward-compute", op):
                    out = programs[op.chunk].forward(op.micro_batch, x_sbh)
                with span("forward-send", op):
                    run.send(op, out)
                if loss_grad is not None:
                    held[slot] = (x_sbh, out)
                continue
            backwards_left[op.chunk] -= 1
            if backwards_left[op.chunk] == 0:
                self.before_last_backward(op.chunk)
            x_sbh, out = held.pop(slot)
            with span("backward-recv", op):
                grad = run.receive(op)
            with span("backward-compute", op):
                torch.autograd.backward(out, loss_grad if grad is None else grad)
            if x_sbh is not None:
                assert x_sbh.grad is not None
                with span("backward-send", op):
                    run.send(op, x_sbh.grad)
        if self.channel is not None:
            self.channel.flush()


def max_sending(layout: Layout) -> int:
    """Messages of one direction that may be on their way while a rank goes on.

    gloo cannot say that a send is done, so without a bound the messages of the whole step would stay in memory. No
    schedule lets a receiver fall behind by more than this, so waiting for an older message never blocks for long.
    """
    return 2 * layout.num_virtual_stages


POSTED_AHEAD = 2
"""Receives of each direction that wait for their messages at a time.

A send begins when its receive is posted: one that is posted late leaves the link idle while this rank computes. In 1F1B
the sender is at most one message ahead of the receiver, in eager 1F1B two.
"""


class _Run:
    """Addresses of one step's messages."""

    def __init__(
        self,
        engine: PipelineEngine,
        schedules: Sequence[Sequence[PipelineOp]],
        iteration: int,
        num_micro_batches: int,
        programs: Sequence[StageProgram],
    ) -> None:
        self.channel = engine.channel
        self.layout = engine.layout
        self.stage = engine.stage
        self.iteration = iteration
        self.num_micro_batches = num_micro_batches
        self.programs = programs
        self.epilogues = [epilogue(ops) for ops in schedules]
        ops = schedules[self.stage]
        self._coming = {
            forward: deque(op for op in ops if op.forward is forward and self._boundary(op, incoming=True) is not None)
            for forward in (True, False)
        }
        self._posted = {True: 0, False: 0}

    def _boundary(self, op: PipelineOp, incoming: bool) -> int | None:
        """The boundary over which an operation's input comes or its output goes; None at the model's ends."""
        stage = self.layout.virtual_stage(self.stage, op.chunk)
        before = op.forward == incoming
        boundary = stage - 1 if before else stage
        return boundary if 0 <= boundary < self.layout.num_virtual_stages - 1 else None

    def _position(self, op: PipelineOp, boundary: int, incoming: bool) -> Position:
        late = False
        if not op.forward:
            sender = self.layout.virtual_stage(self.stage, op.chunk) + incoming
            sent = PipelineOp(False, sender // self.layout.pp, op.micro_batch)
            late = sent in self.epilogues[sender % self.layout.pp]
        return Position(self.iteration, boundary, op.micro_batch, self.num_micro_batches, late)

    def post(self) -> None:
        """Posts the coming receives of both directions."""
        if self.channel is None:
            return
        for forward, coming in self._coming.items():
            way = self.channel.forward if forward else self.channel.backward
            while coming and self._posted[forward] < POSTED_AHEAD:
                op = coming.popleft()
                boundary = self._boundary(op, incoming=True)
                assert boundary is not None
                key = self.programs[op.chunk].key(op.micro_batch)
                self.channel.post(way, self._position(op, boundary, incoming=True), key)
                self._posted[forward] += 1

    def expect(self, op: PipelineOp) -> None:
        """Prepares for what an operation will send."""
        boundary = self._boundary(op, incoming=False)
        if self.channel is not None and boundary is not None:
            way = self.channel.forward if op.forward else self.channel.backward
            key = self.programs[op.chunk].key(op.micro_batch)
            self.channel.expect(way, self._position(op, boundary, incoming=False), key)

    def receive(self, op: PipelineOp) -> Tensor | None:
        boundary = self._boundary(op, incoming=True)
        if self.channel is None or boundary is None:
            return None
        way = self.channel.forward if op.forward else self.channel.backward
        key = self.programs[op.chunk].key(op.micro_batch)
        self._posted[op.forward] -= 1
        return self.channel.recv(way, self._position(op, boundary, incoming=True), key)

    def send(self, op: PipelineOp, x: Tensor) -> None:
        boundary = self._boundary(op, incoming=False)
        if self.channel is not None and boundary is not None:
            way = self.channel.forward if op.forward else self.channel.backward
            key = self.programs[op.chunk].key(op.micro_batch)
            self.channel.send(way, x, self._position(op, boundary, incoming=False), key)
            self.channel.flush(keep=max_sending(self.layout))

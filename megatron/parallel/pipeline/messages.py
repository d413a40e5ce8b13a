"""A step's messages on a rank: their addresses, and the times at which receives are posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megatron.distributed.layout import Layout
from megatron.distributed.policy import Position
from megatron.parallel.pipeline.channel import Message, PipelineChannel
from megatron.parallel.pipeline.schedule import Pass, PipelineOp
from megatron.parallel.pipeline.timetable import Route


class StageProgram(Protocol):
    """The computation of a chunk."""

    def forward(self, micro_batch: int, x_sbh: Tensor | None) -> Tensor:
        """Compute the chunk's activation (s, b, h), or on the last virtual stage the scalar to differentiate.

        ``x_sbh`` is None on the first virtual stage.
        """

    def key(self, micro_batch: int, boundary: int) -> Hashable:
        """Key of a micro-batch's message over a boundary, for codecs that remember samples."""


def max_pending_sends(layout: Layout) -> int:
    """Maximum number of pending sends in a direction before a rank waits for the oldest send.

    gloo does not report that a send has completed, so without a limit all messages of a step would stay in memory. No
    schedule lets a receiver fall further behind, so a wait for an older message is short.
    """
    return 2 * layout.num_virtual_stages


@dataclass
class StepMessages:
    """Addresses of a step's messages on a rank.

    Args:
        layout, stage, channel: see ``PipelineEngine``.
        iteration: training iteration; -1 in evaluation.
        programs: programs of this rank's chunks.
        epilogues: for every stage the operations with exposed messages.
        scale: loss scale in the step's gradients.
    """

    layout: Layout
    stage: int
    channel: PipelineChannel | None
    iteration: int
    programs: Sequence[StageProgram]
    epilogues: Sequence[frozenset[PipelineOp]]
    scale: float = 1.0
    _handed_over: dict[tuple[bool, int, int], Tensor] = field(default_factory=dict)

    def boundary(self, op: PipelineOp, incoming: bool) -> int | None:
        """Boundary of the input or the output of an operation.

        None at the model's first input and last output, and for weight passes.
        """
        if op.computation is Pass.WEIGHT:
            return None
        stage = self.layout.virtual_stage(self.stage, op.chunk)
        boundary = stage - 1 if op.is_forward == incoming else stage
        return boundary if 0 <= boundary < self.layout.num_virtual_stages - 1 else None

    def route(self, op: PipelineOp) -> Route:
        """Route of the message with the input of an operation."""
        boundary = self.boundary(op, incoming=True)
        assert boundary is not None
        return op.is_forward, self.layout.ends_of(boundary, op.is_forward)[0]

    def address(self, op: PipelineOp, incoming: bool) -> Message | None:
        """Address of the input or the output of an operation; None if there is none, or it stays on this rank."""
        boundary = self.boundary(op, incoming)
        if self.channel is None or boundary is None or not self.layout.crosses(boundary):
            return None
        late = False
        if not op.is_forward:
            rank, chunk = self.layout.place_of(boundary + 1)
            late = PipelineOp(Pass.BACKWARD, chunk, op.micro_batch) in self.epilogues[rank]
        position = Position(self.iteration, boundary, op.micro_batch, late)
        direction = self.channel.forward if op.is_forward else self.channel.backward
        return Message(direction, position, self.programs[op.chunk].key(op.micro_batch, boundary), self.scale)

    def expect(self, op: PipelineOp) -> None:
        """Announce the message that an operation will send, so that its codec can prefetch."""
        message = self.address(op, incoming=False)
        if self.channel is not None and message is not None:
            self.channel.expect(message)

    def receive(self, op: PipelineOp, receives: PostedReceives) -> Tensor | None:
        """Receive the input of an operation; None if it has none."""
        boundary, message = self.boundary(op, incoming=True), self.address(op, incoming=True)
        if self.channel is not None and message is not None:
            receives.count(self.route(op))
            return self.channel.recv(message)
        return None if boundary is None else self._handed_over.pop((op.is_forward, boundary, op.micro_batch))

    def send(self, op: PipelineOp, x: Tensor, max_ahead: int) -> None:
        """Send the output of an operation; wait for old sends beyond those that receivers may fall behind."""
        boundary, message = self.boundary(op, incoming=False), self.address(op, incoming=False)
        if self.channel is not None and message is not None:
            self.channel.send(message, x)
            self.channel.flush(keep=max(max_pending_sends(self.layout), max_ahead + 1))
        elif boundary is not None:
            # The next chunk is on this rank, too: there is no message, and no codec.
            self._handed_over[op.is_forward, boundary, op.micro_batch] = x.detach()


class PostedReceives:
    """Receives of a rank, posted in the order in which their messages are sent.

    Args:
        channel: channel to the neighboring stages; None with a single stage.
        max_ahead: maximum number of receives posted before they are due, on each route.

    ``posts_ahead``: whether all kernels are loaded, so that receives may be pending (``first_launches``).
    """

    def __init__(self, channel: PipelineChannel | None, max_ahead: int) -> None:
        self.channel = channel
        self.max_ahead = max_ahead
        self.posts_ahead = True
        self._incoming: dict[Route, deque[Message]] = {}
        self._posted: dict[Route, int] = {}
        self._received: dict[Route, int] = {}

    def add(self, step: StepMessages, ops: Iterable[PipelineOp]) -> list[Message]:
        """Add the inputs of operations, in order on each route; return their messages."""
        messages = []
        for op in ops:
            if (message := step.address(op, incoming=True)) is not None:
                self._incoming.setdefault(step.route(op), deque()).append(message)
                messages.append(message)
        return messages

    def count(self, route: Route) -> None:
        """Count a receive that is about to be waited for."""
        self._received[route] = self._received.get(route, 0) + 1

    def post(self, num_due: Mapping[Route, int]) -> None:
        """Post the receives that are due before the next operation, and later receives if they may be pending.

        Args:
            num_due: number of receives on each route that are due.
        """
        if self.channel is None:
            return
        posting = []
        for route, messages in self._incoming.items():
            ahead = self._received.get(route, 0) + self.max_ahead if self.posts_ahead else 0
            while messages and self._posted.get(route, 0) < max(num_due[route], ahead):
                posting.append(messages.popleft())
                self._posted[route] = self._posted.get(route, 0) + 1
        self.channel.post(posting)
        if not self.posts_ahead:
            self.channel.wait_for_posted()

"""Messages between pipeline stages: activations and their gradients, encoded by codecs.

Receives can be posted early and sends complete in the background, so both overlap with computation. On CUDA, a posted
receive occupies the device until its message arrives; ``first_launches.py`` decides when a receive may be posted. The
boundary between two virtual stages has the number of the earlier stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.compression.api import Codec, Payload
from megatron.compression.identity import IdentityCodec
from megatron.compression.options import CompressorFault
from megatron.compression.points import Point
from megatron.compression.results import check_fit
from megatron.compression.state import CompressorState
from megatron.distributed.group import Group, Pending
from megatron.distributed.layout import Layout
from megatron.distributed.ledger import Ledger
from megatron.distributed.observer import SentMessage
from megatron.distributed.policy import CompressionPlan, Position
from megatron.parallel.tensor.collectives import TensorComm

_IDENTITY = IdentityCodec()
_CAPACITY = 2
"""Size of a mailbox's buffers, relative to the message in fp32 or fp64: codecs may add scales and other data."""
_MIN_CAPACITY = 4096
"""Minimum bytes of these buffers."""
_GATHER_POINTS = {Point.PP_FWD: Point.TP_FWD, Point.PP_BWD: Point.TP_BWD}
"""Tensor-parallel points for all-gathers of split messages, by pipeline point."""


@dataclass
class Direction:
    """Direction of pipeline traffic: this rank's messages and codec states.

    ``posted`` holds receives by boundary and micro-batch, ``newest`` the last posted receive by sending rank, and
    ``mailboxes``, by boundary, the receives of messages that are not known yet, with their buffers. ``sending`` holds
    the sends that may be pending, ``sent`` and ``received`` the codec states by boundary, ``iteration`` the iteration
    of the last sent message, and ``crossed`` the boundaries over which this rank has sent a message.
    """

    point: Point
    group: Group
    posted: dict[tuple[int, int], tuple[Payload, Pending]] = field(default_factory=dict)
    newest: dict[int, Pending] = field(default_factory=dict)
    mailboxes: dict[int, deque[tuple[Tensor, Pending]]] = field(default_factory=dict)
    sending: deque[tuple[Payload, Pending]] = field(default_factory=deque)
    sent: dict[int, CompressorState] = field(default_factory=dict)
    received: dict[int, CompressorState] = field(default_factory=dict)
    iteration: int | None = None
    crossed: set[int] = field(default_factory=set)

    def states(self) -> Iterator[CompressorState]:
        """Codec states of this rank's senders and receivers."""
        yield from (*self.sent.values(), *self.received.values())


@dataclass(frozen=True)
class Message:
    """Address of a pipeline message.

    Args:
        direction: direction of the message.
        position: position in the run.
        key: key of the content (see ``Codec``).
        scale: loss scale in the step's gradients.
    """

    direction: Direction
    position: Position
    key: Hashable
    scale: float = 1.0


class PipelineChannel:
    """This rank's pipeline messages in both directions.

    Args:
        layout: the mesh.
        forward_link, backward_link: groups of the pipeline's ranks, one group per direction.
        plan: plan with the compressors of ``PP_FWD`` and ``PP_BWD``.
        ledger: ledger that counts the bytes.
        shapes: shape (sequence, batch, hidden) of this rank's message by boundary. Shapes may change between steps,
            identically on all ranks.
        dtype, device: dtype and device of activations and their gradients.
        tensor_comm: tensor-parallel ranks, if each of them sends an equal part of the sequence of a replicated
            activation and the receivers all-gather the parts. None if each rank sends its full tensor.
    """

    def __init__(
        self,
        layout: Layout,
        forward_link: Group,
        backward_link: Group,
        plan: CompressionPlan,
        ledger: Ledger,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        tensor_comm: TensorComm | None = None,
    ) -> None:
        self.layout = layout
        self.plan = plan
        self.ledger = ledger
        self.shapes = shapes
        self.dtype = dtype
        self.device = device
        self.tensor_comm = tensor_comm
        self.mailbox_buffers = 0
        self.forward = Direction(Point.PP_FWD, forward_link)
        self.backward = Direction(Point.PP_BWD, backward_link)

    def states(self) -> Iterator[CompressorState]:
        """Codec states of this rank's senders and receivers."""
        for direction in (self.forward, self.backward):
            yield from direction.states()

    def reset_states(self) -> None:
        """Reset the codec states. All ranks must do so, between two steps without messages in flight."""
        for direction in (self.forward, self.backward):
            direction.sent.clear()
            direction.received.clear()

    def residuals(self) -> Iterator[tuple[Point, str, CompressorState]]:
        """Point, name and codec state of each sender on this rank."""
        for direction in (self.forward, self.backward):
            for boundary, state in direction.sent.items():
                yield direction.point, f"boundary {boundary}", state

    def _ends(self, direction: Direction, position: Position) -> tuple[int, int]:
        """Pipeline ranks that send and receive a message."""
        return self.layout.ends_of(position.boundary, forward=direction.point is Point.PP_FWD)

    def _codec(self, direction: Direction, position: Position) -> Codec:
        """Codec of a message, the same for sender and receiver."""
        sender, _ = self._ends(direction, position)
        covered = self.plan.covers(direction.point, sender)
        active = covered and self.plan.activation(direction.point).is_active(position.iteration, position.epilogue)
        # Without a flush, receives are posted between passes of another step.
        codec = self.plan.codec(direction.point, position.iteration) if active else _IDENTITY
        # ``should_compress`` takes the dtype before widening.
        return codec if codec.should_compress(self.shapes[position.boundary], self.dtype) else _IDENTITY

    def _input_format(self, message: Message, codec: Codec) -> tuple[torch.dtype, float]:
        """Dtype of a codec's input, fp32 (or fp64) unless the codec takes any dtype, and the loss scale to remove."""
        backward = message.direction.point is Point.PP_BWD
        if codec.traits.exact or not (backward or codec.traits.widened):
            return self.dtype, 1.0
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return wide, message.scale if backward else 1.0

    def launch_signature(self, sent: Sequence[Message], received: Sequence[Message]) -> list[Hashable]:
        """Launch signatures of a step's messages on this rank, one for each sender and receiver.

        Args:
            sent, received: the step's messages, in order for each boundary.
        """
        ends: dict[tuple[Point, int, bool], list[Message]] = {}
        for sends, messages in ((True, sent), (False, received)):
            for message in messages:
                ends.setdefault((message.direction.point, message.position.boundary, sends), []).append(message)
        signatures: list[Hashable] = []
        for end, messages in ends.items():
            direction, (_, boundary, sends) = messages[0].direction, end
            state = (direction.sent if sends else direction.received).setdefault(boundary, CompressorState())
            keys: dict[Codec, list[Hashable]] = {}
            codecs = [self._codec(direction, message.position) for message in messages]
            for codec, message in zip(codecs, messages, strict=True):
                keys.setdefault(codec, []).append(message.key)
            shape = self.shapes[boundary]
            launches = [codec.launch_signature(shape, state, content_keys) for codec, content_keys in keys.items()]
            signature = end, tuple(shape), messages[0].scale == 1.0, tuple(codecs), tuple(launches)
            signatures.append(None if None in launches else signature)
        if self.tensor_comm is not None:
            signatures += [
                (point, "gather", tuple(self.shapes[boundary]), self.tensor_comm.gather_codec(_GATHER_POINTS[point]))
                for point, boundary, sends in ends
                if not sends
            ]
        return signatures

    def send(self, message: Message, x: Tensor) -> None:
        """Start sending ``x``, or this rank's part of it if tensor-parallel ranks split messages."""
        x = x if self.tensor_comm is None else self.tensor_comm.local_slice(x)
        direction, position, key = message.direction, message.position, message.key
        if direction.iteration != position.iteration:  # reset residuals that last a single step
            direction.iteration = position.iteration
            for state in direction.sent.values():
                self.plan.codec(direction.point).begin_step(state)
        codec = self._codec(direction, position)
        dtype, scale = self._input_format(message, codec)
        with self.ledger.encoding(direction.point):
            wide = x.detach().to(dtype)
            state = direction.sent.setdefault(position.boundary, CompressorState())
            wide = wide if scale == 1.0 else wide / scale
            is_fresh = position.boundary not in direction.crossed and state.empty
            payload = self.ledger.audited(direction.point, codec).encode(wide, state, key)
        direction.crossed.add(position.boundary)
        if is_fresh:
            self._check_size(direction, codec, wide, payload, key)
        for observer in self.ledger.observers:
            observer.on_send(SentMessage(direction.point, position, wide, codec, payload, state, key))
        if self.mailbox_buffers and payload.nbytes > self._capacity(position.boundary):
            raise CompressorFault(
                f"{direction.point.value}: a message has {payload.nbytes:,} bytes, more than {_CAPACITY} times as "
                "many as without compression; leave --no-pipeline-flush out"
            )
        _, receiver = self._ends(direction, position)
        pending = direction.group.send(payload.wire, receiver, tag=position.boundary)
        self.ledger.count_message(direction.point, payload.nbytes, x.nbytes)
        direction.sending.append((payload, pending))
        while direction.sending and direction.sending[0][1].done():
            self.ledger.wait_for(direction.point, direction.sending.popleft()[1])

    def _check_size(self, direction: Direction, codec: Codec, x: Tensor, payload: Payload, key: Hashable) -> None:
        """Check that the first message over a boundary fills the receiver's buffer, which is decoded as a whole.

        Raises:
            CompressorFault: with the point, when it does not.
        """
        room = codec.empty_payload(x.shape, x.dtype, x.device, CompressorState(), key)
        try:
            check_fit(payload, room)
        except CompressorFault as fault:
            raise CompressorFault(f"{direction.point.value}: {fault}") from fault

    def expect(self, message: Message) -> None:
        """Announce a message that will be sent soon, so that the codec can prefetch."""
        direction, position = message.direction, message.position
        state = direction.sent.setdefault(position.boundary, CompressorState())
        self._codec(direction, position).expect(self.shapes[position.boundary], state, message.key)

    def post(self, messages: Sequence[Message]) -> None:
        """Post receives in this order, without kernel launches between the first and the last receive."""
        payloads = [self._empty_payload(message) for message in messages]
        for message, payload in zip(messages, payloads, strict=True):
            direction, position = message.direction, message.position
            sender, _ = self._ends(direction, position)
            direction.newest[sender] = direction.group.recv(payload.wire, sender, tag=position.boundary)
            direction.posted[position.boundary, position.micro_batch] = (payload, direction.newest[sender])

    def _empty_payload(self, message: Message) -> Payload:
        direction, boundary = message.direction, message.position.boundary
        codec = self._codec(direction, message.position)
        state = direction.received.setdefault(boundary, CompressorState())
        dtype, _ = self._input_format(message, codec)
        return codec.empty_payload(self.shapes[boundary], dtype, self.device, state, message.key)

    def open_mailboxes(self, buffers: int) -> None:
        """Post receives of messages that are not known yet, until ``close_mailboxes``; for gloo.

        A gloo message leaves its sender only when a notice of the posted receive has arrived there, and that notice
        queues behind all data on the link. A stage that posted receives at the beginning of each step would wait for
        the notice in each step in which the neighbor is ready to send earlier. NCCL needs the sizes of messages to post
        their receives.

        Args:
            buffers: number of buffers for each boundary; a sender that is further ahead waits.
        """
        self.mailbox_buffers = buffers
        for direction in (self.forward, self.backward):
            for boundary, sender in self._neighbors(direction, sends=False):
                mailbox = direction.mailboxes.setdefault(boundary, deque())
                for _ in range(buffers):
                    buffer = torch.empty(self._capacity(boundary), dtype=torch.uint8, device=self.device)
                    mailbox.append((buffer, direction.group.recv(buffer, sender, tag=boundary)))

    def close_mailboxes(self) -> None:
        """Fill the buffers of all mailboxes with one-byte messages. A collective call; no message may be in flight."""
        filler, sends = torch.zeros(1, dtype=torch.uint8, device=self.device), list[Pending]()
        for direction in (self.forward, self.backward):
            for boundary, receiver in self._neighbors(direction, sends=True):
                sends += [direction.group.send(filler, receiver, boundary) for _ in range(self.mailbox_buffers)]
        for direction in (self.forward, self.backward):
            for mailbox in direction.mailboxes.values():
                for _, pending in mailbox:
                    pending.wait()
            direction.mailboxes.clear()
        for pending in sends:
            pending.wait()
        self.mailbox_buffers = 0

    def _neighbors(self, direction: Direction, sends: bool) -> Iterator[tuple[int, int]]:
        """Boundaries over which this rank sends, or receives, and the ranks on their other sides."""
        for boundary in range(len(self.shapes)):
            sender, receiver = self.layout.ends_of(boundary, forward=direction.point is Point.PP_FWD)
            if self.layout.crosses(boundary) and direction.group.rank == (sender if sends else receiver):
                yield boundary, receiver if sends else sender

    def _capacity(self, boundary: int) -> int:
        """Maximum bytes of a message over a boundary in a mailbox."""
        itemsize = 8 if self.dtype == torch.float64 else 4
        return max(_CAPACITY * self.shapes[boundary].numel() * itemsize, _MIN_CAPACITY)

    def wait_for_posted(self) -> None:
        """Block the host until all posted receives have completed."""
        for direction in (self.forward, self.backward):
            for _, pending in direction.posted.values():
                if not pending.waited:
                    self.ledger.wait_for(direction.point, pending)
        self.synchronize()

    def synchronize(self) -> None:
        """Block the host until all receives after their ``wait`` have completed on the device."""
        for direction in (self.forward, self.backward):
            for pending in direction.newest.values():
                pending.synchronize()

    def recv(self, message: Message) -> Tensor:
        """Wait for a posted message, or the next message of an open mailbox; decode it, and all-gather the parts of a
        split message."""
        direction, position, key = message.direction, message.position, message.key
        if self.mailbox_buffers:
            payload, mailbox = self._empty_payload(message), direction.mailboxes[position.boundary]
            buffer, pending = mailbox.popleft()
            self.ledger.wait_for(direction.point, pending)
            payload.wire.view(-1).view(torch.uint8).copy_(buffer[: payload.nbytes])
            sender, _ = self._ends(direction, position)
            mailbox.append((buffer, direction.group.recv(buffer, sender, tag=position.boundary)))
        else:
            payload, pending = direction.posted.pop((position.boundary, position.micro_batch))
            if not pending.waited:
                self.ledger.wait_for(direction.point, pending)
        codec = self._codec(direction, position)
        dtype, scale = self._input_format(message, codec)
        with self.ledger.decoding(direction.point):
            x = codec.decode(payload, self.shapes[position.boundary], dtype, direction.received[position.boundary], key)
            x = (x if scale == 1.0 else x * scale).to(self.dtype)
        for observer in self.ledger.observers:
            observer.on_receive(direction.point, position, x)
        if self.tensor_comm is None:
            return x
        return self.tensor_comm.at(f"boundary {position.boundary}").gather(x, _GATHER_POINTS[direction.point])

    def flush(self, keep: int = 0) -> None:
        """Wait until at most ``keep`` sends of each direction are pending."""
        for direction in (self.forward, self.backward):
            while len(direction.sending) > keep:
                self.ledger.wait_for(direction.point, direction.sending.popleft()[1])

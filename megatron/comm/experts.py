"""The expert-parallel points: rows of tokens go to the ranks that hold their experts, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.comm.draws import StepDraws
from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan
from megatron.compression.api import Codec, Payload
from megatron.compression.identity import IdentityCodec
from megatron.compression.points import EXPERT_POINTS, Point
from megatron.compression.state import CompressorState
from megatron.topology.group import Group, NodeSplit, num_bytes

_EXACT_CODEC = IdentityCodec()


@dataclass(frozen=True)
class Leg:
    """One way of rows between ranks, and the way of their gradients.

    Args:
        forward, backward: the points of the rows and of their gradients.
        sent, received: rows that this rank sends to each rank, and gets from each.
        layer: number of the layer.
    """

    forward: Point
    backward: Point
    sent: tuple[int, ...]
    received: tuple[int, ...]
    layer: int


class RowCoding:
    """The codecs of the four points, which keep no state: recomputation runs the forward ones again."""

    def __init__(self, plan: CompressionPlan) -> None:
        self._plan = plan
        self._on = dict.fromkeys(EXPERT_POINTS, False)
        self.draws = StepDraws()

    def begin(self, iteration: int) -> None:
        """Begins a step; -1 stands for an evaluation."""
        self.draws.begin(iteration)
        for point in self._on:
            covered = self._plan.covers(point, self._plan.stage)
            self._on[point] = covered and self._plan.activation(point).on(iteration)

    def codec(self, point: Point) -> Codec:
        """The codec of a point in this step."""
        return self._plan.codec(point) if self._on.get(point) else _EXACT_CODEC

    def state(self, point: Point, *message: int) -> CompressorState:
        """A state for one message, which is known by ``message`` among those of the point."""
        return self.draws.state(point.value, *message) if self._on.get(point) else CompressorState()


class RowExchange:
    """Exchanges of rows among the ranks of a group.

    A message holds the rows of one rank for another one, as the codec encodes them: rows are not compressed together
    with those of other ranks, and this rank's own rows not at all.

    Args:
        group: the ranks.
        ledger: where the bytes are counted.
        coding: the codecs; None where rows go as they are.
        inside: whether the ranks are on one node, and this is known.
    """

    def __init__(self, group: Group, ledger: Ledger, coding: RowCoding | None, inside: bool = False) -> None:
        self.group = group
        self.ledger = ledger
        self.inside = inside
        self.coding = coding

    @property
    def size(self) -> int:
        return self.group.size

    def exchange_counts(self, counts_rn: Tensor) -> Tensor:
        """The counts that each rank has for this one, from those that this rank has for each.

        Args:
            counts_rn: (ranks, counts), int64; they go as int32.
        """
        own = counts_rn.to(torch.int32)
        result = torch.empty_like(own)
        pending = self.group.exchange(result, own)
        self.ledger.sent(Point.CONTROL, pending.sent_bytes, inside_bytes=self._inside(pending.sent_bytes))
        self.ledger.wait(Point.CONTROL, pending)
        return result.to(torch.int64)

    def move(self, rows: Tensor, leg: Leg) -> Tensor:
        """Sends rows (those for the first rank first) and returns those that came, in the order of the ranks.

        Gradients go the other way.
        """
        result: Tensor = _Move.apply(rows, self, leg)
        return result

    def move_choices(
        self, weights_p: Tensor, numbers_p: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Sends a weight and a number below 2^24 for each choice, exactly; the weights' gradients go the other way."""
        found: tuple[Tensor, Tensor] = _MoveChoices.apply(weights_p, numbers_p, self, sent, received)
        return found

    def exchange(
        self, rows: Tensor, point: Point, sent: Sequence[int], received: Sequence[int], layer: int = 0
    ) -> Tensor:
        """Sends rows and returns those that came, without a gradient; see ``move``."""
        if self.size == 1:
            return rows
        rank, ranks = self.group.rank, self.group.ranks
        # As codecs have activations: tokens, samples, hidden.
        parts = rows.unsqueeze(1).split(list(sent))
        out = rows.new_empty((sum(received), rows.shape[1]))
        places = out.unsqueeze(1).split(list(received))
        with self.ledger.encoding(point):
            there = [self._state(point, layer, ranks[rank], r) for r in ranks]
            here = [self._state(point, layer, r, ranks[rank]) for r in ranks]
            wires = [
                self._encode(part, point, there[r]) if r != rank else _nothing(rows) for r, part in enumerate(parts)
            ]
            places[rank].copy_(parts[rank])
            buffers = [
                self._buffer(place, point, here[r]) if r != rank else _nothing(rows) for r, place in enumerate(places)
            ]
        pending = self.group.exchange_parts([_flat(x) for x in buffers], [_flat(x) for x in wires])
        raw = num_bytes(rows) - num_bytes(parts[rank])
        self.ledger.sent(point, pending.sent_bytes, raw, self._inside(pending.sent_bytes))
        self.ledger.wait(point, pending)
        with self.ledger.decoding(point):
            for r, (place, wire) in enumerate(zip(places, buffers, strict=True)):
                if r != rank and place.numel():
                    place.copy_(self._decode(wire, place, point, here[r]))
        return out

    def _inside(self, sent_bytes: int) -> int:
        return sent_bytes if self.inside else 0

    def _codec(self, rows: Tensor, point: Point) -> Codec:
        codec = _EXACT_CODEC if self.coding is None else self.coding.codec(point)
        return codec if codec.should_compress(rows.shape, rows.dtype) else _EXACT_CODEC

    def _state(self, point: Point, *message: int) -> CompressorState:
        return CompressorState() if self.coding is None else self.coding.state(point, *message)

    def _encode(self, rows: Tensor, point: Point, state: CompressorState) -> Tensor:
        if not rows.numel():
            return _nothing(rows)
        codec = self._codec(rows, point)
        return codec.encode(rows.to(_input_dtype(codec, rows.dtype)), state, None).wire

    def _buffer(self, rows: Tensor, point: Point, state: CompressorState) -> Tensor:
        if not rows.numel():
            return _nothing(rows)
        codec = self._codec(rows, point)
        dtype = _input_dtype(codec, rows.dtype)
        return codec.empty_payload(rows.shape, dtype, rows.device, state, None).wire

    def _decode(self, wire: Tensor, rows: Tensor, point: Point, state: CompressorState) -> Tensor:
        codec = self._codec(rows, point)
        return codec.decode(Payload(wire), rows.shape, _input_dtype(codec, rows.dtype), state, None)


class ExpertComm:
    """The expert-parallel points of one rank.

    In one stage a row goes to the rank of its expert. In two stages it goes to the node first, once for all the experts
    that the token has there: to the rank at this one's place, which hands it on. The codecs serve the first stage; rows
    inside a node go as they are.

    Args:
        group: the ranks that share the experts of each layer; cut by node where the stages may be two.
        ledger: where the bytes are counted.
        plan: the codecs of the four points, and when they are on.
        two_stage: whether the stages are two: where they are of several ranks each (``auto``), wherever ranks are on
            several nodes (``on``), or never (``off``).
        folded: tensor-parallel ranks hold experts of their own, and send their own tokens.

    ``ranks`` are those among which rows go to their experts: all, or those of this rank's node. ``nodes`` are those at
    this rank's place of all nodes; None in one stage.
    """

    def __init__(
        self,
        group: Group,
        ledger: Ledger,
        plan: CompressionPlan,
        two_stage: Literal["auto", "on", "off"] = "off",
        folded: bool = False,
    ) -> None:
        self.group = group
        self.folded = folded
        self._coding = RowCoding(plan)
        split = group.split if two_stage != "off" else None
        self.nodes: RowExchange | None = None
        self.ranks = RowExchange(group, ledger, self._coding)
        self.node_of: tuple[int, ...] = ()
        self.place_of: tuple[int, ...] = tuple(range(group.size))
        if split is not None and split.across.size > 1 and (split.node.size > 1 or two_stage == "on"):
            self.nodes = RowExchange(split.across, ledger, self._coding)
            self.ranks = RowExchange(split.node, ledger, None, inside=True)
            self.node_of, self.place_of = _ways(split, group)

    @property
    def size(self) -> int:
        """Number of ranks that share the experts."""
        return self.group.size

    @property
    def draws(self) -> StepDraws:
        """What random numbers depend on, those of the tensor-parallel points' messages, too."""
        return self._coding.draws

    def begin(self, iteration: int) -> None:
        """Begins a step; -1 stands for an evaluation."""
        self._coding.begin(iteration)

    def count(self, chosen: Tensor, experts: int, most: int | None = None, total: int | None = None) -> Tensor:
        """Rows of each expert, int64, from the expert of each row; those of the number beyond the last have none.

        Args:
            chosen: int64 experts of any shape.
            experts: number of them.
            most: rows that each takes at most, None for any; for those that cannot look at ``chosen``, as the next.
            total: all rows that have come to the experts of a node; None where they have not been sent yet.
        """
        return _tally(chosen, experts)

    def count_by_node(self, once_tk: Tensor, node_tk: Tensor, experts: int, most: int | None) -> tuple[Tensor, Tensor]:
        """Rows and choices of each node, int64, from the nodes of tokens' choices; the number beyond the last is none.

        Args:
            once_tk: each node of a token once.
            node_tk: the node of each choice.
            experts: number of experts of all nodes.
            most: choices that each expert takes at most, None for any.
        """
        assert self.nodes is not None
        nodes = self.nodes.size
        return _tally(once_tk, nodes), _tally(node_tk, nodes)


def _tally(numbers: Tensor, count: int) -> Tensor:
    """How often each number below ``count`` is there, int64; ``count`` itself may be, too.

    torch's bincount would look for the largest one, for which the host waits.
    """
    flat = numbers.flatten()
    return flat.new_zeros(count + 1).scatter_add_(0, flat, torch.ones_like(flat))[:count]


def _ways(split: NodeSplit, group: Group) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How to reach each rank of the group from this one: the rank of ``split.across`` on its node, and its own in that
    one's ``split.node``."""
    node_of, place_of = [0] * group.size, [0] * group.size
    own = next(part.index(group.rank) for part in split.nodes if group.rank in part)
    for part in split.nodes:
        for place, position in enumerate(part):
            node_of[position] = split.across.ranks.index(group.ranks[part[own]])
            place_of[position] = place
    return tuple(node_of), tuple(place_of)


class _Move(torch.autograd.Function):
    """Rows to their experts' ranks or back; their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: RowExchange, leg: Leg) -> Tensor:
        ctx.comm, ctx.leg = comm, leg
        return comm.exchange(rows.contiguous(), leg.forward, leg.sent, leg.received, leg.layer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        leg: Leg = ctx.leg
        rows: Tensor = ctx.comm.exchange(grad.contiguous(), leg.backward, leg.received, leg.sent, leg.layer)
        return rows, None, None


class _MoveChoices(torch.autograd.Function):
    """Weights and whole numbers to other ranks; the weights' gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        weights_p: Tensor,
        numbers_p: Tensor,
        comm: RowExchange,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        ctx.comm, ctx.sent, ctx.received = comm, sent, received
        both = torch.stack([numbers_p.to(weights_p.dtype), weights_p], dim=1)
        numbers, weights = comm.exchange(both, Point.CONTROL, sent, received).unbind(1)
        found = weights.contiguous(), numbers.to(torch.int64)
        ctx.mark_non_differentiable(found[1])
        return found

    @staticmethod
    def backward(ctx: Any, grad_p: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows = grad_p.contiguous().unsqueeze(1)
        return ctx.comm.exchange(rows, Point.CONTROL, ctx.received, ctx.sent).squeeze(1), None, None, None, None


def _input_dtype(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """Dtype of what a codec is given: fp32 (or fp64), or for an exact one that of the rows."""
    return dtype if codec.traits.exact else torch.promote_types(dtype, torch.float32)


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8)


def _flat(wire: Tensor) -> Tensor:
    """The bytes of a message, which may have any type."""
    return wire.view(-1).view(torch.uint8) if wire.numel() else wire

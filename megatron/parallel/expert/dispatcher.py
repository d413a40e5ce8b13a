"""Expert-parallel communication: dispatch of tokens to the ranks of their experts, and combine of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.compression.api import Codec, Payload
from megatron.compression.identity import IdentityCodec
from megatron.compression.points import EXPERT_POINTS, Point
from megatron.compression.state import CompressorState
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.message_seeds import MessageSeeds
from megatron.distributed.policy import CompressionPlan

_EXACT_CODEC = IdentityCodec()


@dataclass(frozen=True)
class Leg:
    """A dispatch or combine of rows in the forward pass, with the reverse exchange of the gradients.

    Args:
        forward, backward: communication points of the rows and of their gradients.
        sent, received: numbers of rows that this rank sends to each rank and receives from each rank.
        layer: number of the layer.
    """

    forward: Point
    backward: Point
    sent: tuple[int, ...]
    received: tuple[int, ...]
    layer: int


class RowCoding:
    """Codecs of the four expert-parallel points, without state, because recomputation repeats the forward messages."""

    def __init__(self, plan: CompressionPlan, seeds: MessageSeeds | None = None) -> None:
        self._plan = plan
        self._active = dict.fromkeys(EXPERT_POINTS, False)
        self.seeds = seeds or MessageSeeds()

    def begin_step(self, iteration: int) -> None:
        """Begin a step, or an evaluation (-1)."""
        self.seeds.begin_step(iteration)
        for point in self._active:
            self._active[point] = self._plan.compresses(point, iteration)

    def codec(self, point: Point) -> Codec:
        """Codec of a point in this step."""
        return self._plan.codec(point) if self._active.get(point) else _EXACT_CODEC

    def state(self, point: Point, *message: int) -> CompressorState:
        """State for a single message. ``message`` identifies it within the point and seeds stochastic codecs."""
        return self.seeds.state(point.value, *message) if self._active.get(point) else CompressorState()


@dataclass(eq=False)
class RowExchange:
    """All-to-all of rows over a group.

    The rows for each other rank are encoded as a message. Rows that stay on this rank are never compressed.

    Args:
        group: ranks of the exchange.
        ledger: ledger that counts the bytes.
        coding: codecs; None for uncompressed rows.
        inside: whether all ranks are known to be on the same node.
    """

    group: Group
    ledger: Ledger
    coding: RowCoding | None
    inside: bool = False

    @property
    def size(self) -> int:
        return self.group.size

    def exchange_counts(self, counts_rn: Tensor) -> Tensor:
        """All-to-all of counts: send row i to rank i, and return the rows that the ranks send to this rank.

        Args:
            counts_rn: (ranks, counts), int64; sent as int32.
        """
        send_counts = counts_rn.to(torch.int32)
        result = torch.empty_like(send_counts)
        pending = self.group.all_to_all(result, send_counts)
        self.ledger.complete(Point.CONTROL, pending, inside_bytes=pending.sent_bytes if self.inside else 0)
        return result.to(torch.int64)

    def move(self, rows: Tensor, leg: Leg) -> Tensor:
        """All-to-all of rows in rank order, with autograd; gradients take the reverse path."""
        result: Tensor = _MoveRows.apply(rows, self, leg)
        return result

    def move_choices(
        self, weights_p: Tensor, numbers_p: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Send a weight and an integer below 2^24 per choice, uncompressed; weight gradients take the reverse path."""
        result: tuple[Tensor, Tensor] = _MoveChoices.apply(weights_p, numbers_p, self, sent, received)
        return result

    def exchange(
        self, rows: Tensor, point: Point, sent: Sequence[int], received: Sequence[int], layer: int = 0
    ) -> Tensor:
        """All-to-all of rows without autograd; see ``move``."""
        if self.size == 1:
            return rows
        rank, ranks = self.group.rank, self.group.ranks
        # Codecs take activations as (tokens, samples, hidden).
        row_blocks = rows.unsqueeze(1).split(list(sent))
        out = rows.new_empty((sum(received), rows.shape[1]))
        out_blocks = out.unsqueeze(1).split(list(received))
        with self.ledger.encoding(point):
            send_states = [self._state(point, layer, ranks[rank], r) for r in ranks]
            recv_states = [self._state(point, layer, r, ranks[rank]) for r in ranks]
            wires = [rows.new_empty(0, dtype=torch.uint8) for _ in ranks]
            for r, block in enumerate(row_blocks):
                if r != rank and block.numel():
                    codec, dtype = self._codec(block, point)
                    audited = self.ledger.audited(point, codec)
                    wires[r] = audited.encode(block.to(dtype), send_states[r], None).wire
            out_blocks[rank].copy_(row_blocks[rank])
            buffers = [rows.new_empty(0, dtype=torch.uint8) for _ in ranks]
            for r, block in enumerate(out_blocks):
                if r != rank and block.numel():
                    codec, dtype = self._codec(block, point)
                    buffers[r] = codec.empty_payload(block.shape, dtype, block.device, recv_states[r], None).wire
        pending = self.group.all_to_all_uneven([_view_bytes(x) for x in buffers], [_view_bytes(x) for x in wires])
        raw = rows.nbytes - row_blocks[rank].nbytes
        self.ledger.complete(point, pending, raw, pending.sent_bytes if self.inside else 0)
        with self.ledger.decoding(point):
            for r, (block, wire) in enumerate(zip(out_blocks, buffers, strict=True)):
                if r != rank and block.numel():
                    codec, dtype = self._codec(block, point)
                    block.copy_(codec.decode(Payload(wire), block.shape, dtype, recv_states[r], None))
        return out

    def _codec(self, rows: Tensor, point: Point) -> tuple[Codec, torch.dtype]:
        """Codec of some rows, and the dtype of its input: that of the rows for exact codecs, else fp32 (or fp64)."""
        codec = _EXACT_CODEC if self.coding is None else self.coding.codec(point)
        if not codec.should_compress(rows.shape, rows.dtype):
            codec = _EXACT_CODEC
        return codec, rows.dtype if codec.traits.exact else torch.promote_types(rows.dtype, torch.float32)

    def _state(self, point: Point, *message: int) -> CompressorState:
        return CompressorState() if self.coding is None else self.coding.state(point, *message)


class ExpertComm:
    """Expert-parallel communication of a rank.

    A single-stage dispatch sends each row to the rank of its expert. A two-stage dispatch sends a token's row only once
    to each node with any of its experts: to the rank with the sender's local position, which forwards the row within
    the node. Codecs compress the first stage; rows inside a node are uncompressed.

    Args:
        group: ranks that share the experts of each layer; split by node if the dispatch may have two stages.
        ledger: ledger that counts the bytes.
        plan: plan with the codecs of the four points.
        two_stage: when to dispatch in two stages: if both stages have several ranks (``auto``), whenever the ranks
            span nodes (``on``), or never (``off``).
        folded: whether tensor-parallel ranks hold different experts and send different tokens.
        seeds: seeds of stochastic codecs, shared with the other communication points of the layers.

    ``ranks`` exchanges rows over the whole group, or in the second stage over this rank's node. ``nodes`` exchanges
    rows over the ranks with this local position on all nodes; None in a single-stage dispatch.
    """

    def __init__(
        self,
        group: Group,
        ledger: Ledger,
        plan: CompressionPlan,
        two_stage: Literal["auto", "on", "off"] = "off",
        folded: bool = False,
        seeds: MessageSeeds | None = None,
    ) -> None:
        self.group = group
        self.folded = folded
        self._coding = RowCoding(plan, seeds)
        split = group.split if two_stage != "off" else None
        self.nodes: RowExchange | None = None
        self.ranks = RowExchange(group, ledger, self._coding)
        self.node_of: tuple[int, ...] = ()
        self.index_in_node: tuple[int, ...] = tuple(range(group.size))
        if split is not None and split.across.size > 1 and (split.node.size > 1 or two_stage == "on"):
            self.nodes = RowExchange(split.across, ledger, self._coding)
            self.ranks = RowExchange(split.node, ledger, None, inside=True)
            # A row's route to each rank: the position in ``split.across`` of the rank's node, then its position there.
            node_of, index_in_node = [0] * group.size, [0] * group.size
            this_index = next(node.index(group.rank) for node in split.nodes if group.rank in node)
            for node in split.nodes:
                for index, position in enumerate(node):
                    node_of[position] = split.across.ranks.index(group.ranks[node[this_index]])
                    index_in_node[position] = index
            self.node_of, self.index_in_node = tuple(node_of), tuple(index_in_node)

    @property
    def size(self) -> int:
        """Number of ranks that share the experts."""
        return self.group.size

    @classmethod
    def local(cls, ledger: Ledger, plan: CompressionPlan) -> ExpertComm:
        """Communication of a rank that holds all experts."""
        return cls(Group(None, (0,), 0, "expert-parallel", "none"), ledger, plan)

    def begin_step(self, iteration: int) -> None:
        """Begin a step, or an evaluation (-1)."""
        self._coding.begin_step(iteration)

    def count_rows(self, chosen: Tensor, experts: int, capacity: int | None = None, total: int | None = None) -> Tensor:
        """Count the rows of each expert, int64. The index ``experts`` in ``chosen`` means no expert.

        Args:
            chosen: int64 expert indices of any shape.
            experts: number of experts.
            capacity: maximum rows of each expert, None for no limit; for subclasses that cannot read ``chosen``.
            total: number of rows that the experts of a node receive; None before they are sent.
        """
        return _count_occurrences(chosen, experts)

    def count_by_node(
        self, once_tk: Tensor, node_tk: Tensor, experts: int, capacity: int | None
    ) -> tuple[Tensor, Tensor]:
        """Count the rows and the choices of each node, int64. An index past the last node means no node.

        Args:
            once_tk: node of each choice, with repetitions of a token's node replaced by the index past the last node.
            node_tk: node of each choice.
            experts: number of experts on all nodes.
            capacity: maximum number of choices of each expert, None for no limit.
        """
        assert self.nodes is not None
        nodes = self.nodes.size
        return _count_occurrences(once_tk, nodes), _count_occurrences(node_tk, nodes)


def _count_occurrences(numbers: Tensor, count: int) -> Tensor:
    """Count the occurrences of each number below ``count``, int64; ignore the number ``count``.

    torch.bincount computes the maximum, which would synchronize with the host.
    """
    flat = numbers.flatten()
    return flat.new_zeros(count + 1).scatter_add_(0, flat, torch.ones_like(flat))[:count]


class _MoveRows(torch.autograd.Function):
    """Autograd function of ``RowExchange.move``."""

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
    """Autograd function of ``RowExchange.move_choices``."""

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
        rows = torch.stack([numbers_p.to(weights_p.dtype), weights_p], dim=1)
        numbers, weights = comm.exchange(rows, Point.CONTROL, sent, received).unbind(1)
        choices = weights.contiguous(), numbers.to(torch.int64)
        ctx.mark_non_differentiable(choices[1])
        return choices

    @staticmethod
    def backward(ctx: Any, grad_p: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows = grad_p.contiguous().unsqueeze(1)
        return ctx.comm.exchange(rows, Point.CONTROL, ctx.received, ctx.sent).squeeze(1), None, None, None, None


def _view_bytes(wire: Tensor) -> Tensor:
    """View a message of any dtype as bytes."""
    return wire.view(-1).view(torch.uint8) if wire.numel() else wire

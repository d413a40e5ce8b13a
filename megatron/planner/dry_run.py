"""Runs the real code on tensors without contents, to count what a step computes, keeps and sends.

Model, buckets, compressors and tensor-parallel collectives are the ones that train; only the groups of ranks are
stand-ins, which record what they are asked to send. Nothing is described a second time, so nothing can go stale.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from math import comb
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron.comm.experts import ExpertComm, RowExchange
from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan
from megatron.compression.api import Level
from megatron.compression.points import Point
from megatron.planner.cluster import Device
from megatron.topology.group import Group, NodeSplit, Pending, num_bytes
from megatron.topology.work import Work

META = torch.device("meta")

_FREE = frozenset(
    {"detach", "alias", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "sources"}
)
"""Operations that neither read nor write (``sources`` checks our kernels once); views are detected by their storage."""


def _grouped_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Of rows (r, in) by a matrix (in, out) for each group, or of (out, r) by (r, in): no row is in two groups."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[-1]


_GROUPED = {"_grouped_mm": _grouped_flops}
"""Products whose FLOPs torch does not know."""


@dataclass(frozen=True)
class Collective:
    """One collective of a group.

    Args:
        kind: all-reduce, reduce-scatter, all-gather, all-to-all, broadcast, gather or scatter.
        nbytes: bytes of the whole tensor.
        level: which ranks of the group take part.
        of_experts: the group is of the ranks that share experts.
    """

    kind: str
    nbytes: float
    level: Level = Level.ALL
    of_experts: bool = False


@dataclass(frozen=True)
class Spread:
    """How the tokens are spread over experts, and these over nodes.

    Args:
        imbalance: most tokens of an expert over the mean of its layer; the others share the rest.
        nodes: nodes that rows go to first; 0 where they go to their experts in one stage.
    """

    imbalance: float = 1.0
    nodes: int = 0


@dataclass
class Tally:
    """The costs of a part of a step on one rank.

    Args:
        seconds: time of operations other than encoding and decoding, at the device's rates.
        coding_s: time of encoding and decoding.
        waited_s: time of waiting for collectives, where they are real.
        flops: FLOPs of all its products.
        collectives: the collectives, in their order.
        sent: bytes that one rank sends, by point.
        inside: those of these that are known to stay inside the node.
    """

    seconds: float = 0.0
    coding_s: float = 0.0
    waited_s: float = 0.0
    flops: float = 0.0
    collectives: list[Collective] = field(default_factory=list)
    sent: dict[Point, int] = field(default_factory=dict)
    inside: dict[Point, int] = field(default_factory=dict)

    @staticmethod
    def median(tallies: Sequence[Tally]) -> Tally:
        """The median of repeated tallies; the first, which warms up, does not count if there are others.

        A mean would be that of the one time at which the machine was busy with something else.
        """
        counted = tallies[1:] or tallies
        return replace(
            counted[-1],
            seconds=statistics.median(tally.seconds for tally in counted),
            coding_s=statistics.median(tally.coding_s for tally in counted),
            waited_s=statistics.median(tally.waited_s for tally in counted),
        )


@cache
def _out_of_place(packet: Any) -> Any:
    """The operation whose FLOPs torch knows: addmm for addmm_."""
    name = packet.__name__
    return getattr(torch.ops.aten, name.rstrip("_"), packet) if name.endswith("_") else packet


class Recorder(TorchDispatchMode):
    """Tallies the operations that run inside it; encoding and decoding apart.

    Args:
        device: device whose rates count.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.tally = Tally()
        self.ledger: Ledger = _ToldLedger(self)
        self.coding = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if not func.is_view and packet.__name__ not in _FREE:
            formula = _GROUPED.get(packet.__name__) or flop_registry.get(_out_of_place(packet))
            flops = float(formula(*args, **(kwargs or {}), out_val=out)) if formula is not None else 0.0
            moved = sum(num_bytes(leaf) for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor))
            seconds = self.device.seconds(flops, moved)
            self.tally.flops += flops
            if self.coding:
                self.tally.coding_s += seconds
            else:
                self.tally.seconds += seconds
        return out

    def take(self) -> Tally:
        """Returns the tally since the last call."""
        taken, self.tally = self.tally, Tally()
        return taken


class _ToldLedger(Ledger):
    """A ledger that tells a recorder what is coding, and what is sent."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def sent(self, point: Point, wire_bytes: int, raw_bytes: int | None = None, inside_bytes: int = 0) -> None:
        tally = self.recorder.tally
        tally.sent[point] = tally.sent.get(point, 0) + wire_bytes
        tally.inside[point] = tally.inside.get(point, 0) + inside_bytes

    @contextmanager
    def encoding(self, point: Point) -> Iterator[None]:
        self.recorder.coding += 1
        try:
            yield
        finally:
            self.recorder.coding -= 1

    decoding = encoding


class DryGroup(Group):
    """A stand-in for a group, which records collectives.

    Args:
        size: number of ranks.
        recorder: recorder of the collectives.
        nodes: number of nodes that it is cut into; 0 for none.
        level: its place in a group that is cut.
        of_experts: its ranks share experts.
        stride: distance of its ranks, the first of which is 0.
    """

    def __init__(
        self,
        size: int,
        recorder: Recorder,
        nodes: int = 0,
        level: Level = Level.ALL,
        of_experts: bool = False,
        stride: int = 1,
    ) -> None:
        super().__init__(None, tuple(range(0, size * stride, stride)), 0, "a dry run", "nccl")
        self.recorder = recorder
        self.level = level
        self.of_experts = of_experts
        if nodes:
            each = size // nodes
            positions = tuple(tuple(range(node * each, (node + 1) * each)) for node in range(nodes))
            node = DryGroup(each, recorder, level=Level.NODE, of_experts=of_experts)
            across = DryGroup(nodes, recorder, level=Level.ACROSS, of_experts=of_experts, stride=each)
            self.split = NodeSplit(positions, node, across)

    def start(self, what: str, sent: int, call: Callable[[], Work | None]) -> Pending:
        rounds = 2 if what == "all-reduce" else 1
        whole = sent if what == "broadcast" else sent * self.size / (rounds * (self.size - 1))
        self._record(what, whole)
        return Pending(None, sent, what)

    def _record(self, what: str, nbytes: float) -> None:
        self.recorder.tally.collectives.append(Collective(what, nbytes, self.level, self.of_experts))

    def exchange_parts(self, out: Sequence[Tensor], x: Sequence[Tensor]) -> Pending:
        sent, came = (sum(num_bytes(part) for r, part in enumerate(parts) if r != self.rank) for parts in (x, out))
        if self.size > 1:
            # Both ways of a link work at once: the fuller one takes the time.
            self._record("all-to-all", max(sent, came) * self.size / (self.size - 1))
        return Pending(None, sent, "all-to-all")

    def collect(self, out: Tensor, x: Tensor) -> Pending:
        # The first rank, which this is, sends nothing: it receives.
        self._record("gather", float(num_bytes(out)))
        return Pending(None, 0, "gather")


def fused_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **_: Any) -> Tensor:
    """The fused attention that a real device has, which the meta device would take apart."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]
    return out


class DryStand:
    """A stand for dry runs: the meta device, stand-ins for groups, and operations timed at a device's rates.

    Args:
        device: device whose rates count.
    """

    torch_device = META
    repeats = 1
    attention = staticmethod(fused_attention)

    def __init__(self, device: Device) -> None:
        self.device = device

    def recorder(self) -> Recorder:
        """A new recorder."""
        return Recorder(self.device)

    def group(self, size: int, recorder: Recorder, nodes: int = 0) -> Group:
        """A group of ranks that do not exist, on some nodes."""
        return DryGroup(size, recorder, nodes)

    def experts(self, size: int, recorder: Recorder, plan: CompressionPlan, spread: Spread, folded: bool) -> ExpertComm:
        """The points of ranks that do not exist, which share experts."""
        group = DryGroup(size, recorder, spread.nodes, of_experts=True)
        return DryExpertComm(group, recorder.ledger, plan, spread.imbalance, folded)

    def fill(self, x: Tensor) -> Tensor:
        """Does nothing: tensors have no contents."""
        return x


class DryExpertComm(ExpertComm):
    """The expert-parallel points of the rank with the fullest expert, whose tokens choose nothing.

    The choices are not looked at: how many go where follows from the imbalance, the other experts being alike.

    Args:
        group: see ``ExpertComm``; rows go in two stages where it is cut.
        ledger, plan: see ``ExpertComm``.
        imbalance: most tokens of an expert over the mean; the others of its layer share the rest.
        folded: see ``ExpertComm``.
    """

    def __init__(
        self, group: Group, ledger: Ledger, plan: CompressionPlan, imbalance: float, folded: bool = False
    ) -> None:
        super().__init__(group, ledger, plan, "on", folded)
        if self.nodes is not None:
            self.nodes = _DryRows(self.nodes.group, ledger, self.nodes.coding)
        self.ranks = _DryRows(self.ranks.group, ledger, self.ranks.coding, self.ranks.inside)
        self.imbalance = imbalance

    def count(self, chosen: Tensor, experts: int, most: int | None = None, total: int | None = None) -> Tensor:
        """The rows of each expert; the first is the fullest."""
        rows = chosen.numel() if total is None else total
        share = self.imbalance / experts
        if total is not None and self.nodes is not None:
            # Of all experts' choices those of a node's.
            everywhere = experts * self.nodes.size
            share /= self.nodes.size
            share /= share + (experts - 1) * (1 - share) / (everywhere - 1)
        full = min(round(share * rows), rows)
        if total is not None and most is not None:
            full = min(full, most)  # the others' choices have come, too
        each, more = divmod(rows - full, max(experts - 1, 1))
        counts = torch.full((experts,), each)
        counts[0] = full
        counts[1 : 1 + more] += 1
        return counts if most is None else counts.clamp_(max=most)

    def count_by_node(self, once_tk: Tensor, node_tk: Tensor, experts: int, most: int | None) -> tuple[Tensor, Tensor]:
        """The rows and choices of each node; that of the fullest expert is the first.

        A token chooses it with a probability, and the rest of its K among the others, which are alike: of L among M
        others it misses all with probability C(M - L, K) / C(M, K).
        """
        assert self.nodes is not None
        (tokens, k), nodes = once_tk.shape, self.nodes.size
        local, others = experts // nodes, experts - 1
        choices_n = self.count(node_tk, experts, most).view(nodes, local).sum(1)
        chosen = min(self.imbalance * k / experts, 1.0)
        kept = chosen if most is None else min(chosen, most / tokens)

        def hit(among: int, by: int) -> float:
            return 1 - comb(others - among, by) / max(comb(others, by), 1)

        first = kept + (chosen - kept) * hit(local - 1, k - 1) + (1 - chosen) * hit(local - 1, k)
        each = chosen * hit(local, k - 1) + (1 - chosen) * hit(local, k)
        rows_n = torch.tensor([round(tokens * share) for share in (first, *[each] * (nodes - 1))])
        return rows_n.minimum(choices_n), choices_n


class _DryRows(RowExchange):
    """Exchanges of rows with ranks that have as many for this one as it has for itself."""

    def exchange_counts(self, counts_rn: Tensor) -> Tensor:
        rows = list(counts_rn.to(torch.int32))
        sent = self.group.exchange_parts(rows, rows).sent_bytes
        self.ledger.sent(Point.CONTROL, sent, inside_bytes=sent if self.inside else 0)
        return counts_rn[:1].repeat(len(counts_rn), 1)


class SavedTensors:
    """Counts the bytes that autograd saves for backward, each storage once.

    Args:
        ignored: tensors whose storage is kept anyway.
    """

    def __init__(self, *ignored: Tensor) -> None:
        self._seen = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._alive: list[Tensor] = []
        self.nbytes = 0

    def add(self, x: Tensor) -> Tensor:
        """Counts a tensor; a hook for ``saved_tensors_hooks``."""
        storage = x.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(x)
            self.nbytes += storage.nbytes()
        return x

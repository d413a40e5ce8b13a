"""Dry runs: the real code on meta tensors, to count the computation, memory and traffic of a step.

Model, buckets, compressors and tensor-parallel collectives are the training code, so no second cost model can go stale.
Only the process groups are stand-ins, which record the requested collectives.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import comb
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.compression.api import Level
from megatron.compression.points import Point
from megatron.distributed.group import Group, NodeSplit, Pending
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.work import Work
from megatron.parallel.expert.dispatcher import ExpertComm, RowExchange
from megatron.planner.cluster import Device
from megatron.planner.operation import META, run_operation


@dataclass(frozen=True)
class Collective:
    """A collective of a group.

    Args:
        kind: all-reduce, reduce-scatter, all-gather, all-to-all, broadcast, gather or scatter.
        nbytes: bytes of the whole tensor.
        level: the ranks of the group that take part.
        of_experts: whether the group is the expert-parallel group.
    """

    kind: str
    nbytes: float
    level: Level = Level.ALL
    of_experts: bool = False


@dataclass(frozen=True)
class ExpertLoad:
    """Distribution of tokens over experts, and of experts over nodes.

    Args:
        imbalance: maximum over mean number of tokens per expert of a layer; the other experts share the remainder.
        nodes: number of nodes of a two-stage dispatch; 0 for a single stage.
    """

    imbalance: float = 1.0
    nodes: int = 0


@dataclass
class CostTally:
    """Costs of a part of a step on a rank.

    Args:
        seconds: time of operations other than encoding and decoding, at the device's rates.
        coding_s: time of encoding and decoding.
        waited_s: time of waiting for collectives, where they are real.
        flops: FLOPs of all matrix products.
        collectives: the collectives, in order.
        sent: bytes that a rank sends, by point.
        inside: the part of ``sent`` that is known to stay inside the node.
    """

    seconds: float = 0.0
    coding_s: float = 0.0
    waited_s: float = 0.0
    flops: float = 0.0
    collectives: list[Collective] = field(default_factory=list)
    sent: dict[Point, int] = field(default_factory=dict)
    inside: dict[Point, int] = field(default_factory=dict)

    @staticmethod
    def median(tallies: Sequence[CostTally]) -> CostTally:
        """Median of repeated tallies; the first is a warm-up and does not count unless it is the only tally.

        A mean would be distorted by a single repetition on a busy machine.
        """
        counted = tallies[1:] or tallies
        return replace(
            counted[-1],
            seconds=statistics.median(tally.seconds for tally in counted),
            coding_s=statistics.median(tally.coding_s for tally in counted),
            waited_s=statistics.median(tally.waited_s for tally in counted),
        )

    def with_changes(self, changed: Sequence[CostTally]) -> CostTally:
        """Tally with several independent changes, given the tallies with each change alone."""
        collectives = Counter(self.collectives)
        sent, inside = Counter(self.sent), Counter(self.inside)
        for tally in changed:
            collectives.update(tally.collectives)
            collectives.subtract(self.collectives)
            for total, new, old in ((sent, tally.sent, self.sent), (inside, tally.inside, self.inside)):
                total.update(new)
                total.subtract(old)
        return CostTally(
            **{
                name: getattr(self, name) + sum(getattr(tally, name) - getattr(self, name) for tally in changed)
                for name in ("seconds", "coding_s", "waited_s", "flops")
            },
            collectives=list(collectives.elements()),
            sent=dict(sent),
            inside=dict(inside),
        )


class OpRecorder(TorchDispatchMode):
    """Context that tallies the operations that run inside it, with encoding and decoding counted separately.

    Args:
        device: device whose rates apply.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.tally = CostTally()
        self.ledger: Ledger = _RecordingLedger(self)
        self.coding_depth = 0  # of nested encodings and decodings

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled, so dynamo need not be imported to skip each operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, cost = run_operation(func, args, kwargs or {})
        if cost is not None:
            seconds = self.device.seconds(cost.flops, cost.nbytes)
            self.tally.flops += cost.flops
            if self.coding_depth:
                self.tally.coding_s += seconds
            else:
                self.tally.seconds += seconds
        return out

    def take(self) -> CostTally:
        """Return the tally since the last call."""
        tally, self.tally = self.tally, CostTally()
        return tally


class _RecordingLedger(Ledger):
    """A ledger that reports coding and traffic to a recorder."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def count_message(self, point: Point, wire_bytes: int, raw_bytes: int | None = None, inside_bytes: int = 0) -> None:
        tally = self.recorder.tally
        tally.sent[point] = tally.sent.get(point, 0) + wire_bytes
        tally.inside[point] = tally.inside.get(point, 0) + inside_bytes

    @contextmanager
    def encoding(self, point: Point) -> Iterator[None]:
        self.recorder.coding_depth += 1
        try:
            yield
        finally:
            self.recorder.coding_depth -= 1

    decoding = encoding


class DryGroup(Group):
    """A stand-in for a group that records collectives.

    Args:
        size: number of ranks.
        recorder: recorder of the collectives.
        nodes: number of nodes that the group is split into; 0 for no split.
        level: level of this group in a split group.
        of_experts: whether the ranks share experts.
        stride: distance between consecutive ranks; the first is rank 0.
    """

    def __init__(
        self,
        size: int,
        recorder: OpRecorder,
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
            per_node = size // nodes
            positions = tuple(tuple(range(first, first + per_node)) for first in range(0, nodes * per_node, per_node))
            node = DryGroup(per_node, recorder, level=Level.NODE, of_experts=of_experts)
            across = DryGroup(nodes, recorder, level=Level.ACROSS, of_experts=of_experts, stride=per_node)
            self.split = NodeSplit(positions, node, across)

    def start(self, operation: str, sent: int, call: Callable[[], Work | None]) -> Pending:
        rounds = 2 if operation == "all-reduce" else 1
        nbytes = sent if operation == "broadcast" else sent * self.size / (rounds * (self.size - 1))
        self._record(operation, nbytes)
        return Pending(None, sent, operation)

    def _record(self, kind: str, nbytes: float) -> None:
        self.recorder.tally.collectives.append(Collective(kind, nbytes, self.level, self.of_experts))

    def all_to_all_uneven(self, out: Sequence[Tensor], x: Sequence[Tensor]) -> Pending:
        sent, received = (
            sum(tensor.nbytes for r, tensor in enumerate(tensors) if r != self.rank) for tensors in (x, out)
        )
        if self.size > 1:
            # Links are full duplex: the direction with more bytes decides.
            self._record("all-to-all", max(sent, received) * self.size / (self.size - 1))
        return Pending(None, sent, "all-to-all")

    def collect(self, out: Tensor, x: Tensor) -> Pending:
        # This is the first rank, which only receives.
        self._record("gather", float(out.nbytes))
        return Pending(None, 0, "gather")


def fused_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **_: Any) -> Tensor:
    """Fused attention as on a real device; the meta device would decompose it."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, is_causal)[0]
    return out


class DryBackend:
    """A backend for dry runs: the meta device, stand-in groups, and operations timed at a device's rates.

    Args:
        device: device whose rates apply.
    """

    attention: Callable[..., Tensor] = staticmethod(fused_attention)
    """The attention function, for ``ForwardContext``."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.torch_device = META
        self.repeats = 1

    def recorder(self) -> Any:
        """Return a new recorder of the costs of the code inside its context."""
        return OpRecorder(self.device)

    def group(self, size: int, recorder: Any, nodes: int = 0) -> Group:
        """Return a stand-in group, split over nodes."""
        return DryGroup(size, recorder, nodes)

    def experts(
        self, size: int, recorder: Any, plan: CompressionPlan, expert_load: ExpertLoad, folded: bool
    ) -> ExpertComm:
        """Return the expert-parallel points of a stand-in group."""
        group = DryGroup(size, recorder, expert_load.nodes, of_experts=True)
        return DryExpertComm(group, recorder.ledger, plan, expert_load.imbalance, folded)

    def fill(self, x: Tensor) -> Tensor:
        """Do nothing: meta tensors have no contents."""
        return x


class DryExpertComm(ExpertComm):
    """The expert-parallel points of the rank with the fullest expert, without real routing decisions.

    Row counts follow from the imbalance alone; all other experts are equally loaded.

    Args:
        group: see ``ExpertComm``; the dispatch has two stages where it is split.
        ledger, plan: see ``ExpertComm``.
        imbalance: maximum over mean number of tokens per expert; the other experts of the layer share the remainder.
        folded: see ``ExpertComm``.
    """

    def __init__(
        self, group: Group, ledger: Ledger, plan: CompressionPlan, imbalance: float, folded: bool = False
    ) -> None:
        super().__init__(group, ledger, plan, "on", folded)
        if self.nodes is not None:
            self.nodes = _DryRowExchange(self.nodes.group, ledger, self.nodes.coding)
        self.ranks = _DryRowExchange(self.ranks.group, ledger, self.ranks.coding, self.ranks.inside)
        self.imbalance = imbalance

    def count_rows(self, chosen: Tensor, experts: int, capacity: int | None = None, total: int | None = None) -> Tensor:
        """Number of rows of each expert; the first expert is the fullest."""
        rows = chosen.numel() if total is None else total
        share = self.imbalance / experts
        if total is not None and self.nodes is not None:
            # The share among the choices of this node's experts.
            all_experts = experts * self.nodes.size
            share /= self.nodes.size
            share /= share + (experts - 1) * (1 - share) / (all_experts - 1)
        full = min(round(share * rows), rows)
        if total is not None and capacity is not None:
            full = min(full, capacity)  # rows of the other experts have arrived, too
        each, remainder = divmod(rows - full, max(experts - 1, 1))
        counts = torch.full((experts,), each)
        counts[0] = full
        counts[1 : 1 + remainder] += 1
        return counts if capacity is None else counts.clamp_(max=capacity)

    def count_by_node(
        self, once_tk: Tensor, node_tk: Tensor, experts: int, capacity: int | None
    ) -> tuple[Tensor, Tensor]:
        """Number of rows and choices of each node; the first node holds the fullest expert.

        A token chooses the fullest expert with a given probability, and its remaining choices uniformly among the
        others: K choices among M experts miss all L experts of a node with probability C(M - L, K) / C(M, K).
        """
        assert self.nodes is not None
        (tokens, k), nodes = once_tk.shape, self.nodes.size
        local, other_experts = experts // nodes, experts - 1
        choices_n = self.count_rows(node_tk, experts, capacity).view(nodes, local).sum(1)
        chosen = min(self.imbalance * k / experts, 1.0)  # probability of the fullest expert
        kept_share = chosen if capacity is None else min(chosen, capacity / tokens)

        def hit(node_experts: int, choices: int) -> float:
            return 1 - comb(other_experts - node_experts, choices) / max(comb(other_experts, choices), 1)

        first_share = kept_share + (chosen - kept_share) * hit(local - 1, k - 1) + (1 - chosen) * hit(local - 1, k)
        other_share = chosen * hit(local, k - 1) + (1 - chosen) * hit(local, k)
        rows_n = torch.tensor([round(tokens * share) for share in (first_share, *[other_share] * (nodes - 1))])
        return rows_n.minimum(choices_n), choices_n


class _DryRowExchange(RowExchange):
    """Row exchange with stand-in ranks, each of which sends this rank as many rows as it keeps for itself."""

    def exchange_counts(self, counts_rn: Tensor) -> Tensor:
        rows = list(counts_rn.to(torch.int32))
        sent = self.group.all_to_all_uneven(rows, rows).sent_bytes
        self.ledger.count_message(Point.CONTROL, sent, inside_bytes=sent if self.inside else 0)
        return counts_rn[:1].repeat(len(counts_rn), 1)


class SavedTensors:
    """Counter of the bytes that autograd saves for backward, each storage once.

    Args:
        ignored: tensors whose storage is alive anyway.
    """

    def __init__(self, *ignored: Tensor) -> None:
        self._seen = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._alive: list[Tensor] = []
        self.nbytes = 0

    def add(self, x: Tensor) -> Tensor:
        """Count a tensor; a pack hook for ``saved_tensors_hooks``."""
        storage = x.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(x)
            self.nbytes += storage.nbytes()
        return x

"""The pieces on the pipeline ranks of a choice, and the times of their work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron.compression.api import Level
from megatron.compression.points import Point
from megatron.config.run import RunConfig
from megatron.parallel.data.gradients import main_grad_dtype
from megatron.planner.choice import Choice
from megatron.planner.cluster import Cluster, Wire
from megatron.planner.costs import STEADY, CostBook, Levels, Wires
from megatron.planner.dry_run import Collective
from megatron.planner.pieces import PIECES
from megatron.planner.simulate import Hop, Pipeline


@dataclass(frozen=True)
class StageCost:
    """The costs of one pipeline rank besides its passes.

    Args:
        pieces: names and numbers of the pieces on it.
        elements: number of parameters.
        rounds: seconds of each round of its gradients' reduction.
        sent: bytes that a device sends for that.
        across: those of them that sums in two levels send between nodes; None where sums have one level.
        coding_s: seconds of coding for that.
        kept: bytes of the compressors' state.
    """

    pieces: Mapping[str, int]
    elements: int
    rounds: Sequence[float]
    sent: float
    coding_s: float
    kept: float
    across: float | None = None


class Stages:
    """The stages of choices, put together from pieces.

    Args:
        config: resolved configuration.
        cluster: the cluster.
        vocab_size: entries of the vocabulary.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, vocab_size: int) -> None:
        self.config = config
        self.cluster = cluster
        self.vocab_size = vocab_size
        self.book = CostBook(config, cluster, vocab_size)
        dtype = config.precision.params_dtype
        self.param_bytes = dtype.itemsize
        self.grad_bytes = main_grad_dtype(dtype, config.parallel.accumulate_allreduce_grads_in_fp32).itemsize

    def pieces_of(self, choice: Choice, virtual: int) -> dict[str, int]:
        """Pieces of a virtual stage, and their numbers."""
        last = choice.pp * choice.chunks - 1
        layers = self.config.model.num_layers // (choice.pp * choice.chunks)
        return {"embedding": int(virtual == 0), "layer": layers, "head": int(virtual == last)}

    def passes(self, choice: Choice, wires: Wires) -> dict[str, tuple[float, float, float, float]]:
        """Seconds of each piece's forward and backward; of these, exposed tensor-parallel collectives, and coding."""
        found = {}
        for name in PIECES:
            piece = self.book.piece(choice, name)
            row = [0.0, 0.0, 0.0, 0.0]
            for way, tally in enumerate((piece.forward, piece.backward)):
                part = f"{name} {'backward' if way else 'forward'}"
                computed = tally.seconds * self.cluster.correction(part)
                coding = tally.coding_s * self.book.coding(choice, Point.TP_FWD, Point.TP_BWD)
                tp_s = collective_seconds(tally.collectives, wires.tp, choice.tp) * self.cluster.correction(
                    "tensor parallel"
                )
                hidden = 0.0
                if way and self.config.parallel.async_tensor_model_parallel_allreduce:
                    # One of the two sums (or gathers) of a region goes on while its products are computed.
                    hidden = min(tp_s / 2, computed / 2)
                row[way] = computed + coding + tp_s - hidden
                row[2] += tp_s - hidden
                row[3] += coding
            found[name] = (row[0], row[1], row[2], row[3])
        return found

    def compresses(self, choice: Choice, point: Point, sender: int, late: bool) -> bool:
        """Whether what a pipeline rank sends is compressed; ``late`` in its epilogue."""
        spec = self.book.specs(choice).get(point)
        if spec is None:
            return False
        return spec.activation.covers_stage(sender, choice.pp) and spec.activation.on(STEADY, late)

    def pipeline(self, choice: Choice, wires: Wires) -> Pipeline:
        """The pipeline and the times of its chunks."""
        passes = self.passes(choice, wires)
        counts = [self.pieces_of(choice, virtual) for virtual in range(choice.pp * choice.chunks)]
        hops: dict[tuple[bool, bool, Wire], Hop] = {}
        found: dict[tuple[bool, int, bool], Hop] = {}

        def hop(forward: bool, boundary: int, late: bool) -> Hop:
            key = (forward, boundary, late)
            if key not in found:
                found[key] = looked_up(forward, boundary, late)
            return found[key]

        def looked_up(forward: bool, boundary: int, late: bool) -> Hop:
            point = Point.PP_FWD if forward else Point.PP_BWD
            on = self.compresses(choice, point, (boundary if forward else boundary + 1) % choice.pp, late)
            wire = wires.hops[boundary % choice.pp]
            if (forward, on, wire) not in hops:
                sent = self.book.message(choice, point, on)
                factor = self.book.coding(choice, point) if on else 1.0
                arrived_s = sent.decode_s * factor + self.gather_seconds(choice, point, wires)
                hops[forward, on, wire] = Hop(
                    sent.encode_s * factor, sent.nbytes / wire.bytes_per_s, wire.latency_s, arrived_s
                )
            return hops[forward, on, wire]

        return Pipeline(
            choice.schedule,
            [sum(n * passes[name][0] for name, n in count.items()) for count in counts],
            [sum(n * passes[name][1] for name, n in count.items()) for count in counts],
            choice.pp,
            hop,
        )

    def gather_seconds(self, choice: Choice, point: Point, wires: Wires) -> float:
        """Seconds of putting the parts of a pipeline message together."""
        part = self.book.message_gather(choice, point)
        if part is None:
            return 0.0
        collective = Collective("all-gather", part.nbytes * choice.tp)
        return part.encode_s + part.decode_s + collective_seconds([collective], wires.tp, choice.tp)

    def contents(self, choice: Choice, rank: int) -> dict[str, int]:
        """Pieces on a pipeline rank, and their numbers."""
        counts = dict.fromkeys(PIECES, 0)
        for virtual in range(rank, choice.pp * choice.chunks, choice.pp):
            for name, count in self.pieces_of(choice, virtual).items():
                counts[name] += count
        return counts

    def elements(self, choice: Choice, rank: int) -> int:
        """Parameters on a pipeline rank; alone, it holds a tied embedding once."""
        found = sum(n * self.book.piece(choice, name).parameters for name, n in self.contents(choice, rank).items())
        tied = self.book.piece(choice, "embedding").tied_shape
        return found - (math.prod(tied) if tied and choice.pp == 1 else 0)

    def matrices(self, choice: Choice, rank: int) -> tuple[float, float]:
        """Of the parameters on a pipeline rank, those that Muon orthogonalizes, and the operations of one iteration on
        what it orthogonalizes itself; zeros for other optimizers."""
        if self.config.optimizer.optimizer != "muon":
            return 0.0, 0.0
        pieces = [(n, self.book.piece(choice, name)) for name, n in self.contents(choice, rank).items()]
        flops = sum(n * piece.orthogonal_flops for n, piece in pieces)
        return float(sum(n * piece.matrices for n, piece in pieces)), flops / choice.tp / self._shares(choice)

    @staticmethod
    def _shares(choice: Choice) -> int:
        """Parts that the optimizer's work is divided into."""
        return choice.dp if choice.sharded else 1

    def exchanged_matrices(self, choice: Choice, rank: int) -> tuple[float, float]:
        """Bytes of the parts of matrices, two ways, that a rank exchanges with its replicas, its own included, and
        with its tensor-parallel ranks."""
        chosen = self.config.optimizer.muon_fp32_matmul_prec
        width = 2 if chosen == "medium" or (chosen is None and self.param_bytes == 2) else max(self.param_bytes, 4)
        nbytes = 2.0 * width * self.matrices(choice, rank)[0] / self._shares(choice)
        return nbytes * choice.sharded, nbytes * (choice.tp > 1)

    def partial_reduction(self, choice: Choice, rank: int) -> Collective:
        """The all-reduce over tensor-parallel ranks, once a step, of gradients that are partial along the sequence."""
        contents = self.contents(choice, rank).items()
        elements = sum(n * self.book.piece(choice, name).partial for name, n in contents)
        return Collective("all-reduce", float(elements * self.grad_bytes))

    def tied_elements(self, choice: Choice) -> int:
        """Elements of the tied embedding that one holder reduces with the others: all, or a replica's share."""
        elements = math.prod(self.book.piece(choice, "embedding").tied_shape)
        return -(-elements // choice.dp) if choice.sharded and not self.book.fused(choice) else elements

    def stage(self, choice: Choice, rank: int, wires: Wires) -> StageCost:
        """The costs of a pipeline rank's parameters and of the reduction of their gradients."""
        counts = self.contents(choice, rank)
        rounds: list[float] = []
        levels = self.book.levels(choice, Point.DP_GRAD)
        sent = coding = kept = across = 0.0
        if choice.dp > 1:
            parts = [(n, self.book.reduction(choice, name, rank)) for name, n in counts.items() if n]
            for number in range(max(len(part.rounds) for _, part in parts)):
                nbytes_of: dict[tuple[str, Level], float] = {}
                for n, part in parts:
                    for collective in part.rounds[number] if number < len(part.rounds) else ():
                        kind = collective.kind, collective.level
                        nbytes_of[kind] = nbytes_of.get(kind, 0.0) + n * collective.nbytes
                merged = [Collective(kind, nbytes, level) for (kind, level), nbytes in nbytes_of.items()]
                rounds.append(collective_seconds(merged, wires.dp, choice.dp, levels))
                sent += sent_bytes(merged, choice.dp, levels)
                across += sent_bytes([each for each in merged if each.level is Level.ACROSS], choice.dp, levels)
            coding = sum(n * part.coding_s for n, part in parts) * self.book.coding(choice, Point.DP_GRAD)
            kept = sum(n * part.state_bytes for n, part in parts)
        elements = self.elements(choice, rank)
        return StageCost(counts, elements, rounds, sent, coding, kept, across if levels else None)


def collective_seconds(
    collectives: Sequence[Collective], wire: Wire, size: int, levels: Levels = MappingProxyType({})
) -> float:
    """The time of collectives one after the other, over a group or those of its ranks that levels name."""
    total = 0.0
    for collective in collectives:
        used, ranks = levels.get(collective.level, (wire, size))
        total += used.collective(collective.kind, collective.nbytes, ranks)
    return total


def sent_bytes(collectives: Sequence[Collective], size: int, levels: Levels = MappingProxyType({})) -> float:
    """Bytes that each rank sends for collectives; the mean of the ranks where one of them serves the others."""
    total = 0.0
    for collective in collectives:
        ranks = levels[collective.level][1] if collective.level in levels else size
        share = (ranks - 1) / ranks
        factors = {
            "all-reduce": 2 * share,
            "broadcast": 1 / ranks if ranks > 1 else 0.0,
            "gather": share / ranks,
            "scatter": share / ranks,
        }
        total += factors.get(collective.kind, share) * collective.nbytes
    return total

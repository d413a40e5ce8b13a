"""Pieces on each pipeline rank of a choice, and the times of their passes and reductions."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from megatron.compression.api import Level
from megatron.compression.points import Point
from megatron.config.run import RunConfig
from megatron.parallel.data.gradient_sync import bucket_elements, main_grad_dtype
from megatron.parallel.pipeline.list_schedule import AUTO, ListPipeline
from megatron.parallel.pipeline.schedule import ScheduleLimits
from megatron.parallel.pipeline.simulate import Hop, Hops, Pipeline
from megatron.planner.choice import Choice
from megatron.planner.cluster import Cluster, Wire
from megatron.planner.costs import INNER_POINTS, STEADY, TP_POINTS, CostBook, Levels, Wires
from megatron.planner.dry_run import Collective
from megatron.planner.matrix_work import MatrixWork, matrix_work
from megatron.planner.piece_costs import EMBEDDING, HEAD, kind_of, piece_of, pieces_of


@dataclass(frozen=True)
class StageCost:
    """Costs of a pipeline rank other than its passes.

    Args:
        pieces: number of each piece on the rank, by name.
        parts: (number of parameters, number of replicas that hold them), for dense and expert parameters.
        rounds: seconds of each round of the gradient reduction.
        sent: bytes that a device sends in the reduction.
        across: the part of ``sent`` that two-level sums send between nodes.
        coding_s: seconds of encoding and decoding in the reduction.
        first_coding_s: the part of ``coding_s`` before the first round.
    """

    pieces: Mapping[str, int]
    parts: Sequence[tuple[int, int]]
    rounds: Sequence[float]
    sent: float
    across: float
    coding_s: float
    first_coding_s: float


@dataclass(frozen=True)
class Passes:
    """The times of a piece's passes, in seconds.

    Args:
        forward_s, backward_s: the passes of one micro-batch.
        weight_s: the part of ``backward_s`` that a weight pass computes, if the schedule has weight passes.
        tensor_s: exposed tensor-parallel collectives in both passes.
        coding_s: encoding and decoding in both passes.
        experts_s: expert-parallel all-to-alls in both passes.
    """

    forward_s: float
    backward_s: float
    tensor_s: float
    coding_s: float
    experts_s: float
    weight_s: float


class Stages:
    """Pipeline stages of choices, composed of pieces.

    Args:
        config: resolved configuration.
        cluster: the cluster.
        vocab_size: entries of the vocabulary.
        imbalance: maximum over mean number of tokens per expert of a layer.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, vocab_size: int, imbalance: float = 1.0) -> None:
        self.config = config
        self.cluster = cluster
        self.vocab_size = vocab_size
        self.names = pieces_of(config.model)
        self.book = CostBook(config, cluster, vocab_size, imbalance)
        self._matrices: dict[Hashable, list[MatrixWork]] = {}
        self._stages: dict[Hashable, StageCost] = {}
        self._counts: dict[tuple[int, int], dict[str, int]] = {}
        self._passes: dict[Choice, dict[str, Passes]] = {}
        self._hops: dict[Choice, Hops] = {}
        dtype = config.precision.params_dtype
        self.param_bytes = dtype.itemsize
        self.grad_bytes = main_grad_dtype(dtype, config.parallel.accumulate_allreduce_grads_in_fp32).itemsize

    def pieces_of(self, choice: Choice, virtual: int) -> dict[str, int]:
        """Number of each piece in a virtual stage, by name."""
        key = choice.pp * choice.chunks, virtual
        if key not in self._counts:
            order = self.order(choice, virtual)
            self._counts[key] = {name: order.count(name) for name in self.names}
        return self._counts[key]

    def order(self, choice: Choice, virtual: int) -> tuple[str, ...]:
        """Piece names of a virtual stage in forward order."""
        stages, model = choice.pp * choice.chunks, self.config.model
        layers = model.num_layers // stages
        names = [piece_of(model, layer) for layer in range(virtual * layers, (virtual + 1) * layers)]
        return (*[EMBEDDING] * (virtual == 0), *names, *[HEAD] * (virtual == stages - 1))

    def passes(self, choice: Choice, wires: Wires) -> dict[str, Passes]:
        """Times of the forward and backward passes of each piece, by name."""
        key = dataclasses.replace(choice, specs=self.book.spec_texts(choice, *INNER_POINTS))
        if key not in self._passes:
            self._passes[key] = self._make_passes(choice, wires)
        return self._passes[key]

    def _make_passes(self, choice: Choice, wires: Wires) -> dict[str, Passes]:
        passes, separate = {}, choice.has_weight_passes
        for name in self.names:
            piece = self.book.piece(choice, name)
            pass_s = []
            tensor_s = coding_s = experts_s = weight_s = 0.0
            for direction, tally in (("forward", piece.forward), ("backward", piece.backward)):
                computed = tally.seconds * self.cluster.correction(f"{kind_of(name)} {direction}")
                tp_collectives = [each for each in tally.collectives if not each.of_experts]
                ep_collectives = [each for each in tally.collectives if each.of_experts]
                tp_s = collective_seconds(tp_collectives, wires.tp, choice.tp) * self.cluster.correction(
                    "tensor parallel"
                )
                ep_s = collective_seconds(ep_collectives, wires.ep, choice.ep, self.book.expert_levels(choice))
                hidden = 0.0
                if (
                    direction == "backward"
                    and not separate
                    and self.config.parallel.async_tensor_model_parallel_allreduce
                ):
                    # Half of the collectives of a region overlap with the products of its weights' gradients.
                    hidden = min(tp_s / 2, computed / 2)
                pass_s.append(computed + tally.coding_s + tp_s - hidden + ep_s)
                tensor_s += tp_s - hidden
                coding_s += tally.coding_s
                experts_s += ep_s
            if separate:
                weight_s = piece.weight.seconds * self.cluster.correction(f"{kind_of(name)} backward")
            forward_s, backward_s = pass_s
            passes[name] = Passes(forward_s, backward_s, tensor_s, coding_s, experts_s, weight_s)
        return passes

    def compresses(self, choice: Choice, point: Point, sender: int, late: bool) -> bool:
        """Whether messages of a pipeline rank are compressed; ``late``: those sent in its epilogue."""
        spec = self.book.specs(choice).get(point)
        if spec is None:
            return False
        return spec.activation.covers_stage(sender, choice.pp) and spec.activation.is_active(STEADY, late)

    def pipeline(self, choice: Choice, wires: Wires) -> Pipeline:
        """The pipeline of a choice, with the times of its passes and messages."""
        passes = self.passes(choice, wires)
        counts = [self.pieces_of(choice, virtual) for virtual in range(choice.pp * choice.chunks)]
        key = dataclasses.replace(choice, specs=self.book.spec_texts(choice, Point.PP_FWD, Point.PP_BWD, *TP_POINTS))
        if key not in self._hops:
            self._hops[key] = self._make_hops(choice, wires)
        return (ListPipeline if choice.schedule == AUTO else Pipeline)(
            choice.schedule,
            [sum(n * passes[name].forward_s for name, n in count.items()) for count in counts],
            [sum(n * passes[name].backward_s for name, n in count.items()) for count in counts],
            [sum(n * passes[name].weight_s for name, n in count.items()) for count in counts],
            choice.pp,
            self._hops[key],
            ScheduleLimits.from_config(self.config.parallel),
        )

    def _make_hops(self, choice: Choice, wires: Wires) -> Hops:

        @cache
        def hop_over(forward: bool, compressed: bool, wire: Wire) -> Hop:
            point = Point.PP_FWD if forward else Point.PP_BWD
            sent = self.book.message(choice, point, compressed)
            factor = self.book.coding(choice, point) if compressed else 1.0
            arrived_s = sent.decode_s * factor
            part = self.book.message_gather(choice, point)
            if part is not None:
                gather = Collective("all-gather", part.nbytes * choice.tp)
                arrived_s += part.encode_s + part.decode_s + collective_seconds([gather], wires.tp, choice.tp)
            return Hop(sent.encode_s * factor, sent.nbytes / wire.bytes_per_s, wire.latency_s, arrived_s)

        @cache
        def hop(forward: bool, boundary: int, late: bool) -> Hop:
            point = Point.PP_FWD if forward else Point.PP_BWD
            compressed = self.compresses(choice, point, choice.placement.ends_of(boundary, forward)[0], late)
            return hop_over(forward, compressed, wires.hops[choice.link_of(boundary)])

        return hop

    def contents(self, choice: Choice, rank: int) -> dict[str, int]:
        """Number of each piece on a pipeline rank, by name."""
        counts = [self.pieces_of(choice, virtual) for virtual in choice.placement.virtual_stages(rank)]
        return {name: sum(count[name] for count in counts) for name in self.names}

    def elements(self, choice: Choice, rank: int) -> int:
        """Number of parameters on a pipeline rank. If the first rank has both ends of the model, it holds a tied
        embedding only once."""
        total = sum(n * self.book.piece(choice, name).parameters for name, n in self.contents(choice, rank).items())
        tied = self.book.piece(choice, EMBEDDING).tied_shape
        return total - (math.prod(tied) if tied and rank == 0 and not choice.splits_tie else 0)

    def count_replicas(self, choice: Choice, rank: int) -> list[tuple[int, int]]:
        """(Number of parameters, number of replicas that hold them) on a pipeline rank: dense parameters on all
        replicas, expert parameters on those with equal experts."""
        contents = self.contents(choice, rank).items()
        expert_elements = sum(n * self.book.piece(choice, name).unshared_expert_parameters for name, n in contents)
        shared = (self.elements(choice, rank) - expert_elements, choice.dp)
        return [shared, (expert_elements, choice.expert_dp)] if expert_elements else [shared]

    def owned(self, choice: Choice, rank: int) -> float:
        """Number of parameters that a device updates: all of them, or its share."""
        return sum(
            elements / (replicas if choice.sharded else 1) for elements, replicas in self.count_replicas(choice, rank)
        )

    def matrices(self, choice: Choice, rank: int) -> list[MatrixWork]:
        """Muon's work on the parameters of a device, separately for dense and expert parameters as in ``parts``; empty
        for other optimizers."""
        if self.config.optimizer.optimizer != "muon":
            return []
        precision = self.config.optimizer.muon_fp32_matmul_prec
        in_bf16 = precision == "medium" or (precision is None and self.param_bytes == 2)
        chunks = [self.order(choice, virtual) for virtual in choice.placement.virtual_stages(rank)]
        sizes = choice.tp, choice.dp, choice.ep, choice.expert_dp
        key = (tuple(chunks), *sizes, choice.sharded, choice.overlaps_reduction)
        if key not in self._matrices:
            params_by_chunk = [
                [param for name in names for param in self.book.piece(choice, name).params] for names in chunks
            ]
            self._matrices[key] = [
                matrix_work(
                    [
                        [param for param in params if (choice.ep > 1 and param.spec.of_expert) is of_experts]
                        for params in params_by_chunk
                    ],
                    replicas,
                    choice.tp,
                    sharded=choice.sharded,
                    bucket_elements=self.bucket_elements(choice),
                    itemsize=2 if in_bf16 else max(self.param_bytes, 4),
                )
                for of_experts, replicas in ((False, choice.dp), (True, choice.expert_dp))
            ]
        return self._matrices[key]

    def bucket_elements(self, choice: Choice) -> int | None:
        """Minimum size of a gradient bucket; None for a single bucket."""
        return bucket_elements(self.config.parallel.ddp_bucket_size, choice.overlaps_reduction, choice.dp)

    def partial_reduction(self, choice: Choice, rank: int) -> Collective:
        """The all-reduce of sequence-parallel partial gradients over the tensor-parallel ranks, once a step."""
        contents = self.contents(choice, rank).items()
        elements = sum(n * self.book.piece(choice, name).partial for name, n in contents)
        return Collective("all-reduce", float(elements * self.grad_bytes))

    def tied_elements(self, choice: Choice) -> int:
        """Elements of the tied embedding that each holder reduces: all, or a replica's share."""
        elements = math.prod(self.book.piece(choice, EMBEDDING).tied_shape)
        return -(-elements // choice.dp) if choice.sharded and not self.book.fused(choice) else elements

    def stage(self, choice: Choice, rank: int, wires: Wires) -> StageCost:
        """Costs of a pipeline rank's parameters and their gradient reduction."""
        texts = self.book.spec_texts(choice, Point.DP_GRAD, Point.EMBED_GRAD)
        key = dataclasses.replace(choice, specs=texts), rank
        if key in self._stages:
            return self._stages[key]
        pieces = self.contents(choice, rank)
        correction = self.book.coding(choice, Point.DP_GRAD)
        rounds: list[float] = []
        sent = across = coding_s = first_coding_s = 0.0
        # Dense gradients are reduced over all replicas, those of experts over the replicas that hold the same experts.
        for of_experts, wire, size in ((False, wires.dp, choice.dp), (True, wires.expert_dp, choice.expert_dp)):
            costs = [(n, self.book.reduction(choice, name, rank, of_experts)) for name, n in pieces.items() if n]
            levels = self.book.levels(choice, Point.DP_GRAD, of_experts) if size > 1 else {}
            for number in range(max(len(cost.rounds) for _, cost in costs)):
                nbytes_of: dict[tuple[str, Level], float] = defaultdict(float)
                for n, cost in costs:
                    for collective in cost.rounds[number] if number < len(cost.rounds) else ():
                        nbytes_of[collective.kind, collective.level] += n * collective.nbytes
                merged = [Collective(kind, nbytes, level) for (kind, level), nbytes in nbytes_of.items()]
                if number == len(rounds):
                    rounds.append(0.0)
                rounds[number] += collective_seconds(merged, wire, size, levels)
                sent += sent_bytes(merged, size, levels)
                across += sent_bytes([each for each in merged if each.level is Level.ACROSS], size, levels)
            coding_s += correction * sum(n * cost.coding_s for n, cost in costs)
            first_coding_s += correction * sum(n * cost.first_coding_s for n, cost in costs)
        parts = self.count_replicas(choice, rank)
        self._stages[key] = StageCost(pieces, parts, rounds, sent, across, coding_s, first_coding_s)
        return self._stages[key]


def collective_seconds(
    collectives: Sequence[Collective], wire: Wire, size: int, levels: Levels = MappingProxyType({})
) -> float:
    """Seconds of consecutive collectives over a group, or over its ranks at each collective's level."""
    total = 0.0
    for collective in collectives:
        used, ranks = levels.get(collective.level, (wire, size))
        total += used.collective(collective.kind, collective.nbytes, ranks)
    return total


def sent_bytes(collectives: Sequence[Collective], size: int, levels: Levels = MappingProxyType({})) -> float:
    """Bytes that each rank sends for collectives; the mean over ranks where a single rank serves the others."""
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

"""Memory and traffic of a choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from megatron.compression.api import Level
from megatron.compression.points import EXPERT_POINTS, Point
from megatron.config.memory import parameter_bytes
from megatron.config.recompute import RecomputeConfig
from megatron.distributed.layout import Tie
from megatron.parallel.pipeline.list_schedule import AUTO, FIRST
from megatron.parallel.pipeline.schedule import (
    NO_LIMITS,
    Pass,
    PipelineOp,
    ScheduleLimits,
    add_weight_passes,
    find_epilogue,
    make_schedule,
    most_in_flight,
    one_f_one_b,
    warm_ups_without_flush,
)
from megatron.planner.choice import Choice
from megatron.planner.costs import INNER_POINTS, TP_POINTS, Wires
from megatron.planner.dry_run import CostTally
from megatron.planner.piece_costs import EMBEDDING, HEAD
from megatron.planner.stages import Stages, sent_bytes

_IN_FLIGHT_GROUPS = 6
"""Groups of micro-batches after which the peak number of activations in 1F1B stops growing."""


HeldCounts = tuple[tuple[int, int], ...]
"""(Activations of micro-batches, records of weight passes) of each chunk on a rank."""


@cache
def _operations(
    kind: str, pp: int, rank: int, chunks: int, micro_batches: int, limits: ScheduleLimits
) -> list[PipelineOp]:
    """Return a rank's schedule; a long 1F1B step is shortened, with the same peaks of memory and the same epilogue."""
    if kind != "gpipe":
        remainder = micro_batches % pp if chunks == 1 else 0
        shortest = max(_IN_FLIGHT_GROUPS * pp, 2 * (limits.in_flight or 0))
        micro_batches = min(micro_batches, shortest + remainder)
    return make_schedule(kind, pp, rank, chunks, micro_batches, limits)


@cache
def held_by_rank(
    kind: str,
    pp: int,
    rank: int,
    chunks: int,
    micro_batches: int,
    limits: ScheduleLimits = NO_LIMITS,
    flush: bool = True,
    separate: bool = False,
) -> frozenset[HeldCounts]:
    """Return all combinations of activations and records that a rank holds at the same time during a step; under auto,
    the extremes that the limits allow.

    Without ``flush``, ``separate`` says whether there are weight passes.
    """
    if kind == AUTO:  # which may hold as many micro-batches as are allowed
        max_held = min(most_in_flight(AUTO, pp, limits.in_flight), micro_batches)
        max_records = min(max_held, limits.weight_records or max_held) if rank > 0 else 0
        return frozenset({((max_held, 0),), ((max_held - max_records, max_records),)})
    if flush:
        operations = _operations(kind, pp, rank, chunks, micro_batches, limits)
    else:
        warm_up = warm_ups_without_flush(kind, pp, micro_batches, limits)[rank]
        operations = one_f_one_b(warm_up, warm_up + 1)
        operations = add_weight_passes(operations, rank) if separate else operations
    return count_held(operations, chunks)


def count_held(operations: Sequence[PipelineOp], chunks: int) -> frozenset[HeldCounts]:
    """Return all combinations of activations and records that a rank holds at the same time in a step."""
    records_per_backward = any(op.computation is Pass.WEIGHT for op in operations)
    activations, records = [0] * chunks, [0] * chunks
    held_counts = set()
    for op in operations:
        activations[op.chunk] += op.is_forward - op.is_backward
        records[op.chunk] += op.is_backward * records_per_backward - (op.computation is Pass.WEIGHT)
        held_counts.add(tuple(zip(activations, records, strict=True)))
    return frozenset(held_counts)


@cache
def _count_late_messages(
    kind: str, pp: int, rank: int, chunks: int, micro_batches: int, limits: ScheduleLimits
) -> Counter[int]:
    """Number of backward messages sent in a rank's epilogue, by chunk."""
    operations = _operations(kind, pp, rank, chunks, micro_batches, limits)
    return Counter(op.chunk for op in find_epilogue(operations))


def memory(stages: Stages, choice: Choice) -> dict[str, float]:
    """Bytes on the fullest rank, by category."""
    fullest: dict[str, float] = {}
    book = stages.book
    gather_spec = book.specs(choice).get(Point.PARAM_GATHER)
    compressed = choice.sharded and gather_spec is not None and not gather_spec.identity
    sizes, matrix_sizes = (parameter_bytes(stages.config, compressed, matrix) for matrix in (False, True))
    uniform = not stages.config.model.has_experts
    limits = ScheduleLimits.from_config(stages.config.parallel)
    for rank in sorted({0, choice.pp // 2, choice.pp - 1}) if uniform else range(choice.pp):
        chunk_bytes = []  # of activations and records of a micro-batch
        for virtual in choice.placement.virtual_stages(rank):
            pieces = [(n, book.piece(choice, name)) for name, n in stages.pieces_of(choice, virtual).items()]
            saved_bytes = sum(n * piece.saved_bytes for n, piece in pieces)
            chunk_bytes.append((saved_bytes, sum(n * piece.recorded_bytes for n, piece in pieces)))
        counts = held_by_rank(
            choice.schedule, choice.pp, rank, choice.chunks, choice.micro_batches, limits, choice.flush,
            choice.has_weight_passes,
        )  # fmt: skip
        elements = stages.elements(choice, rank)
        owned = stages.owned(choice, rank)
        matrices = sum(work.updated for work in stages.matrices(choice, rank))
        contents = stages.contents(choice, rank)
        working_bytes = max(book.piece(choice, name).working_bytes for name, n in contents.items() if n)
        if choice.recompute.recompute_granularity == "full":  # recomputation holds a group of layers
            plain = replace(choice, recompute=RecomputeConfig())
            layers = [name for name, n in contents.items() if n and name not in (EMBEDDING, HEAD)]
            in_groups = choice.recompute.recompute_method == "uniform"
            num_recomputed = choice.recompute.recompute_num_layers if in_groups else 1
            working_bytes = max(
                working_bytes, max(book.piece(plain, name).saved_bytes for name in layers) * num_recomputed
            )
        summed = choice.dp > 1 and Point.DP_GRAD in book.specs(choice)
        reductions = [
            (n, book.reduction(choice, name, rank, of_experts))
            for name, n in contents.items()
            for of_experts in (False, True)
            if n and summed
        ]
        tied = book.piece(choice, EMBEDDING).tied_shape
        holds_copy = bool(tied) and choice.splits_tie and rank in choice.placement.holders(Tie.WORDS)
        if holds_copy and Point.EMBED_GRAD in book.specs(choice):
            reductions.append((1, book.embedding_reduction(choice, tied, stages.tied_elements(choice))))
        by_category = {
            "parameters": float(elements * sizes.weight * (1 if choice.flush else 3)),
            "gradients": float(elements * sizes.gradient * (1 + choice.delay)),
            "optimizer": (owned - matrices) * sizes.optimizer + matrices * matrix_sizes.optimizer,
            "activations": max(
                sum(
                    activations * saved_bytes + records * recorded_bytes
                    for (activations, records), (saved_bytes, recorded_bytes) in zip(held, chunk_bytes, strict=True)
                )
                for held in counts
            ),
            "work space": working_bytes,
            "compressors": sum(n * cost.state_bytes for n, cost in reductions) + _channel_bytes(stages, choice, rank),
        }
        if sum(by_category.values()) > sum(fullest.values()):
            fullest = by_category
    return fullest


def _channel_bytes(stages: Stages, choice: Choice, rank: int) -> float:
    """Bytes of the pipeline codecs' states on a rank."""
    if choice.pp == 1:
        return 0.0
    state_bytes = 0.0
    specs = stages.book.specs(choice)
    for point in (Point.PP_FWD, Point.PP_BWD):
        if point not in specs:
            continue
        sent = stages.book.message(choice, point, True)
        ends = choice.chunks * (1 if rank in (0, choice.pp - 1) else 2)
        options = specs[point].options
        samples = getattr(options, "memory", 0) or getattr(options, "cache", 0)
        state_bytes += ends * (sent.kept_bytes / 2 + sent.sample_bytes * samples)
    return state_bytes


def traffic(stages: Stages, choice: Choice, wires: Wires) -> dict[str, float]:
    """Bytes that a device sends in a step, by point, averaged over the pipeline ranks."""
    by_point: dict[str, float] = {}
    book = stages.book
    for point in INNER_POINTS:
        total = _inner_traffic(stages, choice, lambda tally: tally.sent, point)
        if point is Point.TP_BWD:
            partial = [stages.partial_reduction(choice, rank) for rank in range(choice.pp)]
            total += sent_bytes(partial, choice.tp)
        gather_cost = book.message_gather(choice, Point.PP_FWD if point is Point.TP_FWD else Point.PP_BWD)
        if gather_cost is not None and point in TP_POINTS:
            messages = len(choice.message_boundaries) * choice.micro_batches
            total += messages * gather_cost.nbytes * (choice.tp - 1)
        by_point[point.value] = total / choice.pp
    for point in (Point.PP_FWD, Point.PP_BWD):
        total = 0.0
        for boundary in choice.message_boundaries:
            rank, chunk = choice.placement.place_of(boundary if point is Point.PP_FWD else boundary + 1)
            late = 0
            if point is Point.PP_BWD:
                # Late messages matter only to codecs that cannot be combined with auto.
                schedule = FIRST if choice.schedule == AUTO else choice.schedule
                limits = ScheduleLimits.from_config(stages.config.parallel)
                order = choice.pp, rank, choice.chunks, choice.micro_batches, limits
                late = _count_late_messages(schedule, *order)[chunk]
            for count, is_late in ((late, True), (choice.micro_batches - late, False)):
                compressed = stages.compresses(choice, point, rank, is_late)
                total += count * book.message(choice, point, compressed).nbytes
        by_point[point.value] = total / choice.pp
    by_point[Point.DP_GRAD.value] = sum(stages.stage(choice, rank, wires).sent for rank in range(choice.pp)) / choice.pp
    by_point[Point.EMBED_GRAD.value] = _embedding_traffic(stages, choice, tuple(Level))
    if choice.sharded:
        by_point[Point.PARAM_GATHER.value] = sum(
            book.param_gather(choice, -(-elements // size), rank).nbytes * (size - 1) / choice.pp
            for rank in range(choice.pp)
            for elements, size in stages.count_replicas(choice, rank)
        )
    for rank in range(choice.pp):
        exchanged = sum(work.to_replicas + work.to_tensors for work in stages.matrices(choice, rank))
        by_point[Point.OPTIMIZER.value] = by_point.get(Point.OPTIMIZER.value, 0.0) + exchanged / choice.pp
    return {point: nbytes for point, nbytes in by_point.items() if nbytes}


def _embedding_traffic(stages: Stages, choice: Choice, levels: Sequence[Level]) -> float:
    """Bytes of the tied embedding's gradient that a device sends in a step at some levels, averaged over the ranks."""
    book = stages.book
    tied = book.piece(choice, EMBEDDING).tied_shape
    if not tied or not choice.splits_tie:
        return 0.0
    reduction = book.embedding_reduction(choice, tied, stages.tied_elements(choice))
    collectives = [each for collectives in reduction.rounds for each in collectives if each.level in levels]
    holders = 2 * choice.dp if book.fused(choice) else 2
    return 2 * sent_bytes(collectives, holders, book.levels(choice, Point.EMBED_GRAD)) / choice.pp


def _inner_traffic(
    stages: Stages, choice: Choice, select: Callable[[CostTally], Mapping[Point, int]], point: Point
) -> float:
    """Bytes of a point summed over all layers, micro-batches and both passes; ``select`` picks the counts."""
    total = 0.0
    for rank in range(choice.pp):
        for name, count in stages.contents(choice, rank).items():
            piece = stages.book.piece(choice, name, balanced=True)
            # With recomputation, backward sends the forward messages again.
            sent = sum(select(tally).get(point, 0) for tally in (piece.forward, piece.backward))
            total += count * choice.micro_batches * sent
    return total


def internode_traffic(stages: Stages, choice: Choice, wires: Wires, sent: Mapping[str, float]) -> dict[str, float]:
    """Bytes that leave the node, by point: for a ring, those sent by its last member in a node; for an all-to-all,
    those sent to members in other nodes."""
    # Where the first and the last stage share a node, all holders of a tied embedding are in it.
    fused = stages.book.fused(choice) and wires.ends.per_node == 1
    groups = {
        Point.TP_FWD: (wires.tp, choice.tp),
        Point.TP_BWD: (wires.tp, choice.tp),
        Point.DP_GRAD: (wires.dp, choice.dp),
        Point.PARAM_GATHER: (wires.dp, choice.dp),
        Point.EMBED_GRAD: (wires.holders, 2 * choice.dp) if fused else (wires.ends, 2),
    }
    by_point = {
        point.value: sent[point.value] / wire.per_node
        for point, (wire, size) in groups.items()
        if point.value in sent and wire.per_node < size
    }
    if stages.book.expert_levels(choice):
        for point in EXPERT_POINTS:
            inside = _inner_traffic(stages, choice, lambda tally: tally.inside, point)
            by_point[point.value] = sent[point.value] - inside / choice.pp
    elif wires.ep.per_node < choice.ep:
        share = (choice.ep - wires.ep.per_node) / (choice.ep - 1)
        by_point |= {point.value: sent[point.value] * share for point in EXPERT_POINTS if point.value in sent}
    if stages.book.levels(choice, Point.DP_GRAD) and Point.DP_GRAD.value in sent:
        across = sum(stages.stage(choice, rank, wires).across for rank in range(choice.pp)) / choice.pp
        by_point |= {Point.DP_GRAD.value: across}
    if stages.book.levels(choice, Point.EMBED_GRAD) and Point.EMBED_GRAD.value in sent:
        by_point[Point.EMBED_GRAD.value] = _embedding_traffic(stages, choice, (Level.ACROSS,))
    boundaries = [wires.hops[choice.link_of(boundary)] for boundary in choice.message_boundaries]
    crossing = sum(wire.per_node == 1 for wire in boundaries)
    for point in (Point.PP_FWD, Point.PP_BWD):
        if crossing and point.value in sent:
            by_point[point.value] = sent[point.value] * crossing / len(boundaries)
    return by_point

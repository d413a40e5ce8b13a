"""Share of each point's traffic that the run's compressors can compress, computed before the first step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed import ReduceOp

from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.linalg import matrix_shape
from megatron.compression.points import Point
from megatron.compression.spec import Spec
from megatron.parallel.data.param_gather import gathers_compressed
from megatron.parallel.data.reducer import BucketReducer
from megatron.training.assembly import Engines

Shares = tuple[float, float, int]
"""Elements of an iteration's traffic that go through a compressor, all elements, and the highest rank that pays."""


def coverage_notes(engines: Engines) -> list[str]:
    """Return a line for each point with traffic and a compressor: its compressed share after warm-up.

    A collective call. Tensors for which a compressor would save nothing, and tensors that its options exclude
    (``stages``, ``when``), are sent uncompressed; if nothing is compressed, the line says so and suggests a remedy.
    """
    points = [point for point in engines.plan.specs if engines.plan.is_compressed(point)]
    if not points:
        return []
    shares = [_shares(engines, point) for point in points]
    elements_p2 = torch.tensor([[compressed, total] for compressed, total, _ in shares], dtype=torch.float64)
    bounds_p = torch.tensor([bound for _, _, bound in shares])
    control = engines.topology.control
    control.all_reduce(elements_p2).wait()
    control.all_reduce(bounds_p, ReduceOp.MAX).wait()
    return [
        _format_line(engines.plan.specs[point], compressed / total, bound, engines.config.precision.params_dtype)
        for point, (compressed, total), bound in zip(points, elements_p2.tolist(), bounds_p.tolist(), strict=True)
        if total
    ]


def highest_rank(spec: Spec, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """Return the highest rank at which the spec's compressor pays for a matrix of this shape and dtype; 0 if none does,
    or the compressor has no rank."""
    if not hasattr(spec.options, "rank"):
        return 0

    def too_high(rank: int) -> bool:
        compressor = spec.make_compressor(replace(spec.options, rank=rank))
        if isinstance(compressor, RoundCompressor):
            return not compressor.should_compress(shape)
        return isinstance(compressor, Codec) and not compressor.should_compress(torch.Size(shape), dtype)

    return bisect_left(range(1, min(matrix_shape(shape)) + 1), True, key=too_high)


def _format_line(spec: Spec, share: float, highest_rank: int, dtype: torch.dtype) -> str:
    flag = f"--compress {spec.point.value}={spec.name}"
    if share:
        return f"{flag} compresses {share:.1%} of the numbers that {spec.point.value} sends"
    if spec.name == "cast" and not spec.point.is_reduction and dtype.itemsize == 2:
        return f"{flag}: the numbers have 16 bits as they are"
    rank = getattr(spec.options, "rank", None)
    if rank is None or rank <= highest_rank:
        advice = ""
    elif highest_rank:
        advice = f": there only ranks up to {highest_rank} send fewer bytes than the matrices; lower rank={rank}"
    else:
        advice = ": there no rank sends fewer bytes than the matrices; leave it out"
    return f"warning: {flag} compresses 0% of what {spec.point.value} sends{advice}"


def _shares(engines: Engines, point: Point) -> Shares:
    """The shares for this rank's part of an iteration."""
    if point in (Point.PP_FWD, Point.PP_BWD):
        if engines.channel is None:
            return 0.0, 0.0, 0
        messages, dtype, plan = engines.channel.shapes, engines.channel.dtype, engines.plan
        layout, training, islands = engines.topology.layout, engines.config.training, engines.config.islands.islands
        covered = plan.covers(point, plan.stage)
        compresses = [covered and plan.ever_compresses(point, shape, dtype) for shape in messages]
        micro_batches = training.global_batch_size // (training.micro_batch_size * layout.dp * islands)
        table = engines.pipeline.get_timetable(engines.config.parallel.pipeline_schedule, micro_batches)
        late, only_late = table.epilogues[plan.stage], plan.activation(point).epilogue
        compressed, total = 0.0, 0.0
        for op in table.schedules[plan.stage]:
            boundary = layout.virtual_stage(plan.stage, op.chunk) - (not op.is_forward)
            sends = op.is_forward if point is Point.PP_FWD else op.is_backward
            if sends and 0 <= boundary < layout.num_virtual_stages - 1 and layout.crosses(boundary):
                total += messages[boundary].numel()
                if compresses[boundary] and (op in late or not only_late):
                    compressed += messages[boundary].numel()
        return compressed, total, max(highest_rank(plan.specs[point], shape, dtype) for shape in messages)
    if point in (Point.TP_FWD, Point.TP_BWD):
        model, comm = engines.config.model, engines.comm
        if comm.size == 1:
            return 0.0, 0.0, 0
        covered = engines.plan.covers(point, engines.plan.stage)
        compressed, total, highest = 0.0, 0.0, 0
        for layer in (number for stage in engines.stages for number in stage.stage_part.layers):
            length = model.labels_of(model.seq_length) if layer in model.decoder_layers else model.seq_length
            shape = (length, engines.config.training.micro_batch_size, model.hidden_size)
            total += length
            compressed += length * (covered and engines.plan.ever_compresses(point, shape))
            highest = max(highest, highest_rank(engines.plan.specs[point], shape))
        return compressed, total, highest
    if point.is_expert_point:
        model, plan = engines.config.model, engines.plan
        # Routing is not known in advance; assume that a layer's tokens choose all its experts uniformly.
        row = (1, model.hidden_size)
        pays = plan.covers(point, plan.stage) and plan.ever_compresses(
            point, row, engines.config.precision.params_dtype
        )
        compressed, total = 0.0, 0.0
        k, ranks, nodes = model.moe_router_topk, engines.expert_comm.ranks, engines.expert_comm.nodes
        for layer in (n for stage in engines.stages for n in stage.stage_part.layers if n in model.expert_layers):
            # Mean rows of a token that go to other ranks: in the stage that codecs serve, and inside nodes after it.
            experts = model.expert_layers[layer]
            between, inside = k * (ranks.size - 1) / ranks.size, 0.0
            if nodes is not None:
                missed = math.comb(experts - experts // nodes.size, k) / math.comb(experts, k)
                between, inside = (nodes.size - 1) * (1 - missed), between
            compressed += between * pays * model.hidden_size
            total += (between + inside) * model.hidden_size
        return compressed, total, 0
    if point is Point.EMBED_GRAD:
        shapes = [tied.shape for tied in engines.sync.ties]
        compressed = float(sum(math.prod(shape) * engines.plan.ever_compresses(point, shape) for shape in shapes))
        highest = max((highest_rank(engines.plan.specs[point], shape) for shape in shapes), default=0)
        return compressed, float(sum(map(math.prod, shapes))), highest
    if point is Point.PARAM_GATHER:
        total = float(sum(buffer.params_flat.numel() for buffer in engines.buffers)) * engines.optimizer.sharded
        return total * gathers_compressed(engines.plan, engines.optimizer.sharded), total, 0
    if point is Point.OUTER:
        fragments = engines.outer.fragments if engines.outer is not None and engines.config.islands.several else []
        return _reducer_shares(engines.plan.specs[point], [fragment.reducer for fragment in fragments])
    exact = engines.sync.group.size == 1 or not engines.sync.reduce
    return _reducer_shares(engines.plan.specs[point], [] if exact else engines.sync.reducers)


def _reducer_shares(spec: Spec, reducers: Sequence[BucketReducer]) -> Shares:
    """The shares of gradients, or of islands' differences, whose buckets are allocated during rounds only."""
    compressed, total = 0, 0
    shapes: set[tuple[int, ...]] = set()
    for reducer in reducers:
        for bucket, units in zip(reducer.buckets, reducer.units, strict=True):
            if bucket.skipped:
                continue
            length = bucket.flat.numel() or bucket.ranges[-1].stop
            total += length
            compressed += sum(unit.ranges[-1].stop - unit.ranges[0].start if unit.ranges else length for unit in units)
            shapes |= {slot.shape for slot in bucket.ranges if len(slot.shape) > 1}
    return float(compressed), float(total), max((highest_rank(spec, shape) for shape in shapes), default=0)

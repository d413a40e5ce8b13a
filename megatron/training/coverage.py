"""The share of each point's traffic that the compressors of a run can compress, computed before the first step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.distributed import ReduceOp

from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.linalg import matrix_shape
from megatron.compression.points import Point
from megatron.compression.spec import Spec
from megatron.optimizer.publish import compresses
from megatron.parallel.pipeline.schedule import epilogue, training_schedule
from megatron.training.assembly import Engines

Shares = tuple[float, float, int]
"""Elements of an iteration's traffic that go through a compressor, all of them, and the highest rank that pays."""


def coverage_notes(engines: Engines) -> list[str]:
    """A line for each point that has traffic and a compressor: the share that is compressed once warm-ups are over.

    A collective call. Tensors for which a compressor would save nothing, and what its options leave out (``stages``,
    ``when``), are sent as they are; where that is all, the line says so and what would help.
    """
    points = [point for point in engines.plan.specs if engines.plan.compressed(point)]
    if not points:
        return []
    shares = [_shares(engines, point) for point in points]
    elements_p2 = torch.tensor([[done, total] for done, total, _ in shares], dtype=torch.float64)
    bounds_p = torch.tensor([bound for _, _, bound in shares])
    control = engines.topology.control
    control.all_reduce(elements_p2).wait()
    control.all_reduce(bounds_p, ReduceOp.MAX).wait()
    return [
        _line(engines.plan.specs[point], done / total, bound)
        for point, (done, total), bound in zip(points, elements_p2.tolist(), bounds_p.tolist(), strict=True)
        if total
    ]


def highest_rank(spec: Spec, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """The highest rank at which the spec's compressor pays for a matrix of this shape and dtype; 0 if none does, or it
    has no rank."""
    if not hasattr(spec.options, "rank"):
        return 0

    def too_high(rank: int) -> bool:
        made = spec.compressor(replace(spec.options, rank=rank))
        if isinstance(made, RoundCompressor):
            return not made.should_compress(shape)
        return isinstance(made, Codec) and not made.should_compress(torch.Size(shape), dtype)

    return bisect_left(range(1, min(matrix_shape(shape)) + 1), True, key=too_high)


def _line(spec: Spec, share: float, highest_rank: int) -> str:
    where = f"--compress {spec.point.value}={spec.name}"
    if share:
        return f"{where} compresses {share:.1%} of the numbers that {spec.point.value} sends"
    rank = getattr(spec.options, "rank", None)
    if rank is None or rank <= highest_rank:
        advice = ""
    elif highest_rank:
        advice = f": there only ranks up to {highest_rank} send fewer bytes than the matrices; lower rank={rank}"
    else:
        advice = ": there no rank sends fewer bytes than the matrices; leave it out"
    return f"warning: {where} compresses 0% of what {spec.point.value} sends{advice}"


def _shares(engines: Engines, point: Point) -> Shares:
    """The shares of this rank's part of one iteration."""
    if point in (Point.PP_FWD, Point.PP_BWD):
        return _pipeline(engines, point)
    if point in (Point.TP_FWD, Point.TP_BWD):
        return _tensor(engines, point)
    if point is Point.EMBED_GRAD:
        return _embedding(engines)
    if point is Point.PARAM_GATHER:
        total = float(sum(buffer.params_flat.numel() for buffer in engines.buffers)) * engines.optimizer.sharded
        return total * compresses(engines.plan, engines.optimizer.sharded), total, 0
    return _gradients(engines)


def _gradients(engines: Engines) -> Shares:
    sync = engines.sync
    if sync.group.size == 1 or not sync.reduce:
        return 0.0, 0.0, 0
    done, total = 0, 0
    shapes: set[tuple[int, ...]] = set()
    for reducer in sync.reducers:
        for bucket, units in zip(reducer.buckets, reducer.units, strict=True):
            if bucket.skipped:
                continue
            total += bucket.flat.numel()
            done += sum(unit.view(bucket.flat).numel() for unit in units)
            shapes |= {place.shape for place in bucket.places if len(place.shape) > 1}
    spec = engines.plan.specs[Point.DP_GRAD]
    return float(done), float(total), max((highest_rank(spec, shape) for shape in shapes), default=0)


def _embedding(engines: Engines) -> Shares:
    slot = engines.sync.tied_slot
    if engines.sync.embedding is None or slot is None:
        return 0.0, 0.0, 0
    shape = tuple(slot.param.shape)
    pays = engines.plan.ever_compresses(Point.EMBED_GRAD, shape)
    highest = highest_rank(engines.plan.specs[Point.EMBED_GRAD], shape)
    return float(slot.param.numel() * pays), float(slot.param.numel()), highest


def _tensor(engines: Engines, point: Point) -> Shares:
    """The shares at a tensor-parallel point, whose tensors are all activations of one shape."""
    model, comm = engines.config.model, engines.comm
    if comm.size == 1:
        return 0.0, 0.0, 0
    shape = (model.seq_length, engines.config.training.micro_batch_size, model.hidden_size)
    covered = engines.plan.covers(point, engines.plan.stage)
    layers = float(sum(len(stage.part.layers) for stage in engines.stages))
    pays = covered and engines.plan.ever_compresses(point, shape)
    return layers * pays, layers, highest_rank(engines.plan.specs[point], shape)


def _pipeline(engines: Engines, point: Point) -> Shares:
    if engines.channel is None:
        return 0.0, 0.0, 0
    shape, dtype, plan = engines.channel.shape, engines.channel.dtype, engines.plan
    pays = plan.covers(point, plan.stage) and plan.ever_compresses(point, shape, dtype)
    messages = list(_sent(engines, point))
    return float(pays * sum(messages)), float(len(messages)), highest_rank(plan.specs[point], shape, dtype)


def _sent(engines: Engines, point: Point) -> Iterator[bool]:
    """Whether the spec's ``when`` lets each message that this rank sends in a step be compressed."""
    layout, stage = engines.topology.layout, engines.plan.stage
    training, kind = engines.config.training, engines.config.parallel.pipeline_schedule
    micro_batches = training.global_batch_size // (training.micro_batch_size * layout.dp)
    ops = training_schedule(kind, layout.pp, stage, layout.chunks, micro_batches)
    late = epilogue(ops)
    only_late = engines.plan.activation(point).epilogue
    last = layout.num_virtual_stages - 1
    for op in ops:
        ends = last if op.forward else 0
        if op.forward == (point is Point.PP_FWD) and layout.virtual_stage(stage, op.chunk) != ends:
            yield op in late or not only_late

"""Publication of updated values: from the optimizer's main values to the model's parameters on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.compression.api import Codec
from megatron.compression.identity import IdentityCodec
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.distributed.compressed_gather import PendingGather
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.data.buffer import FlatBuffer
from megatron.parallel.data.delay_correction import LookAhead
from megatron.parallel.data.gradient_sync import local_share
from megatron.parallel.data.param_shards import ParamShard


class ParamAllGather:
    """Copy of the main values into the model, with an all-gather of the shares if the optimizer is sharded.

    With a compressor at ``PARAM_GATHER`` every rank sends the difference between its main values and the model's, and
    all ranks, including itself, add the decoded difference to the model. Quantization errors remain in the next
    difference, so the model follows the main values without a residual (the weight differences of SDP4Bit, Jia et al.
    2024).

    Args:
        buffers: buffers of the chunks.
        shards: the shards that this rank updates.
        plan: plan with the compressor of ``PARAM_GATHER``.
        ledger: ledger that counts the bytes.
        sharded: whether each rank owns a share.
        look_ahead: extrapolation of the model's parameters in training; None to train at the main values.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        shards: Sequence[ParamShard],
        plan: CompressionPlan,
        ledger: Ledger,
        sharded: bool,
        look_ahead: LookAhead | None = None,
    ) -> None:
        self.look_ahead = look_ahead
        self.ledger, self.sharded = ledger, sharded
        self.plan = plan
        self.separate_main = any(shard.main.data_ptr() != shard.model.data_ptr() for shard in shards)
        self._shards = list(shards)
        self._buckets = [(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]
        self._by_slot: dict[int, list[ParamShard]] = {}
        for shard in shards:
            self._by_slot.setdefault(id(shard.slot), []).append(shard)

    def publish(self, iteration: int) -> None:
        """Update the model's parameters after the optimizer's update."""
        if not self.sharded or not self.plan.compresses(Point.PARAM_GATHER, iteration):
            self.publish_ahead()
            return
        gathers = []
        for buffer, bucket in self._buckets:
            # Main values minus the model's in this rank's share of the bucket; padding is zero.
            share = local_share(bucket, buffer.group, True)
            dtype = torch.float64 if buffer.params_flat.dtype == torch.float64 else torch.float32
            difference = torch.zeros(share.stop - share.start, dtype=dtype, device=buffer.params_flat.device)
            for slot in bucket.slots:
                for shard in self._by_slot.get(id(slot), ()):
                    start = slot.start + shard.start - bucket.start - share.start
                    torch.sub(shard.main, shard.model, out=difference[start : start + shard.main.numel()])
            raw = difference.numel() * buffer.params_flat.element_size()
            # All stages of a tied embedding must draw the same noise for it, whatever their other buckets are.
            key = iteration, bucket.slots[0].logical_name
            gathers.append(
                self._start_gather(buffer.group, self.plan.codec(Point.PARAM_GATHER), difference, key, None, raw)
            )
        for gather, (buffer, bucket) in zip(gathers, self._buckets, strict=True):
            differences = gather.wait()
            with self.ledger.decoding(Point.PARAM_GATHER):
                params = buffer.params_of(bucket)
                params.copy_(params.to(differences.dtype) + differences)

    def publish_ahead(self) -> None:
        """Set the model's parameters to the values at which the next gradients are computed."""
        if self.look_ahead is None:
            self.publish_exactly()
            return
        self.look_ahead.move_model()
        if self.sharded:
            self.gather()

    @contextmanager
    def exact_parameters(self) -> Iterator[None]:
        """Context in which the model's parameters are the main values, even if they look ahead. All ranks enter it."""
        looks_ahead = self.look_ahead is not None and self.look_ahead.previous is not None
        if looks_ahead:
            self.publish_exactly()
        yield
        if looks_ahead:
            self.publish_ahead()

    def publish_exactly(self) -> None:
        """Set the model's parameters to the main values, rounded to the model's precision."""
        if self.separate_main:
            torch._foreach_copy_([shard.model for shard in self._shards], [shard.main for shard in self._shards])
        if self.sharded:
            self.gather()

    def gather(self) -> None:
        """All-gather every bucket of the model's parameters from the ranks that own its shares, exactly."""
        gathers = []
        for buffer, bucket in self._buckets:
            params = buffer.params_of(bucket)
            share = params[local_share(bucket, buffer.group, True)]
            gathers.append(self._start_gather(buffer.group, IdentityCodec(), share, None, params, None))
        for gather in gathers:
            gather.wait()

    def _start_gather(
        self, group: Group, codec: Codec, share: Tensor, key: Hashable, out: Tensor | None, raw_bytes: int | None
    ) -> PendingGather:
        return PendingGather(
            codec, share, CompressorState(), key, group, self.ledger, Point.PARAM_GATHER, out, raw_bytes
        )


def gathers_compressed(plan: CompressionPlan, sharded: bool) -> bool:
    """Whether this rank ever gathers parameters through a compressor."""
    return sharded and plan.covers(Point.PARAM_GATHER, plan.stage)

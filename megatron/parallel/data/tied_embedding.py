"""All-reduce of a tied embedding's gradient over the stages that hold it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from megatron.compression.identity import IdentityRounds
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.round_driver import PackedReduction, TensorReduction
from megatron.parallel.data.reducer import ParamRange, ParamStack


@dataclass(eq=False)
class EmbeddingSync:
    """All-reduce of a tied embedding's gradient over its holders.

    By default the holders are the stages, after the data-parallel reduction. The embedding has a separate bucket on all
    stages, so with the sharded optimizer they hold the same share of it and exchange only that share. In fused mode
    (Optimus-CC, Song et al. 2023, section 5.3) the holders are all replicas of these stages, and this all-reduce
    replaces the data-parallel reduction.

    Args:
        group: the holders with this tensor-parallel rank.
        plan: the compressor of ``EMBED_GRAD``.
        ledger: ledger that counts the bytes; a fused all-reduce is compared with the two reductions that it replaces.
        replicas: number of replicas in a fused all-reduce; 1 after a data-parallel reduction.
    """

    group: Group
    plan: CompressionPlan
    ledger: Ledger
    replicas: int = 1
    state: CompressorState = field(default_factory=CompressorState)
    _active: bool = False

    def begin_step(self, iteration: int) -> None:
        """Begin a step (0-based)."""
        self._active = self.plan.is_compressed(Point.EMBED_GRAD) and self.plan.is_active(Point.EMBED_GRAD, iteration)

    @property
    def needs_update(self) -> bool:
        """Whether the compressor needs the optimizer's update of this step."""
        return (
            self._active and self.plan.rounds(Point.EMBED_GRAD).traits.observes and bool(self.state.count("awaiting"))
        )

    def observe(self, update: Tensor, shape: tuple[int, ...]) -> None:
        """Pass the optimizer's update of the embedding, flat and padded, to the compressor."""
        self.plan.rounds(Point.EMBED_GRAD).observe(self._unit(shape).unscaled_view(update, 1.0), self.state)

    def _unit(self, shape: tuple[int, ...]) -> ParamStack:
        return ParamStack((ParamRange("embedding", 0, shape),), self.state)

    def all_reduce(self, grad: Tensor, shape: tuple[int, ...], scale: float) -> None:
        """All-reduce ``grad`` (flat, contiguous; a parameter of ``shape`` and padding) over the group, in place.

        ``scale`` is the loss scale of the gradient; compression works on the unscaled gradient in fp32 (or fp64).
        """
        count = math.prod(shape)
        holds_all = count <= grad.numel()
        compresses = self._active and holds_all
        compressor = self.plan.select_compressor(Point.EMBED_GRAD, shape, self.state) if compresses else None
        if compressor is None:
            self._all_reduce(TensorReduction(IdentityRounds(), grad, CompressorState()), grad.nbytes)
            return
        unit = self._unit(shape)
        with self.ledger.encoding(Point.EMBED_GRAD):
            x = unit.unscaled_view(grad, scale)
        self._all_reduce(TensorReduction(compressor, x, self.state), count * grad.element_size())
        with self.ledger.decoding(Point.EMBED_GRAD):
            unit.write_back(grad, x, scale)

    def _all_reduce(self, reduction: TensorReduction, exact_bytes: int) -> None:
        # The bytes that this rank would send to reduce an exact gradient over the replicas and then over the stages.
        ranks = (self.replicas, self.group.size // self.replicas)
        raw = sum(2 * (size - 1) * exact_bytes // size for size in ranks)
        PackedReduction([reduction], self.group, self.ledger, Point.EMBED_GRAD, raw_bytes=raw).finish()

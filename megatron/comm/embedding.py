"""Keeps a tied embedding equal on the stages that hold it by all-reducing its gradient."""

from __future__ import annotations

import math

from torch import Tensor

from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan
from megatron.comm.reducer import Place, Unit
from megatron.comm.rounds import PackedReduction, TensorReduction
from megatron.compression.identity import IdentityRounds
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.topology.group import Group, num_bytes


class EmbeddingSync:
    """All-reduces a tied embedding's gradient over its holders.

    The holders are usually the stages, after the data-parallel reduction. The embedding has a bucket of its own on all
    of them, so with the sharded optimizer they hold the same share of it and only that share is exchanged. Fused
    (Optimus-CC, Song et al. 2023, section 5.3) they are the replicas of these stages, and this all-reduce replaces the
    data-parallel one.

    Args:
        group: the holders that all-reduce, of this tensor-parallel rank.
        plan: the compressor of ``EMBED_GRAD``.
        ledger: where the bytes are counted. A fused all-reduce is compared with the two that it replaces.
        replicas: replicas in a fused all-reduce; 1 where the data-parallel reduction comes before.
    """

    def __init__(self, group: Group, plan: CompressionPlan, ledger: Ledger, replicas: int = 1) -> None:
        self.group = group
        self.replicas = replicas
        self.plan = plan
        self.ledger = ledger
        self.state = CompressorState()
        self._on = False

    def begin(self, iteration: int) -> None:
        """Begins a step (0-based)."""
        self._on = self.plan.compressed(Point.EMBED_GRAD) and self.plan.on(Point.EMBED_GRAD, iteration)

    @property
    def wants_update(self) -> bool:
        """Whether the compressor asks for the optimizer's update of this step."""
        return self._on and self.plan.rounds(Point.EMBED_GRAD).traits.observes and bool(self.state.count("awaiting"))

    def observe(self, update: Tensor, shape: tuple[int, ...]) -> None:
        """Hands the compressor the optimizer's update of the embedding, flat and with padding."""
        self.plan.rounds(Point.EMBED_GRAD).observe(self._unit(shape).take(update, 1.0), self.state)

    def _unit(self, shape: tuple[int, ...]) -> Unit:
        return Unit((Place("embedding", 0, shape),), self.state)

    def all_reduce(self, grad: Tensor, shape: tuple[int, ...], scale: float) -> None:
        """All-reduces ``grad`` (flat, contiguous; a parameter of ``shape`` and padding) over the group, in place.

        ``scale`` is the loss scale in the gradient, without which it is compressed, in fp32 (or fp64).
        """
        count = math.prod(shape)
        whole = count <= grad.numel()
        serves = self._on and whole
        compressor = self.plan.serving(Point.EMBED_GRAD, shape, self.state) if serves else None
        if compressor is None:
            self._all_reduce(TensorReduction(IdentityRounds(), grad, CompressorState()), num_bytes(grad))
            return
        unit = self._unit(shape)
        with self.ledger.encoding(Point.EMBED_GRAD):
            x = unit.take(grad, scale)
        self._all_reduce(TensorReduction(compressor, x, self.state), count * grad.element_size())
        with self.ledger.decoding(Point.EMBED_GRAD):
            unit.give(grad, x, scale)

    def _all_reduce(self, reduction: TensorReduction, exact_bytes: int) -> None:
        raw = self._raw_bytes(exact_bytes)
        PackedReduction([reduction], self.group, self.ledger, Point.EMBED_GRAD, raw_bytes=raw).finish()

    def _raw_bytes(self, gradient: int) -> int:
        """Bytes that this rank would send for an exact gradient, over its replicas and then the stages."""
        ranks = (self.replicas, self.group.size // self.replicas)
        return sum(2 * (size - 1) * gradient // size for size in ranks)

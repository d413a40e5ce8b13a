"""Quantization noise of gradients, measured in some steps; see ``MAX_NOISE``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.audit import AuditedCodec, AuditedRounds, Sample, audit, why_not_sampled
from megatron.compression.error_feedback import ErrorFeedback
from megatron.compression.points import Point
from megatron.distributed.ledger import Ledger, gather_rows
from megatron.distributed.observer import StepSampler
from megatron.distributed.topology import Topology

C = TypeVar("C", Codec, RoundCompressor)


class NoiseProbe(StepSampler):
    """Norms of quantized gradients, and of their errors, from a sample of each message of a step.

    Sums with error feedback are left out: their residual is the noise.

    Args:
        topology, ledger: the ranks, and the ledger of this rank.
        points: points of gradients, the same on all ranks.
    """

    def __init__(self, topology: Topology, ledger: Ledger, points: Sequence[Point]) -> None:
        super().__init__(ledger.observers)
        self._topology, self._ledger, self._points = topology, ledger, points
        self._samples = 0
        self._energies: dict[Point, Tensor] = {}

    def take_noise(self) -> dict[Point, float]:
        """Norm of the noise over that of the gradient since ``watch``, over all ranks, by point; without points that
        had no sample of finite gradients. Infinite if finite gradients were sent as other numbers. A collective call.
        """
        if not self._points:
            return {}
        zeros = torch.zeros(2)
        values = [float(x) for point in self._points for x in self._energies.get(point, zeros)]
        self._energies.clear()
        rows = gather_rows(self._topology.control, self._ledger, values)
        sums = [sum(column) for column in zip(*rows, strict=True)]
        pairs = zip(self._points, sums[::2], sums[1::2], strict=True)
        return {
            point: math.sqrt(noise / gradient) if math.isfinite(noise) else math.inf
            for point, gradient, noise in pairs
            if gradient > 0.0
        }

    def audit(self, point: Point, compressor: C) -> C:
        audited = compressor.audited if isinstance(compressor, AuditedRounds | AuditedCodec) else compressor
        is_sampled = audited.traits.quantizes and why_not_sampled(audited) is None
        if point not in self._points or isinstance(audited, ErrorFeedback) or not is_sampled:
            return compressor
        self._samples += 1  # the next sample is of another part
        return audit(compressor, self._samples, partial(self._record, point))

    def _record(self, point: Point, sample: Sample) -> None:
        energies = torch.stack([sample.intended.square().sum(), (sample.intended - sample.sent).square().sum()])
        # Gradients of a step that overflows say nothing about the noise.
        energies = torch.where(sample.intended.isfinite().all(), energies, torch.zeros_like(energies))
        self._energies[point] = self._energies.get(point, torch.zeros_like(energies)) + energies

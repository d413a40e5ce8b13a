"""A bit per number: the sign of the change since a sample's last visit, times the mean magnitude of the change."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.compression.api import Codec, CodecTraits, Payload
from megatron.compression.options import opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.sample_cache import SampleCache
from megatron.compression.state import CompressorState, combine_keys

_CACHE = "samples"


@dataclass(frozen=True)
class SignDeltaConfig:
    """Signs of a sample's changes since its last visit, and their mean magnitude; for runs of several epochs."""

    decay: float = opt(1.0, "factor of the remembered activation before the difference", minimum=0, maximum=1)
    cache: int = opt(20000, "samples that each end of a boundary remembers", minimum=1)


class SignDelta(Codec):
    """Both ends keep, for each sample, the last value received (m). A visit sends d = x - decay m as sign(d) and
    mean |d|; both ends then remember decay m + mean |d| sign(d). A first visit sends x as it is."""

    config: SignDeltaConfig

    def __init__(self, config: SignDeltaConfig | None = None) -> None:
        super().__init__(config or SignDeltaConfig())
        self.traits = CodecTraits(
            widened=False,  # a first visit of a bf16 run then takes 2 bytes per number, not 4
            shared=(f"{_CACHE}.ids", f"{_CACHE}.rows"),
            steady=(_CACHE,),
            samples=self.config.cache,
        )

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        if flags["sample_order"] != "fixed":
            return f"with --sample-order {flags['sample_order']} no sample comes twice; use --sample-order fixed"
        return ""

    def launch_signature(self, shape: torch.Size, state: CompressorState, keys: Sequence[Hashable]) -> Hashable:
        samples = [sample for key in keys for sample in _samples(key)]
        return combine_keys(
            state.layout(self.traits.steady), tuple(self._cache(state).predict_visits(samples, _row(shape).numel()))
        )

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        seen_before = self._visit(key, shape, state)
        state.queue(_CACHE).append(seen_before)
        nbytes = sum(_nbytes(_row(shape), dtype, is_known) for is_known in seen_before)
        return Payload(torch.empty(nbytes, dtype=torch.uint8, device=device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        cache, wires = self._cache(state), []
        for index, (sample, seen_before) in enumerate(
            zip(_samples(key), self._visit(key, x.shape, state), strict=True)
        ):
            x_sample = x.select(1, index)
            if seen_before:
                base = self._base(cache, sample)
                difference = x_sample.to(base.dtype) - base
                scale = difference.abs().mean().view(1)
                wires.append(torch.cat([scale.float().view(torch.uint8), _pack(difference >= 0)]))
                got = self._apply(base, wires[-1], x.dtype)
            else:
                got = x_sample.clone(memory_format=torch.contiguous_format)
                wires.append(got.clone().view(-1).view(torch.uint8))
            cache.store(sample, got)
        return Payload(torch.cat(wires))

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        cache, rows, row, start = self._cache(state), [], _row(shape), 0
        for sample, seen_before in zip(_samples(key), state.queue(_CACHE).popleft(), strict=True):
            wire = payload.wire[start : start + _nbytes(row, dtype, seen_before)].clone()  # aligned
            start += wire.numel()
            got = self._apply(self._base(cache, sample), wire, dtype) if seen_before else wire.view(dtype).view(row)
            cache.store(sample, got)
            rows.append(got)
        return torch.stack(rows, dim=1)

    def _cache(self, state: CompressorState) -> SampleCache:
        return state.cache(_CACHE, self.config.cache)

    def _visit(self, key: Hashable, shape: torch.Size, state: CompressorState) -> list[bool]:
        return [self._cache(state).visit(sample, _row(shape).numel()) for sample in _samples(key)]

    def _base(self, cache: SampleCache, sample: int) -> Tensor:
        """The base of a difference, in fp32 (or fp64)."""
        base = cache.row(sample)
        return base.to(torch.promote_types(base.dtype, torch.float32)) * self.config.decay

    def _apply(self, base: Tensor, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """The received value; the sender computes it from the same bytes."""
        scale = wire[:4].clone().view(torch.float32).to(base.dtype)
        signs = _unpack(wire[4:], base.numel()).view(base.shape)
        return (base + torch.where(signs, scale, -scale)).to(dtype)


def _samples(key: Hashable) -> tuple[int, ...]:
    """The samples of a message: x is (sequence, samples, hidden)."""
    assert isinstance(key, tuple)
    return key


def _row(shape: torch.Size) -> torch.Size:
    return torch.Size((shape[0], *shape[2:]))


def _nbytes(row: torch.Size, dtype: torch.dtype, seen_before: bool) -> int:
    return 4 + -(-row.numel() // 8) if seen_before else row.numel() * dtype.itemsize


def _pack(bits: Tensor) -> Tensor:
    flat = torch.nn.functional.pad(bits.reshape(-1), (0, -bits.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _unpack(codes: Tensor, count: int) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    return ((codes.view(-1, 1) >> places) & 1).bool().view(-1)[:count]


def register(registry: Registry) -> None:
    """Registers ``sign-delta``."""
    registry.register(
        "sign-delta",
        Registration(
            SignDeltaConfig,
            codec=SignDelta,
            points=frozenset({Point.PP_FWD}),
            no_feedback="makes up for what it left out when the sample comes again",
            advice="samples are met again in activations only",
            needs="only with --sample-order fixed, for several epochs",
        ),
    )

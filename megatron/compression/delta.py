"""Messages of differences from a prediction at both ends: a sample's last visit, or the mean of its tokens.

By sample (AQ-SGD, Wang et al. 2022, algorithm 1), both ends remember the receiver's value of each sample. The first
visit sends the activation itself: as it is, in half precision, or in fixed point. Later visits send only the quantized
difference, and the next difference makes up for the error of the last. Both ends distinguish first from later visits by
the sample ids and the sequence length; when the length changes, all samples are forgotten.

By token, both ends keep a running mean of the decoded activations of each token, and every message is a quantized
difference from it. Samples need not repeat.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.base.seeds import hash_text, keyed_seed
from megatron.compression.api import Codec, CodecTraits, Payload, SampleKey
from megatron.compression.fixpoint import FixpointConfig, Quantizer
from megatron.compression.message import FormatCodec
from megatron.compression.options import opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.sample_cache import SampleCache
from megatron.compression.state import CompressorState, combine_keys
from megatron.compression.token_means import COUNTS, MEANS, learn, predict
from megatron.kernels.grid import Role

_CACHE = "samples"
_SAMPLE_OPTIONS = ("first_bits", "cache", "memory", "folder", "cache_dtype", "cache_bits")
"""Options of the sample cache."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class DeltaConfig(FixpointConfig):
    """Differences of activations from the sample's last visit, or from the mean of the token."""

    predict: Literal["sample", "token"] = opt(
        "sample", "differences from the sample's last visit, for runs of several epochs, or from the token's mean"
    )
    horizon: int = opt(
        64, "with predict=token, activations of a token after which its mean forgets older ones", minimum=1
    )
    bits: float = opt(
        4,
        "bits per value of a difference; fractions as in fixpoint",
        minimum=1,
        maximum=8,
        scheduled=True,
        whole_ramp=True,
    )
    first_bits: int = opt(
        16,
        "bits per value at a first visit: 1 to 8, 16 (the run's half precision, else bf16), or 32 (as is)",
        minimum=1,
        maximum=32,
    )
    cache: int = opt(20000, "samples that each end of a boundary remembers", minimum=1)
    memory: int = opt(0, "number of these samples kept in memory, the others in a file; 0 for all", minimum=0)
    folder: str = opt("", "folder of that file; by default the system's temporary folder")
    cache_dtype: Literal["bf16", "fp16", "fp32"] = opt("bf16", "dtype of remembered activations")
    cache_bits: int = opt(0, "bits per remembered value; 0 keeps cache-dtype", minimum=0, maximum=8)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first_bits > 8 and self.first_bits not in (16, 32):
            raise UserError(f"first-bits={self.first_bits}: must be 1 to 8, 16 or 32")
        idle = _SAMPLE_OPTIONS if self.predict == "token" else ("horizon",)
        for field in fields(self):
            if field.name in idle and getattr(self, field.name) != field.default:
                name = field.name.replace("_", "-")
                raise UserError(
                    f"{name}={getattr(self, field.name)}: means nothing with predict={self.predict}; drop it"
                )
        if self.grid == "signed" and 1 in (self.first_bits, self.cache_bits):
            name = "first-bits" if self.first_bits == 1 else "cache-bits"
            raise UserError(f"{name}=1: has no level on one side of zero with grid=signed; use 2, or leave grid out")


@dataclass(frozen=True)
class DeltaLowBitsConfig(DeltaConfig):
    """The compressor delta with a quantized memory."""

    cache_bits: int = opt(4, "bits per remembered value; 0 keeps cache-dtype", minimum=0, maximum=8)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.predict == "token":
            raise UserError("predict=token: remembers no samples, so nothing of them can be quantized; use delta")


class TokenDeltaCodec(FormatCodec):
    """Quantized differences from the token's mean. Without tokens in the key, the prediction is zero."""

    config: DeltaConfig
    format: Quantizer
    traits = CodecTraits(
        widened=False, shared=(MEANS, COUNTS), steady=("messages",), means=((MEANS, COUNTS),), tokens=True
    )

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__(config, Quantizer(config))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        reference = self._predict(x.shape, x.device, state, key)
        wire = self.format.encode(x.float(), _seed(self.config, state), Role.DELTA, reference)
        self._learn(reference, state, key)
        return Payload(wire)

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        decoded = self.format.add_to(self._predict(shape, payload.wire.device, state, key), payload.wire)
        self._learn(decoded, state, key)
        return decoded.to(dtype)

    def _predict(self, shape: torch.Size, device: torch.device, state: CompressorState, key: Hashable) -> Tensor:
        if not isinstance(key, SampleKey) or key.tokens_sb is None:
            return torch.zeros(shape, device=device)
        return predict(state, key.tokens_sb.flatten(), key.vocab_size, shape[-1]).view(shape)

    def _learn(self, decoded: Tensor, state: CompressorState, key: Hashable) -> None:
        if isinstance(key, SampleKey) and key.tokens_sb is not None:
            rows_nh = decoded.view(-1, decoded.shape[-1])
            learn(state, key.tokens_sb.flatten(), rows_nh, key.vocab_size, self.config.horizon)


class DeltaCodec(Codec):
    """Quantized differences from the sample's last visit; each end keeps a row per sample (``SampleCache``)."""

    config: DeltaConfig

    def __init__(self, config: DeltaConfig | None = None) -> None:
        super().__init__(config or DeltaConfig())
        self.traits = CodecTraits(
            widened=False,
            shared=(f"{_CACHE}.ids", f"{_CACHE}.rows"),
            steady=(_CACHE, "messages"),
            samples=self.config.cache,
            samples_in_memory=self.config.memory or None,
            folders=(self.config.folder,) if self.config.folder else (),
        )
        self.difference = Quantizer(self.config)
        self.first = Quantizer(replace(self.config, bits=min(self.config.first_bits, 8)))
        # The default grid must stay the grid of rows in existing checkpoints.
        grid = "symmetric" if self.config.grid == "auto" else self.config.grid
        self.memory = Quantizer(replace(self.config, bits=self.config.cache_bits or 8, rounding="nearest", grid=grid))

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        if flags["sample_order"] != "fixed":
            return (
                f"with --sample-order {flags['sample_order']} no sample comes twice; use --sample-order fixed, or "
                "fixpoint, which remembers nothing"
            )
        return ""

    def launch_signature(self, shape: torch.Size, state: CompressorState, keys: Sequence[Hashable]) -> Hashable:
        split = [_split_samples(shape, key) for key in keys]
        samples = [sample for message_samples, _ in split for sample in message_samples]
        hits = tuple(self._cache(state).predict_visits(samples, self._size(split[0][1]))) if split else ()
        return combine_keys(state.layout(self.traits.steady), hits)

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        samples, row = _split_samples(shape, key)
        hits = self._visit(samples, row, state)
        state.queue(_CACHE).append(hits)
        for sample, is_known in zip(samples, hits, strict=True):
            if is_known:
                self._cache(state).expect(sample, self._size(row))
        nbytes = sum(self._nbytes(row, is_known, dtype) for is_known in hits)
        return Payload(torch.empty(nbytes, dtype=torch.uint8, device=device))

    def expect(self, shape: torch.Size, state: CompressorState, key: Hashable) -> None:
        samples, row = _split_samples(shape, key)
        for sample in samples:
            self._cache(state).expect(sample, self._size(row))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        samples, row = _split_samples(x.shape, key)
        cache = self._cache(state)
        wires = []
        for index, (sample, is_known) in enumerate(zip(samples, self._visit(samples, row, state), strict=True)):
            sample_x = x.select(1, index) if len(row) < x.dim() else x
            seed = _seed(self.config, state)
            if is_known:
                reference = self._recall(cache, sample, row, x.device)
                wire = self.difference.encode(sample_x.float(), seed, Role.DELTA, reference)
            else:
                first_dtype = self._first_dtype(x.dtype)
                if first_dtype is None:
                    wire = self.first.encode(sample_x.float(), seed)
                else:
                    wire = torch.zeros(self._nbytes(row, False, x.dtype), dtype=torch.uint8, device=x.device)
                    wire[: row.numel() * first_dtype.itemsize].view(first_dtype).copy_(sample_x.reshape(-1))
                reference = self._decode_first(wire, row, x.dtype)
            self._remember(cache, sample, reference)
            wires.append(wire)
        return Payload(torch.cat(wires) if wires else torch.empty(0, dtype=torch.uint8, device=x.device))

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        samples, row = _split_samples(shape, key)
        cache, pending = self._cache(state), state.queue(_CACHE)
        known_samples: list[bool] = pending.popleft()
        rows, position = [], 0
        for sample, is_known in zip(samples, known_samples, strict=True):
            nbytes = self._nbytes(row, is_known, dtype)
            wire = payload.wire[position : position + nbytes]
            position += nbytes
            if is_known:
                decoded_row = self._recall(cache, sample, row, wire.device)
                self.difference.add_to(decoded_row, wire)
            else:
                decoded_row = self._decode_first(wire, row, dtype)
            self._remember(cache, sample, decoded_row)
            rows.append(decoded_row.to(dtype))
        decoded = torch.stack(rows, dim=1) if len(row) < len(shape) else rows[0]
        return decoded.view(shape).to(dtype)

    def _cache(self, state: CompressorState) -> SampleCache:
        return state.cache(_CACHE, self.config.cache, self.config.memory or None, self.config.folder or None)

    def _visit(self, samples: list[int], row: torch.Size, state: CompressorState) -> list[bool]:
        cache = self._cache(state)
        return [cache.visit(sample, self._size(row)) for sample in samples]

    def _size(self, row: torch.Size) -> int:
        """Elements of a remembered row."""
        return self.memory.nbytes(row) if self.config.cache_bits else row.numel()

    def remembered_bytes(self, row: torch.Size) -> int:
        itemsize = 1 if self.config.cache_bits else _DTYPES[self.config.cache_dtype].itemsize
        return self._size(row) * itemsize

    def _first_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Wire dtype of first visits in a run with activations of ``dtype``; None for fixed point."""
        if self.config.first_bits <= 8:
            return None
        return dtype if self.config.first_bits == 32 or dtype.itemsize == 2 else torch.bfloat16

    def _nbytes(self, row: torch.Size, is_known: bool, dtype: torch.dtype) -> int:
        first_dtype = self._first_dtype(dtype)
        if is_known or first_dtype is None:
            return (self.difference if is_known else self.first).nbytes(row)
        return -(-row.numel() * first_dtype.itemsize // 4) * 4

    def _decode_first(self, wire: Tensor, row: torch.Size, dtype: torch.dtype) -> Tensor:
        """Decode the row of a first visit, at the receiver and, from the same bytes, at the sender."""
        first_dtype = self._first_dtype(dtype)
        if first_dtype is None:
            return self.first.decode(wire, row)
        row_bytes = wire[: row.numel() * first_dtype.itemsize]
        aligned = row_bytes.clone() if row_bytes.storage_offset() % first_dtype.itemsize else row_bytes
        return aligned.view(first_dtype).view(row)

    def _remember(self, cache: SampleCache, sample: int, decoded_row: Tensor) -> None:
        if self.config.cache_bits:
            cache.store(sample, self.memory.encode(decoded_row.float(), None))
        else:
            cache.store(sample, decoded_row.to(_DTYPES[self.config.cache_dtype], copy=True))

    def _recall(self, cache: SampleCache, sample: int, row: torch.Size, device: torch.device) -> Tensor:
        """A new fp32 copy of a sample's remembered row. Rows from a checkpoint are still on the CPU."""
        stored = cache.row(sample).to(device)
        return self.memory.decode(stored, row) if self.config.cache_bits else stored.to(torch.float32, copy=True)


def _seed(config: DeltaConfig, state: CompressorState) -> int | None:
    """Seed of the next message's noise; None without stochastic rounding."""
    if config.rounding == "nearest":
        return None
    state.stage("messages", state.count("messages") + 1)
    return keyed_seed(config.seed, state.count("messages"))


def _split_samples(shape: torch.Size, key: Hashable) -> tuple[list[int], torch.Size]:
    """Sample ids of a message, and the shape of one sample: (s, b, h) holds b of them along dimension 1."""
    if isinstance(key, tuple) and len(shape) > 1 and len(key) == shape[1]:
        return [_sample_id(sample_key) for sample_key in key], torch.Size((shape[0], *shape[2:]))
    return [_sample_id(key)], shape


def _sample_id(key: Hashable) -> int:
    return key if isinstance(key, int) else hash_text(repr(key))


def register(registry: Registry) -> None:
    """Register ``delta`` and ``delta-lowbits``."""
    for name, config in (("delta", DeltaConfig), ("delta-lowbits", DeltaLowBitsConfig)):
        registry.register(
            name,
            Registration(
                config,
                codec=lambda options: (TokenDeltaCodec if options.predict == "token" else DeltaCodec)(options),
                points=frozenset({Point.PP_FWD}),
                no_feedback="makes up for what it left out when the sample comes again",
                advice="samples are met again in activations only",
                alternatives=("fixpoint",),
                needs="predict=sample only with --sample-order fixed, for several epochs",
                source="AQ-SGD, Wang et al. 2022, algorithm 1",
                example=f"pp-forward={name},bits=4",
            ),
        )

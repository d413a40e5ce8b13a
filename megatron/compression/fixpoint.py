"""Fixed-point numbers with shared scales: activations, their gradients, and sums in two quantised steps.

AQ-SGD's stateless quantiser (Wang et al. 2022, "DirectQ"), with scales of short groups and a grid that reaches both
peaks. Scales are fp32 or bf16 without an epsilon, so tiny gradients keep their size and zero stays zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Codec, Op, Payload, Peers, Request, RoundCompressor
from megatron.compression.options import opt
from megatron.compression.state import CompressorState
from megatron.kernels import reference


@dataclass(frozen=True)
class FixpointConfig:
    """1 to 8 bits a number, with a scale for each group, channel or tensor."""

    bits: int = opt(8, "of each number", minimum=1, maximum=8, scheduled=True)
    scale: Literal["group", "channel", "tensor"] = opt("group", "what shares a scale")
    group: int = opt(64, "numbers in a group, along the last dimension", minimum=8)
    scale_method: Literal["max", "l2"] = opt("max", "largest magnitude, or twice the root mean square")
    scale_dtype: Literal["fp32", "bf16"] = opt("fp32", "of the scales on the wire")
    grid: Literal["symmetric", "asymmetric"] = opt("symmetric", "asymmetric clips the positive peak, as AQ-SGD does")
    rounding: Literal["nearest", "stochastic"] = opt("nearest", "stochastic is unbiased, and seeded")
    seed: int = opt(714, "of stochastic rounding")


class Quantiser:
    """Tensors to bytes and back, without state. 32 and 64-bit inputs are quantised in fp32."""

    def __init__(self, config: FixpointConfig) -> None:
        self.config = config
        self.symmetric = config.grid == "symmetric"
        self.scale_dtype = torch.float32 if config.scale_dtype == "fp32" else torch.bfloat16

    def _grouping(self, shape: torch.Size) -> tuple[int, int]:
        """Number of groups and numbers in each (the last group of a tensor may be padded)."""
        count = shape.numel()
        if self.config.scale == "tensor":
            return 1, count
        if self.config.scale == "channel":
            channels = shape[-1] if len(shape) else 1
            return channels, count // max(channels, 1)
        return -(-count // self.config.group), self.config.group

    def nbytes(self, shape: torch.Size) -> int:
        """Bytes of a tensor's message: codes, then scales."""
        groups, size = self._grouping(shape)
        return reference.packed_size(groups * size, self.config.bits) + groups * self.scale_dtype.itemsize

    def encode(self, x: Tensor, seed: int | None) -> Tensor:
        """The message, uint8. ``seed`` draws the noise of stochastic rounding."""
        groups, size = self._grouping(x.shape)
        x_gn = self._to_groups(x.detach().float(), groups, size)
        mean = self.config.bits == 1 and self.symmetric
        if not x_gn.numel():
            return torch.zeros(self.nbytes(x.shape), dtype=torch.uint8, device=x.device)
        if self.config.scale_method == "l2":
            scale_g = x_gn.square().mean(dim=1).sqrt() * 2
        else:
            scale_g = x_gn.abs().mean(dim=1) if mean else x_gn.abs().amax(dim=1)
        scale_g = scale_g.to(self.scale_dtype)
        noise = None
        if self.config.rounding == "stochastic" and seed is not None:
            noise = torch.rand(x_gn.shape, generator=torch.Generator().manual_seed(seed)).to(x.device)
        codes_gn = reference.quantize(x_gn, self.config.bits, scale_g.float(), noise, self.symmetric)
        packed = reference.pack_bits(codes_gn.flatten(), self.config.bits)
        return torch.cat([packed, scale_g.view(torch.uint8)])

    def decode(self, wire: Tensor, shape: torch.Size) -> Tensor:
        """The tensor of a message, fp32; NaN or infinite groups where the input was not finite."""
        groups, size = self._grouping(shape)
        packed = reference.packed_size(groups * size, self.config.bits)
        codes = reference.unpack_bits(wire[:packed], self.config.bits, groups * size)
        # A slice of bytes need not be aligned for the scales' type.
        scale_g = wire[packed:].clone().view(self.scale_dtype).float()
        x_gn = reference.dequantize(codes.view(groups, size), self.config.bits, scale_g, self.symmetric)
        return self._from_groups(x_gn, shape)

    def _to_groups(self, x: Tensor, groups: int, size: int) -> Tensor:
        if self.config.scale == "channel":
            return x.reshape(-1, groups).t().contiguous()
        flat = x.reshape(-1)
        if flat.numel() == groups * size:
            return flat.view(groups, size)
        return torch.cat([flat, flat.new_zeros(groups * size - flat.numel())]).view(groups, size)

    def _from_groups(self, x_gn: Tensor, shape: torch.Size) -> Tensor:
        if self.config.scale == "channel":
            return x_gn.t().reshape(shape)
        return x_gn.flatten()[: shape.numel()].view(shape)


def message_seed(seed: int, *parts: object) -> int:
    """A seed of 63 bits from a run's seed and what the message is."""
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class FixpointCodec(Codec):
    """Quantise, send, dequantise."""

    config: FixpointConfig

    def __init__(self, config: FixpointConfig | None = None) -> None:
        super().__init__(config or FixpointConfig())
        self.quantiser = Quantiser(self.config)

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return Payload(torch.empty(self.quantiser.nbytes(shape), dtype=torch.uint8, device=device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        seed = None
        if self.config.rounding == "stochastic":
            seed = message_seed(self.config.seed, state.count("messages"), key)
            state.stage("messages", state.count("messages") + 1)
        return Payload(self.quantiser.encode(x, seed))

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        return self.quantiser.decode(payload.wire, shape).to(dtype)


class FixpointRounds(RoundCompressor):
    """The sum in two quantised steps: parts are exchanged and summed in fp32, and the sums are gathered.

    Each rank sends (n - 1)/n of the codes twice, as a ring all-reduce would of the numbers. A rank's contribution is
    its quantised input, and in the part that it sums, the error of quantising the sum as well: with error feedback
    both are made up for, each by the rank that made it.
    """

    config: FixpointConfig

    def __init__(self, config: FixpointConfig | None = None) -> None:
        super().__init__(config or FixpointConfig())
        self.quantiser = Quantiser(self.config)

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        flat = x.reshape(-1)
        count = flat.numel()
        part = -(-count // peers.size)
        parts_sn = torch.cat([flat, flat.new_zeros(part * peers.size - count)]).view(peers.size, part)
        wires = torch.stack([self.quantiser.encode(own, self._seed(state, i)) for i, own in enumerate(parts_sn)])
        local_sn = torch.stack([self._decode(wire, part, x.dtype) for wire in wires])
        received = yield Request(wires, Op.EXCHANGE)
        sum_n = torch.stack([self._decode(wire, part, x.dtype) for wire in received]).sum(dim=0)
        wire = self.quantiser.encode(sum_n, self._seed(state, peers.size))
        gathered = yield Request(wire, Op.GATHER)
        local_sn[peers.rank] += self._decode(wire, part, x.dtype) - sum_n
        total_sn = torch.stack([self._decode(wire, part, x.dtype) for wire in gathered])
        state.stage("messages", state.count("messages") + 1)
        total, local = (t.view(-1)[:count].view(x.shape) for t in (total_sn, local_sn))
        return Aggregate(total=total, local=local)

    def _decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return self.quantiser.decode(wire, torch.Size((count,))).to(dtype)

    def _seed(self, state: CompressorState, part: int) -> int | None:
        if self.config.rounding == "nearest":
            return None
        return message_seed(self.config.seed, state.count("messages"), part)

"""Published set-ups as ratios of communication to computation, which can be imitated on another machine.

A ratio is the time of the uncompressed fp32 traffic on its link over the computing time: of a micro-batch on a stage
for pipelines, of an iteration for data parallelism. Links here get the rate that makes the same ratio with the
computing time measured on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

V100_FP32 = 15.7e12 * 0.5
"""FLOP/s: half of the peak, as matrix products of this size reach it."""
A100_BF16 = 312e12 * 0.45
H100_BF16 = 989e12 * 0.4
_RATES = {"10 Gb/s": 10e9, "1 Gb/s": 1e9, "500 Mb/s": 500e6, "300 Mb/s": 300e6, "100 Mb/s": 100e6}


@dataclass(frozen=True)
class Setup:
    """A link of a published system.

    Args:
        name: name in the tables.
        ratio: communication time over computing time, uncompressed.
        arithmetic: derivation of the ratio.
        rate: bits per second of the link, instead of the ratio.
    """

    name: str
    ratio: float
    arithmetic: str
    rate: float | None = None


def _layer_flops(tokens: int, hidden: int) -> float:
    """FLOPs of a layer on sequences of 1,024: 24 T h^2 + 4 T s h forward, times 4 with backward and recomputation."""
    return 4 * (24.0 * tokens * hidden**2 + 4.0 * tokens * 1024 * hidden)


def as_named() -> list[Setup]:
    """Links of AQ-SGD's rates, for hosts with GPUs at least as fast as its own."""
    return [
        Setup(name, 0.0, "the link's own rate", rate)
        for name, rate in _RATES.items()
        if name in ("100 Mb/s", "1 Gb/s", "10 Gb/s")
    ]


def aqsgd_pipeline() -> list[Setup]:
    """AQ-SGD: GPT-2 XL in fp32 on 8 V100, 6 layers a stage, micro-batches of a sequence, activations recomputed."""
    compute = 6 * _layer_flops(1024, 1600) / V100_FP32
    message = 1024 * 1600 * 4 * 8
    return [
        Setup(
            f"AQ-SGD {name}",
            message / rate / compute,
            f"a micro-batch: {message / 8e6:.2f} MB in {1e3 * message / rate:.0f} ms, "
            f"computed in {1e3 * compute:.0f} ms",
        )
        for name, rate in _RATES.items()
    ]


def aqsgd_data(replicas: int, micro_batches: int = 32) -> list[Setup]:
    """AQ-SGD with data parallelism: a stage's fp32 gradients after its 32 micro-batches of a sequence, or fewer."""
    compute = micro_batches * 6 * _layer_flops(1024, 1600) / V100_FP32
    sent = 2 * (replicas - 1) / replicas * 6 * 12 * 1600**2 * 4 * 8
    fewer = "" if micro_batches == 32 else f", {micro_batches} micro-batches"
    return [
        Setup(
            f"AQ-SGD {name}{fewer}",
            sent / _RATES[name] / compute,
            f"an iteration: {sent / 8e9:.2f} GB in {sent / _RATES[name]:.1f} s, computed in {compute:.1f} s",
        )
        for name in ("1 Gb/s", "500 Mb/s")
    ]


def radius_data() -> Setup:
    """Radius: 2.0B parameters, fp32 gradients, 64 A100 with 200 Gb/s each, 8 sequences of 1024 tokens on each."""
    parameters, tokens = 2.02e9, 8 * 1024
    compute = 6 * parameters * tokens / A100_BF16
    sent = 2 * 63 / 64 * parameters * 4 * 8
    arithmetic = f"an iteration: {sent / 8e9:.1f} GB in {sent / 200e9:.2f} s, computed in {compute:.2f} s"
    return Setup("Radius 200 Gb/s", sent / 200e9 / compute, arithmetic)


def islands_data(rate: float) -> Setup:
    """SparseLoCo's 1B model on an H100 per island, 256 sequences of 2,048 tokens a step: gradients of two in bf16."""
    parameters, tokens = 1e9, 256 * 2048
    compute = 6 * parameters * tokens / H100_BF16
    sent = parameters * 2 * 8
    arithmetic = f"an iteration: {sent / 8e9:.1f} GB in {sent / rate:.0f} s, computed in {compute:.1f} s"
    return Setup(f"H100 with {rate / 1e6:g} Mb/s", sent / rate / compute, arithmetic)


def mixtral_experts() -> list[Setup]:
    """Mixtral 8x7B on eight nodes of eight H100, an expert of each layer on a node, tensor-parallel inside; a link of
    each GPU. Per layer and token: four legs of two rows of 4,096 fp32 numbers, 7/8 of them to other nodes."""
    hidden, inner, keys = 4096, 14336, 1024
    active = hidden * (2 * hidden + 2 * keys) + 2 * 3 * hidden * inner
    compute = 6 * active / (8 * H100_BF16)
    sent = 4 * 2 * hidden * 7 / 8 * 4 * 8
    return [
        Setup(
            f"H100 with {name}",
            sent / (8 * rate) / compute,
            f"a layer for 8,192 tokens: {8192 * sent / 8e6:.0f} MB in {1024e3 * sent / rate:.1f} ms, computed in "
            f"{8192e3 * compute:.1f} ms",
        )
        for name, rate in (("400 Gb/s", 400e9), ("100 Gb/s", 100e9), ("10 Gb/s", 10e9))
    ]


def optimus_pipeline() -> Setup:
    """Optimus-CC: GPT-8.3B on 128 A100, TP 8 in a node, PP 4, 18 layers a stage, 200 Gb/s a node, micro-batch 8."""
    tokens, hidden = 8 * 1024, 3072
    compute = 18 * _layer_flops(tokens, hidden) / (8 * A100_BF16)
    seconds = tokens * hidden * 4 * 8 / 200e9
    arithmetic = f"a micro-batch: 101 MB in {1e3 * seconds:.1f} ms, computed in {1e3 * compute:.0f} ms"
    return Setup("Optimus-CC 200 Gb/s", seconds / compute, arithmetic)

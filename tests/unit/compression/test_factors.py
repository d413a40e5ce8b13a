"""Formats of low-rank factors: bytes, error, and error feedback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.compression.api import Op, Peers, RoundCompressor
from megatron.compression.approximation import dense
from megatron.compression.error_feedback import ErrorFeedback
from megatron.compression.factors import FactorFormat
from megatron.compression.lockstep import run_lockstep
from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.powersgd import PowerSGD, PowerSGDConfig
from megatron.compression.state import CompressorState

FORMATS: tuple[Any, ...] = ("bf16", "fixpoint8", "fixpoint4")
BITS = {"fp32": 32.0, "bf16": 16.0, "fixpoint8": 8 + 16 / 128, "fixpoint4": 4 + 16 / 64}
"""Bits on the wire for each number, its share of a bf16 scale included."""
GPT2_LAYER = ((2304, 768), (768, 768), (3072, 768), (768, 3072))


def _noise(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _sent(compressor: RoundCompressor, x: Tensor, ranks: int) -> int:
    """Bytes sent by all ranks together in an all-reduce to which each contributes ``x``."""
    sent, state = 0, CompressorState()
    rounds = compressor.rounds(x, state, Peers(0, ranks))
    request = next(rounds)
    while True:
        size = request.tensor.numel() * request.tensor.element_size()
        sent += {Op.REDUCE: 2 * (ranks - 1) * size, Op.EXCHANGE: (ranks - 1) * size}.get(request.op, 0)
        sent += ranks * (ranks - 1) * size if request.op is Op.GATHER else 0
        result = torch.stack([request.tensor] * ranks) if request.op is Op.GATHER else request.tensor
        try:
            request = rounds.send(result)
        except StopIteration:
            return sent


@pytest.mark.parametrize("rank", [4, 32])
@pytest.mark.parametrize("factors", BITS)
def test_bytes_are_those_of_the_format(factors: Any, rank: int) -> None:
    """Scales and padding cost no more than the documented table says, at small ranks too."""
    compressor = PowerSGD(PowerSGDConfig(rank=rank, factors=factors))
    ranks = 4
    for shape in GPT2_LAYER:
        numbers = rank * sum(shape)
        expected = 2 * (ranks - 1) * numbers * BITS[factors] / 8
        assert expected <= _sent(compressor, torch.zeros(1, *shape), ranks) <= 1.005 * expected


def test_gpt2_small_takes_the_documented_megabytes() -> None:
    """The table of docs/reference/compressors/factors.md: rank 32, four replicas, all ranks together."""
    matrices = [*(GPT2_LAYER * 12), (50304, 768), (1024, 768)]
    exact = 6 * 4 * (12 * (2304 + 768 + 3072 + 768 + 4 * 768) + 2 * 768)
    megabytes = {}
    for factors in BITS:
        form = FactorFormat(factors)  # type: ignore[arg-type]
        megabytes[factors] = (6 * sum(form.nbytes(32 * n) + form.nbytes(32 * m) for n, m in matrices) + exact) / 1e6
    assert {name: round(mb, 1) for name, mb in megabytes.items()} == {
        "fp32": 156.8, "bf16": 79.8, "fixpoint8": 42.0, "fixpoint4": 23.3
    }  # fmt: skip


def test_quantized_factors_pay_where_fp32_factors_do_not() -> None:
    shape = (64, 64)
    for factors, pays in {"fp32": False, "bf16": True, "fixpoint8": True, "fixpoint4": True}.items():
        assert PowerSGD(PowerSGDConfig(rank=40, factors=factors)).should_compress(shape) == pays  # type: ignore[arg-type]
        codec = LowRankCodec(LowRankConfig(rank=40, factors=factors))  # type: ignore[arg-type]
        assert codec.should_compress(torch.Size((16, 4, 64)), torch.float32) == pays
    assert not LowRankCodec(LowRankConfig(rank=40, factors="bf16")).should_compress(torch.Size(shape), torch.bfloat16)
    assert LowRankCodec(LowRankConfig(rank=40, factors="fixpoint8")).should_compress(torch.Size(shape), torch.bfloat16)


def _decoded(codec: LowRankCodec, x: Tensor, messages: int = 1) -> Tensor:
    """Last of some equal messages, decoded by the receiver."""
    sender, receiver = CompressorState(), CompressorState()
    for _ in range(messages):
        payload = codec.encode(x, sender, 0)
        sender.commit()
    return codec.decode(payload, x.shape, x.dtype, receiver, 0)


def _summed(factors: Any, x: Tensor, steps: int = 1, **options: Any) -> Tensor:
    """Last of some equal all-reduces over two ranks, halved."""
    states = [CompressorState(), CompressorState()]
    compressor = PowerSGD(PowerSGDConfig(factors=factors, **options))
    for _ in range(steps):
        total = run_lockstep(compressor, [x.clone(), x.clone()], states)[0].total
        for state in states:
            state.commit()
    return total / 2


TRANSPORTS: dict[str, Callable[..., Tensor]] = {
    "message": lambda factors, x, rank: _decoded(LowRankCodec(LowRankConfig(rank=rank, factors=factors)), x[0], 8)[
        None
    ],
    "message, channels": lambda factors, x, rank: _decoded(
        LowRankCodec(LowRankConfig(rank=rank, factors=factors, basis="channels")), x[0], 8
    )[None],
    "all-reduce": lambda factors, x, rank: _summed(factors, x, 8, rank=rank),
}


@pytest.mark.parametrize("factors", ["bf16", "fixpoint8"])
def test_quantized_factors_keep_the_small_rows_of_absent_tokens(factors: Any) -> None:
    """In an embedding's gradient these rows are far smaller than their neighbors, but Adam's steps are as large."""
    for small in (1e-2, 1e-3, 1e-4):
        sizes = torch.where(torch.arange(512) % 4 == 0, 1.0, small).unsqueeze(1)
        x = sizes * (_noise((512, 4), 0) @ _noise((4, 64), 1))
        exact, sent = (_summed(name, x[None], 3, rank=4)[0] for name in ("fp32", factors))
        errors = (sent - exact).norm(dim=1) / exact.norm(dim=1)
        assert float(errors.median()) < 0.04
        assert float(errors.max()) < 0.3


def _loss_of_bigrams(factors: Any) -> float:
    """Mean loss of the last steps of a bigram model trained by Adam from scratch; few of its tokens are in a batch."""
    vocabulary, hidden, ranks = 2048, 16, 2
    generator = torch.Generator().manual_seed(0)
    table = (torch.randn(vocabulary, hidden, generator=generator) * 0.02).requires_grad_()
    optimizer = torch.optim.Adam([table], lr=3e-3)
    compressor = ErrorFeedback(PowerSGD(PowerSGDConfig(rank=2, factors=factors)))
    states = [CompressorState() for _ in range(ranks)]
    shares, losses = torch.arange(1, vocabulary + 1) ** -1.1, []
    for _ in range(25):
        grads = []
        for _ in range(ranks):
            tokens = torch.multinomial(shares, 256, replacement=True, generator=generator)
            hidden_th = torch.nn.functional.layer_norm(table[tokens[:128]], (hidden,))
            loss = torch.nn.functional.cross_entropy(hidden_th @ table.t(), tokens[128:]) / ranks
            grads.append(torch.autograd.grad(loss, table)[0].unsqueeze(0))
            losses.append(float(loss.detach()) * ranks)
        table.grad = run_lockstep(compressor, grads, states)[0].total[0]
        for state in states:
            state.commit()
        optimizer.step()
    return sum(losses[-10:]) / 10


@pytest.mark.slow
def test_a_large_vocabulary_is_learned_as_with_fp32_factors() -> None:
    assert _loss_of_bigrams("fixpoint8") == pytest.approx(_loss_of_bigrams("fp32"), rel=1e-3)


@pytest.mark.parametrize("way", TRANSPORTS)
@pytest.mark.parametrize("factors", FORMATS)
def test_small_singular_values_keep_their_direction(factors: Any, way: str) -> None:
    """Columns of the factors share no scale, so a column much smaller than the first is kept."""
    small = 5e-2 if factors == "fixpoint4" else 1e-3
    u, v = (torch.linalg.qr(_noise((size, 2), seed))[0] for size, seed in ((512, 0), (256, 1)))
    x = (u * torch.tensor([1.0, small])) @ v.T
    got = TRANSPORTS[way](factors, x[None], 2)[0]
    projected = u.T @ got @ v
    assert float(projected[0, 0]) == pytest.approx(1.0, rel=0.05)
    assert float(projected[1, 1]) == pytest.approx(small, rel=0.15)


@pytest.mark.parametrize("way", TRANSPORTS)
def test_the_error_of_p_does_not_count_at_full_rank(way: str) -> None:
    """A basis of the whole space cannot be tilted, so only the error of Q remains."""
    x = _noise((1, 64, 64), 3)
    error = float((TRANSPORTS[way]("fixpoint4", x, 64) - x).norm() / x.norm())
    once, code = FactorFormat("fixpoint4"), _noise((1, 64, 64), 4)
    quantized = once.decode(once.encode(code), (1, 64, 64), torch.float32)
    alone = float((quantized - code).norm() / code.norm())
    # A sum is quantized twice; the two equal inputs have equal errors.
    assert error < (1.6 if way == "all-reduce" else 1.1) * alone


@pytest.mark.parametrize("factors", FORMATS)
def test_zeros_stay_zero_and_infinities_stay_visible(factors: Any) -> None:
    assert not _summed(factors, torch.zeros(2, 12, 8), 2, rank=2).any()
    codec = LowRankCodec(LowRankConfig(rank=2, factors=factors))
    assert not _decoded(codec, torch.zeros(12, 8), 2).any()
    for bad in (torch.inf, torch.nan):
        x = _noise((1, 12, 8), 0)
        x[0, 3, 3] = bad
        states = [CompressorState(), CompressorState()]
        compressor = PowerSGD(PowerSGDConfig(rank=2, factors=factors))
        total = run_lockstep(compressor, [x, _noise((1, 12, 8), 1)], states)[0].total
        assert not torch.isfinite(total).all()


@pytest.mark.parametrize("basis", ["tokens", "channels"])
@pytest.mark.parametrize("factors", FORMATS)
def test_the_sender_reconstructs_the_bits_that_arrive(factors: Any, basis: Any) -> None:
    codec = LowRankCodec(LowRankConfig(rank=3, factors=factors, basis=basis))
    for dtype in (torch.float32, torch.float64):
        state, x = CompressorState(), _noise((10, 3, 20), 5, dtype)
        payload = codec.encode(x, state, 0)
        arrived = codec.empty_payload(x.shape, x.dtype, x.device, CompressorState(), 0)
        assert arrived.nbytes == payload.nbytes < x.numel() * x.element_size() // 4
        arrived.wire.copy_(payload.wire)
        got = codec.decode(arrived, x.shape, x.dtype, CompressorState(), 0)
        assert got.dtype == dtype
        assert torch.equal(got, dense(codec.reconstruct(payload, x, state, 0), x))


@pytest.mark.parametrize("factors", BITS)
def test_the_sharded_optimizer_gets_the_same_sums(factors: Any) -> None:
    """A rank that reads only its share of the result still needs all factors."""
    compressor, totals = PowerSGD(PowerSGDConfig(rank=4, factors=factors)), []
    for sharded in (False, True):
        xs = [_noise((2, 16, 24), rank) for rank in range(4)]
        totals.append(
            [result.total for result in run_lockstep(compressor, xs, [CompressorState() for _ in xs], sharded)]
        )
    assert all(torch.equal(plain, shared) for plain, shared in zip(*totals, strict=True))

"""Chunked Top-K against a reference implementation in plain loops, and its message against the documented layout."""

from __future__ import annotations

import math
import struct
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.compression.builtin import BUILTIN
from megatron.compression.chunked_topk import ChunkedTopK, ChunkedTopKConfig
from megatron.compression.contract import (
    check_compressor,
    check_feedback_of_sums,
    check_other_replicas,
    check_state_of_sums,
    check_sum,
)
from megatron.compression.error_feedback import RESIDUAL, ErrorFeedback
from megatron.compression.lockstep import run_lockstep
from megatron.compression.registry import Registry
from megatron.compression.requests import Op, Request
from megatron.compression.schedule import RunLength
from megatron.compression.sorted_places import SortedPlaces
from megatron.compression.spec import read_spec
from megatron.compression.state import CompressorState
from tests.support.noise import seeded

RANKS = 3


def _choice(row: np.ndarray, chunk: int, k: int) -> list[int]:
    """Indices of the k largest nonzero magnitudes of each chunk; a short last chunk has the same share, rounded up."""
    places = []
    for start in range(0, len(row), chunk):
        magnitudes = np.abs(row[start : start + chunk])
        count = math.ceil(k * len(magnitudes) / chunk)
        best = sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], i))[:count]
        places += sorted(start + i for i in best if magnitudes[i])
    return places


def _rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """Values of a parameter as the receiver decodes them."""
    if bits in (16, 32):
        return torch.from_numpy(values).to({16: torch.bfloat16, 32: torch.float32}[bits]).double().numpy()
    if not len(values):
        return values
    bins, single = 2**bits, values.astype(np.float32).astype(np.float64)
    mean = sum(single) / len(single)
    sigma = math.sqrt(sum((v - mean) ** 2 for v in single) / len(single))
    codes = []
    for v in single:
        number = math.floor((v - mean) / (6 * sigma / bins)) + bins // 2 if sigma else bins // 2
        codes.append(min(max(number, 0), bins - 1))
    means = {b: np.mean([v for v, o in zip(single, codes, strict=True) if o == b]) for b in set(codes)}
    return np.array([np.float32(means[b]) for b in codes], dtype=np.float64)


CASES: list[dict[str, Any]] = [
    {"chunk": 8, "k": 3},
    {"chunk": 8, "k": 3, "bits": 1},
    {"chunk": 6, "k": 2, "bits": 4, "merge": "senders"},
    {"chunk": 21, "k": 1, "bits": 32, "merge": "senders"},
    {"chunk": 300, "k": 40, "bits": 16},
    {"chunk": 7, "k": 7, "bits": 8},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", [(2, 7, 6), (1, 3, 7), (3, 4, 16)], ids=str)
def test_sums_and_residuals_against_a_plain_loop(case: dict[str, Any], shape: tuple[int, ...]) -> None:
    config = ChunkedTopKConfig(**case)
    decay = 1.0 if config.k < 3 else 0.9
    compressor = ErrorFeedback(ChunkedTopK(config), decay=decay)
    states = [CompressorState() for _ in range(RANKS)]
    k, n = shape[0], shape[1] * shape[2]
    residuals = np.zeros((RANKS, k, n))
    for step in range(5):
        xs = [seeded(shape, 100 * step + rank) for rank in range(RANKS)]
        for rank, x in enumerate(xs):  # zeros in some, most or all of a chunk
            x.view(k, -1)[:, rank : 3 * rank + n // 3] = 0
        inputs = np.stack([x.view(k, n).numpy().copy() for x in xs]) + decay * residuals
        total = run_lockstep(compressor, xs, states)[0].total.view(k, n).numpy()
        sent, senders = np.zeros((RANKS, k, n)), np.zeros((k, n))
        for rank in range(RANKS):
            for sent_row, row, count in zip(sent[rank], inputs[rank], senders, strict=True):
                places = _choice(row, config.chunk, config.k)
                sent_row[places] = _rounded(row[places], config.bits)
                count[places] += 1
        expected = sent.sum(axis=0)
        if config.merge == "senders":
            expected *= RANKS / np.maximum(senders, 1)
        np.testing.assert_allclose(total, expected, rtol=0, atol=1e-12)
        residuals = inputs - sent
        for state, residual in zip(states, residuals, strict=True):
            state.commit()
            np.testing.assert_allclose(state.tensors[RESIDUAL].view(k, n).numpy(), residual, rtol=0, atol=1e-12)


def _codes(data: bytes, bits: int, count: int) -> list[int]:
    """Consecutive codes, from the lowest bit on."""
    number = int.from_bytes(data, "little")
    return [number >> (i * bits) & ((1 << bits) - 1) for i in range(count)]


@settings(max_examples=80, deadline=None)
@given(rows=st.integers(0, 4), count=st.integers(1, 80), most=st.integers(1, 1 << 16), seed=st.integers(0, 99))
def test_sorted_places_round_trip_in_the_bits_of_the_formula(rows: int, count: int, most: int, seed: int) -> None:
    """Repeated places included, and rows of the largest place alone."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(0, most + 1, (rows, count), generator=generator).sort(dim=1).values
    places[:1] = most
    code = SortedPlaces(rows, count, most)
    buffers = [torch.full((size,), 77, dtype=torch.uint8) for size in code.sizes]
    code.encode(places, buffers)
    assert torch.equal(code.decode(buffers), places)
    if count <= most:
        low = int(math.log2(most / count))
        assert count * code.low_bits + code.unary_bits <= count * low + count + (most >> low)


@pytest.mark.parametrize(("rows", "count", "most"), [(5, 64, 4096), (3, 7, 100), (2, 1, 9)])
def test_a_corrupt_message_decodes_to_places_within_range(rows: int, count: int, most: int) -> None:
    code = SortedPlaces(rows, count, most)
    generator = torch.Generator().manual_seed(5)
    messages = [torch.full((size,), fill, dtype=torch.uint8) for fill in (0, 255) for size in code.sizes]
    for message in (messages[:3], messages[3:]):
        assert code.decode(message).shape == (rows, count)
    for _ in range(50):
        message = [torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8) for size in code.sizes]
        places = code.decode(message)
        assert places.min() >= 0
        assert places.max() <= most


def _received(data: bytes, rows: int, count: int, most: int) -> tuple[list[int], bytes]:
    """Places of rows, read bit by bit, and the remaining bytes."""
    low = max(range(17), key=lambda bits: (-(count * bits + _buckets(count, most, bits)), bits))
    stream, octets = _codes(data, 1, 8 * len(data)), -(-rows * count // 8)
    places, at = [], 0
    for row in range(rows if most >> low else 0):
        row_places: list[int] = []
        bucket, at = 0, row * _buckets(count, most, low)
        while len(row_places) < count:
            if stream[at]:
                row_places.append(bucket << low)
            else:
                bucket += 1
            at += 1
        places += row_places
    at = -(-rows * _buckets(count, most, low) // 8)
    places = places or [0] * (rows * count)
    for bits, shift in ((max(low - 8, 0), 8), (min(low, 8), 0)):
        fields = _codes(data[at:], bits, rows * count)
        places = [index + (bits_of_place << shift) for index, bits_of_place in zip(places, fields, strict=True)]
        at += bits * octets
    return places, data[at:]


def _buckets(count: int, most: int, low: int) -> int:
    return count + (most >> low) if most >> low else 0


@pytest.mark.parametrize(
    ("chunk", "k", "n", "bits", "nbytes"),
    [
        (4096, 64, 4 * 4096, 2, 4 * 80 + 16),  # 64 (8 + 2) bits for 4,096 numbers, and four means
        (4096, 64, 4 * 4096, 4, 4 * 96 + 64),
        (4096, 64, 4 * 4096, 16, 4 * 192),
        (4096, 64, 4 * 4096, 32, 4 * 320),
        (4096, 512, 2 * 4096, 2, 2 * 448 + 16),  # 512 (5 + 2)
        (256, 8, 1000, 2, 3 * 7 + 7 + 8 + 16),  # 3 x 8 (5 + 2), 8 places of the last 232 numbers, and their bins
        (65536, 4, 65536, 2, 1 + 14 + 2 + 16),  # 4 (16 + 2); low bits and bins are packed 8 by 8
        (32, 3, 100, 1, 3 + 2 * 3 + 3 + 2 + 8),  # 9 places in 7 + 3 3 bits a chunk, and 1 of the last 4
    ],
)
def test_a_message_has_the_documented_layout_bit_by_bit(chunk: int, k: int, n: int, bits: int, nbytes: int) -> None:
    requests: list[Request] = []
    x = seeded((1, 1, n), 5).float()
    original = x.clone()
    compressor = ChunkedTopK(ChunkedTopKConfig(chunk=chunk, k=k, bits=bits))
    (result,) = run_lockstep(compressor, [x], [CompressorState()], requests=requests)
    (request,) = requests
    assert request.op is Op.GATHER
    wire = bytes(request.tensor.numpy().tobytes())
    assert len(wire) == -(-nbytes // 4) * 4
    row = original.view(-1).double().numpy()
    places = _choice(row, chunk, k)
    table = 4 * 2**bits if bits <= 8 else bits // 8 * len(places)
    received, remaining_bytes = _received(wire[table:], n // chunk, k, chunk)
    if n % chunk:
        last_places, remaining_bytes = _received(remaining_bytes, 1, math.ceil(k * (n % chunk) / chunk), n % chunk)
        received += last_places
    assert received == [index % chunk for index in places]
    if bits <= 8:
        means = struct.unpack(f"<{2**bits}f", wire[:table])
        values = [means[code] for code in _codes(remaining_bytes, bits, len(places))]
        np.testing.assert_allclose(values, _rounded(row[places], bits), rtol=1e-6)
        total = np.zeros(n)
        total[places] = values
        assert (result.total.view(-1).double().numpy() == total).all()


@pytest.mark.parametrize("case", [{"k": 1}, {"k": 4}, {"chunk": 9, "k": 2, "bits": 1}, {"bits": 16}], ids=str)
def test_zeros_stay_zero(case: dict[str, Any]) -> None:
    """In chunks of zero, one, or a few nonzero numbers: zeros have no bin."""
    config = ChunkedTopKConfig(**{"chunk": 8, "k": 4, **case})
    xs = [torch.zeros(1, 1, 5 * config.chunk + 3) for _ in range(2)]
    values = {config.chunk: 2.0, 2 * config.chunk - 1: -3.0, 3 * config.chunk + 1: 1.0, 5 * config.chunk + 2: 5.0}
    for index, value in values.items():
        xs[0][..., index] = value
    states = [CompressorState(), CompressorState()]
    compressor = ErrorFeedback(ChunkedTopK(config))
    total = run_lockstep(compressor, xs, states)[0].total.view(-1)
    assert set(total.nonzero().view(-1).tolist()) <= values.keys()
    assert len(total.nonzero()) == (3 if config.k == 1 else 4)
    for state in states:
        state.commit()
        assert set(state.tensors[RESIDUAL].view(-1).nonzero().view(-1).tolist()) <= values.keys()


@pytest.mark.parametrize("case", [case for case in CASES if "merge" not in case], ids=str)
def test_contracts_with_full_and_short_chunks(case: dict[str, Any]) -> None:
    check_compressor(BUILTIN["chunked-topk"], ChunkedTopKConfig(**case))
    make = partial(ChunkedTopK, ChunkedTopKConfig(**case))
    for shape in ((2, 8, 6), (1, 5, 5), (3, 1, 2)):
        check_sum(make, shape, torch.float64, sharded=True)
        check_state_of_sums(make, shape, torch.float32)
        check_feedback_of_sums(make, shape, "aggregate")
        check_other_replicas(make, shape)


@pytest.mark.parametrize("case", [case for case in CASES if "merge" in case], ids=str)
def test_a_skipped_step_leaves_decayed_residuals_unchanged(case: dict[str, Any]) -> None:
    config = ChunkedTopKConfig(**case)
    for shape in ((2, 8, 6), (1, 5, 5)):
        check_state_of_sums(lambda: ErrorFeedback(ChunkedTopK(config), decay=0.9), shape, torch.float32)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [1, 2, 8, 16, 32])
def test_a_non_finite_gradient_shows_in_its_parameter_alone(bits: int, bad: float) -> None:
    x = seeded((2, 6, 8), 1).float()
    x[1, 2, 3] = bad
    compressor = ChunkedTopK(ChunkedTopKConfig(chunk=16, k=4, bits=bits))
    total = run_lockstep(compressor, [x, seeded((2, 6, 8), 2).float()], [CompressorState(), CompressorState()])[0].total
    assert not total[1].isfinite().all()
    assert total[0].isfinite().all()


@pytest.mark.parametrize("value", [0.0, -3.0, 3e38, 1e-42])
@pytest.mark.parametrize("bits", [1, 2, 16])
def test_equal_subnormal_and_huge_values_are_sent(bits: int, value: float) -> None:
    """Bins without spread, subnormal numbers, and sums of squares that overflow fp32."""
    x = torch.full((1, 4, 8), value)
    compressor = ChunkedTopK(ChunkedTopKConfig(chunk=16, k=4, bits=bits))
    (result,) = run_lockstep(compressor, [x], [CompressorState()])
    sent = result.total.view(2, 16)
    assert (sent[:, 4:] == 0).all()
    rtol, atol = (2.0**-8, 1e-40) if bits == 16 else (0.0, 0.0)
    torch.testing.assert_close(sent[:, :4], torch.full((2, 4), value), rtol=rtol, atol=atol)


def test_values_above_bf16_are_clipped_and_the_residual_keeps_the_difference() -> None:
    most = torch.finfo(torch.float32).max
    x = torch.full((1, 2, 4), most)
    state = CompressorState()
    compressor = ErrorFeedback(ChunkedTopK(ChunkedTopKConfig(chunk=8, k=8, bits=16)))
    (result,) = run_lockstep(compressor, [x], [state])
    assert (result.total == torch.finfo(torch.bfloat16).max).all()
    state.commit()
    assert (state.tensors[RESIDUAL] == most - torch.finfo(torch.bfloat16).max).all()


def test_small_and_flat_parameters_are_not_compressed() -> None:
    """A table of 256 means is larger than a matrix of 8 x 8 numbers."""
    compressor = ChunkedTopK(ChunkedTopKConfig(bits=8))
    assert not compressor.should_compress((4096,))
    assert not compressor.should_compress((8, 8))
    assert compressor.should_compress((64, 64))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("chunked-topk,chunk=32", "k=64: a chunk has 32 numbers; use a larger chunk"),
        ("chunked-topk,k=64~5000@9", "k=5000: a chunk has 4096 numbers"),
        ("chunked-topk,bits=3", "bits=3: the choices are 1, 2, 4, 8, 16"),
        ("chunked-topk,chunk=100000", "chunk is 100_000; it must be at least 2 and at most 65_536"),
        ("chunked-topk,feedback-decay=0.95,error-feedback=off", "feedback-decay=0.95: there is no residual; add"),
        ("fixpoint,feedback-decay=1.5,error-feedback=on", "feedback-decay=1.5: write a number above 0 and at most 1"),
    ],
)
def test_invalid_options_are_refused(spec: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_spec(f"dp-grad={spec}", Registry(BUILTIN), RunLength(100))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

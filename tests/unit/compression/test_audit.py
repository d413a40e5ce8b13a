"""Samples of messages: they change nothing, and find what a compressor or its residual loses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.checkpoint.verify_command import RESIDUAL_TOLERANCE
from megatron.compression.api import Aggregate, Codec, Peers, RoundCompressor
from megatron.compression.audit import SLICE, AuditedCodec, AuditedRounds, Sample, why_not_sampled
from megatron.compression.builtin import BUILTIN
from megatron.compression.cast import CastCodec, CastConfig
from megatron.compression.contract import noise
from megatron.compression.error_feedback import RESIDUAL, ErrorFeedback, ErrorFeedbackCodec
from megatron.compression.fixpoint import FixpointConfig, FixpointRounds
from megatron.compression.lockstep import run_lockstep
from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.points import Point
from megatron.compression.powersgd import PowerSGD, PowerSGDConfig
from megatron.compression.state import CompressorState
from megatron.compression.topk import StableTopK, StableTopKConfig
from megatron.training.certificate import MessageSampler

WITH_RESIDUAL = sorted(name for name, entry in BUILTIN.items() if entry.rounds is not None and not entry.no_feedback)
CODECS = sorted(name for name, entry in BUILTIN.items() if entry.codec is not None)


def _rounds(name: str) -> RoundCompressor:
    entry = BUILTIN[name]
    assert entry.rounds is not None
    return entry.rounds(entry.config())


def _reduce(compressor: RoundCompressor, state: CompressorState, steps: int, shape: tuple[int, ...]) -> list[Tensor]:
    sums = []
    for step in range(steps):
        x = noise(shape, torch.float32, step)
        run_lockstep(compressor, [x], [state])
        if compressor.traits.observes:
            getattr(compressor, "inner", compressor).observe(x.clone(), state)
        state.commit()
        sums.append(x)
    return sums


@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_every_compressor_with_a_residual_adds_up_and_is_not_changed(name: str) -> None:
    samples: list[Sample] = []
    plain, audited = CompressorState(), CompressorState()
    inner = ErrorFeedback(_rounds(name), decay=0.9)
    expected = _reduce(inner, plain, 5, (2, 24, 40))
    sums = _reduce(AuditedRounds(inner, 3, samples.append), audited, 5, (2, 24, 40))
    assert all(torch.equal(x, y) for x, y in zip(sums, expected, strict=True))
    assert torch.equal(plain.tensors[RESIDUAL], audited.tensors[RESIDUAL])
    assert all(sample.relative_error() < RESIDUAL_TOLERANCE for sample in samples)
    assert all(sample.residual is not None for sample in samples)


def test_reductions_that_leave_nothing_out_are_not_sampled() -> None:
    """Dense steps of stable Top-K, whose interval is 5 here; the steps between them are."""
    samples: list[Sample] = []
    inner = ErrorFeedback(StableTopK(StableTopKConfig(density=0.1, interval=5)))
    _reduce(AuditedRounds(inner, 0, samples.append), CompressorState(), 11, (1, 24, 40))
    assert len(samples) == 8


def test_each_sample_takes_another_part_of_a_large_tensor() -> None:
    parts = []
    for number in range(4):
        samples: list[Sample] = []
        x = torch.arange(5.0 * SLICE).view(1, 5, SLICE)
        run_lockstep(AuditedRounds(FixpointRounds(), number, samples.append), [x], [CompressorState()])
        parts.append(float(samples[0].intended[0]))
    assert len(set(parts)) == 4


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 400),
    columns=st.integers(1, 400),
    decay=st.floats(0.1, 1.0),
    kind=st.sampled_from(["local", "aggregate"]),
    number=st.integers(0, 1000),
)
def test_any_slice_of_any_shape_adds_up(rows: int, columns: int, decay: float, kind: Any, number: int) -> None:
    samples: list[Sample] = []
    inner = ErrorFeedback(FixpointRounds(FixpointConfig(bits=2, group=8)), kind, decay)
    state = CompressorState()
    for step in range(3):
        x = noise((rows, columns), torch.float32, step)
        run_lockstep(AuditedRounds(inner, number, samples.append), [x], [state])
        state.commit()
    assert len(samples) == 3
    for sample in samples:
        assert sample.intended.numel() == min(rows * columns, SLICE)
        assert sample.residual is not None
        assert sample.relative_error() < RESIDUAL_TOLERANCE


class _Forgets(ErrorFeedback):
    """Keeps only 99.9% of the residual."""

    def finalize(self, x: Tensor, aggregate: Aggregate, state: CompressorState, peers: Peers) -> None:
        super().finalize(x, aggregate, state, peers)
        state.tensors[RESIDUAL].mul_(0.999)


class _NeverAdds(ErrorFeedback):
    """Does not add the residual to the next gradient."""

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Any:
        kept = state.tensors.pop(RESIDUAL, None)
        result = yield from super().rounds(x, state, peers)
        if kept is not None:
            state.tensors[RESIDUAL] = kept
        return result


@pytest.mark.parametrize("broken", [_Forgets, _NeverAdds])
def test_a_lost_residual_is_found(broken: type[ErrorFeedback]) -> None:
    samples: list[Sample] = []
    compressor = broken(PowerSGD(PowerSGDConfig(rank=1)))
    _reduce(AuditedRounds(compressor, 0, samples.append), CompressorState(), 3, (1, 24, 40))
    assert max(sample.relative_error() for sample in samples) > 100 * RESIDUAL_TOLERANCE


def test_without_a_residual_the_error_is_that_of_the_message() -> None:
    samples: list[Sample] = []
    compressor = AuditedRounds(FixpointRounds(FixpointConfig(bits=4, group=8)), 0, samples.append)
    x = noise((64,), torch.float32, 1)
    before = x.clone()
    run_lockstep(compressor, [x], [CompressorState()])
    (sample,) = samples
    assert sample.residual is None
    assert sample.relative_error() == pytest.approx(float((x - before).norm() / before.norm()), rel=1e-5)
    assert 0.01 < sample.relative_error() < 0.2


@pytest.mark.parametrize("kind", ["lazy", "lazy-reset", "lazy-mean"])
def test_messages_with_lazy_residuals_add_up_and_are_not_changed(kind: Any) -> None:
    samples: list[Sample] = []
    codec = ErrorFeedbackCodec(LowRankCodec(LowRankConfig(rank=2)), kind)
    plain, audited = CompressorState(), CompressorState()
    for step in range(6):
        length = 12 if step < 4 else 8  # shorter sequences shift the errors
        x = noise((length, 2, 16), torch.float32, step)
        expected = codec.encode(x.clone(), plain, None)
        payload = AuditedCodec(codec, step, samples.append).encode(x.clone(), audited, None)
        assert torch.equal(payload.wire, expected.wire)
        if step % 2:
            plain.commit()
            audited.commit()
    assert len(samples) == 6
    assert all(sample.residual is not None and sample.relative_error() < RESIDUAL_TOLERANCE for sample in samples)


def test_a_message_whose_residual_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[Sample] = []
    codec = ErrorFeedbackCodec(LowRankCodec(LowRankConfig(rank=1)))
    encode = codec.encode

    def lose(x: Tensor, state: CompressorState, key: Any) -> Any:
        payload = encode(x, state, key)
        state.stage(RESIDUAL, torch.zeros_like(x))
        return payload

    monkeypatch.setattr(codec, "encode", lose)
    AuditedCodec(codec, 0, samples.append).encode(noise((12, 2, 16), torch.float32, 0), CompressorState(), None)
    assert samples[0].relative_error() > 0.1


@pytest.mark.parametrize("name", CODECS)
def test_codecs_that_decode_with_a_memory_are_not_sampled(name: str) -> None:
    """All others leave sender and message as they are."""
    entry = BUILTIN[name]
    assert entry.codec is not None
    codec: Codec = entry.codec(entry.config())
    if name.startswith("delta"):
        assert "memory" in str(why_not_sampled(codec))
        return
    if why_not_sampled(codec) is not None:
        assert codec.traits.exact
        return
    samples: list[Sample] = []
    plain, audited = CompressorState(), CompressorState()
    for step in range(3):
        x = noise((12, 2, 16), torch.float32, step)
        expected = codec.encode(x.clone(), plain, None)
        payload = AuditedCodec(codec, step, samples.append).encode(x.clone(), audited, None)
        assert torch.equal(payload.wire, expected.wire)
    assert plain.layout() == audited.layout()
    assert all(sample.residual is None and sample.relative_error() < 0.8 for sample in samples)


@pytest.mark.parametrize("has_feedback", [False, True])
def test_a_message_that_overflows_is_not_counted(has_feedback: bool) -> None:
    """Its step is skipped. The error is infinite, or not a number with feedback: neither can be certified."""
    cast = CastCodec(CastConfig("fp16"))
    sampler = MessageSampler([])
    sampler.join()
    codec = sampler.audit(Point.PP_FWD, ErrorFeedbackCodec(cast) if has_feedback else cast)
    expected: list[tuple[float, list[tuple[int, float]]]] = [(1e6, []), (1.0, [(1, 0.0)])]
    for value, entries in expected:
        codec.encode(torch.full((2, 4), value), CompressorState(), 0)
        sampler.leave()
        assert [(entry.samples, entry.worst_error) for entry in sampler.entries.values()] == entries

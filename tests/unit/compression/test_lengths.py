"""Growing sequences: codecs keep their state where a change of shape allows it, equally at both ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.compression.api import Codec, SampleKey
from megatron.compression.delta import DeltaCodec, DeltaConfig, DeltaLowBitsConfig
from megatron.compression.error_feedback import RESIDUAL, ErrorFeedbackCodec, MessageResidual
from megatron.compression.fixpoint import FixpointCodec, FixpointConfig
from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.state import CompressorState
from tests.unit.compression.test_launches import MORE_CODECS
from tests.unit.compression.test_properties import CODECS, make_codec, noise

LENGTHS = (4, 4, 4, 8, 8, 8, 8, 12, 12, 12)
SKIPPED = (3, 8)
"""Steps that are rolled back, at a new length and at a known length."""


def _step(codec: Codec, ends: tuple[CompressorState, CompressorState], xs: list[Tensor], keys: list[SampleKey]) -> None:
    """Messages of a step; all receives are posted first, and layouts must agree."""
    cpu, dtype = torch.device("cpu"), torch.float32
    buffers = [codec.empty_payload(x.shape, dtype, cpu, ends[1], key) for x, key in zip(xs, keys, strict=True)]
    for x, buffer, key in zip(xs, buffers, keys, strict=True):
        codec.expect(x.shape, ends[0], key)
        payload = codec.encode(x.clone(), ends[0], key)
        assert buffer.wire.shape == payload.wire.shape
        assert buffer.wire.dtype == payload.wire.dtype
        got = codec.decode(payload, x.shape, dtype, ends[1], key)
        assert got.shape == x.shape
        assert got.isfinite().all()


@pytest.mark.parametrize("name", [*CODECS, *MORE_CODECS])
def test_both_ends_agree_while_sequences_grow(name: str) -> None:
    codec = MORE_CODECS[name]() if name in MORE_CODECS else make_codec(name)
    ends = CompressorState(), CompressorState()
    for step, length in enumerate(LENGTHS):
        keys = [SampleKey((2 * message, 2 * message + 1)) for message in range(3)]
        xs = [noise((length, 2, 24), torch.float32, 10 * step + message) for message in range(3)]
        for key in keys:
            key.tokens_sb, key.vocab_size = torch.arange(2 * length).view(length, 2) % 64, 64
        before = [end.export_tensors() for end in ends]
        codec.begin_step(ends[0])
        _step(codec, ends, xs, keys)
        for end in ends:
            end.rollback() if step in SKIPPED else end.commit()
        states = [end.export_tensors() for end in ends]
        if step in SKIPPED:
            for old, new in zip(before, states, strict=True):
                assert all(torch.equal(old[kind], x) for kind, x in new.items())
        for kind in codec.traits.shared:
            assert (kind in states[0]) == (kind in states[1])
            assert kind not in states[0] or torch.equal(states[0][kind], states[1][kind])


MEMORIES: dict[str, Callable[[], DeltaConfig]] = {
    "in memory": lambda: DeltaConfig(bits=4, cache_dtype="fp32", first_bits=32),
    "in a file": lambda: DeltaConfig(bits=4, cache_dtype="fp32", first_bits=32, memory=1),
    "quantized": lambda: DeltaLowBitsConfig(bits=4, first_bits=32),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_samples_of_another_length_are_sent_raw_and_stored_again(name: str) -> None:
    codec = DeltaCodec(MEMORIES[name]())
    ends = CompressorState(), CompressorState()
    key, used_memory = SampleKey((7, 9)), []
    for step, length in enumerate((4, 4, 8, 8, 8)):
        shape = torch.Size((length, 2, 24))
        x = noise(tuple(shape), torch.float32, step)
        buffer = codec.empty_payload(shape, torch.float32, torch.device("cpu"), ends[1], key)
        payload = codec.encode(x, ends[0], key)
        got = codec.decode(payload, shape, torch.float32, ends[1], key)
        sent_raw = payload.nbytes == x.numel() * 4
        used_memory.append(not sent_raw)
        assert buffer.nbytes == payload.nbytes
        assert not sent_raw or torch.equal(got, x)
        for end in ends:
            end.rollback() if step == 2 else end.commit()
        rows = ends[0].export_tensors()["samples.rows"]
        assert len(rows) == 2
        assert torch.equal(rows, ends[1].export_tensors()["samples.rows"])
    # The step that was rolled back leaves rows of the old length, so the next step is a first visit again.
    assert used_memory == [False, True, False, False, True]


@pytest.mark.parametrize("kind", ["lazy", "lazy-reset", "lazy-mean"])
def test_residuals_are_sent_at_another_length(kind: MessageResidual) -> None:
    """Summed over the tokens, outputs and residual add up to the inputs."""
    codec = ErrorFeedbackCodec(FixpointCodec(FixpointConfig(bits=2)), kind)
    state = CompressorState()
    input_sum, sent = torch.zeros(3, 6), torch.zeros(3, 6)
    for step, length in enumerate((4, 4, 6, 6, 10, 5)):
        x = noise((length, 3, 6), torch.float32, step)
        codec.begin_step(state)
        payload = codec.encode(x, state, None)
        input_sum, sent = (
            input_sum + x.sum(dim=0),
            sent + codec.decode(payload, x.shape, x.dtype, state, None).sum(dim=0),
        )
        state.commit()
        assert state.tensors[RESIDUAL].shape == (x.shape[-1:] if kind == "lazy-mean" else x.shape)
        if kind == "lazy":
            torch.testing.assert_close(sent + state.tensors[RESIDUAL].sum(dim=0), input_sum, rtol=0, atol=1e-5)


def test_residuals_of_another_batch_size_are_dropped() -> None:
    codec, state = ErrorFeedbackCodec(FixpointCodec(FixpointConfig(bits=2))), CompressorState()
    codec.encode(noise((4, 3, 6), torch.float32, 0), state, None)
    state.commit()
    x = noise((4, 2, 6), torch.float32, 1)
    alone = codec.encode(x.clone(), CompressorState(), None)
    assert torch.equal(codec.encode(x, state, None).wire, alone.wire)


def test_a_warm_start_survives_a_change_of_length() -> None:
    """Matrices of different lengths share their rows, so the factor of the first serves the others."""
    codec, state = LowRankCodec(LowRankConfig(rank=2)), CompressorState()
    rows = noise((2, 24), torch.float64, 0)

    def matrix(length: int) -> Tensor:
        return (noise((2 * length, 2), torch.float64, length) @ rows).view(length, 2, 24)

    for length in (6, 8):
        x = matrix(length)
        codec.encode(x, state, None)
        state.commit()
        factor = state.tensors["q"]
        assert factor.shape == (1, 24, 2)
    cold, warm = (codec.encode(matrix(12), end, None) for end in (CompressorState(), state))
    assert not torch.equal(cold.wire, warm.wire)

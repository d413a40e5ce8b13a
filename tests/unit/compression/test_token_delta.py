"""Differences from the mean of a token: the means against a reference loop, and the error of messages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.base.errors import UserError
from megatron.compression.api import SampleKey
from megatron.compression.delta import DeltaConfig, DeltaLowBitsConfig, TokenDeltaCodec
from megatron.compression.fixpoint import FixpointConfig, Quantizer
from megatron.compression.state import CompressorState
from megatron.compression.token_means import COUNTS, MEANS, learn, predict

S, B, H, V = 6, 2, 16, 11
SHAPE = torch.Size((S, B, H))


def _content(tokens_sb: Tensor) -> SampleKey:
    key = SampleKey(range(tokens_sb.shape[1]))
    key.tokens_sb, key.vocab_size = tokens_sb, V
    return key


def _message(step: int, spread: float = 0.1) -> tuple[Tensor, SampleKey]:
    """Activations that depend on their tokens, plus noise, and the key of their tokens."""
    generator = torch.Generator().manual_seed(step)
    tokens_sb = torch.randint(0, V, (S, B), generator=generator)
    of_token_vh = torch.randn((V, H), generator=torch.Generator().manual_seed(99))
    return of_token_vh[tokens_sb] + spread * torch.randn(SHAPE, generator=generator), _content(tokens_sb)


def _sent(codec: TokenDeltaCodec, x: Tensor, ends: tuple[CompressorState, CompressorState], key: SampleKey) -> Tensor:
    payload = codec.encode(x, ends[0], key)
    room = codec.empty_payload(x.shape, x.dtype, x.device, ends[1], key)
    assert room.wire.shape == payload.wire.shape
    room.wire.copy_(payload.wire)
    return codec.decode(room, x.shape, x.dtype, ends[1], key)


@given(
    tokens=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=4),
    horizon=st.integers(1, 6),
)
def test_means_match_a_reference_loop(tokens: list[list[int]], horizon: int) -> None:
    state = CompressorState()
    means = [[0.0, 0.0] for _ in range(5)]
    counts = [0] * 5
    for number, sequence in enumerate(tokens):
        x_nh = torch.randn((len(sequence), 2), generator=torch.Generator().manual_seed(number))
        assert predict(state, torch.arange(5), 5, 2) == pytest.approx(torch.tensor(means), abs=1e-5)
        learn(state, torch.tensor(sequence), x_nh, 5, horizon)
        for token in set(sequence):
            rows = [x_nh[i].tolist() for i in range(len(sequence)) if sequence[i] == token]
            share = len(rows) / (min(counts[token], horizon) + len(rows))
            for channel in range(2):
                new = sum(row[channel] for row in rows) / len(rows)
                means[token][channel] += share * (new - means[token][channel])
            counts[token] += len(rows)
    assert predict(state, torch.arange(5), 5, 2) == pytest.approx(torch.tensor(means), abs=1e-5)
    assert state.get(COUNTS).tolist() == counts  # type: ignore[union-attr]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_both_ends_are_equal_and_a_skipped_step_changes_nothing(rounding: str) -> None:
    codec = TokenDeltaCodec(DeltaConfig(predict="token", bits=4, rounding=rounding))  # type: ignore[arg-type]
    ends = CompressorState(), CompressorState()
    for step in range(12):
        before = {name: tensor.clone() for name, tensor in ends[1].export_tensors().items()}
        for micro_batch in range(3):
            x, key = _message(10 * step + micro_batch)
            if step == 5 and micro_batch == 1:
                x[0, 1, 3] = torch.inf
            _sent(codec, x, ends, key)
        for state in ends:
            state.rollback() if step in (4, 5) else state.commit()
        states = [state.export_tensors() for state in ends]
        assert states[0].keys() == states[1].keys() == {MEANS, COUNTS}
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        if step in (4, 5):
            assert all(torch.equal(before[name], states[1][name]) for name in before)
    assert all(torch.isfinite(tensor).all() for tensor in states[0].values())


def test_non_finite_rows_are_not_learned() -> None:
    state = CompressorState()
    x_nh = torch.tensor([[1.0, 2.0], [math.nan, 0.0], [3.0, math.inf], [3.0, 4.0]])
    learn(state, torch.tensor([0, 1, 0, 0]), x_nh, 3, 64)
    assert predict(state, torch.arange(3), 3, 2).tolist() == [[2.0, 3.0], [0.0, 0.0], [0.0, 0.0]]


def test_the_error_falls_to_that_of_the_noise() -> None:
    codec = TokenDeltaCodec(DeltaConfig(predict="token", bits=4))
    direct = Quantizer(FixpointConfig(bits=4))
    ends = CompressorState(), CompressorState()
    ours, plain = [], []
    for step in range(60):
        x, key = _message(step)
        got = _sent(codec, x, ends, key)
        ours.append(float((got - x).norm() / x.norm()))
        plain.append(float((direct.decode(direct.encode(x, None), x.shape) - x).norm() / x.norm()))
        assert codec.encode(x, CompressorState(), key).nbytes == direct.nbytes(SHAPE)
        for state in ends:
            state.commit()
    assert ours[0] == pytest.approx(plain[0]), "nothing is known yet"
    assert sum(ours[30:]) < 0.2 * sum(plain[30:])


def test_a_bf16_message_comes_back_in_bf16() -> None:
    codec = TokenDeltaCodec(DeltaConfig(predict="token", bits=8))
    x, key = _message(0)
    got = _sent(codec, x.to(torch.bfloat16), (CompressorState(), CompressorState()), key)
    assert got.dtype == torch.bfloat16
    assert float((got.float() - x).norm() / x.norm()) < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predict": "token", "cache": 5}, "cache=5: means nothing with predict=token"),
        ({"predict": "token", "first_bits": 32}, "first-bits=32: means nothing"),
        ({"predict": "token", "memory": 1}, "memory=1"),
        ({"horizon": 3}, "horizon=3: means nothing with predict=sample"),
    ],
)
def test_options_of_the_other_prediction_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DeltaConfig(**options)  # type: ignore[arg-type]


def test_low_bit_delta_refuses_predictions_by_token() -> None:
    with pytest.raises(UserError, match="use delta"):
        DeltaLowBitsConfig(predict="token")

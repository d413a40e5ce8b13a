"""``launch_signature``: after a value that was seen before, a compressor launches no new kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from megatron.compression.api import Codec, CodecTraits, Payload, RoundCompressor, SampleKey
from megatron.compression.contract import noise
from megatron.compression.delta import DeltaCodec, DeltaConfig, TokenDeltaCodec
from megatron.compression.error_feedback import ErrorFeedback, ErrorFeedbackCodec
from megatron.compression.fixpoint import FixpointCodec, FixpointConfig, FixpointRounds
from megatron.compression.lockstep import run_lockstep
from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.powersgd import PowerSGD, PowerSGDConfig
from megatron.compression.state import CompressorState
from megatron.compression.topk import StableTopK, StableTopKConfig
from tests.support.launches import PretendedDevice
from tests.unit.compression.test_properties import CODECS, ROUNDS, make_codec, make_rounds

SHAPE = torch.Size((8, 2, 24))
MESSAGES, STEPS = 3, 14
STOCHASTIC = FixpointConfig(bits=4, rounding="stochastic")

MORE_CODECS: dict[str, Callable[[], Codec]] = {
    "lowrank with residual": lambda: ErrorFeedbackCodec(LowRankCodec(LowRankConfig(rank=2))),
    "lowrank, quantized factors": lambda: ErrorFeedbackCodec(LowRankCodec(LowRankConfig(rank=2, factors="fixpoint4"))),
    "fixpoint with mean residual": lambda: ErrorFeedbackCodec(FixpointCodec(STOCHASTIC), "lazy-mean"),
    "delta by token": lambda: TokenDeltaCodec(DeltaConfig(predict="token", rounding="stochastic")),
    "delta that evicts": lambda: DeltaCodec(DeltaConfig(cache=7, rounding="stochastic")),
}
MORE_ROUNDS: dict[str, Callable[[], RoundCompressor]] = {
    "powersgd with residual": lambda: ErrorFeedback(PowerSGD(PowerSGDConfig(rank=2))),
    "powersgd, quantized factors": lambda: ErrorFeedback(PowerSGD(PowerSGDConfig(rank=2, factors="fixpoint8"))),
    "stochastic with residual": lambda: ErrorFeedback(FixpointRounds(STOCHASTIC)),
    "stable top-k with residual": lambda: ErrorFeedback(StableTopK(StableTopKConfig(interval=3, flush="mean"))),
    "stable top-k in turns": lambda: ErrorFeedback(StableTopK(StableTopKConfig(interval=3, flush="rotate"))),
}


class Watched:
    """A rank or an end of a link: announced values of ``launch_signature``, and kernels launched after them."""

    def __init__(self) -> None:
        self.device = PretendedDevice()
        self.announced: set[Hashable] = set()
        self.surprises: list[str] = []
        self.knew = False

    def run(self, value: Hashable, call: Callable[[], Any]) -> Any:
        before = set(self.device.loaded)
        with self.device:
            result = call()
        self.knew = value is not None and value in self.announced
        new = sorted(str(kernel) for kernel in self.device.loaded - before)
        if self.knew and new:
            self.surprises.append(f"{value}: {new[0]}")
        if value is not None:
            self.announced.add(value)
        return result


def _messages(codec: Codec) -> tuple[Watched, Watched]:
    """Run steps of several messages and roll back the fourth; samples come again after five steps."""
    sender, receiver = Watched(), Watched()
    states = CompressorState(), CompressorState()
    for step in range(STEPS):
        keys = [SampleKey((10 * (step % 5) + message, 10 * (step % 5) + message + 5)) for message in range(MESSAGES)]
        for key in keys:
            key.tokens_sb, key.vocab_size = torch.arange(16).view(8, 2) + key[0], 64
        xs = [noise(tuple(SHAPE), torch.float32, 10 * step + message) for message in range(MESSAGES)]

        def encode(xs: Sequence[torch.Tensor] = xs, keys: Sequence[Hashable] = keys) -> list[Payload]:
            return [codec.encode(x, states[0], key) for x, key in zip(xs, keys, strict=True)]

        def decode(payloads: Sequence[Payload], keys: Sequence[Hashable] = keys) -> None:
            for key in keys:
                codec.empty_payload(SHAPE, torch.float32, torch.device("cpu"), states[1], key)
            for payload, key in zip(payloads, keys, strict=True):
                codec.decode(payload, SHAPE, torch.float32, states[1], key)

        payloads = sender.run(codec.launch_signature(SHAPE, states[0], keys), encode)
        receiver.run(codec.launch_signature(SHAPE, states[1], keys), partial(decode, payloads))
        for state in states:
            state.rollback() if step == 3 else state.commit()
    return sender, receiver


@pytest.mark.parametrize("name", [*CODECS, *MORE_CODECS])
def test_codecs_announce_all_launches(name: str) -> None:
    codec = MORE_CODECS[name]() if name in MORE_CODECS else make_codec(name)
    for end in _messages(codec):
        assert end.surprises == []
        assert end.knew, "the steady state is never known"


def _sums(compressor: RoundCompressor) -> Watched:
    watched = Watched()
    states = [CompressorState(), CompressorState()]
    shape = (2, 12, 16) if compressor.traits.batched else (384,)
    for step in range(STEPS):
        xs = [noise(shape, torch.float32, 10 * step + rank) for rank in range(2)]

        def total(xs: Sequence[torch.Tensor] = xs) -> None:
            run_lockstep(compressor, xs, states)
            for state in states:
                if compressor.traits.observes and state.count("awaiting"):
                    compressor.observe(xs[0].clone(), state)

        watched.run(compressor.launch_signature(states[0]), total)
        for state in states:
            state.commit()
    return watched


@pytest.mark.parametrize("name", [*ROUNDS, *MORE_ROUNDS])
def test_sums_announce_all_launches(name: str) -> None:
    compressor = MORE_ROUNDS[name]() if name in MORE_ROUNDS else make_rounds(name)
    watched = _sums(compressor)
    assert watched.surprises == []
    assert watched.knew or name == "stable-topk", "the steady state is never known"  # a dense step every 100 steps


class Counting(FixpointCodec):
    """Computes something else at every fourth message, without declaring it."""

    traits = CodecTraits()

    def encode(self, x: torch.Tensor, state: CompressorState, key: Hashable) -> Payload:
        state.stage("calls", state.count("calls") + 1)
        return super().encode(x if state.count("calls") % 4 else x.abs(), state, key)


class Concealing(Counting):
    """Declares the counter steady, although it matters."""

    traits = CodecTraits(steady=("calls",))


def test_an_undeclared_counter_is_taken_to_matter() -> None:
    sender, _ = _messages(Counting())
    assert sender.surprises == []
    assert not sender.knew


def test_a_false_declaration_is_noticed() -> None:
    sender, _ = _messages(Concealing())
    assert sender.surprises != []

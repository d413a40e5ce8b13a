"""What ``check_compressor`` says about compressors that break a promise, and that documented ones keep them all."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Codec, CodecTraits, Payload, Peers, Request, RoundCompressor
from megatron.compression.contract import check_compressor
from megatron.compression.options import CompressorFault
from megatron.compression.plugins import build_registry
from megatron.compression.registry import Registration
from megatron.compression.state import CompressorState
from tests.support.documented import python_blocks


@dataclass(frozen=True)
class _Options:
    """None."""


class _Halved(Codec):
    """A codec that keeps its promises: bf16 bytes."""

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return Payload(torch.empty(shape, dtype=torch.bfloat16, device=device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        state.stage("messages", state.count("messages") + 1)
        return Payload(x.to(torch.bfloat16).contiguous())

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        return payload.wire.to(dtype)


class _Long(_Halved):
    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        return Payload(torch.cat([x.to(torch.bfloat16).flatten(), torch.zeros(1, dtype=torch.bfloat16)]))


class _Greedy(_Halved):
    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        sent = super().encode(x, state, key)
        x.zero_()
        return sent


class _Proud(_Halved):
    traits = CodecTraits(exact=True)


class _Forgetful(_Halved):
    """Counts its messages in itself."""

    made = 0

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        self.made += 1
        return super().encode(x * self.made, state, key)


class _Hasty(_Halved):
    """Changes what it has kept at once."""

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        kept = state.get("kept")
        if kept is None:
            kept = torch.zeros(1)
            state.stage("kept", kept)
        kept.add_(1)
        return super().encode(x * float(kept), state, key)


class _Borrowing(_Halved):
    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        last = state.get("last")
        got = super().decode(payload, shape, dtype, state, key)
        state.stage("last", got)
        return got if last is None else got + 0 * last


class _Failing(_Halved):
    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        raise ValueError("no idea\nat all")


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (_Long, "round trip, a message of (6, 2, 8) torch.float32: encode makes a message of (97,) torch.bfloat16, but "
         "empty_payload has room for (6, 2, 8) torch.bfloat16"),
        (_Greedy, "round trip, a message of (6, 2, 8) torch.float32: encode changes its input"),
        (_Proud, "CodecTraits.exact, but other numbers come back"),
        (_Forgetful, "state of messages, a message of (6, 2, 8) torch.float32: a skipped step leaves a trace; write"),
        (_Hasty, "a skipped step leaves a trace; write state with state.stage"),
        (_Borrowing, "memory of its own, a message of (6, 2, 8): the state or the result lives in a message"),
        (_Failing, "round trip, a message of (6, 2, 8) torch.float32: ValueError: no idea"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_broken_promise_of_messages_is_named(codec: type[Codec], said: str) -> None:
    with pytest.raises(CompressorFault) as caught:
        check_compressor(Registration(_Options, codec=codec))
    lines = str(caught.value).splitlines()
    assert any(said in line for line in lines)
    assert len({line.partition(",")[0] for line in lines}) == len(lines), "a promise is named twice"


class _Plain(RoundCompressor):
    """A sum that keeps its promises."""

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        state.stage("steps", state.count("steps") + 1)
        total = yield Request(x.clone())
        return Aggregate(total, x.clone())


class _Boastful(_Plain):
    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        total = yield Request(x * 0.5)
        return Aggregate(total, x.clone())


class _Uneven(_Plain):
    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        total = yield Request(x.flatten()[: 5 + peers.rank].clone())
        return Aggregate(total, x.clone())


class _Selfish(_Plain):
    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        aggregate = yield from super().rounds(x, state, peers)
        assert isinstance(aggregate.total, Tensor)
        return Aggregate(aggregate.total + peers.rank, aggregate.local)


class _Private(_Plain):
    """Keeps the last sum in itself."""

    last = 0.0

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        share = 1.0 if self.last else 0.5
        total = yield Request(x * share)
        if peers.rank == peers.size - 1:
            self.last = 1.0
        return Aggregate(total, x * share)


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        (_Boastful, "sum, a sum of (2, 12, 8): the ranks' Aggregate.local do not add up to Aggregate.total"),
        (_Boastful, "error feedback of sums, a sum of (2, 12, 8): over six steps, the sums and the residuals are not"),
        (_Uneven, "the ranks ask for different operations, levels, shapes or dtypes in one round"),
        (_Selfish, "sum, a sum of (2, 12, 8): the ranks have different sums"),
        (_Private, "state of sums, a sum of (2, 12, 8): a run that goes on from a checkpoint computes another sum"),
    ],
)
def test_a_broken_promise_of_sums_is_named(rounds: type[RoundCompressor], said: str) -> None:
    with pytest.raises(CompressorFault) as caught:
        check_compressor(Registration(_Options, rounds=rounds))
    assert any(said in line for line in str(caught.value).splitlines())


def test_what_keeps_its_promises_passes() -> None:
    check_compressor(Registration(_Options, codec=_Halved, rounds=_Plain))


@pytest.mark.parametrize(("block", "names"), [(0, ("tensor-float8", "random-rows")), (1, ("large-rows",))])
def test_the_documented_compressors_pass(block: int, names: tuple[str, ...], tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    module.write_text(python_blocks("writing-a-compressor.md")[block])
    registry = build_registry([str(module)])
    for name in names:
        check_compressor(registry[name])

"""``check_compressor`` names broken promises; the documented compressors pass."""

from __future__ import annotations

import runpy
from collections.abc import Generator, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.compression.api import (
    Aggregate,
    Codec,
    CodecTraits,
    Op,
    Payload,
    Peers,
    Request,
    RoundCompressor,
    SumTraits,
)
from megatron.compression.contract import check_compressor
from megatron.compression.lockstep import run_lockstep
from megatron.compression.options import CompressorFault
from megatron.compression.plugins import build_registry
from megatron.compression.registry import Registration
from megatron.compression.results import NOT_DECODED, NOT_SUMMED
from megatron.compression.state import CompressorState
from tests.support.documented import REPO, python_blocks


@dataclass(frozen=True)
class _Options:
    """No options."""


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


class _Undefined(_Halved):
    """Keeps no state."""

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        return payload.wire.to(dtype) * torch.nan


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
    """Counts its messages in an attribute instead of the state."""

    calls = 0

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        self.calls += 1
        return super().encode(x * self.calls, state, key)


class _Hasty(_Halved):
    """Changes its state in place instead of staging it."""

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        calls = state.get("kept")
        if calls is None:
            calls = torch.zeros(1)
            state.stage("kept", calls)
        calls.add_(1)
        return super().encode(x * float(calls), state, key)


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
    ("codec", "message"),
    [
        (_Long, "round trip, a message of (6, 2, 8) torch.float32: encode makes a message of (97,) torch.bfloat16, but "
         "empty_payload has room for (6, 2, 8) torch.bfloat16"),
        (_Greedy, "round trip, a message of (6, 2, 8) torch.float32: encode changes its input"),
        (_Proud, "CodecTraits.exact is set, but decoded numbers differ"),
        (_Forgetful, "state of messages, a message of (6, 2, 8) torch.float32: a skipped step changes the state"),
        (_Hasty, "a skipped step changes the state; write state with state.stage"),
        (_Borrowing, "separate memory, a message of (6, 2, 8): the state or the result shares memory with a message"),
        (_Failing, "round trip, a message of (6, 2, 8) torch.float32: ValueError: no idea"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_codec_that_breaks_a_promise_is_named(codec: type[Codec], message: str) -> None:
    with pytest.raises(CompressorFault) as caught:
        check_compressor(Registration(_Options, codec=codec))
    lines = str(caught.value).splitlines()
    assert any(message in line for line in lines)
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
    """Remembers the last sum in an attribute."""

    last = 0.0

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        share = 1.0 if self.last else 0.5
        total = yield Request(x * share)
        if peers.rank == peers.size - 1:
            self.last = 1.0
        return Aggregate(total, x * share)


class _Infinite(_Plain):
    """Keeps no state."""

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        total = yield Request(x.clone())
        return Aggregate(total * torch.nan, x.clone())


class _Cropped(_Plain):
    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        total = yield Request(x.clone())
        return Aggregate(total[:, :-1], x.clone())


class _Bare(_Plain):
    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Any]:
        return (yield Request(x.clone()))


class _Unasked(_Plain):
    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Any, Tensor, Aggregate]:
        total = yield x.clone()
        return Aggregate(total, x.clone())


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        (_Infinite, "sum, a sum of (2, 12, 8): finite numbers have a sum that is not finite"),
        (_Cropped, "sum, a sum of (2, 12, 8): _Cropped.rounds returns an Aggregate.total of (2, 11, 8) for (2, 12, 8)"),
        (_Bare, "sum, a sum of (2, 12, 8): _Bare.rounds returns a Tensor; return Aggregate(total, local)"),
        (_Unasked, "sum, a sum of (2, 12, 8): _Unasked.rounds yields a Tensor; yield Request(tensor)"),
        (_Unasked, "error feedback of sums, a sum of (2, 12, 8): _Unasked.rounds yields a Tensor"),
        (_Boastful, "sum, a sum of (2, 12, 8): the ranks' Aggregate.local do not add up to Aggregate.total"),
        (_Boastful, "error feedback of sums, a sum of (2, 12, 8): over six steps, sums and residuals do not add up"),
        (_Uneven, "the ranks ask for different operations, levels, shapes or dtypes in one round"),
        (_Selfish, "sum, a sum of (2, 12, 8): the ranks have different sums"),
        (_Private, "state of sums, a sum of (2, 12, 8): a run resumed from a checkpoint computes a different sum"),
    ],
)
def test_a_sum_that_breaks_a_promise_is_named(rounds: type[RoundCompressor], message: str) -> None:
    with pytest.raises(CompressorFault) as caught:
        check_compressor(Registration(_Options, rounds=rounds))
    assert any(message in line for line in str(caught.value).splitlines())


def test_numbers_that_are_not_finite_break_no_other_promise() -> None:
    """NaN differs from itself, but the state is as it was, and all ranks have the same sum."""
    with pytest.raises(CompressorFault) as caught:
        check_compressor(Registration(_Options, rounds=_Infinite))
    assert {line.rpartition(": ")[2] for line in str(caught.value).splitlines()} == {NOT_SUMMED}
    with pytest.raises(CompressorFault) as caught:
        check_compressor(Registration(_Options, codec=_Undefined))
    assert {line.rpartition(": ")[2] for line in str(caught.value).splitlines()} == {NOT_DECODED}


def test_compressors_that_keep_their_promises_pass() -> None:
    check_compressor(Registration(_Options, codec=_Halved, rounds=_Plain))


@pytest.mark.parametrize(
    ("page", "block", "names"),
    [
        ("compressor", 0, ("tensor-float8", "random-rows")),
        ("advanced-compressors", 0, ("majority-vote",)),
        ("advanced-compressors", 1, ("large-rows",)),
    ],
)
def test_the_documented_compressors_pass(page: str, block: int, names: tuple[str, ...], tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    module.write_text(python_blocks(f"extend/{page}.md")[block])
    registry = build_registry([str(module)])
    for name in names:
        check_compressor(registry[name])


def test_the_documented_check_runs_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = python_blocks("extend/compressor.md")
    (tmp_path / "mine.py").write_text(blocks[0])
    (tmp_path / "check_mine.py").write_text(blocks[1])
    monkeypatch.chdir(tmp_path)
    runpy.run_path("check_mine.py")
    broken = blocks[0].replace("zeros_like(x).index_copy(1, rows, x[:, rows])", "zeros_like(x)")
    assert broken != blocks[0]
    (tmp_path / "mine.py").write_text(broken)
    with pytest.raises(CompressorFault) as caught:
        runpy.run_path("check_mine.py")
    page = (REPO / "docs/extend/compressor.md").read_text(encoding="utf-8")
    assert str(caught.value).splitlines()[0] in page.splitlines()


def test_the_documented_majority_vote_computes_its_formula(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(python_blocks("extend/advanced-compressors.md")[0])
    vote = build_registry([str(tmp_path / "mine.py")])["majority-vote"]
    assert vote.rounds is not None
    xs = [torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    votes = torch.stack([torch.where(x >= 0, 1.0, -1.0) for x in xs]).sum(dim=0)
    expected = votes.sign() * torch.stack(xs).abs().mean(dim=(2, 3)).sum(dim=0).view(2, 1, 1)
    results = run_lockstep(vote.rounds(vote.config()), [x.clone() for x in xs], [CompressorState() for _ in xs])
    for result in results:
        torch.testing.assert_close(result.total, expected)


@pytest.mark.parametrize("op", Op)
def test_results_have_the_documented_shapes(op: Op) -> None:
    class Asks(RoundCompressor):
        traits = SumTraits(batched=True)

        def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
            shape = (peers.size, 2, 3) if op is Op.EXCHANGE else (2, 3)
            result = yield Request(torch.full(shape, float(peers.rank)), op)
            shapes.append(tuple(result.shape))
            return Aggregate(x, x)

    shapes: list[tuple[int, ...]] = []
    run_lockstep(Asks(None), [torch.zeros(1, 2, 3) for _ in range(4)], [CompressorState() for _ in range(4)])
    text = (REPO / "docs/extend/advanced-compressors.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `Op.{op.name}`"))
    stacked, first_alone = "(n, " in row.split("|")[3], op is Op.COLLECT
    assert shapes == [(0 if first_alone and rank else 4, 2, 3) if stacked else (2, 3) for rank in range(4)]

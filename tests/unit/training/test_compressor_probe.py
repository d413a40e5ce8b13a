"""The search for the compressor that makes a run diverge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.error_feedback import ErrorFeedback
from megatron.compression.fixpoint import FixpointCodec, FixpointRounds
from megatron.compression.identity import IdentityCodec, IdentityRounds
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.distributed.ledger import Ledger
from megatron.distributed.round_driver import PackedReduction, TensorReduction
from megatron.distributed.topology import single_process
from megatron.training.compressor_probe import CompressorProbe
from tests.support.nan_codes import NanCodec, NanRounds


class _Plan:
    """A plan with a compressor at two points."""

    def __init__(self) -> None:
        self.specs = {point: SimpleNamespace(name="mine") for point in Point}

    def is_compressed(self, point: Point) -> bool:
        return point in (Point.PP_FWD, Point.DP_GRAD)


def _probe() -> tuple[CompressorProbe, Ledger]:
    ledger = Ledger()
    engines: Any = SimpleNamespace(ledger=ledger, plan=_Plan(), topology=single_process())
    return CompressorProbe(engines), ledger


def _encode(ledger: Ledger, codec: Codec, x: torch.Tensor) -> None:
    ledger.audited(Point.PP_FWD, codec).encode(x, CompressorState(), None)


def _sum(ledger: Ledger, compressor: RoundCompressor, x: torch.Tensor) -> None:
    reduction = TensorReduction(compressor, x.clone(), CompressorState())
    PackedReduction([reduction], single_process().dp, ledger, Point.DP_GRAD).finish()


FINITE = torch.ones(2, 3, 4)
NOT_FINITE = FINITE.index_fill(0, torch.tensor([1]), torch.inf)


def test_only_suspicious_steps_are_sampled() -> None:
    probe, ledger = _probe()
    assert not ledger.observers
    for _ in range(2):
        probe.watch(True)
        assert ledger.observers == [probe]
    for _ in range(2):
        probe.watch(False)
        assert not ledger.observers
    codec, rounds = NanCodec(), NanRounds()
    assert ledger.audited(Point.PP_FWD, codec) is codec
    assert ledger.audited(Point.DP_GRAD, rounds) is rounds
    probe.watch(True)
    exact_codec, exact_rounds = IdentityCodec(), IdentityRounds()
    assert ledger.audited(Point.PP_FWD, exact_codec) is exact_codec
    assert ledger.audited(Point.DP_GRAD, exact_rounds) is exact_rounds


@pytest.mark.parametrize(
    ("codec", "rounds", "x", "spec"),
    [
        (NanCodec(), None, FINITE, "pp-forward=mine"),
        (None, NanRounds(), FINITE, "dp-grad=mine"),
        (FixpointCodec(), NanRounds(), FINITE, "dp-grad=mine"),
        (NanCodec(), NanRounds(), FINITE, "pp-forward=mine"),
        (NanCodec(), NanRounds(), NOT_FINITE, None),
        (FixpointCodec(), FixpointRounds(), FINITE, None),
    ],
)
def test_the_first_compressor_that_makes_nan_of_finite_numbers_is_found(
    codec: Codec | None, rounds: RoundCompressor | None, x: torch.Tensor, spec: str | None
) -> None:
    probe, ledger = _probe()
    probe.watch(True)
    for value in (NOT_FINITE, x, NOT_FINITE):  # the others are no compressor's fault
        if codec is not None:
            _encode(ledger, codec, value)
        if rounds is not None:
            _sum(ledger, rounds, value)
    probe.end_step()
    assert probe.find_faulty_spec() == spec


@pytest.mark.parametrize(("point", "spec"), [(Point.DP_GRAD, "dp-grad=mine"), (Point.TP_FWD, None)])
def test_a_residual_that_is_not_finite_is_the_compressors_fault(point: Point, spec: str | None) -> None:
    """Where all ranks check that the gradients are finite."""
    (probe, ledger), state = _probe(), CompressorState()
    for is_sampled in (False, True):
        probe.watch(is_sampled)
        reduction = TensorReduction(ErrorFeedback(NanRounds(), "local"), FINITE.clone(), state)
        PackedReduction([reduction], single_process().dp, ledger, point).finish()
        state.commit()
        probe.end_step()
    assert probe.find_faulty_spec() == spec


def test_another_ranks_compressor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, _ = _probe()
    texts = ["", "dp-grad=mine", "pp-forward=mine"]
    monkeypatch.setattr("megatron.training.compressor_probe.gather_texts", lambda group, text: [text, *texts])
    assert probe.find_faulty_spec() == "dp-grad=mine"
    assert probe.compressed_points == ["pp-forward", "dp-grad"]

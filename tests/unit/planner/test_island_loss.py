"""The fit to measured losses of islands."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.config.compression import CompressionConfig
from megatron.planner.island_loss import EVERY, METHODS, USUAL_SHARE, IslandLoss, MeasuredLoss, fit


def _rows(
    factor: float, power: float, relief: float = 0.0, shares: tuple[float, ...] = (USUAL_SHARE,)
) -> list[MeasuredLoss]:
    return [
        MeasuredLoss("diloco", "identity", h, 4, factor * h**power * math.exp(relief * (USUAL_SHARE - share)), share)
        for h in (5, 20, 50)
        for share in shares
    ]


@pytest.mark.parametrize(("factor", "power"), [(0.5, 0.3), (2.0, 0.05), (0.1, 1.2), (0.0, 0.5)])
def test_a_fit_finds_its_own_coefficients(factor: float, power: float) -> None:
    curve = fit(_rows(factor, power))
    assert curve.factor == pytest.approx(factor, rel=0.02)
    assert curve.relief == 0.0
    if factor:
        assert curve.power == pytest.approx(power, abs=5e-3)
    for h in EVERY:
        assert curve.percent(h, USUAL_SHARE) == pytest.approx(factor * h**power, rel=0.02)


def test_the_share_in_step_counts_where_several_were_measured() -> None:
    curve = fit(_rows(0.5, 0.3, 2.0, (0.0, 0.1, USUAL_SHARE)))
    assert curve.relief == pytest.approx(2.0, abs=0.05)
    assert curve.percent(20, 0.0) == pytest.approx(curve.percent(20, USUAL_SHARE) * math.exp(2.0 / 3), rel=0.03)


def test_gradients_that_are_compressed_in_step_have_a_factor_of_their_own() -> None:
    """Where they were measured, and never a lower one; others cost what exact ones do, and it is said."""
    exact = _rows(0.5, 0.3, 2.0, (0.1, USUAL_SHARE))
    coded = [replace(row, percent=1.4 * row.percent, compressed=True) for row in exact if row.every == 20]
    curve = fit([*exact, *coded])
    assert curve.factor == pytest.approx(0.5, rel=0.02)
    assert curve.power == pytest.approx(0.3, abs=5e-3)
    assert curve.percent(50, 0.1, compressed=True) == pytest.approx(1.4 * curve.percent(50, 0.1), rel=1e-3)
    better = fit([*exact, *(replace(row, percent=0.9 * row.percent) for row in coded)])
    assert better.compressed_factor >= better.factor
    alone = fit(exact)
    assert alone.percent(20, 0.1, compressed=True) == alone.percent(20, 0.1)

    def beyond(rows: list[MeasuredLoss]) -> str:
        text = "outer=identity,outer-preset=diloco,every=20,in-step=compressed"
        spec = CompressionConfig(compress=[text]).specs(RunLength(900))[Point.OUTER]
        found = IslandLoss(rows).of_spec(spec, 4, 900)
        assert found is not None
        return "; ".join(found.beyond)

    assert beyond([*exact, *coded]) == ""
    assert beyond(exact) == "gradients compressed in step, measured with exact ones"


def test_penalties_are_zero_without_rounds_and_grow_with_them() -> None:
    """Also where what was measured does not: least squares must not make longer rounds, or shorter starts, better."""
    odd = [
        MeasuredLoss("diloco", "identity", h, 4, y, s) for h, y, s in ((5, 2.0, 0.0), (20, 1.0, 0.3), (50, 1.5, 0.6))
    ]
    for curve in (fit(_rows(0.5, 0.3)), fit(odd)):
        found = [curve.percent(h, USUAL_SHARE) for h in (0, *EVERY, 1000)]
        assert found[0] == 0.0
        assert found == sorted(found)
        assert curve.percent(20, 0.1) >= curve.percent(20, 0.5)
    assert fit([MeasuredLoss("muloco", "identity", h, 4, -1.0) for h in (5, 50)]).percent(20, USUAL_SHARE) == 0.0


def test_what_was_not_measured_is_said() -> None:
    losses = IslandLoss(_rows(0.5, 0.3))

    def beyond(codec: str = "identity", every: int = 20, islands: int = 4, share: float = USUAL_SHARE) -> str:
        found = losses.penalty("diloco", codec, every, islands, share)
        assert found is not None
        return "; ".join(found.beyond)

    assert beyond() == ""
    assert beyond(every=100) == "H = 100, measured from 5 to 50"
    assert beyond(islands=8) == "8 islands, measured with 4"
    assert beyond(codec="fixpoint 2") == "fixpoint 2, measured with identity"
    assert beyond(share=0.0) == "0% of the run in step, measured with 33% to 33%"
    assert losses.penalty("sparseloco", "chunked-topk 2", 20, 4, USUAL_SHARE) is None


def test_what_is_tried_are_specs_of_measured_methods() -> None:
    losses = IslandLoss()
    for muon in (False, True):
        found = losses.specs(muon, 24)
        ways = {one: len(one.codecs) * len(losses.starts(one.preset)) for one in METHODS if one.muon is muon}
        assert len(found) == sum(ways.values()) * len(EVERY)
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7, 24])
def test_fragments_that_are_tried_can_be_trained(layers: int) -> None:
    """Training refuses more fragments than layers, and turns of different lengths."""
    for text in IslandLoss().specs(False, layers):
        spec = CompressionConfig(compress=[text]).specs(RunLength(1000))[Point.OUTER]
        assert spec.outer.fragments <= layers
        assert spec.outer.every % spec.outer.fragments == 0
        if "streaming" in text and layers == 24:
            assert spec.outer.turn in (5, 10)

"""The search, beside trying everything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import pytest

from megatron.base.errors import UserError
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.search import choices, search
from tests.unit.planner.support import CLUSTER, VOCAB, small_run

pytestmark = pytest.mark.slow

SETS: tuple[tuple[str, ...], ...] = ((), ("pp-forward=fixpoint,bits=4", "dp-grad=powersgd,rank=2"))


@pytest.fixture(scope="module")
def everything() -> list[Prediction]:
    """Every choice of the small run."""
    config = small_run()
    predictor = Predictor(config, CLUSTER, VOCAB)
    return [predictor.predict(choice) for choice in choices(config, CLUSTER, SETS)]


def _fastest(predictions: Iterable[Prediction], limit: float) -> list[float]:
    """Seconds of the fastest choice of every layout that needs no more than so many bytes, fastest first."""
    fastest: dict[tuple[int, int, int], float] = {}
    for one in predictions:
        if one.memory_bytes <= limit:
            layout = (one.choice.tp, one.choice.pp, one.choice.dp)
            fastest[layout] = min(one.seconds, fastest.get(layout, math.inf))
    return sorted(fastest.values())


@pytest.mark.parametrize("gib", [1.0, 0.0028])
def test_nothing_faster_is_left_out(gib: float, everything: list[Prediction]) -> None:
    config = small_run()
    found = search(Predictor(config, CLUSTER, VOCAB), SETS, top=4, memory_gib=gib)
    all_of_them = _fastest(everything, gib * 2**30)
    assert [one.seconds for one in found.best] == pytest.approx(all_of_them[:4])
    assert len(found.best) == min(4, len(all_of_them)) == len({one.choice.layout for one in found.best})
    assert found.considered > found.predicted
    assert all(one.memory_bytes <= gib * 2**30 for one in found.best)
    if gib < 1.0:
        assert found.too_large > 0


def test_what_is_found_trains() -> None:
    config = small_run()
    for one in search(Predictor(config, CLUSTER, VOCAB), SETS, top=3).best:
        resolved = one.choice.configure(config).resolve(8)
        assert resolved.training.global_batch_size == 32


def test_slow_links_call_for_compression() -> None:
    config = small_run(model={"hidden_size": 256})
    slow = dataclasses.replace(CLUSTER, across=dataclasses.replace(CLUSTER.across, gbit_per_s=0.05))
    best = search(Predictor(config, slow, VOCAB), SETS, top=1).best[0]
    assert best.choice.specs
    assert best.seconds < 0.7 * search(Predictor(config, slow, VOCAB), ((),), top=1).best[0].seconds


def test_nothing_that_fits_is_said() -> None:
    with pytest.raises(UserError, match=r"nothing fits into 0 GiB.*take more devices"):
        search(Predictor(small_run(), CLUSTER, VOCAB), SETS, memory_gib=1e-6)


def test_nothing_that_divides_is_said() -> None:
    config = small_run(training={"global_batch_size": 32})
    odd = dataclasses.replace(CLUSTER, gpus=7 * 13)
    with pytest.raises(UserError, match="no layout of 91 devices divides 8 layers"):
        search(Predictor(config, odd, VOCAB), SETS)

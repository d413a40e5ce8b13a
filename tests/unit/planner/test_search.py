"""The search, against trying all choices."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.base.errors import UserError
from megatron.parallel.pipeline.schedule import SCHEDULES
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.search import enumerate_choices, search
from tests.unit.planner.support import CLUSTER, VOCAB, fastest_seconds, limit_memory, small_run

pytestmark = pytest.mark.slow

SETS: tuple[tuple[str, ...], ...] = ((), ("pp-forward=fixpoint,bits=4", "dp-grad=powersgd,rank=2"))


@pytest.fixture(scope="module")
def everything() -> list[Prediction]:
    """Every choice of the small run."""
    config = small_run()
    predictor = Predictor(config, CLUSTER, VOCAB)
    return [predictor.predict(choice) for choice in enumerate_choices(config, CLUSTER, SETS)]


@pytest.mark.parametrize("gib", [1.0, 0.0028])
def test_the_search_finds_the_fastest_choices(gib: float, everything: list[Prediction]) -> None:
    assert {prediction.choice.schedule for prediction in everything} == set(SCHEDULES)
    result = search(Predictor(small_run(), limit_memory(CLUSTER, gib), VOCAB), SETS, top=4)
    fastest = fastest_seconds(everything, gib * 2**30)
    assert [prediction.seconds for prediction in result.best] == pytest.approx(fastest[:4])
    assert len(result.best) == min(4, len(fastest)) == len({prediction.choice.layout for prediction in result.best})
    assert result.considered > result.predicted
    assert all(prediction.memory_bytes <= gib * 2**30 for prediction in result.best)
    if gib < 1.0:
        assert result.too_large > 0


def test_the_best_choices_are_valid_runs() -> None:
    config = small_run()
    for prediction in search(Predictor(config, CLUSTER, VOCAB), SETS, top=3).best:
        resolved = prediction.choice.configure(config).resolve(8)
        assert resolved.training.global_batch_size == 32


def test_the_search_compresses_over_slow_links() -> None:
    config = small_run(model={"hidden_size": 256})
    slow = dataclasses.replace(CLUSTER, across=dataclasses.replace(CLUSTER.across, gbit_per_s=0.05))
    best = search(Predictor(config, slow, VOCAB), SETS, top=1).best[0]
    assert best.choice.specs
    assert best.seconds < 0.7 * search(Predictor(config, slow, VOCAB), ((),), top=1).best[0].seconds


def test_a_search_without_a_result_is_an_error() -> None:
    with pytest.raises(UserError, match=r"nothing fits into 0 GiB.*use more or larger devices"):
        search(Predictor(small_run(), limit_memory(CLUSTER, 1e-6), VOCAB), SETS)
    with pytest.raises(UserError, match="no layout of 91 devices divides 8 layers"):
        search(Predictor(small_run(), dataclasses.replace(CLUSTER, gpus=7 * 13), VOCAB), SETS)

"""Ranks that EDGC chooses, alike on all ranks."""

from __future__ import annotations

import pytest

from megatron.compression.edgc import RankByEntropy, RankController
from megatron.compression.points import Point
from megatron.training.assembly import Engines
from tests.multiprocess.test_compression import Changes, _run
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_engines, tiny_train


def _rule(engines: Engines) -> RankByEntropy:
    controller = engines.sync.controllers.by_point[Point.DP_GRAD]
    assert isinstance(controller, RankController)
    return controller.rule


def _ranks_by_entropy(changes: Changes) -> tuple[list[int], list[float]]:
    engines = tiny_engines(changes)
    ranks: list[int] = []

    def note(engines: Engines) -> None:
        ranks.append(_rule(engines).rank)

    tiny_train(engines, 16, after_step=note)
    return ranks, _rule(engines).means


def test_ranks_follow_the_entropy_alike_on_every_rank() -> None:
    """Decided at the ends of windows alone, by numbers that all hold, and independent of the loss scale."""
    spec = "dp-grad=edgc,rank=8,min-rank=2,window=4,sample-every=1,max-step=2,stage-slack=0"
    results = run_ranks(4, _ranks_by_entropy, _run(spec, pp=2))
    assert all(result == results[0] for result in results)
    ranks, means = results[0]
    assert ranks[:11] == [8] * 11
    assert ranks[11:15] == [ranks[11]] * 4
    assert ranks[15] < 8
    scaled = run_ranks(4, _ranks_by_entropy, _run(spec, pp=2, precision="fp16"))[0]
    assert scaled[1] == pytest.approx(means, abs=0.1)


def _rule_and_own_rank(changes: Changes) -> tuple[tuple[int, int], int]:
    engines = tiny_engines(changes)
    tiny_train(engines, 1)
    return _rule(engines).shape, engines.plan.rounds(Point.DP_GRAD).config.rank


def test_all_stages_decide_by_the_matrices_of_the_first() -> None:
    """The first stage's gradients are measured; each stage sets the rank that its slack gives."""
    spec = "dp-grad=edgc,rank=8,min-rank=2,rule=formula,stage-slack=0.5"
    changes = {**_run(spec, pp=2), "model": {"max_position_embeddings": 512}}
    results = run_ranks(4, _rule_and_own_rank, changes)
    assert [shape for shape, _ in results] == [results[0][0]] * 4
    assert results[0][0] == (512, 32), "the embedding of positions, which the last stage does not hold"


def test_the_first_compressed_step_has_the_greatest_rank() -> None:
    """Windows of the dense warm-up are measured, but they do not move the rank."""
    spec = "dp-grad=edgc,rank=8,min-rank=2,window=2,sample-every=1,max-step=2,warmup=9,stage-slack=0"
    ranks, means = run_ranks(2, _ranks_by_entropy, _run(spec))[0]
    assert len(means) > 2
    assert ranks[:9] == [8] * 9
    assert ranks[9] == 6, "the window that ends the warm-up decides for the steps behind it"
    assert min(ranks) < 6

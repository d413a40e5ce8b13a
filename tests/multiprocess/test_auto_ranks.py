"""``--compress auto``: ranks whose libraries round differently agree on sets and on how to time them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import pytest

from megatron.compression.points import Point
from megatron.planner.auto import AutoSearch
from megatron.planner.candidates import CandidateSpec
from megatron.planner.choice import Choice
from megatron.planner.compressor_search import CompressorSearch
from megatron.planner.predict import Predictor
from megatron.planner.settings import Settings
from megatron.training.auto_compression import _try_sets, agree_on_sets
from megatron.training.trial_steps import SetTime
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_engines
from tests.unit.planner.test_auto import NODES, FakePredictor

pytestmark = pytest.mark.multiprocess

BITS = {bits: f"dp-grad=fixpoint,bits={bits},error-feedback=on" for bits in (4, 8)}
OVERLAP: Settings = {"overlap_grad_reduce": True}


def _make_search(memory_gib: float = 0.0) -> AutoSearch:
    """A search of compressors of gradients whose engines need so much of 10 GiB in addition to 1 GiB."""
    fake = FakePredictor(dict.fromkeys(BITS.values(), 0.3), dict.fromkeys(BITS.values(), memory_gib))
    fake.cluster = dataclasses.replace(NODES, device=dataclasses.replace(NODES.device, memory_gib=10.0))
    ladders = {Point.DP_GRAD: [CandidateSpec(spec, 0.1) for spec in BITS.values()]}
    limits = cast(Predictor, fake), Choice(1, 1, 1), ladders, 0.5, 2.0
    search = AutoSearch(*limits, {})
    search.searches.append(CompressorSearch(*limits, OVERLAP))
    return search


def _agree() -> list[tuple[list[str], dict[str, bool | str], bool]]:
    """Specs and settings of the sets that the ranks agree on, and whether they are predicted with the setting."""
    topology, search = tiny_engines({}).topology, _make_search()
    own: list[tuple[list[str], Settings]] = [([], {}), ([BITS[8]], OVERLAP), ([BITS[4]], {})]
    if topology.rank == 1:
        own = [([], OVERLAP), ([BITS[4]], {})]
    agreed = agree_on_sets(topology.control.pg, [search.find_set(*each) for each in own], search)
    return [(each.specs, dict(each.settings), each.prediction.choice.overlap) for each in agreed]


def test_all_ranks_take_the_specs_and_the_settings_of_rank_0() -> None:
    expected = [([], {}, False), ([BITS[8]], dict(OVERLAP), True), ([BITS[4]], {}, False)]
    assert run_ranks(2, _agree) == [expected, expected]


def _time_with_little_memory(crowded_rank: int | None) -> bool:
    """Whether engines of all timed sets are kept together, if those of a rank do not fit together."""
    engines, together = tiny_engines({"compression": {"compress": ["auto"]}}), []
    search = _make_search(7.0 if engines.topology.rank == crowded_rank else 0.0)
    contenders = [search.find_set(specs, {}) for specs in ([], [BITS[8]])]

    def time_sets(configs: Sequence[Any], *args: Any) -> list[SetTime]:
        together.append(args[2])
        set_times = [SetTime(1.0, False)] * len(configs)
        assert args[4](set_times) is None  # nothing is chosen
        return set_times

    _try_sets(engines.config, engines.topology, search, contenders, time_sets, 0.0)
    (is_together,) = together
    return bool(is_together)


@pytest.mark.parametrize(("crowded_rank", "together"), [(None, True), (0, False), (1, False)])
def test_no_rank_keeps_engines_together_that_do_not_fit_on_one(crowded_rank: int | None, together: bool) -> None:
    assert run_ranks(2, _time_with_little_memory, crowded_rank) == [together, together]

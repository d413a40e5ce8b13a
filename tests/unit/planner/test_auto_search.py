"""The search of ``--compress auto``: its bounds, and its result against predictions of all sets."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megatron.compression.points import EXPERT_POINTS, Point
from megatron.planner.auto import AutoSearch
from megatron.planner.candidates import CandidateSpec, Ladders, read_ladders
from megatron.planner.choice import Choice
from megatron.planner.cluster import Cluster
from megatron.planner.command import main
from megatron.planner.compressor_search import PASS_GROUPS, WORTHWHILE
from megatron.planner.costs import wires_of
from megatron.planner.predict import Predictor
from megatron.planner.search import refusal_reason
from tests.support.combinations import mark_repeats
from tests.support.layer_codes import MODULE, TP_POINTS
from tests.unit.planner.support import CLUSTER, predictor_of, small_run, write_files
from tests.unit.planner.test_auto import FakePredictor

NODES = dataclasses.replace(CLUSTER, gpus_per_node=1)
SLOW = dataclasses.replace(NODES, across=dataclasses.replace(CLUSTER.across, gbit_per_s=0.05))
FAST = dataclasses.replace(NODES, across=CLUSTER.inside)
STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 4, "use_distributed_optimizer": True}
IN_LAYERS = ("tp-forward=fixpoint", "ep-combine-backward=fixpoint,bits=4,group=64,rotation=64")
SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("dp-grad=fixpoint,bits=4,error-feedback=on",),
    ("dp-grad=powersgd,rank=16,factors=fixpoint8", "pp-forward=float8", *IN_LAYERS[:1]),
    ("param-gather=fixpoint,bits=4,group=2048", "pp-backward=fixpoint,bits=6", *IN_LAYERS),
    ("embedding=none,fused=on", "pp-forward=fixpoint,bits=4"),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": STAGES,
    "overlap": {"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True},
    "delayed": {"delay": 1},
    "delayed stages": {"pipeline_model_parallel_size": 2, "delay": 1, "no_pipeline_flush": True},
    "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "experts": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2,
        "pipeline_schedule": "zb-h1",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", mark_repeats(LAYOUTS, LAYOUTS.keys() - {"delayed"}))
def test_bounds_of_the_parts_of_an_iteration_are_below_it(name: str) -> None:
    model = {"hidden_size": 256, "num_experts": [4] if name == "experts" else None}
    config = small_run(model=model, parallel=LAYOUTS[name])
    for cluster, slowdown in ((SLOW, 1.0), (FAST, 0.5)):
        predictor, choice = predictor_of(config, cluster)
        predictor.slowdown = slowdown
        for specs in SETS:
            kept = (spec for spec in specs if not spec.startswith("ep-") or name == "experts")
            compressed = dataclasses.replace(choice, specs=tuple(kept))
            if refusal_reason(config, compressed) is not None:
                continue
            seconds, passes_s = predictor.seconds(compressed), predictor.passes_s(compressed)
            assert seconds == predictor.predict(compressed).seconds
            assert 0.0 < predictor.lower_bound(compressed) <= passes_s * (1 + 1e-9)
            assert 0.0 < predictor.least_update_s(compressed) <= (seconds - passes_s) * (1 + 1e-9)


SPECS_OF_PASSES = [
    "pp-forward=fixpoint,bits=4",
    "pp-backward=lowrank,rank=4",
    "tp-forward=fixpoint",
    "tp-backward=fixpoint,bits=4",
    *(f"{point.value}=fixpoint,bits={bits}" for point, bits in zip(EXPERT_POINTS, (2, 4, 6, 8), strict=True)),
]


HIDING = dataclasses.replace(NODES, across=dataclasses.replace(CLUSTER.across, gbit_per_s=1))
"""Links over which some tensor-parallel collectives hide behind gradients of weights only if they are compressed."""


@pytest.mark.parametrize("cluster", [SLOW, HIDING, FAST], ids=["slow", "hiding", "fast"])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("gpipe", 1)])
@pytest.mark.parametrize("granularity", [None, "full"])
def test_changes_of_the_bounds_add_up(schedule: str, chunks: int, granularity: str | None, cluster: Cluster) -> None:
    """Over the groups of points, also with measured rates of compressors."""
    parallel = {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2,
        "pipeline_schedule": schedule, "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
    }  # fmt: skip
    recompute = {"recompute_granularity": granularity}
    config = small_run(model={"hidden_size": 256, "num_experts": [4]}, parallel=parallel, recompute=recompute)
    corrections = {f"coding {spec}": 1.5 + number for number, spec in enumerate(SPECS_OF_PASSES)}
    predictor, choice = predictor_of(config, dataclasses.replace(cluster, corrections=corrections))

    def bounds_s(specs: Sequence[str]) -> Any:
        return np.array(predictor.pass_bounds_s(dataclasses.replace(choice, specs=tuple(specs))))

    plain = bounds_s([])
    groups = [[spec for spec in SPECS_OF_PASSES if Point(spec.partition("=")[0]) in group] for group in PASS_GROUPS]
    assert all(groups)
    added = plain + sum(bounds_s(group) - plain for group in groups)
    np.testing.assert_allclose(bounds_s(SPECS_OF_PASSES), added, rtol=1e-9)
    assert not np.allclose(added, plain, rtol=1e-2)


def test_each_compressor_inside_layers_has_its_own_measured_rate() -> None:
    specs = ("tp-forward=fixpoint", "tp-backward=fixpoint,bits=4", "ep-dispatch-forward=fixpoint")
    parallel = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    config = small_run(model={"hidden_size": 256, "num_experts": [4]}, parallel=parallel)
    factors = dict(zip(specs, (2.0, 3.0, 5.0), strict=True))

    def coding_s(used: Sequence[str], corrected: bool) -> float:
        corrections = {f"coding {spec}": factor for spec, factor in factors.items()} if corrected else {}
        predictor, choice = predictor_of(config, dataclasses.replace(SLOW, corrections=corrections))
        choice = dataclasses.replace(choice, specs=tuple(used))
        passes = predictor.passes(choice, wires_of(predictor.cluster, choice))
        return sum(each.coding_s for each in passes.values())

    plain_s = coding_s([], corrected=False)
    added_s = sum(factor * coding_s([spec], corrected=False) - plain_s for spec, factor in factors.items())
    assert coding_s(specs, corrected=True) == pytest.approx(plain_s + added_s)


def test_the_bound_holds_if_a_rank_reduces_fast_and_another_updates_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, choice = predictor_of(small_run(parallel=STAGES | {"pipeline_model_parallel_size": 2}))
    passes_s = predictor.passes_s(choice)
    monkeypatch.setattr(predictor, "_least_reduction_s", lambda choice, rank, wires: (0.0, 10.0)[rank])
    monkeypatch.setattr(predictor, "_update_s", lambda choice, rank: (10.0, 0.0)[rank])
    # The passes of the second rank end 9 seconds before those of the first.
    monkeypatch.setattr(predictor, "_reduction_ends", lambda *_: ([passes_s, passes_s + 1.0], 0.0))
    assert predictor.least_update_s(choice) <= predictor.seconds(choice) - passes_s


@pytest.mark.parametrize("budget", [0.4, 1.5])
def test_the_search_agrees_with_predictions_of_all_sets(budget: float) -> None:
    config = small_run(model={"hidden_size": 256}, parallel=STAGES | {"pipeline_model_parallel_size": 2})
    predictor, choice = predictor_of(config, SLOW)
    ladders = {point: ladder[:2] for point, ladder in read_ladders(config, choice, SLOW).items()}
    auto = AutoSearch(predictor, choice, ladders, budget, 40.0, {})
    search = auto.searches[0]
    seconds: dict[tuple[str, ...], float] = {}
    for specs in _sets_within(ladders, budget):
        seconds[specs] = predictor.predict(dataclasses.replace(choice, specs=specs)).seconds
    assert search.considered == len(seconds) > 20
    fastest = sorted(specs for specs in seconds if specs)
    fastest.sort(key=seconds.__getitem__)
    assert sorted(each.seconds for each in search.sets)[:2] == [seconds[specs] for specs in fastest[:2]]
    within = [each for each in fastest if seconds[each] * (1 - WORTHWHILE) <= seconds[fastest[0]]]
    increases = {candidate.spec: candidate.increase for ladder in ladders.values() for candidate in ladder}
    lowest = min(sum(increases[spec] for spec in specs) for specs in within)
    assert auto.choose().chosen.increase == pytest.approx(lowest)


def _sets_within(ladders: Ladders, budget: float) -> Iterator[tuple[str, ...]]:
    """The specs of all sets within a budget."""
    for members in itertools.product(*([None, *ladder] for ladder in ladders.values())):
        chosen = [member for member in members if member is not None]
        if sum(member.increase for member in chosen) <= budget:
            yield tuple(member.spec for member in chosen)


TIGHT: dict[str, tuple[dict[str, tuple[float, float]], list[str]]] = {
    "the fastest set has other than the fastest passes": (
        {
            "pp-forward=bold": (0.3, 0.5),
            "pp-forward=mild": (0.27, 0.1),
            "dp-grad=bold": (0.2, 0.4),
            "dp-grad=mild": (0.15, 0.05),
            "dp-grad=milder": (0.14, 0.04),
        },
        ["pp-forward=mild", "dp-grad=bold"],
    ),
    "the mildest of the fastest sets is the third": (
        {
            "pp-forward=bold": (0.3, 0.2),
            "dp-grad=bold": (0.2, 0.3),
            "dp-grad=mild": (0.199, 0.2),
            "dp-grad=milder": (0.198, 0.1),
        },
        ["pp-forward=bold", "dp-grad=milder"],
    ),
}
"""Seconds that specs save and their increases of the loss, and the specs to choose within a budget of 0.58%."""


@pytest.mark.parametrize("name", TIGHT)
def test_the_search_is_exact_if_bounds_are_equal_to_the_times(name: str) -> None:
    """Higher bounds would leave the set to choose out."""
    specs, expected = TIGHT[name]
    saved_s = {spec: saved for spec, (saved, _) in specs.items()}
    ladders: dict[Point, list[CandidateSpec]] = {}
    for spec, (_, increase) in specs.items():
        ladders.setdefault(Point(spec.partition("=")[0]), []).append(CandidateSpec(spec, increase))
    fake = cast(Predictor, FakePredictor(saved_s, dict.fromkeys(saved_s, 0.0), slack=0.0))
    auto = AutoSearch(fake, Choice(1, 1, 1), ladders, 0.58, 2.0, {})
    seconds = sorted(1.0 - sum(saved_s[spec] for spec in each) for each in _sets_within(ladders, 0.58))
    assert sorted(each.seconds for each in auto.searches[0].sets)[:2] == pytest.approx(seconds[:2])
    assert auto.choose().chosen.specs == expected


@pytest.mark.slow
def test_traffic_inside_layers_is_compressed_on_a_described_slow_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not on a fast one."""
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    compression = {"compress": ["auto"], "compress_module": [MODULE], "max_loss_increase": 50.0}
    config = small_run(model={"hidden_size": 256, "num_experts": [4]}, parallel=layout, compression=compression)
    points = {point.value for point in (*TP_POINTS, *EXPERT_POINTS)}
    for cluster, chosen in ((SLOW, points), (FAST, set())):
        assert main(write_files(tmp_path, config, cluster)) == 0
        (report,) = re.findall(r"^--compress auto: (?:.+\n)+", capsys.readouterr().out, re.MULTILINE)
        assert all(f"\n  {point} " in report for point in points)
        assert {point for point in points if f"--compress {point}=" in report} == chosen

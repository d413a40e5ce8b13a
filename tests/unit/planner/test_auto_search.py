"""The search of ``--compress auto``: its bounds, and its result against predictions of all sets."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.compression.points import EXPERT_POINTS
from megatron.planner.auto import AutoSearch
from megatron.planner.candidates import read_ladders
from megatron.planner.command import main
from megatron.planner.compressor_search import WORTHWHILE, CompressorSearch
from megatron.planner.search import refusal_reason
from tests.support.combinations import mark_repeats
from tests.support.layer_codes import MODULE, TP_POINTS
from tests.unit.planner.support import CLUSTER, predictor_of, small_run, write_files

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
    search = CompressorSearch(predictor, choice, ladders, budget, memory_gib=40.0)
    seconds: dict[tuple[str, ...], float] = {}
    for members in itertools.product(*([None, *ladder] for ladder in ladders.values())):
        chosen = [member for member in members if member is not None]
        if sum(member.increase for member in chosen) <= budget:
            specs = tuple(member.spec for member in chosen)
            seconds[specs] = predictor.predict(dataclasses.replace(choice, specs=specs)).seconds
    assert search.considered == len(seconds) > 20
    fastest = sorted(specs for specs in seconds if specs)
    fastest.sort(key=seconds.__getitem__)
    assert sorted(each.seconds for each in search.sets)[:2] == [seconds[specs] for specs in fastest[:2]]
    within = [each for each in fastest if seconds[each] * (1 - WORTHWHILE) <= seconds[fastest[0]]]
    increases = {candidate.spec: candidate.increase for ladder in ladders.values() for candidate in ladder}
    lowest = min(sum(increases[spec] for spec in specs) for specs in within)
    assert AutoSearch([search]).choose().chosen.increase == pytest.approx(lowest)


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

"""The regret of ``--compress auto`` in its benchmark."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.regret.run import record_of, regret_of, table
from benchmarks.regret.worker import ROUNDS, select_sets
from megatron.planner.auto import AutoSearch
from megatron.planner.compressor_search import CompressorSet
from tests.unit.planner.test_auto import SLOW, _auto


def _set(times: list[float], chosen: bool = False, flags: str = "") -> dict[str, Any]:
    middle = sorted(times)[len(times) // 2]
    return {"flags": flags.split(), "predicted_s": 0.9, "seconds": middle, "times": times, "is_chosen": chosen}


def test_the_regret_is_that_over_the_fastest_set() -> None:
    assert regret_of([_set([4.0] * 5), _set([2.2] * 5, True), _set([2.0] * 5)]) == pytest.approx(0.1)
    assert regret_of([_set([4.0] * 5), _set([2.0] * 5, True)]) == 0.0


def test_equal_sets_have_no_regret_on_average() -> None:
    """The fastest of eight equal sets by the same rounds would seem to be 4% faster than the chosen one."""
    generator = random.Random(1)
    regrets = []
    for _ in range(400):
        sets = [_set([generator.gauss(1.0, 0.05) for _ in range(ROUNDS)], number == 0) for number in range(8)]
        regrets.append(regret_of(sets))
    assert abs(sum(regrets) / len(regrets)) < 0.006


def test_the_run_as_it_is_and_the_chosen_set_are_timed_beside_the_fastest() -> None:
    search: AutoSearch = _auto(SLOW, 0.5).search
    sets: list[CompressorSet] = [search.searches[0].predict_set({})]
    for point, ladder in search.searches[0].ladders.items():
        sets += [search.searches[0].predict_set({point: candidate}) for candidate in ladder]
    slowest = max(sets[1:], key=lambda each: each.prediction.seconds)
    selected = select_sets(sets, slowest)
    assert selected[:2] == [sets[0], slowest]
    fastest = min(sets, key=lambda each: each.prediction.seconds)
    assert fastest in selected


def test_the_table_has_the_finished_cells(tmp_path: Path) -> None:
    record = record_of(tmp_path, "pp4", "30mbit", "4x256")
    record.parent.mkdir()
    sets = [_set([4.0] * 5), _set([1.0] * 5, True, "--compress pp-forward=cast"), _set([2.0] * 5)]
    record.write_text(json.dumps({"grid": 12, "sets": sets, "choosing_s": 17.4}))
    text = table(tmp_path, ["dp4", "pp4"], ["30mbit"], ["4x256"])
    assert text.splitlines()[2:] == [
        "| pp4 | 30mbit | 4x256 | 4.00 | 1.00 | 1.00 | +0% | -10% | -78 to -10% "
        "| 17 s, 1.7% | 3 of 12 | pp-forward=cast |"
    ]

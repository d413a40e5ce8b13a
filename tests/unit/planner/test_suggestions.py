"""Suggested settings: each is predicted to save what is said, and training accepts it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from megatron.planner.choice import Choice
from megatron.planner.suggestions import suggestions
from tests.unit.planner.support import CLUSTER, predictor_of, small_run

NODES = dataclasses.replace(CLUSTER, gpus_per_node=1)


def _suggestions(gbit_per_s: float, changes: dict[str, Any], **parallel: Any) -> list[tuple[str, int, float]]:
    """Flags of each suggestion, its percentage, and the percentage by predicting the choice with ``changes``."""
    cluster = dataclasses.replace(NODES, across=dataclasses.replace(CLUSTER.across, gbit_per_s=gbit_per_s))
    config = small_run(model={"hidden_size": 256}, parallel=parallel)
    predictor, choice = predictor_of(config, cluster)
    prediction = predictor.predict(choice)
    changed: Choice = dataclasses.replace(choice, **changes)
    gain = 100 * (1.0 - predictor.predict(changed).seconds / prediction.seconds)
    lines = suggestions(predictor, prediction)
    matches = [re.match(r"(.*) would save (\d+)% of an iteration", line) for line in lines]
    assert all(matches)
    return [(match[1], int(match[2]), gain) for match in matches if match]


def test_a_pipeline_on_fast_links_should_not_wait_for_weight_gradients() -> None:
    matches = {match[0]: match for match in _suggestions(100.0, {"schedule": "zb-h1"}, pipeline_model_parallel_size=8)}
    _, percent, gain = matches["--pipeline-schedule zb-h1"]
    assert percent == pytest.approx(gain, abs=0.5)


@pytest.mark.parametrize(
    ("flags", "given"), [("--delay 1 --no-pipeline-flush", {}), ("--no-pipeline-flush", {"delay": 1})], ids=str
)
def test_a_pipeline_with_few_micro_batches_should_stay_full(flags: str, given: dict[str, Any]) -> None:
    changes = {"schedule": "eager-1f1b", "delay": 1, "flush": False}
    suggested = _suggestions(100.0, changes, pipeline_model_parallel_size=8, **given)
    _, percent, gain = {match[0]: match for match in suggested}[f"{flags} --pipeline-schedule eager-1f1b"]
    assert percent == pytest.approx(gain, abs=0.5)
    assert gain > 10


def test_a_pipeline_in_v_form_waits_even_less() -> None:
    changes = {"schedule": "zb-v", "chunks": 2}
    matches = {match[0]: match for match in _suggestions(100.0, changes, pipeline_model_parallel_size=2)}
    _, percent, gain = matches["--pipeline-schedule zb-v"]
    assert percent == pytest.approx(gain, abs=0.5)


def test_reductions_as_long_as_backward_should_overlap() -> None:
    (flags, percent, gain), *_ = _suggestions(50.0, {"overlap": True}, ddp_bucket_size=100_000)
    assert flags == "--overlap-grad-reduce"
    assert percent == pytest.approx(gain, abs=0.5)


def test_slow_links_suggest_a_delay() -> None:
    matches = {match[0]: match for match in _suggestions(20.0, {"delay": 1})}
    _, percent, gain = matches["--delay 1"]
    assert percent == pytest.approx(gain, abs=0.5)
    assert gain > 10


@pytest.mark.parametrize(("gbit_per_s", "is_suggested"), [(400.0, True), (450.0, False)])
def test_a_delay_must_save_a_tenth(gbit_per_s: float, is_suggested: bool) -> None:
    """It would save 10.6% and 9.5%."""
    names = [name for name, *_ in _suggestions(gbit_per_s, {"delay": 1})]
    assert ("--delay 1" in names) == is_suggested


def test_slow_links_suggest_islands() -> None:
    spec = "outer=fixpoint,bits=4,outer-preset=streaming,every=30"
    (*_, (flags, percent, gain)) = _suggestions(0.05, {"dp": 1, "islands": 8, "specs": (spec,)})
    assert flags == f"--islands 8 --compress {spec}"
    assert percent == pytest.approx(gain, abs=0.5)
    assert gain > 20


def test_what_is_set_or_refused_is_not_suggested() -> None:
    assert not _suggestions(100.0, {}, pipeline_model_parallel_size=8, pipeline_schedule="zb-h1")
    names = [entry[0] for entry in _suggestions(50.0, {}, overlap_grad_reduce=True, ddp_bucket_size=100_000)]
    assert "--overlap-grad-reduce" not in names

"""Settings that ``--compress auto`` switches on besides compressors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import comb
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from megatron.planner.auto import AutoChoice, AutoSearch
from megatron.planner.auto_report import report
from megatron.planner.candidates import read_ladders
from megatron.planner.choice import Choice
from megatron.planner.compressor_search import MAX_TRIALS, WORTHWHILE, CompressorSet
from megatron.planner.settings import FREE_SETTINGS, apply_settings, find_settings, list_free_settings
from tests.support.tiny import tiny_config
from tests.unit.planner.support import CLUSTER, predictor_of, small_run
from tests.unit.planner.test_experts import MOE

NODES = dataclasses.replace(CLUSTER, gpus_per_node=1)
OVERLAP, SCHEDULE, TWO_STAGE = FREE_SETTINGS
BOTH: dict[str, Any] = {"pipeline_model_parallel_size": 2, "ddp_bucket_size": 100_000}
REPLICAS: dict[str, Any] = {"ddp_bucket_size": 100_000}


def _search(gbit_per_s: float, explicit: Sequence[str] = (), budget: float = 0.5, **parallel: Any) -> AutoSearch:
    cluster = dataclasses.replace(NODES, across=dataclasses.replace(CLUSTER.across, gbit_per_s=gbit_per_s))
    config = small_run(model={"hidden_size": 256}, parallel=parallel)
    predictor, choice = predictor_of(config, cluster)
    ladders = read_ladders(config, choice, cluster)
    free_settings = list_free_settings(config, choice, explicit)
    return AutoSearch(predictor, choice, ladders, budget, 40.0, free_settings)


def test_settings_are_free_where_they_concern_the_run_and_the_user_has_not_set_them() -> None:
    def free(explicit: Sequence[str] = (), **parallel: Any) -> set[str]:
        return set(list_free_settings(config := small_run(parallel=parallel), predictor_of(config)[1], explicit))

    assert free(**BOTH) == {OVERLAP, SCHEDULE}
    assert free(("parallel.pipeline_schedule", "model.num_layers"), **BOTH) == {OVERLAP}
    assert free(("parallel.overlap_grad_reduce",), **BOTH) == {SCHEDULE}
    assert free(**REPLICAS) == {OVERLAP}
    assert free(delay=1) == set()
    assert free(pipeline_model_parallel_size=8) == {SCHEDULE}
    assert free(pipeline_model_parallel_size=8, pipeline_schedule="gpipe") == set()
    assert free(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2) == {OVERLAP}
    assert free(pipeline_model_parallel_size=8, delay=1, no_pipeline_flush=True) == set()
    experts = small_run(model=MOE, parallel={"expert_model_parallel_size": 4})
    assert set(list_free_settings(experts, predictor_of(experts)[1], ())) == {OVERLAP, TWO_STAGE}
    assert TWO_STAGE not in list_free_settings(experts, predictor_of(experts)[1], ("parallel.moe_two_stage",))


@pytest.mark.parametrize(
    ("choice", "backend", "is_free"), [("auto", "gloo", True), ("auto", "nccl", False), ("off", "nccl", True)]
)
def test_compiled_layers_keep_their_schedule(choice: str, backend: Literal["gloo", "nccl"], is_free: bool) -> None:
    """``--pipeline-schedule auto`` would compute weight gradients separately, in layers that are not compiled."""
    parallel = {"pipeline_model_parallel_size": 8}
    config = small_run(model={"attention_dropout": 0.0}, parallel=parallel, training={"compile": choice})
    on_backend = dataclasses.replace(config.parallel, distributed_backend=backend)
    config = dataclasses.replace(config, parallel=on_backend)
    assert (SCHEDULE in list_free_settings(config, predictor_of(config)[1], ())) == is_free


def test_another_rank_may_have_found_other_settings() -> None:
    """Where its floating-point numbers round differently."""
    search = _search(50.0, ("parallel.overlap_grad_reduce",), **REPLICAS)
    specs = search.sets[1].specs
    found = search.find_set(specs, {OVERLAP: True})
    assert (found.specs, dict(found.settings)) == (specs, {OVERLAP: True})
    assert found.prediction.choice.overlap


def test_a_run_without_a_point_to_choose_still_has_settings() -> None:
    config = small_run(specs=("dp-grad=cast",), model={"hidden_size": 256}, parallel=REPLICAS)
    predictor, choice = predictor_of(config, NODES)
    result = AutoSearch(predictor, choice, {}, 0.5, 40.0, list_free_settings(config, choice, ())).choose()
    assert dict(result.chosen.settings) == {OVERLAP: True}
    assert report(result, 0.5).endswith("  the same by hand: --overlap-grad-reduce")


@pytest.mark.parametrize(("gbit_per_s", "parallel"), [(50.0, REPLICAS), (100.0, BOTH), (10.0, BOTH), (0.05, BOTH)])
def test_the_choice_is_the_gentlest_of_the_fastest_with_and_without_settings(
    gbit_per_s: float, parallel: dict[str, Any]
) -> None:
    """Against predictions of all subsets of the settings with the sets that their searches found."""
    search = _search(gbit_per_s, **parallel)
    chosen = search.choose().chosen
    assert chosen.prediction.seconds == search.predictor.seconds(chosen.prediction.choice)
    assert chosen.seconds * (1 - WORTHWHILE) <= min(each.seconds for each in search.sets)
    as_fast = [each for each in search.sets if each.seconds * (1 - WORTHWHILE) <= min(s.seconds for s in search.sets)]
    assert (bool(chosen.candidates), chosen.increase, len(chosen.settings)) == min(
        (bool(each.candidates), each.increase, len(each.settings)) for each in as_fast
    )
    choice = chosen.prediction.choice
    assert (choice.overlap, choice.schedule == "auto") == (OVERLAP in chosen.settings, SCHEDULE in chosen.settings)


def test_settings_come_before_compressors_that_cost_loss() -> None:
    """Where overlapping alone hides the reduction, nothing is compressed."""
    result = _search(50.0, budget=5.0, **REPLICAS).choose()
    assert dict(result.chosen.settings) == {OVERLAP: True}
    assert not result.chosen.candidates
    text = report(result, 5.0)
    saved_s = result.plain.seconds - result.chosen.seconds
    assert f"  --overlap-grad-reduce: predicted to save {saved_s:.3g} s, at no cost in loss" in text
    assert text.endswith("  the same by hand: --overlap-grad-reduce")


def test_tokens_of_several_experts_on_a_node_are_sent_once() -> None:
    """On slow links between nodes of one rank, where --moe-two-stage auto sends them to each expert; 8 experts of a
    token are on 3.7 of 4 ranks."""
    model = {"hidden_size": 256, "num_experts": [32], "expert_interval": 1, "moe_router_topk": 8}
    config = small_run(model=model, parallel={"expert_model_parallel_size": 4})
    cluster = dataclasses.replace(NODES, across=dataclasses.replace(CLUSTER.across, gbit_per_s=0.1))
    predictor, choice = predictor_of(config, cluster)
    free_settings = list_free_settings(config, choice, ())
    result = AutoSearch(predictor, choice, {}, 0.5, 40.0, free_settings).choose()
    assert result.chosen.settings[TWO_STAGE] == "on"
    assert "--moe-two-stage on" in result.chosen.flags
    assert result.chosen.seconds < 0.95 * result.plain.seconds
    sent = [each.prediction.sent["ep-dispatch-forward"] for each in (result.plain, result.chosen)]
    tokens = 4 * (1 - comb(24, 8) / comb(32, 8))
    assert sent[1] / sent[0] == pytest.approx(tokens / 8, rel=0.01)
    nodes_of_two = dataclasses.replace(cluster, gpus_per_node=2)
    predictor, choice = predictor_of(config, nodes_of_two)
    result = AutoSearch(predictor, choice, {}, 0.5, 40.0, free_settings).choose()
    assert TWO_STAGE not in result.chosen.settings  # they are already


def test_settings_of_the_user_are_left_alone() -> None:
    result = _search(50.0, ("parallel.overlap_grad_reduce",), **REPLICAS).choose()
    assert not result.settings
    assert not result.chosen.settings
    assert "--overlap-grad-reduce" not in report(result, 0.5)


def test_a_small_gain_switches_nothing_on() -> None:
    search = _search(50.0, **REPLICAS)
    predictions = [search.sets[0].prediction]
    gain = 1 - search.predictor.seconds(apply_settings(predictions[0].choice, {OVERLAP: True})) / predictions[0].seconds
    free = {OVERLAP: True}
    assert find_settings(search.predictor, predictions, free, gain - 1e-9) == free
    assert find_settings(search.predictor, predictions, free, gain + 1e-9) == {}


def test_settings_do_not_exceed_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    search = _search(100.0, **BOTH)
    prediction, predictor = search.sets[0].prediction, search.predictor
    free = list_free_settings(predictor.config, prediction.choice, ())
    assert find_settings(predictor, [prediction], free, WORTHWHILE)
    predict = predictor.predict

    def predict_large(choice: Choice) -> SimpleNamespace:
        return SimpleNamespace(seconds=predict(choice).seconds, memory_bytes=2.0**40)

    monkeypatch.setattr(predictor, "predict", predict_large)
    assert find_settings(predictor, [prediction], free, WORTHWHILE) == {}


def _timed(search: AutoSearch, seconds: dict[bool, float]) -> AutoChoice:
    """The choice after trial steps that take as long as given for sets with and without settings."""
    contenders = search.contenders()
    plain_s = contenders[0].prediction.seconds
    trials = [contenders[0]]
    for each in contenders[1:]:
        trial_s = seconds[bool(each.settings)] * plain_s
        trials.append(dataclasses.replace(each, trial_s=trial_s, gains=trial_s < plain_s))
    return search.choose([dataclasses.replace(trials[0], trial_s=plain_s), *trials[1:]])


def test_the_best_set_without_settings_is_timed_too() -> None:
    """It is chosen if the settings save less than predicted."""
    search = _search(10.0, budget=5.0, **BOTH)
    contenders: list[CompressorSet] = search.contenders()
    assert contenders[0] == search.sets[0]
    assert contenders[1].settings
    assert [bool(each.settings) for each in contenders[2:3]] == [False]
    assert contenders[2].candidates
    result = _timed(search, {True: 1.1, False: 0.8})
    assert result.chosen.candidates
    assert not result.chosen.settings
    text = report(result, 5.0)
    assert " s, but trial steps do not confirm this" in text
    assert "  not switched on: --" in text
    assert _timed(search, {True: 0.7, False: 0.8}).chosen.settings


def test_the_best_set_without_settings_is_not_timed_for_a_small_gain_or_in_short_runs() -> None:
    """It must save twice ``WORTHWHILE``: smaller gains take many rounds to become certain."""
    are_timed = set()
    for gbit_per_s in (10.0, 15.0, 17.0, 50.0):
        search = _search(gbit_per_s, budget=5.0, **BOTH)
        plain, *others = search.contenders()
        if not others or not others[0].settings:
            continue
        sets = search.searches[0].sets
        as_fast = [each for each in sets if each.seconds * (1 - WORTHWHILE) <= min(s.seconds for s in sets)]
        without_settings = min(as_fast, key=lambda each: (bool(each.candidates), each.increase))
        gains = without_settings.seconds <= plain.seconds * (1 - 2 * WORTHWHILE)
        are_timed.add(gains)
        assert (without_settings in others) is gains
        assert len(others) <= MAX_TRIALS + gains
        assert search.contenders(1) == [plain, others[0]]
    assert are_timed == {False, True}


def test_settings_that_save_less_than_counts_stay_off() -> None:
    """With 1% faster steps, which are no more than noise."""
    search = _search(10.0, budget=5.0, **BOTH)
    plain, with_settings, without_settings, *_ = search.contenders()
    same = dataclasses.replace(without_settings, settings=with_settings.settings, trial_s=0.5, gains=True)
    for faster_s, expected in ((0.495, {}), (0.4, with_settings.settings)):
        trials = [
            dataclasses.replace(plain, trial_s=1.0),
            dataclasses.replace(same, trial_s=faster_s),
            dataclasses.replace(same, settings={}),
        ]
        assert search.choose(trials).chosen.settings == expected


def test_only_the_schedule_auto_keeps_the_cluster_of_the_run() -> None:
    config = tiny_config({"parallel": {"pipeline_cluster": "cluster.yaml"}}, 1)
    assert Choice(1, 2, 1, schedule="auto").configure(config).parallel.pipeline_cluster == "cluster.yaml"
    assert Choice(1, 2, 1, schedule="zb-h1").configure(config).parallel.pipeline_cluster is None

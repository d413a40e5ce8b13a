"""Predictions of the schedule zb-v, whose first rank holds the first and the last stage."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron.planner.choice import make_choice
from megatron.planner.cluster import LinkSpec
from megatron.planner.command import main
from megatron.planner.footprint import held_by_rank
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.report import describe_choice, format_flags
from megatron.planner.search import SPEC_SETS, enumerate_choices
from tests.support.svg import read_rows, read_texts
from tests.unit.planner.support import CLUSTER, VOCAB, predictor_of, small_run, write_files

MODEL = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
FAST = dataclasses.replace(CLUSTER, inside=LinkSpec(1e6, 0.01), across=LinkSpec(1e6, 0.01))


def _predict(schedule: str) -> tuple[Predictor, Prediction]:
    parallel = {"pipeline_model_parallel_size": 4, "pipeline_schedule": schedule}
    predictor, choice = predictor_of(small_run(parallel=parallel), FAST)
    return predictor, predictor.predict(choice)


def test_stages_wait_less_and_hold_no_more() -> None:
    """Fast links; the embedding and the output layer, of which the first rank has both, are small."""
    predictions = {schedule: _predict(schedule)[1] for schedule in ("1f1b", "zb-h1", "zb-v")}
    waiting = [prediction.parts["pipeline"] for prediction in predictions.values()]
    assert waiting == sorted(waiting, reverse=True)
    for prediction in predictions.values():
        assert sum(prediction.parts.values()) == pytest.approx(prediction.seconds)
        assert all(seconds >= 0 for seconds in prediction.parts.values())


def test_a_rank_holds_as_many_layers_as_the_first_stage_of_1f1b() -> None:
    for rank in range(4):
        for held in held_by_rank("zb-v", 4, rank, 2, 64):
            assert sum(activations + records for activations, records in held) <= 2 * 4


def test_the_output_layer_holds_a_single_micro_batch() -> None:
    """Whose logits take much memory."""
    assert max(held[1][0] for held in held_by_rank("zb-v", 4, 0, 2, 16)) == 1


def test_the_first_rank_holds_a_tied_embedding_once() -> None:
    plain, v_form = (_predict(schedule) for schedule in ("1f1b", "zb-v"))
    assert "embedding" in plain[1].sent
    assert "embedding" not in v_form[1].sent
    elements = [
        [predictor.elements(prediction.choice, rank) for rank in range(4)] for predictor, prediction in (plain, v_form)
    ]
    copy = VOCAB * 64
    assert sum(elements[0]) - sum(elements[1]) == pytest.approx(copy, rel=0.1)  # with padding
    assert elements[1][0] == max(elements[1])


def test_messages_cross_all_boundaries_but_the_turn() -> None:
    sent = {schedule: _predict(schedule)[1].sent["pp-forward"] for schedule in ("1f1b", "zb-v")}
    assert sent["zb-v"] == 2 * sent["1f1b"]
    choice = _predict("zb-v")[1].choice
    assert choice.message_boundaries == [0, 1, 2, 4, 5, 6]
    assert [choice.link_of(boundary) for boundary in choice.message_boundaries] == [0, 1, 2, 2, 1, 0]


def test_a_choice_is_described_with_its_flags() -> None:
    choice = _predict("zb-v")[1].choice
    assert "zb-v" in describe_choice(choice)
    assert "interleaved" not in describe_choice(choice)
    assert "--pipeline-schedule zb-v" in format_flags(choice)
    assert "--virtual" not in format_flags(choice)
    assert make_choice(choice.resolve(small_run()), 8) == choice


def test_the_search_tries_it_where_layers_fit() -> None:
    for layers, sizes in ((8, {2, 4}), (12, {2}), (16, {2, 4, 8})):
        found = enumerate_choices(small_run(model=MODEL | {"num_layers": layers}), FAST, SPEC_SETS)
        in_v_form = [choice for choice in found if choice.schedule == "zb-v"]
        assert {choice.pp for choice in in_v_form} == sizes
        assert {choice.chunks for choice in in_v_form} == {2}
        assert not any(spec.startswith("embedding") for choice in in_v_form for spec in choice.specs)


def test_a_step_in_v_form_is_drawn(tmp_path: Path) -> None:
    config = small_run(parallel={"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-v"})
    picture = tmp_path / "schedule.svg"
    assert main([*write_files(tmp_path, config), "--no-search", "--draw-schedule", str(picture)]) == 0
    assert [len(row) for row in read_rows(picture)] == [6 * 16] * 4
    assert any("zb-v" in text for text in read_texts(picture))

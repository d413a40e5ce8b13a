"""Sequences that grow: the same numbers on any layout, and compressors for messages that change their shape."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.steps import StepSizes
from megatron.training.assembly import Engines
from megatron.training.replica_check import disagreements
from megatron.training.step import evaluation_step, take_batches, train_step
from tests.multiprocess.test_layouts import BERT, DOUBLE, LAYOUTS, RICH, Changes
from tests.support import combinations
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags, write_documents
from tests.support.events import read_events
from tests.support.spawn import run_ranks
from tests.support.tiny import Trace, merge, tiny_batches, tiny_engines, tiny_train
from tests.support.train import train

STEPS = 5
LENGTHS = LengthSchedule((4, 8, 12, 16), (0, 1, 2, 4))
GROWING: Changes = {"training": {"global_batch_size": 8}}
DROPOUT: Changes = {"model": {"attention_dropout": 0.2, "hidden_dropout": 0.3}, **DOUBLE}


def _sizes(engines: Engines) -> StepSizes:
    """Batches grow from 4 to 8 samples, while sequences grow from 4 to 16 tokens."""
    micro, dp = engines.config.training.micro_batch_size, engines.topology.layout.dp
    return StepSizes(BatchSizeSchedule(8, micro_batch_size=micro, dp_size=dp, rampup=(4, 4, 16)), LENGTHS)


def _grown(changes: Changes, **options: Any) -> tuple[Trace, list[float], list[str]]:
    """Losses of a run, those of an evaluation of whole sequences after every second step, and where ranks disagree."""
    engines = tiny_engines(merge(GROWING, changes, {"data": {"eod_mask_loss": options.get("masked", False)}}))
    held_out: list[float] = []
    differences: list[str] = []
    steps = itertools.count(1)

    def after(engines: Engines) -> None:
        if next(steps) % 2:
            return
        layout = engines.topology.layout
        batches = tiny_batches(engines.config, engines.topology, masked=False, start=1000)
        micro_batches = 4 // (engines.config.training.micro_batch_size * layout.dp)
        held_out.append(evaluation_step(engines, list(itertools.islice(batches, micro_batches)))["lm loss"][0])
        differences.extend(disagreements(engines))

    return tiny_train(engines, STEPS, after_step=after, sizes=_sizes(engines), **options), held_out, differences


def _grown_all(runs: dict[str, Changes], masked: bool) -> dict[str, tuple[Trace, list[float], list[str]]]:
    return {name: _grown(changes, masked=masked) for name, changes in runs.items()}


NAMES = {
    1: ("micro 2", "uniform"),
    2: ("tp2 sp uniform micro 2", "pp2 virtual", "pp2 eager", "dp2 sharded overlap micro 2", "dp2 torch"),
    4: ("tp4 sp selective micro 2", "tp2 pp2 virtual sp block", "tp2 dp2 sp sharded overlap"),
}
FOUR_GROUPS: Changes = {"model": {"num_query_groups": 4}}  # for four tensor-parallel ranks
ROTARY = merge(RICH, FOUR_GROUPS)
MODELS: dict[str, Changes] = {"learned positions, dropout": DROPOUT, "rotary positions": ROTARY, "bert": BERT}
NAMES_OF_OTHERS = {
    "rotary positions": {2: ("tp2 sp uniform micro 2", "pp2 virtual"), 4: ("tp4 sp selective micro 2",)},
    "bert": {2: ("pp2 virtual", "dp2 sharded overlap micro 2"), 4: ("tp2 pp2 virtual sp block",)},
}
"""The first model trains on all layouts, the others on those that cut their positions, stages or batches."""


def _names(world_size: int, model: str) -> tuple[str, ...]:
    """Layouts of a size for a model."""
    if combinations.all_combinations:
        return NAMES[world_size]
    return NAMES_OF_OTHERS.get(model, {}).get(world_size, NAMES[world_size])


CASES = list(itertools.product(NAMES, MODELS))
# Four ranks train the models that have fewer layouts there; two have BERT's kinds of layouts for the others.
REPEATS = [(4, "learned positions, dropout"), (2, "bert")]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("world_size", "model"), mark_repeats(CASES, keep=[case for case in CASES if case not in REPEATS])
)
def test_the_same_numbers_on_any_layout(world_size: int, model: str) -> None:
    masked = True
    reference, held_out, _ = _grown(MODELS[model], masked=masked)
    runs = {name: merge(LAYOUTS[world_size][name], MODELS[model]) for name in _names(world_size, model)}
    ranks = (
        [_grown_all(runs, masked)]
        if world_size == 1
        else run_ranks(world_size, _grown_all, runs, masked, timeout=300.0)
    )
    for name in runs:
        sums = [sum(values) for values in zip(*(rank[name][1] for rank in ranks), strict=True)]
        assert sums == pytest.approx(held_out, rel=1e-10, abs=0), name
        for rank in ranks:
            trace, _, differences = rank[name]
            assert differences == [], name
            for step, expected in zip(trace.named, reference.named, strict=True):
                assert step == pytest.approx(expected, rel=1e-10, abs=0), name
            assert trace.grad_norms == pytest.approx(reference.grad_norms, rel=1e-10, abs=0), name


@pytest.mark.parametrize("model", [{}, RICH["model"]], ids=["learned", "rotary"])
def test_a_short_step_is_that_of_a_run_of_short_sequences(model: dict[str, Any]) -> None:
    """Positions begin at 0, and tokens behind the cut play no part."""
    changes: Changes = {"model": model, "data": {"eod_mask_loss": True}, **DOUBLE}
    grown = tiny_engines(changes)
    short = tiny_engines(merge(changes, {"model": {"seq_length": 8}}))
    for iteration in range(3):
        batches = [itertools.islice(tiny_batches(grown.config, grown.topology, True), 4) for _ in range(2)]
        cut_batches = take_batches(batches[0], 4, grown.topology.device, 8)
        plain = [replace(batch, **{name: x[:, :8].clone() for name, x in _of_tokens(batch)}) for batch in batches[1]]
        outcome = train_step(grown, cut_batches, iteration, 1e-2, 0.1, seq_length=8)
        expected = train_step(short, plain, iteration, 1e-2, 0.1)
        assert (outcome.loss, outcome.grad_norm) == (expected.loss, expected.grad_norm)
        assert outcome.seq_length == expected.seq_length == 8


def _of_tokens(batch: Any) -> list[tuple[str, Any]]:
    return [(name, x) for name, x in vars(batch).items() if x is not None and x.dim() == 2]


FIXED: Changes = {"data": {"sample_order": "fixed", "data_path": ["unused"]}}
PIPELINE: Changes = {"parallel": {"pipeline_model_parallel_size": 2}}
SEQUENCE: Changes = {
    "parallel": {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
}


def _compressed(*specs: str) -> Changes:
    return {"compression": {"compress": list(specs)}}


COMPRESSED: dict[str, Changes] = {
    "samples remembered": merge(
        PIPELINE, FIXED, _compressed("pp-forward=delta,bits=8", "pp-backward=fixpoint,bits=8,error-feedback=lazy")
    ),
    "samples remembered in a file, sequence-parallel": merge(
        SEQUENCE,
        FIXED,
        _compressed(
            "pp-forward=delta-lowbits,bits=4,cache-bits=8,memory=2",
            "pp-backward=lowrank,rank=6,error-feedback=lazy",
        ),
    ),
    "tokens remembered, mean errors": merge(
        PIPELINE,
        _compressed(
            "pp-forward=delta,predict=token,bits=6,eval=on", "pp-backward=fixpoint,bits=6,error-feedback=lazy-mean"
        ),
    ),
    "factors, tensor-parallel codecs": merge(
        SEQUENCE,
        _compressed(
            "pp-forward=lowrank,rank=14,eval=on",
            "pp-backward=lowrank,rank=14,error-feedback=lazy-reset",
            "tp-forward=fixpoint,bits=8",
            "tp-backward=fixpoint,bits=8",
            "embedding=fused",
        ),
    ),
    "gradients": merge(
        {"parallel": {"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True, "ddp_bucket_size": 3000}},
        _compressed("dp-grad=powersgd,rank=4", "embedding=stable-topk,density=0.5,interval=3"),
    ),
}


def _compressed_all(runs: dict[str, Changes]) -> dict[str, tuple[Trace, list[float], list[str]]]:
    return {name: _grown(changes, epoch=8) for name, changes in runs.items()}


@pytest.mark.multiprocess
def test_compressors_go_on_when_messages_change_their_shape() -> None:
    """Both ends stay equal, nobody waits for ever, and the model learns as it does uncompressed."""
    plain, _, _ = _grown({}, epoch=8)
    ranks = run_ranks(4, _compressed_all, COMPRESSED, timeout=300.0)
    for name in COMPRESSED:
        for rank in ranks:
            trace, _, differences = rank[name]
            assert differences == [], name
            assert trace.losses == ranks[0][name][0].losses, name
            assert all(map(math.isfinite, trace.losses)), name
            assert trace.losses[-1] == pytest.approx(plain.losses[-1], rel=0.1), name


@pytest.mark.multiprocess
def test_a_run_counts_its_tokens_and_names_its_lengths(tmp_path: Path) -> None:
    """From DeepSpeed's file to the log: 500 tokens hold ten steps of four samples."""
    config, log, text = tmp_path / "ds.json", tmp_path / "log.jsonl", tmp_path / "log.txt"
    schedule = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 4}}
    ends = {"min_difficulty": 4, "max_difficulty": 16}
    curriculum = {"enabled": True, "curriculum_type": "seqlen", **ends, **schedule}
    config.write_text(json.dumps({"curriculum_learning": curriculum}))
    flags = {"train_iters": None, "train_tokens": 500, "deepspeed_config": config, "eval_interval": 4}
    train(1, tiny_flags(write_documents(tmp_path / "tiny"), **flags, log_json_file=log, log_txt_file=text))
    steps = read_events(log)
    lengths = [4, 8, 8, 12, 12, 16, 16, 16, 16, 16]
    assert [event["curriculum_seqlen"] for event in steps] == lengths
    assert [event["consumed_tokens"] for event in steps] == [4 * sum(lengths[: k + 1]) for k in range(10)]
    rates = [event["tokens_per_second"] * event["seconds_per_iteration"] for event in steps]
    assert rates == pytest.approx([4.0 * length for length in lengths])
    assert "| curriculum seqlen:    12 |" in text.read_text()
    assert len(read_events(log, "validation")) == 3
    assert read_events(log, "config")[0]["size"]["tokens"] == 4 * sum(lengths)

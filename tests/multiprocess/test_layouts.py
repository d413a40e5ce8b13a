"""The same numbers on any layout: losses and gradient norms against a single process."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest

from megatron.distributed import group
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import ODD, T5, Trace, merge, tiny_run

pytestmark = pytest.mark.multiprocess

Changes = dict[str, dict[str, Any]]


def _parallel(tp: int = 1, pp: int = 1, **options: Any) -> Changes:
    return {
        "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **options},
    }


SPLIT = {"scatter_gather_tensors_in_pipeline": True}
SP = {"sequence_parallel": True}
DIST = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}
VIRTUAL = {"num_layers_per_virtual_pipeline_stage": 1}
UNIFORM = {"recompute": {"recompute_granularity": "full", "recompute_method": "uniform"}}
BLOCK = {"recompute": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}}
SELECTIVE = {"recompute": {"recompute_granularity": "selective"}}
MICRO2 = {"training": {"micro_batch_size": 2}}
PADDED = {"model": {"make_vocab_size_divisible_by": 48}}

LAYOUTS: dict[int, dict[str, Changes]] = {
    1: {
        "uniform": UNIFORM,
        "block": BLOCK,
        "selective": SELECTIVE,
        "micro 2": MICRO2,
        "padded": PADDED,
    },
    2: {
        "tp2": _parallel(tp=2),
        "tp2 sp": _parallel(tp=2, **SP),
        "tp2 padded micro 2": {**_parallel(tp=2), **PADDED, **MICRO2},
        "tp2 sp uniform micro 2": {**_parallel(tp=2, **SP), **UNIFORM, **MICRO2},
        "tp2 synchronous micro 2": {**_parallel(tp=2, async_tensor_model_parallel_allreduce=False), **MICRO2},
        "pp2": _parallel(pp=2),
        "pp2 gpipe": _parallel(pp=2, pipeline_schedule="gpipe"),
        "pp2 eager": _parallel(pp=2, pipeline_schedule="eager-1f1b"),
        "pp2 virtual": _parallel(pp=2, **VIRTUAL),
        "pp2 micro 2": {**_parallel(pp=2), **MICRO2},
        "dp2": _parallel(),
        "dp2 overlap": _parallel(**OVERLAP),
        "dp2 sharded": _parallel(**DIST),
        "dp2 sharded overlap micro 2": {**_parallel(**DIST, **OVERLAP), **MICRO2},
        "dp2 torch": _parallel(ddp_impl="torch"),
    },
    4: {
        "tp4 micro 2": {**_parallel(tp=4), **MICRO2},  # half the messages: four ranks wait for each other at each
        "tp4 sp selective micro 2": {**_parallel(tp=4, **SP), **SELECTIVE, **MICRO2},
        "pp4": _parallel(pp=4),
        "dp4 sharded": _parallel(**DIST),
        "tp2 pp2 sp": _parallel(tp=2, pp=2, **SP),
        "tp2 pp2 split eager": _parallel(tp=2, pp=2, pipeline_schedule="eager-1f1b", pipeline_max_in_flight=4, **SPLIT),
        "tp2 pp2 virtual split uniform": {**_parallel(tp=2, pp=2, **VIRTUAL, **SPLIT), **UNIFORM},
        "tp2 pp2 virtual sp block": {**_parallel(tp=2, pp=2, **VIRTUAL, **SP), **BLOCK},
        "tp2 dp2 sp sharded overlap": _parallel(tp=2, **SP, **DIST, **OVERLAP),
        "pp2 dp2 sharded": _parallel(pp=2, **DIST),
        "pp2 dp2 virtual overlap": _parallel(pp=2, **VIRTUAL, **OVERLAP),
    },
    8: {
        "tp2 pp2 dp2": _parallel(tp=2, pp=2),
        "tp2 pp2 dp2 everything": {
            **_parallel(tp=2, pp=2, **SP, **DIST, **OVERLAP, **VIRTUAL),
            **UNIFORM,
        },
        "pp4 dp2 gpipe sharded": _parallel(pp=4, pipeline_schedule="gpipe", **DIST),
    },
}

LONG = {
    2: ("tp2 sp uniform micro 2", "pp2 virtual", "dp2 sharded overlap micro 2"),
    4: ("tp2 pp2 virtual sp block", "tp2 dp2 sp sharded overlap", "pp2 dp2 virtual overlap"),
    8: ("tp2 pp2 dp2 everything",),
}


def _chosen(world_size: int, names: Mapping[int, Sequence[str]]) -> dict[str, Changes]:
    """Some layouts of a size."""
    return {name: LAYOUTS[world_size][name] for name in names[world_size]}


def _divide(layouts: Mapping[int, Mapping[str, Changes]], repeats: Mapping[int, Collection[str]]) -> list[Any]:
    """Parameters by number of ranks: layouts, and apart from them, marked ``repeats``, those that repeat others."""
    cases = []
    for world_size, by_name in layouts.items():
        others = repeats.get(world_size, ())
        assert by_name.keys() >= set(others), others
        kept, further = ({n: c for n, c in by_name.items() if (n in others) is repeated} for repeated in (False, True))
        if kept:
            cases.append(pytest.param(world_size, kept, id=str(world_size)))
        if further:
            cases.append(pytest.param(world_size, further, id=f"{world_size} further", marks=pytest.mark.repeats))
    return cases


STEPS = {True: 3, False: 2}
"""Steps of the layouts in ``LONG``, and of the others."""

DOUBLE = {"precision": {"fp64": True}}
SINGLE = {"optimizer": {"lr": 1e-3}}  # Adam's first steps amplify rounding by the learning rate


Runs = dict[str, tuple[Changes, int]]
"""Changes of the configuration and steps, by name."""


def _run_all(runs: Runs, masked: bool) -> dict[str, Trace]:
    """Runs on every rank; several layouts share a start of the processes."""
    return {name: tiny_run(changes, steps, masked) for name, (changes, steps) in runs.items()}


def _traces(world_size: int, runs: Runs, masked: bool = False) -> dict[str, Trace]:
    """Traces that all ranks report alike."""
    if world_size == 1:
        return _run_all(runs, masked)
    results: list[dict[str, Trace]] = run_ranks(world_size, _run_all, runs, masked, timeout=300.0)
    for name in runs:
        for rank_traces in results[1:]:
            assert rank_traces[name].losses == results[0][name].losses, f"{name}: ranks report different losses"
    return results[0]


def _batch_sizes(world_size: int, base: Changes, changes: Changes) -> Changes:
    """Half of the twelve samples of ``ODD``, and two of them a micro-batch, for fewer messages, where a layout can
    divide them so."""
    if base.get("training", {}).get("global_batch_size") != 12:
        return {}
    parallel = changes.get("parallel", {})
    tp, pp = (parallel.get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline"))
    least = changes.get("training", {}).get("micro_batch_size", 1)
    for samples, micro in ((6, 2), (6, 1), (12, 2)):
        count, remainder = divmod(samples, micro * (world_size // (tp * pp)))
        in_turns = count % pp == 0 or not VIRTUAL.keys() & parallel.keys()
        if remainder == 0 and micro >= least and count >= pp and in_turns:
            return {"training": {"global_batch_size": samples, "micro_batch_size": micro}}
    return {}


def _runs(world_size: int, base: Changes, layouts: Mapping[str, Changes], steps: int) -> Runs:
    return {
        name: (merge(base, _batch_sizes(world_size, base, changes), changes), steps)
        for name, changes in layouts.items()
    }


def _assert_close(trace: Trace, reference: Trace, tolerance: float, name: str) -> None:
    """Compares the steps of a trace with the first ones of a reference."""
    steps = len(trace.losses)
    assert trace.losses == pytest.approx(reference.losses[:steps], rel=tolerance, abs=0), name
    assert trace.grad_norms == pytest.approx(reference.grad_norms[:steps], rel=tolerance, abs=0), name
    for losses, expected in zip(trace.named, reference.named[:steps], strict=True):
        assert losses == pytest.approx(expected, rel=tolerance, abs=0), name


def _reference(base: Changes, steps: int, masked: bool = False) -> Trace:
    """The trace of a single process, which several tests compare with."""
    return _run_once(json.dumps(base, sort_keys=True), steps, masked)


@cache
def _run_once(base: str, steps: int, masked: bool) -> Trace:
    return tiny_run(json.loads(base), steps, masked)


def _agree(
    world_size: int,
    base: Changes,
    steps: int = 2,
    layouts: Mapping[str, Changes] | None = None,
    masked: bool = False,
) -> Trace:
    """Compares layouts (all of a size by default) with a single process; returns its trace."""
    layouts = LAYOUTS[world_size] if layouts is None else layouts
    _compare(world_size, base, _runs(world_size, base, layouts, steps), masked)
    return _reference(base, steps, masked)


def _compare(world_size: int, base: Changes, runs: Runs, masked: bool, tolerance: float = 1e-10) -> None:
    """Compares runs with a single process that takes batches of the same size."""
    steps = max(steps for _, steps in runs.values())
    for name, trace in _traces(world_size, runs, masked).items():
        samples = runs[name][0].get("training", {}).get("global_batch_size")
        same_batch: Changes = {} if samples is None else {"training": {"global_batch_size": samples}}
        _assert_close(trace, _reference(merge(base, same_batch), steps, masked), tolerance, name)


def _long_and_short(world_size: int, base: Changes, layouts: Mapping[str, Changes]) -> Runs:
    """Layouts of a size; those that combine the most take more steps."""
    long, short = (
        {n: c for n, c in layouts.items() if (n in LONG.get(world_size, ())) == chosen} for chosen in (True, False)
    )
    return _runs(world_size, base, long, STEPS[True]) | _runs(world_size, base, short, STEPS[False])


DROPOUT: Changes = {"model": {"attention_dropout": 0.2, "hidden_dropout": 0.3}}
COMBINED = {
    2: ("tp2", "tp2 sp", "pp2", "pp2 micro 2", "dp2", "dp2 sharded"),
    4: ("tp4 micro 2", "dp4 sharded", "tp2 pp2 sp", "tp2 pp2 virtual split uniform"),
    8: ("tp2 pp2 dp2", "pp4 dp2 gpipe sharded"),
}
"""Layouts of which others have each part, with more beside it or on other ranks."""


@pytest.mark.parametrize(("world_size", "layouts"), _divide(LAYOUTS, COMBINED))
def test_double_precision_agrees_with_masks_and_dropout(world_size: int, layouts: dict[str, Changes]) -> None:
    """Masks differ in their number of tokens, so averaging per micro-batch first would depend on the layout."""
    base = merge(DOUBLE, ODD, DROPOUT)
    reference = _reference(base, 4, masked=True)
    assert reference.losses[-1] < reference.losses[0] - 0.1
    assert reference.losses[0] != _reference(base, 1).losses[0], "nothing is masked"
    assert reference.losses[0] != _reference(merge(DOUBLE, ODD), 1, masked=True).losses[0], "nothing is dropped"
    _compare(world_size, base, _long_and_short(world_size, base, layouts), masked=True)


def check_long_layouts(world_size: int, iterations: int) -> None:
    """The same over some iterations, only for the layouts that combine the most."""
    _agree(world_size, DOUBLE, iterations, _chosen(world_size, LONG), masked=True)


# Double precision shows the layouts; two ranks sum in fp32 in each kind of group.
@pytest.mark.parametrize("world_size", mark_repeats(LONG, keep=[2]))
def test_single_precision_agrees(world_size: int) -> None:
    runs = _runs(world_size, SINGLE, _chosen(world_size, LONG), STEPS[True])
    _compare(world_size, SINGLE, runs, masked=False, tolerance=1e-5)


@pytest.mark.repeats
def test_rounding_grows_slowly_in_single_precision() -> None:
    reference = tiny_run(SINGLE, 20)
    trace = run_ranks(4, tiny_run, merge(SINGLE, LAYOUTS[4]["tp2 dp2 sp sharded overlap"]), 20)[0]
    for steps, tolerance in ((10, 1e-5), (20, 3e-5)):
        assert trace.losses[:steps] == pytest.approx(reference.losses[:steps], rel=tolerance, abs=0)
        assert trace.grad_norms[:steps] == pytest.approx(reference.grad_norms[:steps], rel=tolerance, abs=0)


RICH: Changes = {
    "model": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "normalization": "RMSNorm",
        "swiglu": True,
        "num_query_groups": 2,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "ffn_hidden_size": 48,
        "rotary_scaling": "llama3",
        "rotary_scaling_factor": 4.0,
        "rotary_scaling_original_length": 8,
        "add_qkv_bias": True,
        "sliding_window": 5,
        "window_attn_skip_freq": [2],
        "parallel_residual": True,
    },
    **DOUBLE,
}


@pytest.mark.parametrize("world_size", mark_repeats([2, 4], keep=[2]))
def test_llama_like_model_agrees(world_size: int) -> None:
    _agree(world_size, RICH, layouts=_chosen(world_size, LONG))


GEMMA: Changes = {
    "model": {
        "position_embedding_type": "rope", "rotary_base": 60.0, "rope_local_base_freq": 15.0, "sliding_window": 5,
        "window_attn_skip_freq": [2], "normalization": "RMSNorm", "apply_layernorm_1p": True, "sandwich_norm": True,
        "qk_layernorm": True, "apply_embedding_scaling": True, "geglu": True, "ffn_hidden_size": 48,
        "add_bias_linear": False, "num_query_groups": 2, "query_pre_attn_scalar": 3, "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0, "attention_dropout": 0.1, "hidden_dropout": 0.2,
    },
    **DOUBLE,
}  # fmt: skip
OF_GEMMA = {
    1: ("uniform", "selective", "micro 2", "padded"),
    2: ("tp2", "tp2 sp uniform micro 2", "tp2 padded micro 2", "pp2 virtual", "dp2 sharded overlap micro 2"),
    4: ("tp2 pp2 virtual sp block", "tp2 pp2 split eager", "pp4"),
}


@pytest.mark.parametrize("world_size", mark_repeats(OF_GEMMA, keep=[1, 2]))
def test_gemma_like_model_agrees(world_size: int) -> None:
    _agree(world_size, merge(GEMMA, ODD), layouts=_chosen(world_size, OF_GEMMA))


ZERO_BUBBLE: dict[str, Any] = {"pipeline_schedule": "zb-h1"}
OF_ZERO_BUBBLE: dict[int, dict[str, Changes]] = {
    2: {
        "pp2": _parallel(pp=2, **ZERO_BUBBLE),
        "pp2 a record": _parallel(pp=2, **ZERO_BUBBLE, pipeline_max_weight_records=1),
    },
    4: {
        "pp4": _parallel(pp=4, **ZERO_BUBBLE),
        "pp4 two records": _parallel(pp=4, **ZERO_BUBBLE, pipeline_max_weight_records=2),
        "tp2 pp2 sp uniform": {**_parallel(tp=2, pp=2, **ZERO_BUBBLE, **SP), **UNIFORM},
        "tp2 pp2 selective": {**_parallel(tp=2, pp=2, **ZERO_BUBBLE), **SELECTIVE},
        "pp2 dp2 sharded overlap": _parallel(pp=2, **ZERO_BUBBLE, **DIST, **OVERLAP),
    },
}


PASSING = [
    pytest.param(world_size, base, id=f"{name}-{world_size}")
    for name, base in (("gpt", merge(DOUBLE, DROPOUT)), ("llama", RICH))
    for world_size in OF_ZERO_BUBBLE
]


@pytest.mark.parametrize(("world_size", "base"), mark_repeats(PASSING, keep=["gpt-4", "llama-2"]))
def test_weight_passes_agree(world_size: int, base: Changes) -> None:
    base = merge(base, ODD)
    _compare(world_size, base, _runs(world_size, base, OF_ZERO_BUBBLE[world_size], 2), masked=True, tolerance=1e-12)


BERT: Changes = {"model": {"model_type": "bert", "attention_dropout": 0.1, "hidden_dropout": 0.2}, **DOUBLE}
OF_BERT = {
    1: ("selective", "micro 2", "padded"),
    2: ("tp2", "tp2 sp uniform micro 2", "pp2", "pp2 virtual", "dp2 sharded overlap micro 2", "dp2 torch"),
    4: ("tp2 pp2 virtual sp block", "tp2 dp2 sp sharded overlap", "pp2 dp2 sharded"),
}


HEADS = [
    pytest.param(world_size, head, id=f"{world_size}-{'two losses' if head else 'one loss'}")
    for world_size in OF_BERT
    for head in (True, False)
]


@pytest.mark.parametrize(
    ("world_size", "head"), mark_repeats(HEADS, keep=["1-two losses", "1-one loss", "2-two losses"])
)
def test_bert_agrees(world_size: int, head: bool) -> None:
    """Samples differ in their number of masked words, and the two losses are means over different numbers."""
    base = merge(BERT, ODD, {"model": {"bert_binary_head": head}})
    zero_bubble = {"pp2 zb-h1": OF_ZERO_BUBBLE[2]["pp2"]} if world_size == 2 else {}
    reference = _agree(world_size, base, layouts=_chosen(world_size, OF_BERT) | zero_bubble)
    assert [set(step) for step in reference.named] == [{"lm loss", "sop loss"} if head else {"lm loss"}] * 2


CONVOLVED = {"model": {"conv_kernel_size": 3}}
OF_DEBERTA: Changes = {
    "model": {
        "model_type": "deberta", "task_head": "classification", "task_classes": 2, "position_buckets": 6,
        "attention_dropout": 0.1, "hidden_dropout": 0.2,
    },
    **DOUBLE,
}  # fmt: skip
DISTANT: dict[int, dict[str, Changes]] = {
    1: {name: {**LAYOUTS[1][name], **CONVOLVED} for name in ("uniform", "selective", "micro 2")},
    2: {
        "tp2": {**LAYOUTS[2]["tp2"], **CONVOLVED},
        "tp2 sp uniform micro 2": LAYOUTS[2]["tp2 sp uniform micro 2"],
        "pp2": {**LAYOUTS[2]["pp2"], **CONVOLVED},
        "dp2 sharded overlap micro 2": LAYOUTS[2]["dp2 sharded overlap micro 2"],
    },
    4: {
        "pp4": LAYOUTS[4]["pp4"],
        "tp2 pp2": {**_parallel(tp=2, pp=2, **OVERLAP), **SELECTIVE, **CONVOLVED},
        "tp2 pp2 sp": LAYOUTS[4]["tp2 pp2 sp"],
        "pp2 dp2 sharded": LAYOUTS[4]["pp2 dp2 sharded"],
        "pp2 dp2 fused": {**_parallel(pp=2), "compression": {"compress": ["embedding=fused"]}},
    },
}
"""Every stage holds the embedding of distances, and every tensor-parallel rank a part of its gradient."""


# With four ranks only what two do not have: a stage in the middle, and an embedding summed with its replicas.
@pytest.mark.parametrize(("world_size", "layouts"), _divide(DISTANT, {4: ("tp2 pp2", "tp2 pp2 sp", "pp2 dp2 sharded")}))
def test_deberta_agrees(world_size: int, layouts: dict[str, Changes]) -> None:
    base = merge(OF_DEBERTA, ODD)
    assert _reference(merge(base, CONVOLVED), 2).losses != _reference(base, 2).losses
    for convolved in ({}, CONVOLVED):
        chosen = {n: c for n, c in layouts.items() if ("model" in c) == bool(convolved)}
        if chosen:
            _agree(world_size, merge(base, convolved), layouts=chosen)


OF_T5: Changes = {
    **T5,
    "model": {**T5["model"], "num_layers": 2, "decoder_num_layers": 6, "attention_dropout": 0.1, "hidden_dropout": 0.2},
    **DOUBLE,
}
SPLITS: dict[int, dict[str, Changes]] = {
    1: {name: LAYOUTS[1][name] for name in ("uniform", "selective", "micro 2", "padded")},
    2: {
        name: LAYOUTS[2][name]
        for name in ("tp2", "tp2 sp uniform micro 2", "pp2", "dp2 sharded overlap micro 2", "dp2 torch")
    },
    3: {
        "pp3": _parallel(pp=3, **ZERO_BUBBLE),
        "pp3 split at 2": {**_parallel(pp=3, pipeline_model_parallel_split_rank=2, **OVERLAP), **BLOCK},
    },
    4: {
        "tp2 pp2": {**_parallel(tp=2, pp=2, pipeline_schedule="eager-1f1b"), **SELECTIVE},
        "tp2 pp2 sp": {**_parallel(tp=2, pp=2, **SP), **UNIFORM},
        "tp2 pp2 in parts": _parallel(tp=2, pp=2, scatter_gather_tensors_in_pipeline=True),
        "pp2 dp2 sharded": _parallel(pp=2, **DIST),
        "pp4": {**_parallel(pp=4, pipeline_schedule="gpipe"), **PADDED},
        "pp4 split at 1": _parallel(pp=4, pipeline_model_parallel_split_rank=1),
    },
    6: {
        "tp2 pp3 sp": _parallel(tp=2, pp=3, **SP),
        "tp2 pp3 in parts": _parallel(tp=2, pp=3, **SPLIT),
    },
}
"""Up to three stages hold the embedding, and two the positions."""
SPLIT_ALIKE = {
    2: ("tp2", "dp2 torch"),
    4: ("tp2 pp2", "pp2 dp2 sharded", "pp4", "pp4 split at 1"),
    6: tuple(SPLITS[6]),
}


@pytest.mark.parametrize(("world_size", "layouts"), _divide(SPLITS, SPLIT_ALIKE))
def test_t5_agrees(world_size: int, layouts: dict[str, Changes]) -> None:
    """Samples differ in their number of labels, and the encoder's length is not the decoder's."""
    _agree(world_size, merge(OF_T5, ODD), layouts=layouts)


def test_stages_exchange_a_residual_stream_in_fp32() -> None:
    """With parameters of bf16 a stage's end would round it."""
    model = {"fp32_residual_connection": True, "untie_embeddings_and_output_weights": True}
    # Sums over stages (of the norm, of a tied embedding) have another order than in a single process.
    base: Changes = {"precision": {"bf16": True}, "model": model, "optimizer": {"clip_grad": 0.0}}
    reference = tiny_run(base, 3)
    layouts = {"pp2": _parallel(pp=2), "pp2 virtual": _parallel(pp=2, **VIRTUAL)}
    for name, trace in _traces(2, _runs(2, base, layouts, 3)).items():
        assert trace.losses == reference.losses, name


def test_stages_of_t5_exchange_both_residual_streams_of_fp32() -> None:
    """The encoder's output is of bf16, and travels beside the decoder's stream."""
    model = {"fp32_residual_connection": True, "decoder_num_layers": 2}
    base = merge(T5, {"precision": {"bf16": True}, "model": model})
    reference = tiny_run(base, 3)
    layouts = {"pp3": _parallel(pp=3, pipeline_model_parallel_split_rank=1)}
    trace = _traces(3, _runs(3, base, layouts, 3))["pp3"]
    assert trace.losses[0] == reference.losses[0]
    _assert_close(trace, reference, 1e-3, "pp3")


STEPWISE = {2: ("dp2 sharded", "tp2 sp"), 4: ("dp4 sharded", "tp2 dp2 sp sharded overlap")}


def _run_stepwise(runs: Runs) -> dict[str, Trace]:
    with mock.patch.object(group, "_STEPWISE_BYTES", 1):
        return _run_all(runs, masked=False)


@pytest.mark.parametrize("world_size", STEPWISE)
def test_stepwise_gathers_and_exchanges_compute_the_same(world_size: int) -> None:
    """On gloo large models exchange with a partner at a time; here all sizes do."""
    reference = _reference(DOUBLE, 2)
    runs = _runs(world_size, DOUBLE, _chosen(world_size, STEPWISE), 2)
    for traces in run_ranks(world_size, _run_stepwise, runs):
        for name, trace in traces.items():
            _assert_close(trace, reference, 1e-10, name)

"""The same numbers on any layout: losses and gradient norms against a single process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from megatron.distributed import group
from tests.support.spawn import run_ranks
from tests.support.tiny import ODD, T5, Trace, merge, tiny_run

Changes = dict[str, dict[str, Any]]


def _parallel(tp: int = 1, pp: int = 1, **more: Any) -> Changes:
    return {
        "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **more},
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
        "tp2 pp2 split eager": _parallel(tp=2, pp=2, pipeline_schedule="eager-1f1b", **SPLIT),
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

Steps = tuple[int, int]
"""Steps of the layouts in ``LONG``, and of the others."""
IN_DOUBLE: Steps = (10, 4)
IN_SINGLE: Steps = (30, 10)

DOUBLE = {"precision": {"fp64": True}}
SINGLE = {"optimizer": {"lr": 1e-3}}  # Adam's first steps amplify rounding by the learning rate


def _run_all(layouts: dict[str, Changes], base: Changes, iterations: int, masked: bool) -> dict[str, Trace]:
    """Runs on every rank; several layouts share one start of the processes."""
    traces = {}
    for name, changes in layouts.items():
        traces[name] = tiny_run(merge(base, changes), iterations, masked)
    return traces


def _reference(base: Changes, iterations: int, masked: bool = False) -> Trace:
    return tiny_run(base, iterations, masked)


def _first(trace: Trace, iterations: int) -> Trace:
    return Trace(trace.losses[:iterations], trace.grad_norms[:iterations], {}, {})


def _assert_close(trace: Trace, reference: Trace, tolerance: float, name: str) -> None:
    assert trace.losses == pytest.approx(reference.losses, rel=tolerance, abs=0), name
    assert trace.grad_norms == pytest.approx(reference.grad_norms, rel=tolerance, abs=0), name


def _traces(
    world_size: int, base: Changes, iterations: int, masked: bool = False, layouts: dict[str, Changes] | None = None
) -> dict[str, Trace]:
    """Traces of all layouts of a size, or of some, which all ranks report alike."""
    layouts = LAYOUTS[world_size] if layouts is None else layouts
    results = run_ranks(world_size, _run_all, layouts, base, iterations, masked, timeout=300.0)
    for name in layouts:
        for rank_traces in results[1:]:
            assert rank_traces[name].losses == results[0][name].losses, f"{name}: ranks report different losses"
    return dict(results[0])


def _long_and_short(
    world_size: int, base: Changes, steps: Steps, masked: bool = False
) -> tuple[dict[str, Trace], dict[str, Trace]]:
    """Traces of the layouts that combine the most, and shorter ones of the others."""
    layouts, long = LAYOUTS[world_size], LONG.get(world_size, tuple(LAYOUTS[world_size]))
    traces = _traces(world_size, base, steps[0], masked, {name: layouts[name] for name in long})
    short = {name: changes for name, changes in layouts.items() if name not in long}
    return traces, _traces(world_size, base, steps[1], masked, short) if short else {}


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", sorted(LAYOUTS))
def test_double_precision_agrees_over_10_steps(world_size: int) -> None:
    """Masks differ in their number of tokens, so averaging per micro-batch first would depend on the layout."""
    base, (steps, fewer) = merge(DOUBLE, ODD), IN_DOUBLE
    reference = _reference(base, steps, masked=True)
    assert reference.losses[-1] < reference.losses[0] - 0.3
    assert reference.losses[0] != _reference(base, 1).losses[0], "nothing is masked"
    long, short = _long_and_short(world_size, base, IN_DOUBLE, masked=True)
    assert {*long, *short} == {*LAYOUTS[world_size]}
    for name, trace in long.items():
        _assert_close(trace, reference, 1e-10, name)
    for name, trace in short.items():
        _assert_close(trace, _first(reference, fewer), 1e-10, name)


def check_long_layouts(world_size: int, iterations: int) -> None:
    """The same over some iterations, of the layouts that combine the most alone."""
    reference = _reference(DOUBLE, iterations, masked=True)
    chosen = {name: LAYOUTS[world_size][name] for name in LONG[world_size]}
    for name, trace in _traces(world_size, DOUBLE, iterations, masked=True, layouts=chosen).items():
        _assert_close(trace, reference, 1e-10, name)


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", sorted(LAYOUTS))
def test_single_precision_agrees(world_size: int) -> None:
    """At the end of 30 steps rounding has grown."""
    steps, fewer = IN_SINGLE
    reference = _reference(SINGLE, steps)
    long, short = _long_and_short(world_size, SINGLE, IN_SINGLE)
    for name, trace in {**long, **short}.items():
        _assert_close(_first(trace, fewer), _first(reference, fewer), 1e-5, name)
    for name, trace in long.items():
        _assert_close(trace, reference, 1e-4, name)


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


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", [2, 4])
def test_llama_like_model_agrees(world_size: int) -> None:
    layouts = {name: c for name, c in LAYOUTS[world_size].items() if "tp4" not in name}
    reference = _reference(RICH, 4)
    results = run_ranks(world_size, _run_all, layouts, RICH, 4, False, timeout=300.0)
    for name in layouts:
        _assert_close(results[0][name], reference, 1e-10, name)


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


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", OF_GEMMA)
def test_gemma_like_model_agrees(world_size: int) -> None:
    base, layouts = merge(GEMMA, ODD), {name: LAYOUTS[world_size][name] for name in OF_GEMMA[world_size]}
    reference = _reference(base, 2)
    traces = _run_all(layouts, base, 2, False) if world_size == 1 else _traces(world_size, base, 2, layouts=layouts)
    for name, trace in traces.items():
        _assert_close(trace, reference, 1e-10, name)


DROPOUT: Changes = {"model": {"attention_dropout": 0.2, "hidden_dropout": 0.3}, **DOUBLE}


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_dropout_does_not_depend_on_the_layout(world_size: int) -> None:
    reference = _reference(DROPOUT, 4)
    assert reference.losses != _reference(DOUBLE, 4).losses
    if world_size == 1:
        traces = _run_all(LAYOUTS[1], DROPOUT, 4, False)
    else:
        traces = _traces(world_size, DROPOUT, 4)
    for name, trace in traces.items():
        _assert_close(trace, reference, 1e-10, name)


BERT: Changes = {"model": {"model_type": "bert", "attention_dropout": 0.1, "hidden_dropout": 0.2}, **DOUBLE}
OF_BERT = {
    1: ("selective", "micro 2", "padded"),
    2: ("tp2", "tp2 sp uniform micro 2", "pp2", "pp2 virtual", "dp2 sharded overlap micro 2", "dp2 torch"),
    4: ("tp2 pp2 virtual sp block", "tp2 dp2 sp sharded overlap", "pp2 dp2 sharded"),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("head", [True, False], ids=["two losses", "one loss"])
@pytest.mark.parametrize("world_size", OF_BERT)
def test_bert_agrees(world_size: int, head: bool) -> None:
    """Samples differ in their number of masked words, and the two losses are means over different numbers."""
    base = merge(BERT, ODD, {"model": {"bert_binary_head": head}})
    reference = _reference(base, 2)
    assert [set(step) for step in reference.named] == [{"lm loss", "sop loss"} if head else {"lm loss"}] * 2
    layouts = {name: LAYOUTS[world_size][name] for name in OF_BERT[world_size]}
    traces = _run_all(layouts, base, 2, False) if world_size == 1 else _traces(world_size, base, 2, layouts=layouts)
    for name, trace in traces.items():
        _assert_close(trace, reference, 1e-10, name)
        for found, wanted in zip(trace.named, reference.named, strict=True):
            assert found == pytest.approx(wanted, rel=1e-10, abs=0), name


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


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", DISTANT)
def test_deberta_agrees(world_size: int) -> None:
    base, layouts = merge(OF_DEBERTA, ODD), DISTANT[world_size]
    references = {True: _reference(merge(base, CONVOLVED), 2), False: _reference(base, 2)}
    assert references[True].losses != references[False].losses
    traces = _run_all(layouts, base, 2, False) if world_size == 1 else _traces(world_size, base, 2, layouts=layouts)
    for name, trace in traces.items():
        _assert_close(trace, references["model" in layouts[name]], 1e-10, name)


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
        "pp3": _parallel(pp=3),
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


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", SPLITS)
def test_t5_agrees(world_size: int) -> None:
    """Samples differ in their number of labels, and the encoder's length is not the decoder's."""
    base, layouts = merge(OF_T5, ODD), SPLITS[world_size]
    reference = _reference(base, 2)
    traces = _run_all(layouts, base, 2, False) if world_size == 1 else _traces(world_size, base, 2, layouts=layouts)
    for name, trace in traces.items():
        _assert_close(trace, reference, 1e-10, name)


@pytest.mark.multiprocess
def test_stages_exchange_a_residual_stream_of_fp32_as_it_is() -> None:
    """With parameters of bf16 a stage's end would round it."""
    model = {"fp32_residual_connection": True, "untie_embeddings_and_output_weights": True}
    # Sums over stages (of the norm, of a tied embedding) come in another order than one process's.
    base: Changes = {"precision": {"bf16": True}, "model": model, "optimizer": {"clip_grad": 0.0}}
    layouts = {"pp2": _parallel(pp=2), "pp2 virtual": _parallel(pp=2, **VIRTUAL)}
    reference = _reference(base, 5)
    for traces in run_ranks(2, _run_all, layouts, base, 5, False):
        for name, trace in traces.items():
            assert trace.losses == reference.losses, name


@pytest.mark.multiprocess
def test_stages_of_t5_exchange_both_residual_streams_of_fp32() -> None:
    """The encoder's output is of bf16, and travels beside the decoder's stream."""
    base: Changes = {**T5, "precision": {"bf16": True}, "model": {**T5["model"], "fp32_residual_connection": True}}
    layouts = {"pp3": _parallel(pp=3, pipeline_model_parallel_split_rank=1)}
    base["model"]["decoder_num_layers"] = 2
    reference = _reference(base, 3)
    trace = _traces(3, base, 3, layouts=layouts)["pp3"]
    assert trace.losses[0] == reference.losses[0]
    _assert_close(trace, reference, 1e-3, "pp3")


STEPWISE = {2: ("dp2 sharded", "tp2 sp"), 4: ("dp4 sharded", "tp2 dp2 sp sharded overlap")}


def _run_stepwise(layouts: dict[str, Changes], base: Changes, iterations: int) -> dict[str, Trace]:
    with mock.patch.object(group, "_STEPWISE_BYTES", 1):
        return _run_all(layouts, base, iterations, masked=False)


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", STEPWISE)
def test_gathers_and_exchanges_of_large_models_compute_the_same(world_size: int) -> None:
    """On gloo they go one partner at a time where a model is large; here they do so whatever the size."""
    reference = _reference(DOUBLE, 6)
    layouts = {name: LAYOUTS[world_size][name] for name in STEPWISE[world_size]}
    for traces in run_ranks(world_size, _run_stepwise, layouts, DOUBLE, 6):
        for name, trace in traces.items():
            _assert_close(trace, reference, 1e-10, name)


LAMB: Changes = {
    "optimizer": {"optimizer": "lamb", "lr": 2e-2},
    "model": {"init_method_std": 0.2},  # matrices move by a share of their norm
    **DOUBLE,
}
WHOLE = {
    2: ("tp2 padded micro 2", "dp2 sharded overlap micro 2", "pp2 virtual"),
    4: ("tp2 dp2 sp sharded overlap", "pp2 dp2 sharded", "tp4 micro 2"),
    8: ("tp2 pp2 dp2 everything",),
}
"""Layouts that cut a matrix, whose norms LAMB needs whole, or hold the tied embedding twice."""


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", WHOLE)
def test_the_norms_of_lamb_are_those_of_whole_matrices(world_size: int) -> None:
    reference = _reference(LAMB, 10)
    assert reference.losses[-1] < reference.losses[0] - 0.3
    layouts = {name: LAYOUTS[world_size][name] for name in WHOLE[world_size]}
    for name, trace in _traces(world_size, LAMB, 10, layouts=layouts).items():
        _assert_close(trace, reference, 1e-10, name)


MUON: Changes = {
    "optimizer": {"optimizer": "muon", "lr": 1e-2},
    "model": {"swiglu": True, "num_query_groups": 2, "ffn_hidden_size": 48, "num_experts": [4], "expert_interval": 2},
    **DOUBLE,
}
CUT = {
    2: {
        **{name: LAYOUTS[2][name] for name in ("tp2 sp", "dp2 sharded", "pp2 virtual")},
        "ep2": _parallel(expert_model_parallel_size=2),
    },
    4: {
        **{name: LAYOUTS[4][name] for name in ("tp2 dp2 sp sharded overlap", "pp2 dp2 virtual overlap", "dp4 sharded")},
        "ep2 tp2 sharded": _parallel(tp=2, expert_model_parallel_size=2, **DIST),
        "ep2 of whole experts tp2 sharded": _parallel(
            tp=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1, **DIST
        ),
        "ep2 dp4 sharded": _parallel(expert_model_parallel_size=2, **DIST, **OVERLAP),
    },
    8: {name: LAYOUTS[8][name] for name in ("tp2 pp2 dp2 everything",)},
}
"""Layouts that cut matrices, along rows, columns, and anywhere, and hold experts on other ranks."""


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", CUT)
def test_the_matrices_of_muon_are_whole_on_any_layout(world_size: int) -> None:
    reference = _reference(MUON, 10)
    assert reference.losses[-1] < reference.losses[0] - 0.3
    for name, trace in _traces(world_size, MUON, 10, layouts=CUT[world_size]).items():
        _assert_close(trace, reference, 1e-10, name)

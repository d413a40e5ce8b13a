"""Costs from dry runs, against formulas and real runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.base.errors import UserError
from megatron.compression.points import Point
from megatron.kernels.native import problem
from megatron.models.flops import model_flops_per_sample
from megatron.parallel.pipeline.list_schedule import AUTO
from megatron.parallel.pipeline.schedule import ScheduleLimits
from megatron.planner.cluster import Device
from megatron.planner.costs import wires_of
from megatron.planner.dry_run import CostTally, DryBackend, OpRecorder
from megatron.planner.footprint import HeldCounts, held_by_rank
from megatron.planner.measure import LiveBackend
from megatron.planner.pieces import Pieces
from megatron.planner.report import describe_choice
from tests.unit.planner.support import VOCAB, predictor_of, small_run

LLAMA = {"swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm"}
BERT = {"model_type": "bert"}  # each tensor-parallel rank computes the head's full dense layers


@pytest.mark.skipif(problem() is not None, reason="the compiled kernels are not in use")
def test_loading_the_kernels_is_no_operation_of_a_step() -> None:
    """Otherwise the first prediction of a process would be slower than later ones."""
    with OpRecorder(Device()) as recorder:
        torch.ops.megatron_cc.sources()
    assert recorder.take() == CostTally()


@pytest.mark.parametrize(
    ("model", "tp"),
    [({}, 1), ({}, 2), ({"num_query_groups": 2}, 1), ({"num_query_groups": 2}, 2), (LLAMA, 1), (LLAMA, 2), (BERT, 1)],
)
def test_flops_match_the_formula(model: dict[str, Any], tp: int) -> None:
    config = small_run(model=model, parallel={"tensor_model_parallel_size": tp})
    predictor, choice = predictor_of(config)
    total = 0.0
    for name, count in (("embedding", 1), ("layer", config.model.num_layers), ("head", 1)):
        piece = predictor.book.piece(choice, name)
        total += count * (piece.forward.flops + piece.backward.flops)
    # The backward pass of fused attention recomputes the scores: a fifth product of 2 s^2 h beside the formula's four.
    width = config.model.num_attention_heads * config.model.kv_channels
    again = config.model.num_layers * 2 * config.model.seq_length**2 * width
    # The head's products are over the padded vocabulary.
    expected = model_flops_per_sample(config.model, 1024, causal=False) + again
    assert total * tp == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("tp", [1, 2])
def test_attention_with_bounded_scores_is_not_fused(tp: int) -> None:
    """Its backward pass recomputes no scores."""
    gemma = {"geglu": True, "add_bias_linear": False, "sandwich_norm": True, "num_query_groups": 2}
    bounded = {**gemma, "normalization": "RMSNorm", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = small_run(model=bounded, parallel={"tensor_model_parallel_size": tp})
    predictor, choice = predictor_of(config)
    counts = {"embedding": 1, "layer": config.model.num_layers, "head": 1}
    pieces = {name: predictor.book.piece(choice, name) for name in counts}
    total = sum(count * (pieces[name].forward.flops + pieces[name].backward.flops) for name, count in counts.items())
    assert total * tp == pytest.approx(model_flops_per_sample(config.model, 1024, causal=False), rel=1e-3)
    plain, _ = predictor_of(
        small_run(model={**bounded, "sandwich_norm": False}, parallel={"tensor_model_parallel_size": tp})
    )
    assert predictor.elements(choice, 0) - plain.elements(choice, 0) == 2 * config.model.num_layers * 64


@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 2), (4, 1)])
def test_the_number_of_parameters(layout: tuple[int, int]) -> None:
    tp, pp = layout
    config = small_run(
        parallel={"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "sequence_parallel": tp > 1}
    )
    predictor, choice = predictor_of(config)
    h, layers = 64, 8
    layer = 12 * h * h // tp + (3 * h + 4 * h) // tp + 6 * h
    embedding = 1024 // tp * h if tp < 8 else 0
    copies = 2 if pp > 1 else 1
    elements = sum(predictor.elements(choice, rank) for rank in range(pp))
    assert elements == layers * layer + copies * embedding + 32 * h + 2 * h


def test_recomputing_costs_a_forward_and_saves_memory() -> None:
    plain, choice = predictor_of(small_run())
    again, chosen = predictor_of(small_run(recompute={"recompute_granularity": "full"}))
    dense, full = plain.book.piece(choice, "layer"), again.book.piece(chosen, "layer")
    ratio = full.backward.flops / dense.backward.flops
    assert 1.3 < ratio < 1.5
    assert full.saved_bytes == 32 * 64 * 4
    assert dense.saved_bytes > 10 * full.saved_bytes
    head = again.book.piece(chosen, "head").working_bytes
    assert again.predict(chosen).memory["work space"] == max(dense.saved_bytes, head)
    several = dataclasses.replace(chosen, recompute=dataclasses.replace(chosen.recompute, recompute_num_layers=4))
    assert again.predict(several).memory["work space"] == 4 * dense.saved_bytes


@pytest.mark.parametrize("granularity", [None, "selective", "full"])
def test_a_weight_pass_computes_the_products_of_weights(granularity: str | None) -> None:
    recompute = {} if granularity is None else {"recompute_granularity": granularity}
    predictor, choice = predictor_of(small_run(recompute=recompute))
    piece, h, tokens = predictor.book.piece(choice, "layer"), 64, 32
    assert piece.weight.flops == 2 * tokens * 12 * h * h
    # Inputs of 1, 1, 1 and 4 times the width, and gradients of outputs of 3, 1, 4 and 1 times.
    assert piece.recorded_bytes == 4 * tokens * (7 + 9) * h
    assert predictor.book.piece(choice, "embedding").weight.flops == 0


def test_weight_passes_shorten_a_pipeline_and_hold_records() -> None:
    sizes = {"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-h1"}
    model, batch = {"hidden_size": 1024, "seq_length": 512}, {"global_batch_size": 16}
    predictor, separate = predictor_of(small_run(model=model, training=batch, parallel=sizes))
    joint = dataclasses.replace(separate, schedule="1f1b")
    seconds, bound = predictor.predict(separate).seconds, predictor.lower_bound(separate)
    assert bound <= seconds < 0.95 * predictor.predict(joint).seconds
    held = predictor.predict(separate).memory["activations"] / predictor.predict(joint).memory["activations"]
    assert 1.0 < held < 2.0


def test_saved_bytes_match_a_real_run() -> None:
    config = small_run()
    predictor, choice = predictor_of(config)
    real = Pieces(
        config, VOCAB, LiveBackend(torch.device("cpu"), repeats=2), predictor.book._make_pieces(choice, {}).plan, 50
    )
    # The CPU's fused attention saves a few more bytes.
    assert real.piece("layer").saved_bytes == pytest.approx(predictor.book.piece(choice, "layer").saved_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("spec", "of_matrices", "of_vectors"),
    [
        ("dp-grad=none", 4.0, 4.0),
        ("dp-grad=cast", 2.0, 2.0),
        ("dp-grad=fixpoint,bits=4,group=64", 0.5 + 4 / 64, 0.5 + 4 / 64),
        ("dp-grad=float8,tile=64,rounding=stochastic", 1.0 + 4 / 64, 1.0 + 4 / 64),
        ("dp-grad=float8,format=e5m2,scale-dtype=e8m0", 1.0 + 1 / 128, 1.0 + 1 / 128),
        ("dp-grad=fixpoint,bits=3.6,grid=minmax,rotation=64,rotate-when=outlier", *[3.6 / 8 + 8 / 64 + 1 / 8 / 64] * 2),
        ("dp-grad=stable-topk,density=0.1,interval=10", 0.4, 4.0),
        # Half of the bytes that eight ranks gather; four matrices have 16 bytes of means each.
        ("dp-grad=chunked-topk", 4 * (10 / 64 + 4 * 128 / (12 * 64**2)) / 8, 4.0),
    ],
)
def test_bytes_of_compressed_gradients(spec: str, of_matrices: float, of_vectors: float) -> None:
    config = small_run(specs=(spec,))
    predictor, choice = predictor_of(config)
    reduction = predictor.book.reduction(choice, "layer", 0)
    elements = predictor.book.piece(choice, "layer").parameters
    halves = {"all-reduce": 1.0, "all-to-all": 0.5, "all-gather": 0.5}
    sent = sum(halves[collective.kind] * collective.nbytes for group in reduction.rounds for collective in group)
    matrices = 12 * 64**2
    assert sent == pytest.approx(of_matrices * matrices + of_vectors * (elements - matrices), rel=0.01)


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ("fixpoint,bits=4,group=2048", 4 + 32 / 2048),
        ("float8", 8 + 32 / 128),
        ("float8,scale=row", 8 + 32 / 2**20),
        ("float8,tile=32,scale-dtype=e8m0", 8 + 8 / 32),
    ],
)
def test_bytes_of_compressed_parameters(spec: str, bits: float) -> None:
    parallel = {"use_distributed_optimizer": True}
    predictor, choice = predictor_of(small_run(specs=(f"param-gather={spec}",), parallel=parallel))
    cost = predictor.book.param_gather(choice, 2**20, stage=0)
    assert cost.nbytes == 2**20 * bits / 8
    assert cost.encode_s > 0
    assert cost.decode_s > 0


def test_a_compressor_that_cannot_be_planned_is_refused() -> None:
    predictor, choice = predictor_of(small_run(specs=("dp-grad=stable-topk,density=0.1,flush=rotate",)))
    with pytest.raises(UserError, match=r"--compress dp-grad=stable-topk.*cannot be planned.*leave it out"):
        predictor.predict(choice)


def test_a_pipeline_without_a_flush_holds_the_parameters_of_two_steps() -> None:
    parallel = {"pipeline_model_parallel_size": 2, "delay": 1}
    bytes_of = []
    for extra in ({}, {"no_pipeline_flush": True}):
        predictor, choice = predictor_of(small_run(parallel={**parallel, **extra}))
        assert choice.flush == (not extra)
        bytes_of.append(predictor.predict(choice).memory["parameters"])
    assert bytes_of[1] == 3 * bytes_of[0]


@pytest.mark.parametrize(
    ("limit", "no_flush", "count", "held"),
    [
        (None, False, 64, 7),
        (9, False, 64, 9),
        (40, False, 64, 40),
        (40, False, 8, 8),
        (40, True, 8, 9),
        (6, True, 8, 6),
    ],
)
def test_micro_batches_in_flight_take_memory(limit: int | None, no_flush: bool, count: int, held: int) -> None:
    """As many as the flag allows, and a step has; without a flush one more."""
    activations = []
    for most, flushes, micro_batches in ((None, True, 64), (limit, not no_flush, count)):
        parallel = {"pipeline_model_parallel_size": 4, "pipeline_schedule": "eager-1f1b", "delay": int(not flushes)}
        config = small_run(
            parallel={**parallel, "pipeline_max_in_flight": most, "no_pipeline_flush": not flushes},
            training={"global_batch_size": 2 * micro_batches},
            model={"num_layers": 4},
        )
        predictor, choice = predictor_of(config)
        activations.append(predictor.predict(choice).memory["activations"])
    assert activations[1] == pytest.approx(activations[0] * held / 7)


def test_records_of_weight_passes_are_limited() -> None:
    """Those of the last of four stages; under auto, as if it held as much as it may."""
    most = {}
    for kind in ("zb-h1", AUTO):
        for limit in (None, 2, 1):
            held = held_by_rank(kind, 4, 3, 1, 8, ScheduleLimits(weight_records=limit))
            most[kind, limit] = max(records for ((_, records),) in held)
    assert most == {("zb-h1", None): 4, (AUTO, None): 7} | {(kind, n): n for kind in ("zb-h1", AUTO) for n in (2, 1)}
    assert held_by_rank(AUTO, 4, 3, 1, 8, ScheduleLimits(weight_records=2)) == {((7, 0),), ((5, 2),)}
    assert held_by_rank(AUTO, 4, 0, 1, 8) == {((7, 0),)}


def test_records_of_weight_passes_without_a_flush() -> None:
    """One on each stage but the first, after which the backward's activation is free; none of tensor-parallel ranks."""

    def held(stage: int, separate: bool) -> frozenset[HeldCounts]:
        return held_by_rank("1f1b", 4, stage, 1, 8, flush=False, separate=separate)

    assert {records for ((_, records),) in held(1, separate=True)} == {0, 1}
    assert max(sum(counts) for (counts,) in held(1, separate=True)) == 3
    assert {records for stage, separate in ((0, True), (1, False)) for ((_, records),) in held(stage, separate)} == {0}
    parallel = {"pipeline_model_parallel_size": 2, "delay": 1, "no_pipeline_flush": True}
    for tp in (1, 2):
        predictor, choice = predictor_of(small_run(parallel={**parallel, "tensor_model_parallel_size": tp}))
        pipeline = predictor.pipeline(choice, wires_of(predictor.cluster, choice))
        assert any(pipeline.weight_s) == choice.has_weight_passes == (tp == 1)


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b"])
def test_the_bound_of_a_pipeline_without_a_flush_leaves_out_filling_and_draining(schedule: str) -> None:
    parallel = {"pipeline_model_parallel_size": 8, "delay": 1, "no_pipeline_flush": True}
    config = small_run(
        model={"hidden_size": 1024, "seq_length": 512},
        training={"global_batch_size": 8},
        parallel={**parallel, "pipeline_schedule": schedule},
    )
    predictor, choice = predictor_of(config)
    assert not choice.flush
    seconds, flushed = predictor.predict(choice).seconds, predictor.predict(dataclasses.replace(choice, flush=True))
    assert predictor.lower_bound(choice) <= seconds < 0.8 * flushed.seconds
    assert f"{schedule} without a flush" in describe_choice(choice)
    assert "without a flush" not in describe_choice(flushed.choice)


@pytest.mark.parametrize(
    ("optimizer", "precision", "bytes_per_number"),
    [
        ({}, {}, 8),
        ({}, {"bf16": True}, 12),
        ({"optimizer": "sgd"}, {}, 4),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, {}, 0),
        ({}, {"fp64": True}, 16),
    ],
)
def test_memory_of_the_optimizer(optimizer: dict[str, Any], precision: dict[str, Any], bytes_per_number: int) -> None:
    """Moments, and the fp32 copies of 16-bit parameters."""
    predictor, choice = predictor_of(small_run(optimizer=optimizer, precision=precision))
    memory = predictor.predict(choice).memory
    elements = memory["parameters"] / (2 if "bf16" in precision else 8 if precision else 4)
    assert memory["optimizer"] == bytes_per_number * elements / (choice.dp if choice.sharded else 1)


@pytest.mark.parametrize("sharded", [False, True])
def test_muon_has_a_single_moment_of_matrices_and_exchanges_shards(sharded: bool) -> None:
    parallel = {"use_distributed_optimizer": sharded}
    predictor, choice = predictor_of(small_run(optimizer={"optimizer": "muon"}, parallel=parallel))
    adam_predictor, adam_choice = predictor_of(small_run(parallel=parallel))
    layers, shares = predictor.contents(choice, 0)["layer"], choice.dp if sharded else 1
    matrices = layers * 12 * 64**2
    prediction, adam = predictor.predict(choice), adam_predictor.predict(adam_choice)
    assert adam.memory["optimizer"] - prediction.memory["optimizer"] == 4 * matrices / shares
    # Matrices of h x h, 3 h x h (as three), 4 h x h and h x 4 h: 2 m^2 (2 n + m) for a short side m.
    flops = layers * 2 * 64**3 * (4 * 3 + 2 * 9)
    of_all, of_experts = predictor.matrices(choice, 0)
    assert (of_all.updated, of_experts.updated) == (matrices / shares, 0.0)
    # The busiest rank has at most a matrix of 4 h x h more than its share.
    assert flops / shares <= of_all.flops <= flops / shares + (sharded and 18 * 64**3)
    seconds = 5 * flops / shares / predictor.cluster.device.flops
    assert prediction.parts["optimizer"] > adam.parts["optimizer"] + 0.999 * seconds
    # An owner's shard of its matrices is not sent: tests of training check the bytes.
    most = 2 * 4 * matrices / shares
    sent = prediction.sent.get("optimizer", 0.0)
    assert 0 < sent < most if sharded else sent == 0


def test_compressed_gathers_need_a_copy_of_fp32_parameters() -> None:
    cases: list[tuple[tuple[str, ...], int]] = [((), 8), (("param-gather=none",), 8), (("param-gather=float8",), 12)]
    for specs, bytes_per_number in cases:
        predictor, choice = predictor_of(small_run(specs=specs, parallel={"use_distributed_optimizer": True}))
        memory = predictor.predict(choice).memory
        assert memory["optimizer"] == bytes_per_number * memory["parameters"] / 4 / choice.dp, specs


def test_memory_of_a_sample_cache() -> None:
    specs = ("pp-forward=delta,bits=4,cache=100",)
    config = small_run(specs=specs, parallel={"pipeline_model_parallel_size": 2}, data={"sample_order": "fixed"})
    predictor, choice = predictor_of(config)
    plain = predictor.predict(choice).memory["compressors"]
    assert plain == pytest.approx(100 * 32 * 64 * 2, rel=0.01)
    smaller = dataclasses.replace(choice, specs=("pp-forward=delta,bits=4,cache=100,memory=10",))
    assert predictor.predict(smaller).memory["compressors"] == pytest.approx(10 * 32 * 64 * 2, rel=0.01)


def test_memory_of_the_tied_embedding_residual() -> None:
    """The first and the last stage keep a residual and a factor of their copies."""
    specs = ("embedding=powersgd,rank=4",)
    predictor, choice = predictor_of(small_run(specs=specs, parallel={"pipeline_model_parallel_size": 2}))
    entries, hidden = predictor.book.piece(choice, "embedding").tied_shape
    assert predictor.predict(choice).memory["compressors"] == 4 * (entries * hidden + 4 * hidden)


@pytest.mark.parametrize("coding", ["encoding", "decoding"])
def test_coding_and_computing_are_separate(coding: str) -> None:
    backend = DryBackend(Device(memory_gib=1.0))
    recorder = backend.recorder()
    x = torch.empty(8, device=backend.torch_device)
    with recorder:
        with getattr(recorder.ledger, coding)(Point.DP_GRAD):
            x + 1
        coded = recorder.take()
        x + 1
        computed = recorder.take()
    assert (coded.coding_s, coded.seconds) == (computed.seconds, 0.0)
    assert computed.seconds > computed.coding_s == 0.0

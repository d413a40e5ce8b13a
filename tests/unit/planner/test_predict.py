"""Predictions against published figures and measurements on an emulated network."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.network.cases import BENCHES
from benchmarks.network.run import apply_rate, predict_seconds
from megatron.config.run import RunConfig
from megatron.models.flops import benchmark_tflops
from megatron.planner.choice import make_choice
from megatron.planner.cluster import LinkSpec, read_cluster
from megatron.planner.costs import wires_of
from megatron.planner.growth import describe_growth
from megatron.planner.predict import Predictor
from tests.unit.planner.support import CLUSTER, predictor_of, small_run

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[3]
A100 = REPO / "examples" / "clusters" / "a100-40gb-hdr.yaml"
RECORDED = sorted((REPO / "tests" / "golden" / "laboratory").glob("*.json"))


def _jupiter(layers: int, hidden: int, heads: int, batch: int, tp: int, pp: int, gpus: int) -> RunConfig:
    plain: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": 2048,
            "position_embedding_type": "rope",
        },
        "training": {"micro_batch_size": 1, "global_batch_size": batch, "train_iters": 100},
        "optimizer": {"lr": 1e-4},
        "tokenizer": {"vocab_size": 50257},
        "precision": {"fp16": True},
        "parallel": {
            "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "sequence_parallel": True,
            "use_distributed_optimizer": True,
        },
        "recompute": {"recompute_granularity": "selective"},
    }  # fmt: skip
    return RunConfig.from_dict(plain).resolve(gpus)


@pytest.mark.parametrize(
    ("config", "gpus", "gbit", "published"),
    [
        (_jupiter(96, 12288, 96, 96, 8, 8, 384), 384, 700.0, 137.89),
        (_jupiter(40, 5120, 32, 1024, 2, 4, 32), 32, 350.0, 206.9),
    ],
    ids=["175B on 96 nodes of 4 A100", "13B on 8 nodes of 4 A100"],
)
def test_published_figures_of_the_jupiter_benchmark(
    config: RunConfig, gpus: int, gbit: float, published: float
) -> None:
    """TFLOP/s by the benchmark's formula; the cluster file assumes the efficiency of matrix products."""
    cluster = dataclasses.replace(read_cluster(A100), gpus=gpus, across=LinkSpec(gbit, 6.0))
    prediction = Predictor(config, cluster, 50257).predict(make_choice(config, gpus))
    batch, seconds = config.training.global_batch_size, prediction.seconds
    tflops = benchmark_tflops(
        config.model, 50257, global_batch_size=batch, seconds=seconds, world_size=gpus, recompute=True
    )
    assert tflops == pytest.approx(published, rel=0.15)
    assert prediction.memory_bytes < cluster.device.memory_gib * 2**30


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_predictions_match_measurements(file: Path) -> None:
    """Iterations measured by ``make bench-network``, with the rates of the same hosts (the YAML beside them)."""
    bench, cluster = BENCHES[file.stem], read_cluster(file.with_suffix(".yaml"))
    cases = {case.name: case for case in bench.cases}
    errors = {}
    for row in json.loads(file.read_text()):
        seconds = predict_seconds(bench, cases[row["case"]], apply_rate(cluster, row["rate"]))
        if seconds is not None:
            errors[row["setup"], row["case"]] = seconds / row["seconds"] - 1
    assert len(errors) >= 10
    # The machine's speed drifts by some hundredths from case to case.
    assert max(map(abs, errors.values())) < 0.2
    assert sum(abs(error) < 0.15 for error in errors.values()) >= 0.9 * len(errors)


def test_parts_add_up_to_the_iteration() -> None:
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
    specs = ("pp-forward=fixpoint,bits=4", "dp-grad=powersgd,rank=4", "tp-forward=fixpoint,bits=8")
    predictor, choice = predictor_of(small_run(specs=specs, parallel=parallel))
    prediction = predictor.predict(choice)
    assert sum(prediction.parts.values()) == pytest.approx(prediction.seconds)
    assert all(seconds >= 0 for seconds in prediction.parts.values())
    assert prediction.parts["coding"] > 0
    assert prediction.tokens_per_s == pytest.approx(32 * 32 / prediction.seconds)
    assert 0 < prediction.mfu < 1
    assert set(prediction.across) <= set(prediction.sent)


def test_a_measured_slowdown_multiplies_all_times() -> None:
    predictor, choice = predictor_of(small_run(parallel={"pipeline_model_parallel_size": 2}))
    before = predictor.predict(choice)
    predictor.slowdown = 1.5
    after = predictor.predict(choice)
    assert after.seconds == predictor.seconds(choice) == pytest.approx(1.5 * before.seconds)
    assert after.parts == pytest.approx({name: 1.5 * seconds for name, seconds in before.parts.items()})
    assert after.tokens_per_s == pytest.approx(before.tokens_per_s / 1.5)
    assert after.mfu == pytest.approx(before.mfu / 1.5)
    assert after.memory == before.memory


def test_without_a_flush_each_step_copies_the_parameters() -> None:
    """Each is read and written once, in fp32."""
    predictor, choice = predictor_of(small_run(parallel={"pipeline_model_parallel_size": 2}))
    flushed = dataclasses.replace(choice, schedule="eager-1f1b", delay=1, overlap=False)
    overlapped = dataclasses.replace(flushed, flush=False)
    before_s, after_s = (predictor.predict(each).parts["optimizer"] for each in (flushed, overlapped))
    copied_s = [
        predictor.elements(choice, rank)
        * 8
        / (predictor.cluster.device.memory_gbyte_per_s * 1e9)
        * predictor.cluster.correction("optimizer")
        for rank in range(2)
    ]
    assert any(after_s - before_s == pytest.approx(seconds) for seconds in copied_s)


def test_coding_overlaps_with_other_buckets_alone() -> None:
    """A bucket is coded while another is being sent."""
    specs = ("dp-grad=powersgd,rank=4,factors=fixpoint8",)
    ready = {}
    for size in (None, 1000):
        config = small_run(specs=specs, parallel={"overlap_grad_reduce": True, "ddp_bucket_size": size})
        predictor, choice = predictor_of(config)
        stage = predictor.stage(choice, 0, wires_of(predictor.cluster, choice))
        assert 0 < stage.first_coding_s < stage.coding_s
        seconds_by_part = predictor.predict(choice).parts
        ready[size] = seconds_by_part["coding"] + seconds_by_part["gradients"]
    assert ready[None] == pytest.approx(stage.coding_s + sum(stage.rounds), rel=1e-6)
    assert ready[1000] < ready[None]


def test_corrections_multiply_seconds() -> None:
    predictor, choice = predictor_of(small_run(specs=("dp-grad=fixpoint,bits=4",)))
    plain = predictor.predict(choice)
    corrections = {"layer forward": 3.0, "coding dp-grad=fixpoint,bits=4": 2.0, "optimizer": 5.0}
    cluster = dataclasses.replace(predictor.cluster, corrections=corrections)
    slower = Predictor(predictor.config, cluster, predictor.vocab_size).predict(choice)
    piece = predictor.book.piece(choice, "layer")
    extra = 2 * choice.micro_batches * 8 * piece.forward.seconds
    assert slower.parts["compute"] - plain.parts["compute"] == pytest.approx(extra)
    assert slower.parts["coding"] == pytest.approx(2 * plain.parts["coding"])
    moved = predictor.elements(choice, 0) * (4 + 2 * 4 + 24)
    update = moved / (predictor.cluster.device.memory_gbyte_per_s * 1e9)
    assert slower.parts["optimizer"] - plain.parts["optimizer"] == pytest.approx(4 * update)


def test_bytes_of_factors_depend_on_their_format() -> None:
    sent = {}
    for factors in ("fp32", "bf16", "fixpoint8", "fixpoint4"):
        config = small_run(4, (f"dp-grad=powersgd,rank=8,factors={factors}",))
        predictor, choice = predictor_of(config, dataclasses.replace(CLUSTER, gpus=4, gpus_per_node=4))
        sent[factors] = predictor.predict(choice).sent["dp-grad"]
    exact = 2 * sent["bf16"] - sent["fp32"]
    assert 0 < exact < 0.1 * sent["fp32"]
    numbers = sent["fp32"] - exact
    assert (sent["fixpoint8"] - exact) / numbers == pytest.approx(8.125 / 32, rel=5e-3)
    assert (sent["fixpoint4"] - exact) / numbers == pytest.approx(4.25 / 32, rel=5e-3)


@pytest.mark.parametrize("spec", ["topk,density=0.01", "chunked-topk"])
def test_top_k_sends_coordinates_to_every_replica(spec: str) -> None:
    """Therefore the bytes grow with the number of replicas."""
    sent = {}
    for dp in (2, 4, 8):
        config = small_run(dp, (f"dp-grad={spec}",))
        cluster = dataclasses.replace(CLUSTER, gpus=dp, gpus_per_node=dp)
        predictor, choice = predictor_of(config, cluster)
        sent[dp] = predictor.predict(choice).sent["dp-grad"]
    # Exact sums (biases, norms) go around a ring; coordinates from each to all.
    exact, chosen = np.linalg.solve([[1.0, 1.0], [1.75, 7.0]], [sent[2], sent[8]])
    assert min(chosen, exact) > 0
    assert sent[4] == pytest.approx(1.5 * exact + 3 * chosen, rel=1e-6)


def test_a_central_parameter_server_sends_over_a_single_link() -> None:
    sent, seconds = {}, {}
    for server in ("", "sharded", "central"):
        specs = (f"dp-grad=parameter-server,server={server}",) if server else ()
        config = small_run(8, specs, model={"hidden_size": 512})
        slow = dataclasses.replace(CLUSTER, gpus_per_node=1, across=LinkSpec(1.0, 1.0))
        predictor, choice = predictor_of(config, slow)
        prediction = predictor.predict(choice)
        sent[server], seconds[server] = prediction.sent["dp-grad"], prediction.parts["gradients"]
    assert sent["sharded"] == pytest.approx(sent[""], rel=1e-3)
    assert sent["central"] == pytest.approx(sent[""], rel=1e-3)
    assert seconds["sharded"] == pytest.approx(seconds[""], rel=0.02)
    # 2 (n - 1) P over the server's link, in place of 2 (n - 1) / n P over each.
    assert seconds["central"] == pytest.approx(8 * seconds[""], rel=0.02)


def test_growing_sequences_shorten_the_mean_iteration() -> None:
    """The first and the full length are predicted; the time between follows the polynomial of the FLOPs."""
    curriculum = {"curriculum_learning": True, "curriculum_seqlen_min": 512, "curriculum_seqlen_steps": 50}
    model = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 2048}
    plain, choice = predictor_of(small_run(model={**model, "seq_length": 2048}))
    assert describe_growth(plain, choice) == ""
    text = describe_growth(*predictor_of(small_run(model={**model, "seq_length": 2048}, curriculum=curriculum)))
    short = predictor_of(small_run(model={**model, "seq_length": 536}))[0]
    first_s, full_s = short.predict(choice).seconds, plain.predict(choice).seconds
    before, _, after = text.partition(f"takes {first_s:.3g} s at first, {full_s:.3g} s in the end, and ")
    assert before == "sequences grow from 536 tokens to 2048, the length assumed here: an iteration "
    mean_s, _, rest = after.partition(" s on average over ")
    assert rest == "the run's 100 iterations"
    assert full_s / 2 + first_s / 2 < float(mean_s) < full_s  # half of the run has the full length

"""The planner's predicted bytes, beside the bytes that training counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from megatron.planner.choice import make_choice
from megatron.planner.cluster import Cluster
from megatron.planner.command import count_vocab_entries
from megatron.planner.predict import Predictor
from tests.multiprocess.test_experts import FOLDED, Changes, _parallel
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags, write_documents
from tests.support.events import read_events
from tests.support.islands import events, run_islands
from tests.support.spawn import run_ranks
from tests.support.tiny import VOCAB, tiny_config, tiny_engines
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

IN_BUCKETS = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}
EVEN = {"num_experts": 4, "moe_router_topk": 4, "moe_ffn_hidden_size": 32, "train_iters": 4}
"""Experts that all tokens go to: a router's choices cannot be predicted."""


SETTINGS: dict[str, dict[str, object]] = {
    "tp2 dp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "compress": ["tp-forward=fixpoint,bits=8", "dp-grad=fixpoint,bits=4", "param-gather=fixpoint,bits=8"],
    },
    "pp2 dp2": {
        "pipeline_model_parallel_size": 2,
        "compress": [
            "pp-forward=fixpoint,bits=4",
            "pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy",
            "dp-grad=powersgd,rank=2",
            "embedding=fused",
        ],
    },
    "tp2 pp2 interleaved": {
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
        "tensor_model_parallel_size": 2,
        "compress": ["pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy"],
    },
    "tp2 pp2 in parts": {
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "scatter_gather_tensors_in_pipeline": True,
        "compress": ["pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy", "tp-forward=fixpoint"],
    },
    "pp4 eager": {
        "pipeline_model_parallel_size": 4,
        "pipeline_schedule": "eager-1f1b",
        "global_batch_size": 8,
        "compress": ["pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy"],
    },
    "pp2 dp2 in V form": {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "zb-v",
        "compress": [
            "pp-forward=fixpoint,bits=4",
            "pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy",
            "dp-grad=powersgd,rank=2",
        ],
    },
    "tp2 recomputed": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "compress": ["tp-forward=fixpoint,bits=8"],
    },
    "ep2 dp4": {
        **EVEN,
        "expert_interval": 2,
        "expert_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "compress": [
            "ep-dispatch-forward=fixpoint,bits=8,group=16",
            "ep-combine=fixpoint,bits=4,group=16",
            "dp-grad=fixpoint,bits=4,group=16",
            "param-gather=fixpoint,bits=8,group=16",
        ],
    },
    "ep2 pp2": {
        **EVEN,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "compress": ["ep-dispatch-forward=fixpoint,bits=8,group=16"],
    },
    "ep2 tp2": {
        **EVEN,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "moe_expert_capacity_factor": 0.5,
        "moe_min_capacity": 1,
    },
    "ep4 in two stages": {
        **EVEN,
        "expert_model_parallel_size": 4,
        "compress": ["ep-dispatch=fixpoint,bits=8,group=16", "ep-combine-backward=fixpoint,bits=4,group=16"],
    },
    "ep4 tp2 of whole experts in two stages": {
        **EVEN,
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "optimizer": "muon",
        "compress": ["ep-dispatch-forward=fixpoint,bits=8,group=16"],
    },
    "muon sharded": {"optimizer": "muon", "use_distributed_optimizer": True},
    "muon sharded tp2": {"tensor_model_parallel_size": 2, "optimizer": "muon", "use_distributed_optimizer": True},
    "muon sharded ep2": {
        **EVEN,
        "expert_model_parallel_size": 2,
        "optimizer": "muon",
        "use_distributed_optimizer": True,
    },
    "muon sharded pp2 in buckets": {
        "pipeline_model_parallel_size": 2,
        "optimizer": "muon",
        "use_distributed_optimizer": True,
        **IN_BUCKETS,
    },
}
REPEATS = ("pp4 eager", "ep2 pp2", "ep4 in two stages", "muon sharded", "muon sharded ep2")
"""Nothing else is predicted for them by another formula than for the others."""


@pytest.mark.parametrize("name", mark_repeats(SETTINGS, keep=SETTINGS.keys() - set(REPEATS)))
def test_bytes_are_what_training_counts(name: str, tmp_path: Path) -> None:
    settings = SETTINGS[name]
    log, saved = tmp_path / "log.jsonl", tmp_path / "saved"
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"),
        **{"num_layers": 4, "train_iters": 4, "save": saved, "log_json_file": log, **settings},
    )
    train(4, flags, env={"LOCAL_WORLD_SIZE": "2"})
    counted = read_events(log)[-1]["comm"]
    config = RunConfig.from_yaml(next(saved.glob("iter_*/config.yaml")).read_text()).resolve(4)
    predictor = Predictor(config, Cluster(gpus=4, gpus_per_node=2), count_vocab_entries(config))
    prediction = predictor.predict(make_choice(config, 4))
    total = {point: 4 * nbytes for point, nbytes in prediction.sent.items()}
    measured = {point: figures["wire_bytes"] for point, figures in counted.items() if point != "control"}
    # Parts of so small a model do not divide evenly into groups and shares.
    assert total == pytest.approx(measured, rel=1e-2)
    inside = {point: figures["inside_bytes"] for point, figures in counted.items() if figures.get("inside_bytes")}
    crossing = {point: 4 * prediction.across[point] for point in inside if point.startswith("ep-")}
    assert crossing == pytest.approx({point: measured[point] - inside[point] for point in crossing}, rel=1e-2)
    assert len(crossing) == (4 if settings.get("expert_model_parallel_size") == 4 else 0)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"compress": ["outer=chunked-topk,chunk=64,k=4,every=3,fragments=3,delay=0,warmup=2"]}),
        (
            2,
            {
                "pipeline_model_parallel_size": 2,
                "compress": ["outer=fixpoint,bits=4,every=2,error-feedback=on,warmup=3"],
            },
        ),
        (1, {"compress": ["outer=fixpoint,bits=4,every=2,fragments=2,in-step=compressed,warmup=3"]}),
        (2, {"use_distributed_optimizer": True, "compress": ["outer=identity,outer-preset=diloco,every=3"]}),
    ],
    ids=["fragments of one process", "two stages", "compressed in step", "sharded"],
)
def test_bytes_between_islands_are_what_training_counts(ranks: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """Over a whole run: its iterations in step, its rounds, and the last round."""
    log, saved = tmp_path / "log.jsonl", tmp_path / "saved"
    changes = {"num_layers": 4, "train_iters": 9, "save": saved, "log_json_file": log, **settings}
    run_islands(2, ranks, tiny_flags(write_documents(tmp_path / "tiny"), **changes))
    counted = [event["comm"].get("outer", {}) for event in events(tmp_path / "log.island_0.jsonl")]
    assert len(counted) == 9
    config = RunConfig.from_yaml(next((saved / "island_0").glob("iter_*/config.yaml")).read_text())
    predictor = Predictor(config, Cluster(gpus=2 * ranks), count_vocab_entries(config))
    prediction = predictor.predict(make_choice(config, 2 * ranks))
    sent = sum(account.get("wire_bytes", 0) for account in counted)
    assert 9 * ranks * prediction.sent["outer"] == pytest.approx(sent, rel=1e-2)
    assert prediction.outer is not None
    assert counted[0]["wire_bytes"] == pytest.approx(prediction.outer.in_step_bytes, rel=1e-2)


def _parameters(layouts: dict[str, Changes]) -> dict[str, int]:
    """Parameters on this rank."""
    return {
        name: sum(buffer.params_flat.numel() for buffer in tiny_engines(changes).buffers)
        for name, changes in layouts.items()
    }


def test_parameters_are_those_of_the_ranks() -> None:
    """Of layers with experts and without, on each layout; the optimizer's shards cover the parameters of the
    replicas."""
    model = {"model": {"num_experts": [4, 8], "expert_interval": 2, "moe_shared_expert_intermediate_size": 24}}
    sizes = {"ep4": (1, 1, 4), "ep2": (1, 1, 2), "ep2 tp2": (2, 1, 2), "ep2 pp2": (1, 2, 2), "dp4": (1, 1, 1)}
    layouts = {name: {**model, **_parallel(tp=tp, pp=pp, ep=ep)} for name, (tp, pp, ep) in sizes.items()}
    layouts["pp2 in V form"] = {**model, **_parallel(pp=2, pipeline_schedule="zb-v")}
    layouts |= {f"whole, ep{ep} tp2": {**model, **_parallel(tp=2, ep=ep, **FOLDED)} for ep in (2, 4)}
    ranks = run_ranks(4, _parameters, layouts)
    for name, changes in layouts.items():
        config = tiny_config(changes, 4)
        choice = make_choice(config, 4)
        stages = Predictor(config, Cluster(gpus=4), VOCAB)
        elements = [stages.elements(choice, stage) for stage in range(choice.pp) for _ in range(4 // choice.pp)]
        assert elements == [counts[name] for counts in ranks], name
        parameters = stages.count_replicas(choice, 0)
        assert sum(count for count, _ in parameters) == elements[0]
        if choice.ep > 1:
            assert [replicas for _, replicas in parameters] == [choice.dp, choice.expert_dp]

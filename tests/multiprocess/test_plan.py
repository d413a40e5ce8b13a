"""What the planner says is sent, beside what training counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config.run import RunConfig
from megatron.planner.choice import choice_of
from megatron.planner.cluster import Cluster
from megatron.planner.command import entries_of
from megatron.planner.predict import Predictor
from tests.support.corpus import tiny_flags, write_documents
from tests.support.train import train

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    "settings",
    [
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "compress": ["tp-forward=fixpoint,bits=8", "dp-grad=fixpoint,bits=4", "param-gather=fixpoint,bits=8"],
        },
        {
            "pipeline_model_parallel_size": 2,
            "compress": [
                "pp-forward=fixpoint,bits=4",
                "pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy",
                "dp-grad=powersgd,rank=2",
                "embedding=fused",
            ],
        },
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_per_virtual_pipeline_stage": 1,
            "tensor_model_parallel_size": 2,
            "compress": ["pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy"],
        },
        {
            "pipeline_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "scatter_gather_tensors_in_pipeline": True,
            "compress": ["pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy", "tp-forward=fixpoint"],
        },
        {
            "pipeline_model_parallel_size": 4,
            "pipeline_schedule": "eager-1f1b",
            "global_batch_size": 8,
            "compress": ["pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy"],
        },
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "compress": ["tp-forward=fixpoint,bits=8"],
        },
    ],
    ids=["tp2 dp2", "pp2 dp2", "tp2 pp2 interleaved", "tp2 pp2 in parts", "pp4 eager", "tp2 recomputed"],
)
def test_bytes_are_what_training_counts(settings: dict[str, object], tmp_path: Path) -> None:
    log, saved = tmp_path / "log.jsonl", tmp_path / "saved"
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"), num_layers=4, train_iters=4, save=saved, log_json_file=log, **settings
    )
    train(4, flags)
    counted = [event for event in map(json.loads, log.read_text().splitlines()) if event["kind"] == "train"][-1]["comm"]
    config = RunConfig.load_yaml(next(saved.glob("iter_*/config.yaml"))).resolve(4)
    found = Predictor(config, Cluster(gpus=4), entries_of(config)).predict(choice_of(config, 4))
    total = {point: 4 * nbytes for point, nbytes in found.sent.items()}
    measured = {point: figures["wire_bytes"] for point, figures in counted.items() if point != "control"}
    # Parts of so small a model do not divide evenly into groups and shares.
    assert total == pytest.approx(measured, rel=1e-2)

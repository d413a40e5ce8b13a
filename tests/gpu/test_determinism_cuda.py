"""--deterministic-mode on a CUDA device: an uninterrupted and a resumed run are equal to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.training.pretrain import main
from tests.support.corpus import tiny_flags, write_documents
from tests.support.device import has_8_bit_units
from tests.support.events import read_events
from tests.support.one_gpu import be_a_host
from tests.support.spawn import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]

# Few entries, so that many tokens add to each row of the embedding; heads that flash attention takes.
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 512,
    "max_position_embeddings": 512,
    "micro_batch_size": 4,
    "global_batch_size": 16,
    "lr": 1e-3,
    "distributed_backend": "nccl",
    "bf16": True,
    "deterministic_mode": True,
}


def _main(flags: list[str]) -> None:
    be_a_host()
    assert main(flags) == 0


def _train(world_size: int, folder: Path, name: str, **changes: Any) -> None:
    flags = tiny_flags(folder / "tiny", **{**SIZES, **changes}, log_json_file=folder / f"{name}.jsonl")
    run_ranks(world_size, _main, flags, timeout=280, init=False)


def _figures(folder: Path, name: str) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each iteration, as exact as they were written."""
    events = read_events(folder / f"{name}.jsonl")
    return {event["iteration"]: (event["lm_loss"], event["grad_norm"]) for event in events}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dropout": (1, {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "documents apart, rope, swiglu, grouped queries": (
        1,
        {
            "reset_attention_mask": True,
            "reset_position_ids": True,
            "position_embedding_type": "rope",
            "swiglu": True,
            "num_query_groups": 2,
        },
    ),
    "tp2 with sequence parallelism": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tensorwise 8-bit products": (1, {"fp8": "tensorwise"}),
    "rowwise 8-bit products, tp2": (2, {"fp8": "rowwise", "tensor_model_parallel_size": 2}),
    "dp2, sharded, powersgd, 8 bits": (
        2,
        {"use_distributed_optimizer": True, "compress": ["dp-grad=powersgd,rank=4", "param-gather=fixpoint,bits=8"]},
    ),
    "dp2, stable-topk": (2, {"compress": ["dp-grad=stable-topk,interval=3"]}),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES)
def test_an_uninterrupted_and_a_resumed_run_give_the_same_bits(case: str, tmp_path: Path) -> None:
    """Up to the interruption, the other run is a second run like the first."""
    world_size, changes = CASES[case]
    if "fp8" in changes and not has_8_bit_units():
        pytest.skip("no 8-bit units")
    write_documents(tmp_path / "tiny", documents=400)
    length = {"train_iters": 12}
    _train(world_size, tmp_path, "whole", **changes, **length)
    saved = tmp_path / "saved"
    _train(world_size, tmp_path, "parts", **changes, **length, save=saved, exit_interval=6)
    _train(world_size, tmp_path, "parts", **changes, **length, load=saved)
    figures = _figures(tmp_path, "whole")
    assert len(figures) == 12
    assert _figures(tmp_path, "parts") == figures

"""Islands: worlds of their own that train one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.corpus import tiny_flags, write_documents
from tests.support.islands import losses, run_islands, saved_tensors
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

FP64: dict[str, Any] = {"fp64": True, "train_iters": 6, "global_batch_size": 4, "micro_batch_size": 1}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("data") / "tiny")


def _close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], limit: float = 1e-10) -> None:
    assert one.keys() == other.keys()
    assert one
    for name, x in one.items():
        torch.testing.assert_close(x, other[name], rtol=limit, atol=limit, msg=name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_islands_in_step_are_data_parallelism(prefix: Path, tmp_path: Path, ranks: int) -> None:
    """Two islands, of one rank or of two replicas with a sharded optimizer, against one world of all replicas."""
    more: dict[str, Any] = {"use_distributed_optimizer": True} if ranks == 2 else {}
    flags = {**FP64, **more, "seq_length": 16}
    whole = tmp_path / "whole"
    train(2 * ranks, tiny_flags(prefix, **flags, save=whole, log_json_file=tmp_path / "whole.jsonl"))
    together = tiny_flags(
        prefix,
        **flags,
        save=tmp_path / "islands",
        log_json_file=tmp_path / "log.jsonl",
        compress=["outer=identity,every=1,warmup=1.0"],
    )
    run_islands(2, ranks, together)
    for island in (0, 1):
        found = losses(tmp_path / f"log.island_{island}.jsonl")
        assert found == pytest.approx(losses(tmp_path / "whole.jsonl"), rel=1e-10, abs=1e-10)
        _close(saved_tensors(tmp_path / "islands" / f"island_{island}", 6), saved_tensors(whole, 6))

"""Islands: worlds of their own that train one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.corpus import tiny_flags, write_documents
from tests.support.islands import events, losses, run_islands, saved_tensors
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


LOCAL: dict[str, Any] = {**FP64, "train_iters": 9, "save_interval": 100, "optimizer": "adam"}
SPECS = {
    "residual": "outer=fixpoint,bits=2,error-feedback=on,every=3,warmup=2",
    "on its way": "outer=powersgd,rank=2,every=4,fragments=2,delay=1,mixing=0.5,warmup=0",
}


@pytest.mark.parametrize("name", SPECS)
def test_resume_in_the_middle_of_a_round_is_exact(prefix: Path, tmp_path: Path, name: str) -> None:
    """Stopped between two rounds, and while a fragment is on its way, with residuals; two islands of two replicas."""
    stop = 4 if name == "residual" else 6
    flags = {**LOCAL, "use_distributed_optimizer": True, "compress": [SPECS[name]]}
    run_islands(2, 2, tiny_flags(prefix, **flags, save=tmp_path / "whole", log_json_file=tmp_path / "whole.jsonl"))
    parts = {**flags, "save": tmp_path / "parts", "log_json_file": tmp_path / "parts.jsonl"}
    run_islands(2, 2, tiny_flags(prefix, **parts, exit_interval=stop))
    common = json.loads((tmp_path / "parts" / "island_0" / f"iter_{stop:07d}" / "common.json").read_text())
    assert (common["outer"]["flight"] is not None) == (name == "on its way")
    run_islands(2, 2, tiny_flags(prefix, **parts, load=tmp_path / "parts"))
    for island in (0, 1):
        whole, found = (tmp_path / f"{which}.island_{island}.jsonl" for which in ("whole", "parts"))
        assert losses(found) == losses(whole)
        rounds = [[(e["iteration"], e["norm"]) for e in events(path, "outer")] for path in (whole, found)]
        assert rounds[0] == rounds[1]
        saved = [saved_tensors(tmp_path / which / f"island_{island}", 9) for which in ("whole", "parts")]
        _close(saved[0], saved[1], 0.0)
    weights = [saved_tensors(tmp_path / "whole" / f"island_{island}", 9, "model.") for island in (0, 1)]
    _close(weights[0], weights[1], 0.0)

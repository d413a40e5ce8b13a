"""A plug-in codec with a memory for each sample, through the command line: it trains, is counted, and resumes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import sign_delta
from tests.support.cli import run_cli
from tests.support.corpus import tiny_flags, write_documents
from tests.support.events import read_events
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

ITERATIONS = 30


def _flags(prefix: Path, **changes: Any) -> list[str]:
    """Six iterations see all samples once."""
    values = {
        "pipeline_model_parallel_size": 2,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "train_iters": ITERATIONS,
        "sample_order": "fixed",
        "compress_module": sign_delta.__file__,
        "compress": ["pp-forward=sign-delta,decay=0.9"],
    }
    return tiny_flags(prefix, **{**values, **changes})


def _steps(path: Path) -> dict[int, tuple[float, float, float]]:
    """Loss, gradient norm and bytes of pp-forward by iteration."""
    return {
        event["iteration"]: (event["lm_loss"], event["grad_norm"], event["comm"]["pp-forward"]["wire_bytes"])
        for event in read_events(path)
    }


def test_a_plug_in_with_a_memory_for_each_sample_trains_and_resumes_exactly(tmp_path: Path) -> None:
    prefix, saved = write_documents(tmp_path / "tiny"), tmp_path / "saved"
    uninterrupted, resumed = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    result = run_cli(
        2, ["pretrain_gpt.py", *_flags(prefix, log_json_file=uninterrupted, log_comm=True, check_replicas=5)]
    )
    counted = re.findall(r"pp-forward: (\S+ k?B) of (\S+ k?B)", result.check().stdout)
    # 4 samples of 64 x 16 numbers: as they are, and with a bit for each and a scale.
    assert counted[0] == ("16.38 kB", "16.38 kB")
    assert counted[-1] == ("528 B", "16.38 kB")
    train(2, _flags(prefix, log_json_file=resumed, save=saved, exit_interval=ITERATIONS - 4))
    train(2, _flags(prefix, log_json_file=resumed, load=saved))
    steps = _steps(uninterrupted)
    assert len(steps) == ITERATIONS
    assert _steps(resumed) == steps
    assert steps[ITERATIONS][0] < steps[1][0] - 0.1


def test_it_is_refused_where_no_sample_returns(tmp_path: Path) -> None:
    flags = _flags(write_documents(tmp_path / "tiny"), sample_order=None)
    result = run_cli(2, ["pretrain_gpt.py", *flags])
    assert result.returncode == 2
    assert "no sample comes twice; use --sample-order fixed" in result.stdout + result.stderr

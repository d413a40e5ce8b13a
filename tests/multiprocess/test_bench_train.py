"""The training benchmark runs, and its table says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.kernels import products
from tests.support.cli import run_cli


@pytest.mark.multiprocess
def test_quick_run(tmp_path: Path) -> None:
    out = tmp_path / "train.json"
    words = ["-m", "benchmarks.train", "--quick", "--no-compiled", "--threads", "1", "--out", str(out)]
    result = run_cli(1, words).check()
    assert "compiled" not in result.stdout
    figures = json.loads(out.read_text())
    assert {row["precision"] for row in figures["single"]} == {"fp32", "bf16"}
    assert [(row["shape"], row["precision"]) for row in figures["experts"]] == [
        ("Mixtral 4 x L2 h128 s32 b2", "fp32"),
        ("Mixtral 4 x L2 h128 s32 b2", "bf16"),
    ]
    for row in (*figures["single"], *figures["experts"]):
        assert row["ratio"] > 0
        assert f"| {row['ratio']:.2f} |" in result.stdout
    assert [row["shape"] for row in figures["programs"]] == ["L2 h128 s32 b2"]
    for row in figures["programs"]:
        assert row["ratio"] > 0
        assert f"| {row['ratio']:.2f} |" in result.stdout
    layers = {row["shape"] for row in figures["products"]}
    assert layers == ({"L2 h128 s32 b2", "Mixtral 4 x L2 h128 s32 b2"} if products.problem() is None else set())
    for row in figures["products"]:
        assert min(row[name] for name in ("ratio", "own_rate", "torchs_rate")) > 0
        assert f"| {row['sizes']} |" in result.stdout
    for row in figures["lengths"]:
        assert row["half_length_seconds"] > 0
        assert f"| {row['ratio']:.2f} |" in result.stdout
    assert [row["kind"] for row in figures["kinds"]] == ["bert", "t5"]
    for row in figures["kinds"]:
        assert row["seconds"] > 0
        assert f"| {row['ratio']:.2f} |" in result.stdout
    assert [row["layout"] for row in figures["parallel"]] == [
        "tensor-parallel 2",
        "pipeline 2, two micro-batches",
        "data-parallel 2",
        "data-parallel 2, sharded optimizer",
    ]

"""Ranks that were started differently end at once, all with an error that names the first difference."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

import pytest

from megatron.training.pretrain import main
from tests.support.corpus import tiny_flags, write_documents
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.multiprocess


def _run(flags_of: list[list[str]], variables: list[dict[str, str]] | None = None) -> tuple[int, str, str, float]:
    """Status, output, errors and seconds of ``pretrain_gpt.py`` on this rank, with its own flags."""
    import os

    rank = int(os.environ["RANK"])
    os.environ.update(variables[rank] if variables else {})
    out, err = io.StringIO(), io.StringIO()
    started = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(flags_of[rank])
    return status, out.getvalue(), err.getvalue(), time.monotonic() - started


def _refused(flags_of: list[list[str]], variables: list[dict[str, str]] | None = None) -> str:
    """Error message of rank 0 when every rank refuses."""
    results = run_ranks(len(flags_of), _run, flags_of, variables, init=False)
    assert [status for status, *_ in results] == [2] * len(flags_of)
    assert all("iteration" not in out for _, out, _, _ in results)
    assert max(seconds for *_, seconds in results) < 20
    errors, *silent = [err for _, _, err, _ in results]
    assert silent == [""] * len(silent)
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    return errors


DIFFERENT: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "layers": (
        {"pipeline_model_parallel_size": 2, "num_layers": 4},
        {"pipeline_model_parallel_size": 2, "num_layers": 2},
        "--num-layers is 4 on rank 0 and 2 on rank 1",
    ),
    "bf16": ({}, {"bf16": True}, " on rank 0 and True on rank 1"),
    "codec": (
        {"pipeline_model_parallel_size": 2, "compress": ["pp-forward=fixpoint,bits=4"]},
        {"pipeline_model_parallel_size": 2},
        "--compress is pp-forward=fixpoint,bits=4 on rank 0 and empty on rank 1",
    ),
    "save": ({"save": "{folder}/a"}, {}, "/a on rank 0 and not given on rank 1"),
    "a flag that one cannot read": ({}, {"lr": "fast"}, "rank 1: --lr: 'fast' is not a number"),
    "a setting that one refuses": ({}, {"num_attention_heads": 3}, "rank 1: --hidden-size 16 is not a multiple"),
    "a setting that the first refuses": ({"num_attention_heads": 3}, {}, "error: --hidden-size 16 is not a multiple"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_flag_on_one_rank_is_named(prefix: Path, tmp_path: Path, name: str) -> None:
    *changes, says = DIFFERENT[name]
    flags = [[word.replace("{folder}", str(tmp_path)) for word in tiny_flags(prefix, **each)] for each in changes]
    assert says in _refused(flags)
    assert list(tmp_path.iterdir()) == []


def test_other_data_at_the_same_path_are_named(prefix: Path, tmp_path: Path) -> None:
    """Paths may differ, as copies on the disks of machines do; contents may not."""
    other = write_documents(tmp_path / "other", seed=1)
    errors = _refused([tiny_flags(prefix), tiny_flags(other)])
    assert "the .bin file of dataset 1 of --data-path is " in errors
    missing = _refused([tiny_flags(prefix), tiny_flags(tmp_path / "none")])
    assert "and unreadable (No such file or directory) on rank 1" in missing


def test_copies_of_the_data_and_other_logs_are_alike(prefix: Path, tmp_path: Path) -> None:
    copy = write_documents(tmp_path / "copy")
    flags = [
        tiny_flags(prefix, train_iters=1, log_json_file=tmp_path / "a.jsonl", num_workers=1, local_rank=0),
        tiny_flags(copy, train_iters=1, log_txt_file=tmp_path / "b.txt", num_workers=0, local_rank=1),
    ]
    results = run_ranks(2, _run, flags, init=False)
    assert [status for status, *_ in results] == [0, 0]


def test_worlds_of_two_sizes_are_named(prefix: Path) -> None:
    errors = _refused([tiny_flags(prefix)] * 2, [{"WORLD_SIZE": size} for size in ("2", "4")])
    assert "WORLD_SIZE is 2 on rank 0 and 4 on rank 1" in errors


def test_two_processes_of_one_rank_are_named(prefix: Path) -> None:
    errors = _refused([tiny_flags(prefix, global_batch_size=3)] * 3, [{}, {"RANK": "1"}, {"RANK": "1"}])
    assert "two processes were started as rank 1" in errors

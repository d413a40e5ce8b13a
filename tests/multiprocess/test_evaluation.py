"""Tasks and sweeps of checkpoints on several ranks: the figures of a single process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.distributed.layout import Layout
from megatron.distributed.topology import build_topology
from megatron.evaluation import continuation, lambada, wikitext
from megatron.inference.model import load_model
from tests.support.cli import run_cli
from tests.support.corpus import tiny_flags, write_documents
from tests.support.events import read_events
from tests.support.spawn import run_ranks
from tests.support.train import train
from tests.unit.convert.support import MODELS, saved_model

pytestmark = pytest.mark.multiprocess


def _lines(root: Path, folder: Path, layout: Layout | None) -> list[str]:
    """Result lines of all tasks on this rank."""
    topology = None if layout is None else build_topology(layout, torch.device("cpu"))
    model = load_model(root, topology=topology)
    text, lines = str(folder / "text"), str(folder / "lines")
    return [
        wikitext.evaluate(model, *wikitext.read_text(text), text, 7, 3),
        lambada.evaluate(model, lambada.read_texts(lines), lines, True, 3),
        continuation.evaluate(model, lambada.read_texts(lines), lines, continuation.QuestionOptions(9, 6, 5, 3), 4),
    ]


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(pp=2, dp=2)], ids=["tp2 pp2", "pp2 dp2"])
def test_tasks_do_not_depend_on_the_layout(layout: Layout, tmp_path: Path) -> None:
    saved = saved_model(tmp_path / "saved", MODELS["gpt2"], layers=4)
    rows = np.random.default_rng(3).integers(0, 96, (9, 12)).tolist()
    (tmp_path / "text").write_text(" ".join(str(token) for row in rows for token in row))
    lines = [json.dumps({"text": " ".join(map(str, row))}) for row in rows]
    (tmp_path / "lines").write_text("\n".join(lines))
    alone = _lines(saved, tmp_path, None)
    assert "WIKITEXT103" in alone[0]
    assert "LAMBADA" in alone[1]
    assert "CONTINUATION" in alone[2]
    assert run_ranks(4, _lines, saved, tmp_path, layout) == [alone] * 4


def test_a_sweep_has_the_losses_of_training_and_resumes(tmp_path: Path) -> None:
    prefix, saved, log = write_documents(tmp_path / "tokens"), tmp_path / "saved", tmp_path / "log.jsonl"
    saving = {"save": saved, "save_interval": 2, "eval_interval": 2, "eval_iters": 3, "log_json_file": log}
    train(1, tiny_flags(prefix, num_layers=4, **saving))
    sweep = ["val_check_gpt.py", "--load", str(saved)]
    done = run_cli(4, [*sweep, "--pipeline-model-parallel-size", "2", "--first", "4"]).check()
    assert "written to" in done.stdout
    sweep_losses = json.loads((saved / "val_check.json").read_text())
    assert sweep_losses["val_iters"] == [4, 6]
    # Training draws other samples at every evaluation; its first evaluation has the sweep's.
    losses = [event["lm_loss"] for event in read_events(log, "validation")]
    run_cli(1, sweep).check()
    again = json.loads((saved / "val_check.json").read_text())
    assert again["val_iters"] == [2, 4, 6]
    assert again["val_lmloss"][1:] == sweep_losses["val_lmloss"]
    assert again["val_lmloss"][0] == pytest.approx(losses[0], rel=1e-5)
    assert again["val_lmloss_ppl"] == pytest.approx(np.exp(again["val_lmloss"]).tolist())
    assert len(again["val_checkpoints"]) == 3
    # Known losses stay when a sweep covers only a part, with the settings that they belong to.
    run_cli(1, [*sweep, "--last", "2"]).check()
    assert json.loads((saved / "val_check.json").read_text()) == again
    other = run_cli(1, [*sweep, "--eval-samples", "4"])
    assert other.returncode == 2
    assert "other samples" in other.stderr
    shard = next((saved / "iter_0000004").glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:100])
    partly = run_cli(1, sweep).check()
    assert "left out, since files are missing or damaged: iterations 4" in partly.stdout
    alone = run_cli(1, [*sweep, "--first", "4", "--last", "4"])
    assert alone.returncode == 2
    assert "files of 4 are missing or damaged" in alone.stderr
    old = [
        "pretrain_gpt.py",
        "--num-layers",
        "2",
        "--get_val_ppls",
        "--src_ckpt_path",
        str(saved),
        "--val_start_iteration",
        "2",
    ]
    old += ["--val_target_iteration", "6", "--val_ckpt_interval", "4", "--eval-iters", "3"]
    old += ["--val_ppls_save_path", str(tmp_path), "--experiment_name", "mine"]
    assert "--get-val-ppls is known but has no effect here" in run_cli(1, old).check().stderr
    mine = json.loads((tmp_path / "mine.json").read_text())
    assert mine["val_iters"] == [2, 6]
    assert mine["val_lmloss"] == again["val_lmloss"][::2]
    none = run_cli(1, [*sweep, "--first", "7"])
    assert none.returncode == 2
    assert "there are 2, 6" in none.stderr

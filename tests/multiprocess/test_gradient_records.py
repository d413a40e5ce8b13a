"""--log-gradients over stages, and the picture of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.corpus import tiny_flags, write_documents
from tests.support.events import read_events
from tests.support.train import train
from tools.plot_grad_distribution import main

pytestmark = pytest.mark.multiprocess


def test_every_stage_is_recorded_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "new" / "gradients.png"
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"),
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        train_iters=6,
        log_gradients=True,
        log_gradients_interval=2,
        log_gradients_density=0.1,
        log_gradients_bins=8,
        log_json_file=log,
    )
    train(4, flags)
    events = read_events(log, "gradients")
    assert [event["iteration"] for event in events] == [2, 4, 6]
    names = events[-1]["parameters"].keys()
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"0", "1"}
    assert all("kept" not in figures for figures in events[0]["parameters"].values())
    for figures in events[-1]["parameters"].values():
        assert 0.1 <= figures["energy"] <= 1.0
        assert 0.0 <= figures["kept"] <= 1.0
        assert len(figures["places"]) == 8
    assert main([str(log), "-o", str(out), "--places", str(tmp_path / "places.png")]) == 0
    assert (tmp_path / "places.png").read_bytes()[:4] == b"\x89PNG"
    assert "| mlp.dense_h_to_4h | 0." in capsys.readouterr().out
    assert out.read_bytes()[:4] == b"\x89PNG"


def test_a_file_that_cannot_be_drawn_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain.jsonl").write_text('{"kind": "train", "iteration": 1}\n')
    for name, message in (("none.jsonl", "No such file"), ("plain.jsonl", "no records of gradients; run with --log-g")):
        assert main([str(tmp_path / name), "-o", str(tmp_path / "x.png")]) == 2
        assert message in capsys.readouterr().err

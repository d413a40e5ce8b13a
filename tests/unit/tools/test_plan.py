"""The planner's command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.planner.support import CLUSTER, small_run
from tools.plan import main
from tools.planner.cluster import read_cluster, write_cluster


def _files(folder: Path, specs: tuple[str, ...] = ()) -> list[str]:
    config, cluster = folder / "run.yaml", folder / "cluster.yaml"
    config.write_text(small_run(specs=specs, parallel={"pipeline_model_parallel_size": 2}).to_yaml())
    cluster.write_text(write_cluster(CLUSTER))
    return ["--config", str(config), "--cluster", str(cluster)]


def test_a_run_is_predicted_and_faster_ones_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*_files(tmp_path), "--specs", "", "--specs", "dp-grad=fixpoint,bits=4", "--top", "2"]
    assert main([*words, "--json", str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr().out
    assert "the run as it is, on c:" in shown
    assert "tp 1, pp 2, dp 4, 8 x 1, 1f1b" in shown
    assert "dp-grad: " in shown
    assert "the fastest of " in shown
    assert "--tensor-model-parallel-size" in shown
    assert "the runner-up is " in shown
    written = json.loads((tmp_path / "plan.json").read_text())
    assert len(written) == 3
    assert written[1]["seconds"] <= written[2]["seconds"]
    assert {"seconds", "parts", "memory", "sent", "mfu", "choice"} <= written[0].keys()


def test_the_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_files(tmp_path, ("pp-forward=fixpoint,bits=4",)), "--no-search", "--gpus", "4"]) == 0
    shown = capsys.readouterr().out
    assert "tp 1, pp 2, dp 2" in shown
    assert "pp-forward=fixpoint,bits=4" in shown
    assert "fastest" not in shown


def test_a_run_of_gpus_is_planned_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = _files(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(config.read_text().replace("distributed_backend: gloo", "distributed_backend: nccl"))
    assert "nccl" in config.read_text()
    assert main([*words, "--top", "1", "--specs", ""]) == 0
    assert "the fastest of " in capsys.readouterr().out


def test_the_runs_own_choice_is_among_the_searched_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = _files(tmp_path)
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
    run = small_run(training={"micro_batch_size": 32, "global_batch_size": 32}, parallel=sizes)
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert main([*words, "--specs", "", "--top", "1000", "--json", str(tmp_path / "plan.json")]) == 0
    given, *found = json.loads((tmp_path / "plan.json").read_text())
    assert found[0]["seconds"] <= given["seconds"]
    assert any(one["choice"]["micro_batch"] == 32 for one in found)


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = _files(tmp_path)
    (tmp_path / "cluster.yaml").write_text("gpus: 8\ndevice: {memory_gib: 0.0001}\n")
    assert main([*words, "--no-search"]) == 0
    assert "it does not fit" in capsys.readouterr().out


def test_measuring_fills_the_file_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = _files(tmp_path, ("dp-grad=powersgd,rank=2",))
    assert main([*words, "--measure", "--no-search"]) == 0
    measured = read_cluster(tmp_path / "cluster.yaml")
    assert (measured.gpus, measured.gpus_per_node, measured.across) == (8, 4, CLUSTER.across)
    assert measured.device.peak_tflops != CLUSTER.device.peak_tflops
    assert measured.device.memory_gib == CLUSTER.device.memory_gib
    assert {"layer forward", "head backward", "optimizer", "coding dp-grad=powersgd,rank=2"} <= set(
        measured.corrections
    )
    assert "measured; written to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--gpus", "3"], "does not divide the 3 processes"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--cluster", "none.yaml"], "none.yaml"),
        (["--specs", "dp-grad=zip"], "no compressor is named 'zip'"),
        (["--config", "block.yaml"], "--recompute-method block"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    change: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    (tmp_path / "block.yaml").write_text(small_run(recompute=block).to_yaml())
    assert (
        main([*_files(tmp_path), *(word.replace("block.yaml", str(tmp_path / "block.yaml")) for word in change)]) == 2
    )
    error = capsys.readouterr().err
    assert error.startswith("plan: error: ")
    assert says in error
    assert error.count("\n") == 1


def test_counts_are_positive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*_files(tmp_path), "--top", "0"])
    assert "--top 0: give at least 1" in capsys.readouterr().err

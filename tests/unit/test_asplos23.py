"""The reports of ASPLOS23/ on malformed logs, and its runner's files and refusals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ASPLOS23 import run as runner
from ASPLOS23.experiments import names_in, read_experiment, read_model
from ASPLOS23.progress import run_shown
from ASPLOS23.run import main

_COMM = {"dp-grad": {"raw_bytes": 2e6, "wire_bytes": 1e6, "coded_s": 0.1, "waited_s": 0.2}, "control": {}}
_TRAIN = {"lm_loss": 4.0, "seconds_per_iteration": 1.0, "memory_bytes": 5e6, "comm": _COMM}
_PROBE = {"cosine_sim": [0.1, 0.2], "error_avg": [0.1, 0.1], "acti_delta_avg": [0.1, 0.1]}


def _write_log(out: Path, experiment: str, scheme: str, **changed: Any) -> Path:
    """Write a log of three iterations with changed fields; fields that are "none" are left out."""
    events: list[dict[str, Any]] = []
    for iteration in (1, 2, 3):
        events.append({"kind": "train", "iteration": iteration, **_TRAIN})
        events.append({"kind": "validation", "iteration": iteration, "lm_loss": 4.5})
        events.append({"kind": "orthogonality", "iteration": iteration, **_PROBE})
    for event in events:
        event.update({name: value for name, value in changed.items() if name in event})
    events = [{name: value for name, value in event.items() if value != "none"} for event in events]
    path = out / experiment / "toy" / scheme / "log.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def _report(out: Path, experiment: str) -> int:
    return main([experiment, "--model", "toy", "--report", "--out", str(out)])


@pytest.mark.parametrize(
    ("changed", "row"),
    [
        ({}, "| CB | 3 | 4.0000 | 4.0000 | 1.000 | 2.00 | 1.000 |"),
        ({"lm_loss": None}, "| CB | 3 | nan | nan | 1.000 | 2.00 | 1.000 |"),
        ({"lm_loss": "none"}, "| CB | 3 |  |  | 1.000 | 2.00 | 1.000 |"),
        ({"comm": "none"}, "| CB | 3 | 4.0000 | 4.0000 |  |  |"),
        ({"comm": {}}, "| CB | 3 | 4.0000 | 4.0000 | 0.000 |  |"),
    ],
)
def test_a_diverged_run_is_reported(
    changed: dict[str, Any], row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_log(tmp_path, "functionality", "CB", **changed)
    assert _report(tmp_path, "functionality") == 0
    assert row in capsys.readouterr().out


@pytest.mark.parametrize(
    ("experiment", "changed", "row"),
    [
        ("tbl2", {"lm_loss": None}, "| CB | 3 | nan | nan | 3.47e-05 |"),
        ("tbl2", {"lm_loss": "none", "seconds_per_iteration": None}, "| CB | 3 |  |  |  |"),
        ("fig10", {"comm": "none"}, "| CB | 1.0000 | 1.0000 to 1.0000 |  |  | 1.00 |"),
        ("fig10", {"seconds_per_iteration": None}, "| CB |  |  |  | 0.1000 | 0.2000 |  |"),
        ("fig11", {"cosine_sim": [None, 0.3]}, "| CB-ALL | +0.3000 | 0.3000 |"),
        ("fig11", {"cosine_sim": [None, None]}, "| CB-ALL | +nan | nan | 1.00e-01 |"),
        ("fig12", {"memory_bytes": None}, "| CB |  |  |  |"),
        ("fig12", {"memory_bytes": "none"}, "| CB |  |  |  |"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_missing_figures_leave_cells_empty(
    experiment: str, changed: dict[str, Any], row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheme = "CB-ALL" if experiment == "fig11" else "CB"
    _write_log(tmp_path, experiment, scheme, **changed)
    assert _report(tmp_path, experiment) == 0
    assert row in capsys.readouterr().out
    assert (tmp_path / experiment / "toy" / "figure.png").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lm_loss": "much"}, "log.jsonl:1: lm_loss: 'much' is not a number"),
        ({"iteration": "none"}, "log.jsonl:7: iteration is missing"),
        ({"comm": None}, "log.jsonl:1: comm is missing"),
        ({"comm": {"dp-grad": {"raw_bytes": []}}}, "jsonl:7: comm dp-grad: raw_bytes: expected a number, not a list"),
    ],
)
def test_a_malformed_record_is_named(
    changed: dict[str, Any], message: str, tmp_path: Path, error_line: Callable[[], str]
) -> None:
    _write_log(tmp_path, "functionality", "CB", **changed)
    assert _report(tmp_path, "functionality") == 1
    assert message in error_line()


def _record_commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands that would start."""
    started: list[list[str]] = []

    def note(words: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        started.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(runner.subprocess, "run", note)
    return started


def test_data_is_made_when_a_run_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = _record_commands(monkeypatch)
    words = ["tbl2", "--model", "toy", "--scheme", "CB", "--out", str(tmp_path / "out")]
    for how in ([], ["--print"]):
        assert main([*words, *how]) == 0
    assert f"--data-path {tmp_path / 'out' / 'data' / 'toy960_document'}" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert not started
    assert main([*words, "--slurm"]) == 0
    assert len(started) == 1
    assert {path.name for path in (tmp_path / "out" / "data").iterdir()} == {
        "toy960_document.bin",
        "toy960_document.idx",
    }


def test_the_kernels_are_measured_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = _record_commands(monkeypatch)
    for how in ([], ["--print"]):
        assert main(["fig14", *how, "--out", str(tmp_path / "out"), "--", "--quick"]) == 0
        printed = capsys.readouterr().out
        assert printed == f"python -m benchmarks.kernels --out {tmp_path / 'out' / 'fig14'} --quick\n"
    assert not started
    assert not (tmp_path / "out").exists()
    assert main(["fig14", "--local", "--out", str(tmp_path / "out"), "--", "--quick"]) == 0
    assert started[0][1:] == ["-m", "benchmarks.kernels", "--out", str(tmp_path / "out" / "fig14"), "--quick"]


@pytest.mark.parametrize(
    "words", [["--slurm"], ["--lsf"], ["--report"], ["--model", "toy"], ["--scheme", "CB"], ["--data-path", "x"]]
)
def test_the_kernels_need_no_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_line: Callable[[], str]
) -> None:
    started = _record_commands(monkeypatch)
    assert main(["fig14", *words, "--out", str(tmp_path / "out")]) == 1
    assert f"{words[0]} is not for fig14" in error_line()
    assert not started


@pytest.mark.parametrize(
    "words",
    [
        ["fig14", "--local"],
        ["tbl2", "--local"],
        ["tbl2", "--model", "335M", "--data-path", "x", "--vocab-file", "v", "--merge-file", "m", "--slurm"],
    ],
)
def test_an_unwritable_folder_is_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_line: Callable[[], str]
) -> None:
    started = _record_commands(monkeypatch)
    (tmp_path / "file").write_text("")
    assert main([*words, "--out", str(tmp_path / "file" / "out")]) == 1
    assert "Not a directory; give --out a folder that can be written" in error_line()
    assert not started


def test_an_unwritable_report_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_log(tmp_path, "functionality", "CB")
    (tmp_path / "functionality" / "toy" / "report.md").mkdir()
    assert _report(tmp_path, "functionality") == 1
    assert "report.md: Is a directory; give --out a folder that can be written" in capsys.readouterr().err


@pytest.mark.parametrize("kinds", [("train", "validation", "orthogonality"), ("train",)])
@pytest.mark.filterwarnings("error")
def test_every_experiment_has_a_report(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Also when only training has happened yet."""
    for name in names_in("experiments"):
        log = _write_log(tmp_path, name, read_experiment(name).schemes[-1])
        lines = [line for line in log.read_text().splitlines() if json.loads(line)["kind"] in kinds]
        log.write_text("\n".join(lines))
        assert _report(tmp_path, name) == 0


def test_a_local_run_shows_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        f" iteration {number:8d}/      40 | consumed samples: {number:12d} | lm loss: {9 - number / 10:.6E} |"
        for number in range(1, 41)
    ]
    script = f"print('noise\\n' + '\\n'.join({lines!r}))"
    status = run_shown([sys.executable, "-c", script], os.environ, tmp_path, tmp_path / "log", "fig10 toy CB")
    assert status == 0
    first, *progress, last = capsys.readouterr().out.splitlines()
    assert first == "fig10 toy CB: starting"
    assert progress == [f"fig10 toy CB: iteration {n} of 40, lm loss {9 - n / 10:.4f}" for n in range(4, 41, 4)]
    assert re.fullmatch(r"fig10 toy CB: 40 iterations in \d+ s", last)
    assert (tmp_path / "log").read_text().splitlines() == ["noise", *lines]


def test_a_terminal_gets_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    script = "print(' iteration 1/ 2 | x | lm loss: 3.0E+00 |\\n iteration 2/ 2 | x | lm loss: 2.5E+00 |')"
    assert run_shown([sys.executable, "-c", script], os.environ, tmp_path, tmp_path / "log", "fig10 toy CB") == 0
    printed = capsys.readouterr()
    assert "fig10 toy CB: 100%" in printed.err
    assert "loss=2.5000" in printed.err
    assert "iteration 1 of 2" not in printed.out


def test_a_failed_local_run_shows_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "run_shown", lambda words, env, cwd, log, *_: log.write_text("error: it broke\n") and 2)
    assert main(["fig10", "--local", "--scheme", "CB", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "CB: " in error
    assert "ended with exit status 2; everything it said is in " in error
    assert "error: it broke" in error


def _validated(out: Path, scheme: str, losses: dict[int, float], end: float | None) -> None:
    """A log with evaluations during training, and a log of other samples at iteration 3."""
    path = _write_log(out, "tbl2", scheme, lm_loss=None)
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["kind"] == "train"]
    events: list[dict[str, Any]] = [
        {"kind": "validation", "iteration": iteration, "lm_loss": loss, "samples": None}
        for iteration, loss in losses.items()
    ]
    if end is not None:
        events.append({"kind": "validation", "iteration": 3, "lm_loss": end, "samples": 64})
        events.append({"kind": "test", "iteration": 3, "lm_loss": 9.0, "samples": 64})
    path.write_text("\n".join([*lines, *map(json.dumps, events)]))


@pytest.mark.parametrize(
    ("cb", "end", "head", "rows"),
    [
        ({2: 4.5, 3: 4.3}, 4.4, "validation loss at the end, iteration 3", ("4.2000", "4.4000")),
        ({2: 4.5, 3: 4.3}, None, "validation loss at iteration 3", ("4.1000", "4.3000")),
        ({2: 4.5}, None, "validation loss at iteration 2", ("4.4000", "4.5000")),
        ({}, None, "validation loss at the end, iteration 3", ("4.2000", "")),
        ({7: 4.0}, None, "validation loss", ("", "")),
    ],
)
def test_schemes_are_compared_on_the_same_samples(
    cb: dict[int, float],
    end: float | None,
    head: str,
    rows: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _validated(tmp_path, "Baseline", {2: 4.4, 3: 4.1}, 4.2)
    _validated(tmp_path, "CB", cb, end)
    assert main(["tbl2", "--model", "toy", "--scheme", "Baseline,CB", "--report", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"| {head} |" in printed
    for scheme, loss in zip(("Baseline", "CB"), rows, strict=True):
        assert f"| {scheme} | 3 | {loss} |" in printed


def _printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_the_functionality_check_is_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Published for 335M: TP 2 x PP 2 on eight devices."""
    printed = _printed(["functionality", "--model", "335M", "--scheme", "CB-FE-SC"], capsys)
    assert "python tools/launch.py --nproc-per-node 8 pretrain_gpt.py" in printed
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 " in printed
    # The first three of two stages are both.
    assert "dp-grad=powersgd,rank=128,stages=first:2" in printed
    assert "FIRST_NODE" not in printed


def test_runs_of_several_nodes_are_printed_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    printed = _printed(["fig10", "--model", "8.3B", "--scheme", "CB-FE-SC"], capsys)
    assert "# CB-FE-SC, on each of 16 nodes; FIRST_NODE: one of them\n" in printed
    assert (
        "python tools/launch.py --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500"
        in printed
    )
    assert "stages=first:3" in printed
    printed = _printed(["fig10", "--model", "8.3B", "--scheme", "CB", "--replicas", "2"], capsys)
    assert "python tools/launch.py --nnodes 8 --nproc-per-node 8 " in printed
    assert main(["fig10", "--model", "8.3B", "--replicas", "0"]) == 1
    assert capsys.readouterr().err == "error: --replicas 0: give at least 1\n"


@pytest.mark.parametrize("experiment", names_in("experiments"))
@pytest.mark.parametrize("model", names_in("models"))
def test_every_case_has_gradients_to_average(experiment: str, model: str) -> None:
    """With a single replica, FE and SC would send the same as schemes without them."""
    assert read_model(model, read_experiment(experiment).layouts.get(model)).replicas > 1

"""Times of schemes that take turns on this machine, from invented seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ASPLOS23.experiments import read_experiment
from ASPLOS23.run import main

_NOTE = "Links inside one machine are not shaped"


def _write_seconds(log: Path, seconds: Sequence[float]) -> None:
    """Write a log of two slow warm-up iterations, then of these seconds."""
    log.parent.mkdir(parents=True, exist_ok=True)
    comm = {"dp-grad": {"raw_bytes": 2e6, "wire_bytes": 1e6, "coded_s": 0.01, "waited_s": 0.02}}
    events = [
        {"kind": "train", "iteration": number, "lm_loss": 4.0, "seconds_per_iteration": second, "comm": comm}
        for number, second in enumerate([90.0, 80.0, *seconds], 1)
    ]
    log.write_text("".join(json.dumps(event) + "\n" for event in events))


def _report(out: Path, rounds: Mapping[str, Sequence[float]]) -> str:
    """The report on rounds of these seconds."""
    folder = out / "fig10" / "toy"
    for scheme, seconds in rounds.items():
        for number, second in enumerate(seconds, 1):
            _write_seconds(folder / scheme / f"round{number}" / "log.jsonl", [second, second, 9 * second])
    assert main(["fig10", "--model", "toy", "--scheme", ",".join(rounds), "--report", "--out", str(out)]) == 0
    assert (folder / "figure.png").exists()
    return (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("baseline", "scheme", "row"),
    [
        # The noise of runs minutes apart: medians 2.94 times apart, ranges that overlap.
        ([2.94, 2.94, 0.9], [1.0, 1.0, 1.0], "| CB | 1.0000 | 1.0000 to 1.0000 | 0.9700 | 0.0100 | 0.0200 | overlap |"),
        ([2.0, 2.0, 2.0], [1.0, 1.1, 0.9], "| CB | 1.0000 | 0.9000 to 1.1000 | 0.9700 | 0.0100 | 0.0200 | 2.00 |"),
        ([0.5, 0.4, 0.6], [1.0, 0.8, 1.2], "| CB | 1.0000 | 0.8000 to 1.2000 | 0.9700 | 0.0100 | 0.0200 | 0.50 |"),
        ([1.0, 2.0, 2.0], [1.0, 0.8, 0.9], "| CB | 0.9000 | 0.8000 to 1.0000 | 0.8700 | 0.0100 | 0.0200 | overlap |"),
    ],
)
def test_a_speedup_needs_disjoint_ranges(baseline: list[float], scheme: list[float], row: str, tmp_path: Path) -> None:
    text = _report(tmp_path, {"Baseline": baseline, "CB": scheme})
    head = (
        "| scheme | s / iteration | least to most | compute | coding | exposed: dp-grad | times as fast as Baseline |"
    )
    assert head in text
    assert row in text
    first = next(line for line in text.splitlines() if line.startswith("| Baseline |"))
    assert first.endswith("| 1.00 |")


def test_a_report_of_local_rounds_describes_the_measurement(tmp_path: Path) -> None:
    text = " ".join(_report(tmp_path, {"Baseline": [1.0, 1.0], "CB": [2.0, 2.0]}).split())
    assert "medians of rounds (up to 2), in which the schemes took turns" in text
    assert f"{_NOTE}, so differences are the cost of coding, not of the network." in text
    assert "tools/netlab.py" in text
    tools = Path(__file__).resolve().parents[2] / "tools"
    assert (tools / "netlab.py").exists()


def test_an_unfinished_round_does_not_count(tmp_path: Path) -> None:
    _write_seconds(tmp_path / "fig10" / "toy" / "CB" / "round3" / "log.jsonl", [])
    assert "| CB | 2.0000 | 2.0000 to 2.0000 |" in _report(tmp_path, {"CB": [2.0, 2.0]})


def test_a_single_round_compares_nothing(tmp_path: Path) -> None:
    text = _report(tmp_path, {"Baseline": [3.0], "CB": [1.0]})
    assert "| CB | 1.0000 | 1.0000 to 1.0000 | 0.9700 | 0.0100 | 0.0200 |  |" in text


def test_single_runs_have_the_range_of_their_iterations(tmp_path: Path) -> None:
    """As on a cluster, of whose links nothing is known."""
    folder = tmp_path / "fig10" / "335M"
    _write_seconds(folder / "Baseline" / "log.jsonl", [2.0, 2.0, 1.0])
    _write_seconds(folder / "CB" / "log.jsonl", [1.1, 1.5, 1.2])
    _write_seconds(folder / "CB-FE" / "log.jsonl", [0.5, 0.5, 0.6])
    assert main(["fig10", "--model", "335M", "--report", "--out", str(tmp_path)]) == 0
    text = (folder / "report.md").read_text()
    assert "| CB | 1.2000 | 1.1000 to 1.5000 | 1.1700 | 0.0100 | 0.0200 | overlap |" in text
    assert "| CB-FE | 0.5000 | 0.5000 to 0.6000 | 0.4700 | 0.0100 | 0.0200 | 4.00 |" in text
    assert _NOTE not in text
    assert "With one run of each scheme, the range is that of its iterations" in text


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of the local runs that were started; each took as many seconds as runs had started before it."""
    folders: list[Path] = []

    def run(words: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path, name: str) -> int:
        del words, env, cwd, name
        folders.append(log.parent)
        _write_seconds(log.parent / "log.jsonl", [float(len(folders))])
        return 0

    monkeypatch.setattr("ASPLOS23.run.run_shown", run)
    return folders


def test_schemes_take_turns(tmp_path: Path, started: list[Path]) -> None:
    words = ["fig10", "--local", "--scheme", "Baseline,CB", "--out", str(tmp_path)]
    assert main([*words, "--rounds", "3"]) == 0
    folder = tmp_path / "fig10" / "toy"
    assert started == [folder / scheme / f"round{n}" for n in (1, 2, 3) for scheme in ("Baseline", "CB")]
    text = (folder / "report.md").read_text()
    assert "| Baseline | 3.0000 | 1.0000 to 5.0000 |" in text
    assert "| CB | 4.0000 | 2.0000 to 6.0000 |" in text
    # Rounds of an earlier run do not belong to this run.
    assert main([*words, "--rounds", "2"]) == 0
    assert "| Baseline | 8.0000 | 7.0000 to 9.0000 |" in (folder / "report.md").read_text()
    started.clear()
    assert main(words) == 0
    assert len(started) == 2 * 5


def test_jobs_of_a_cluster_take_the_place_of_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _report(tmp_path, {"CB": [1.0, 1.0]})
    monkeypatch.setattr("ASPLOS23.run.subprocess.run", lambda words, **_: CompletedProcess(words, 0))
    assert main(["fig10", "--model", "toy", "--scheme", "CB", "--out", str(tmp_path), "--print"]) == 0
    logs = tmp_path / "fig10" / "toy" / "CB"
    assert len(list(logs.glob("*/log.jsonl"))) == 2
    assert main(["fig10", "--model", "toy", "--scheme", "CB", "--out", str(tmp_path), "--slurm"]) == 0
    assert not list(logs.glob("*/log.jsonl"))


def test_other_experiments_run_once(tmp_path: Path, started: list[Path]) -> None:
    assert read_experiment("fig12").local_rounds is None
    assert main(["fig12", "--local", "--scheme", "CB", "--out", str(tmp_path)]) == 0
    assert started == [tmp_path / "fig12" / "toy" / "CB"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fig10", "--local", "--rounds", "0"], "--rounds 0: give at least 2"),
        (["fig10", "--local", "--rounds", "1"], "--rounds 1: give at least 2"),
        (["fig12", "--local", "--rounds", "2"], "--rounds is for fig10 --local, whose schemes take turns"),
        (["fig10", "--model", "335M", "--rounds", "2"], "--rounds is for fig10 --local, whose schemes take turns"),
        (["fig14", "--local", "--rounds", "2"], "--rounds is not for fig14"),
    ],
)
def test_impossible_rounds_are_one_line(
    words: list[str], message: str, tmp_path: Path, started: list[Path], error_line: Callable[[], str]
) -> None:
    assert main([*words, "--out", str(tmp_path)]) == 1
    assert message in error_line()
    assert not started

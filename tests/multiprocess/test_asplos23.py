"""Every experiment of ASPLOS23/ at toy size, and the runner's output and submissions."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ASPLOS23.experiments import names_in, read_experiment, read_model
from ASPLOS23.report import breakdown
from ASPLOS23.run import main
from megatron.config.flags import parse_args
from megatron.training.records import read_records
from tests.support.cli import run_cli

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]

REPO = Path(__file__).resolve().parents[2]


def _run_forked(words: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path, name: str) -> int:
    """Calls the program as the launcher does, without it."""
    del env, cwd, name
    ranks, program = int(words[words.index("--nproc-per-node") + 1]), words.index("pretrain_gpt.py")
    done = run_cli(ranks, words[program:])
    log.write_text(done.text())
    return done.returncode


@pytest.mark.parametrize(
    ("experiment", "schemes", "says", "iterations"),
    [
        ("functionality", "CB-FE-SC", "| CB-FE-SC | 10 |", None),
        ("fig10", "CB", "exposed: pp-backward", None),
        ("tbl2", "CB-NON-LEP", "| CB-NON-LEP | 6 |", 6),
        ("fig11", "CB-ALL", "| CB-ALL | ", 6),
        ("fig12", "Baseline", "| Baseline | ", 6),
    ],
)
def test_locally(
    experiment: str,
    schemes: str,
    says: str,
    iterations: int | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if experiment != "functionality":  # shows that the launcher is called correctly
        monkeypatch.setattr("ASPLOS23.run.run_shown", _run_forked)
    rounds = ["--rounds", "2"] if experiment == "fig10" else []
    fewer = ["--", "--train-iters", str(iterations)] if iterations else []
    status = main([experiment, "--local", "--scheme", schemes, "--out", str(tmp_path), *rounds, *fewer])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert says in printed.out
    folder = tmp_path / experiment / "toy"
    assert (folder / "report.md").read_text().startswith("## ")
    assert (folder / "figure.png").exists() == (experiment != "functionality")
    for scheme in schemes.split(","):
        events = read_records(folder / scheme / ("round2" if rounds else "") / "log.jsonl")
        train = [event for event in events if event["kind"] == "train"]
        assert len(train) == (iterations or {"functionality": 10, "fig10": 6}[experiment])
        assert train[-1]["lm_loss"] < train[0]["lm_loss"] - 0.2
        shares = breakdown(events)
        assert 0 < shares["compute"] <= shares["all"]
        comm = train[-1]["comm"]
        assert comm.keys() >= {"embedding", "pp-backward", "pp-forward", "dp-grad"}
        # In the epilogue a quarter of the messages is compressed at the first boundary, without epilogue all of them.
        ratios = {point: figures["raw_bytes"] / figures["wire_bytes"] for point, figures in comm.items()}
        assert (ratios["pp-backward"] > 1.2) == (scheme != "Baseline")
        # A sum of V bytes over four ranks, in place of sums over each two replicas and over the two stages.
        assert ratios["embedding"] == pytest.approx(4 / 3 if "FE" in scheme else 1.0)
        assert (ratios["dp-grad"] > 1.7) == ("SC" in scheme)
    assert main([experiment, "--model", "toy", "--report", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize("model", names_in("models"))
def test_commands_are_runs_that_resolve(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for experiment in names_in("experiments"):
        assert (
            main([experiment, "--model", model, "--data-path", "x", "--out", str(tmp_path), "--", "--seed", "5"]) == 0
        )
        commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("python tools/launch.py")]
        assert commands
        for command in commands:
            words = shlex.split(command)
            flags = words[words.index("pretrain_gpt.py") + 1 :]
            nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
            ranks = nodes * int(words[words.index("--nproc-per-node") + 1])
            assert ranks == read_model(model, read_experiment(experiment).layouts.get(model)).ranks
            config = parse_args(flags).config.resolve(ranks)
            assert config.training.seed == 5


def _recorder(folder: Path, name: str) -> Path:
    """A stand-in for a command that writes down how it was called."""
    path = folder / name
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$0" "$@" "RUN_DIR=$RUN_DIR" "FLAGS=$FLAGS" >> {folder}/calls\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("how", "command"), [("slurm", "sbatch"), ("lsf", "bsub")])
def test_jobs_are_submitted(how: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _recorder(tmp_path, command)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["fig10", "--model", "335M", "--scheme", "CB,CB-FE", "--out", str(tmp_path / "o")]
    files = ["--data-path", "d", "--vocab-file", "v.json", "--merge-file", "m.txt"]
    assert main([*words, *files, f"--{how}"]) == 0
    calls = (tmp_path / "calls").read_text()
    assert calls.count(f"/{command}\n") == 2
    assert f"RUN_DIR={tmp_path / 'o' / 'fig10' / '335M' / 'CB-FE'}" in calls
    assert "embedding=fused" in calls
    assert ("--nodes=16" if how == "slurm" else "-n\n16") in calls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fig13"], "fig13: the experiments are fig10, fig11"),
        (["fig10"], "--model is needed: 2.5B, 335M, 8.3B, toy"),
        (["fig10", "--model", "1B"], "--model 1B: the models are"),
        (["fig10", "--model", "toy", "--scheme", "XX"], "--scheme XX: the schemes are Baseline, CB"),
        (["fig10", "--model", "335M", "--slurm"], "335M needs --data-path, --vocab-file, --merge-file;"),
        (["fig10", "--model", "335M", "--lsf", "--data-path", "d"], "335M needs --vocab-file, --merge-file;"),
        (["fig10", "--model", "335M", "--report"], "no logs in"),
    ],
)
def test_impossible_experiments_are_refused_in_a_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_commands_can_be_seen_before_there_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fig10", "--model", "335M", "--scheme", "CB-FE-SC", "--print"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "--data-path DATA_PATH --vocab-file VOCAB_FILE --merge-file MERGE_FILE" in printed
    assert [line for line in printed.splitlines() if line.startswith("#")] == [
        "# DATA_PATH, VOCAB_FILE, MERGE_FILE: --data-path, --vocab-file, --merge-file put yours in",
        "# CB-FE-SC, on each of 16 nodes; FIRST_NODE: one of them",
    ]  # fmt: skip
    assert main([*words, "--data-path", "d", "--", "--vocab-file=v.json", "--merge-file", "m.txt"]) == 0
    printed = capsys.readouterr().out
    assert "_FILE" not in printed
    assert "--data-path d" in printed
    assert main([*words, "--data-path", "d", "--", "--tokenizer-type", "HuggingFaceTokenizer"]) == 0
    assert "_FILE" not in capsys.readouterr().out


def test_a_report_names_runs_without_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "fig12" / "335M" / "CB"
    folder.mkdir(parents=True)
    event = {"kind": "train", "iteration": 1, "lm_loss": 1.0, "memory_bytes": 5e6}
    (folder / "log.jsonl").write_text(json.dumps(event) + "\n")
    assert main(["fig12", "--model", "335M", "--report", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| CB | 5 | +0 | 1.000 |" in printed
    assert "No log yet of Baseline, CB-NON-LEP." in printed

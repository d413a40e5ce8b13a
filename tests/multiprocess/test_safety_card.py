"""A whole safety card of models that hardly train, which goes on where it was killed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import REPO, runs
from benchmarks.safety import run as safety_run
from benchmarks.safety.run import card_folder, main
from benchmarks.safety.settings import SHORT, Size

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]

RUN = runs.run
SPEC = "dp-grad=powersgd,rank=1,error-feedback=off"


def _run_with_a_small_corpus(command: list[str], log: Path, threads: int = 1) -> None:
    """Runs a command; instead of the quickstart's corpus, guides and references of this project are written."""
    if "make_corpus" not in command[0]:
        RUN(command, log, threads)
        return
    folder = Path(command[command.index("--output-dir") + 1])
    folder.mkdir(parents=True)
    for split, pages in (("train", "guides"), ("heldout", "reference")):
        texts = [path.read_text() for path in sorted((REPO / "docs" / pages).glob("*.md"))[:8]]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_a_card_of_tiny_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main_size, sizes = Size(16, 6), (Size(16, 3), Size(16, 6), Size(32, 3))
    tiny = replace(
        SHORT, name="tiny", seeds=2, main=main_size, sizes=sizes, heldout=Size(32, 6), train_bytes=30_000, layers=1,
        places=128, prompts=10, canary_iterations=3, evaluations=2, canary_documents=400,
    )  # fmt: skip
    monkeypatch.setattr(safety_run, "SHORT", tiny)
    monkeypatch.setattr(runs, "run", _run_with_a_small_corpus)
    words = ["--short", "--spec", SPEC, "--output", str(tmp_path)]
    assert main(words) == 0
    planner = safety_run.make_planner(tmp_path, SPEC, tiny)
    folder = card_folder(planner)
    content = json.loads((folder / "card.json").read_text())
    loss = content["loss"]
    percents = [100 * (ours / dense - 1) for ours, dense in zip(loss["losses"], loss["dense_losses"], strict=True)]
    assert loss["percents"] == pytest.approx(percents)
    assert all(percent != 0 for percent in percents)
    assert len(content["law"]["gaps"]) == 4
    assert set(content["canaries"]["exact"]) == {"copy", "reverse", "recall", "sums", "brackets"}
    assert 0 < content["behavior"]["flips"] <= 1
    assert 0 < content["behavior"]["kl"] < content["behavior"]["dense_kl"]
    sent = content["bytes"]
    assert 0 < sent["compressed"]["by_point"]["dp-grad"] < 0.7 * sent["dense"]["by_point"]["dp-grad"]
    for side in sent.values():
        assert side["connections"] > 0.9 * side["ledger"]  # more are gloo's headers, as messages are short
        assert side["interfaces"] > 0.9 * side["ledger"]
    assert content["cost"]["runs"] == 12
    assert content["cost"]["hours"] > content["cost"]["dense_hours"] > 0
    assert "## Flips and KL" in (folder / "card.md").read_text()
    assert (folder / "card.svg").stat().st_size > 10_000
    capsys.readouterr()
    killed = planner.main_runs[1]
    killed.cost_file.unlink()
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "11 of 12 runs are finished" in printed
    assert printed.count(" ...\n") == 1
    assert json.loads((folder / "card.json").read_text())["loss"] == loss

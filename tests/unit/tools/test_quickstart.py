"""The quickstart's tools: a corpus without overlap, a deterministic vocabulary, entropy, stages, logs and summary."""

from __future__ import annotations

import fcntl
import json
import math
import os
import struct
import subprocess
import sys
import termios
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.base.errors import UserError
from megatron.config.flags import parse_args
from megatron.data.indexed import IndexedWriter
from tools.quickstart.make_corpus import write_corpus
from tools.quickstart.process import CommandFailed, run_logged
from tools.quickstart.run import Quickstart
from tools.quickstart.stages import QuickstartStage, digest
from tools.quickstart.summary import Summary, format_summary, summarize
from tools.quickstart.unigram import Unigram, unigram

REPO = Path(__file__).resolve().parents[3]


def make_library(folder: Path, modules: int) -> Path:
    for number in range(modules):
        (folder / f"module{number}.py").write_text(f'"""Module {number}."""\n\nvalue = {number}\n')
    for left_out in ("test/test_a.py", "pkg/tests/b.py", "site-packages/c.py", "encodings/cp1.py"):
        path = folder / left_out
        path.parent.mkdir(parents=True)
        path.write_text("left_out = True\n")
    (folder / "latin.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    (folder / "broken.py").write_bytes(b"name = '\xe9'\n")
    (folder / "copy_of_latin.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    (folder / "empty.py").write_text("\n")
    return folder


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_corpus_is_deterministic_and_its_splits_share_no_text(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    library = make_library(tmp_path / "library", 200)
    sizes = write_corpus(tmp_path / "a", library)
    write_corpus(tmp_path / "b", library)
    documents = {split: read(tmp_path / "a" / f"{split}.jsonl") for split in ("train", "heldout")}
    for split, records in documents.items():
        name = f"{split}.jsonl"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert sizes[split] == (len(records), sum(len(r["text"].encode()) for r in records))
    texts = {split: {r["text"] for r in records} for split, records in documents.items()}
    assert not texts["train"] & texts["heldout"]
    assert len(documents["train"]) > 10 * len(documents["heldout"]) > 0
    names = {r["name"]: r["text"] for r in documents["train"] + documents["heldout"]}
    assert sum(name.startswith("module") for name in names) == 200
    assert "é" in names["copy_of_latin.py"]
    assert "latin.py" not in names  # its text is a repeat
    assert not {"broken.py", "empty.py"} & set(names)
    assert not any("left_out" in text for text in names.values())
    assert any(name.startswith("help/") for name in names)


def test_a_library_without_held_out_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.quickstart.make_corpus.help_documents", lambda: iter(()))
    (tmp_path / "library").mkdir()
    with pytest.raises(UserError, match="no Python sources"):
        write_corpus(tmp_path / "out", tmp_path / "library")
    assert not list(tmp_path.glob("out/*"))


def write_tokens(prefix: Path, documents: list[list[int]]) -> None:
    with IndexedWriter(prefix, dtype=np.dtype(np.uint16)) as writer:
        for document in documents:
            writer.add_document(document)


def test_unigram_entropy_of_known_distributions(tmp_path: Path) -> None:
    write_tokens(tmp_path / "even", [[0, 1], [2, 3, 0], [1, 2, 3]])
    even = unigram(tmp_path / "even")
    assert even.tokens == 8
    assert even.nats_per_token == pytest.approx(math.log(4))
    write_tokens(tmp_path / "one", [[5, 5, 5]])
    assert unigram(tmp_path / "one") == Unigram(3, 0.0)
    write_tokens(tmp_path / "skewed", [[0] * 3 + [700]])
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram(tmp_path / "skewed").nats_per_token == pytest.approx(expected)


def test_unigram_entropy_of_an_empty_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing"):
        unigram(tmp_path / "missing")


def test_a_stage_runs_again_only_when_something_changed(tmp_path: Path) -> None:
    output = tmp_path / "output"
    calls: list[str] = []

    def stage(key: str) -> QuickstartStage:
        def action() -> None:
            calls.append(key)
            output.write_text(key * len(calls))

        return QuickstartStage("title", tmp_path / "done" / "stamp.json", key, [output], action)

    assert stage("a").run() is not None
    assert stage("a").run() is None
    assert stage("b").run() is not None
    output.write_text("changed by hand")
    assert stage("b").run() is not None
    output.unlink()
    assert stage("b").run() is not None
    (tmp_path / "done" / "stamp.json").write_text("{")
    assert stage("b").run() is not None
    assert calls == ["a", "b", "b", "b", "b"]


def test_a_stage_that_failed_is_not_done(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_text("from before")

    def fail() -> None:
        raise UserError("wrong")

    stage = QuickstartStage("title", tmp_path / "stamp.json", "a", [output], fail)
    for _ in range(2):
        with pytest.raises(UserError):
            stage.run()


def test_digest_distinguishes_different_inputs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a")
    names = [digest("a", "b"), digest("ab"), digest("a"), digest(path), digest({"x": 1}), digest({"x": 2})]
    path.write_text("b")
    names.append(digest(path))
    assert len(set(names)) == len(names)
    assert digest({"x": 1, "y": 2}) == digest({"y": 2, "x": 1})


def test_a_failing_command_shows_its_reason_and_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "import os, sys; print(os.environ['NAME']); sys.exit('error: the disk is full')"
    log = tmp_path / "logs" / "step.log"
    with pytest.raises(CommandFailed) as caught:
        run_logged([sys.executable, "-c", script], log, cwd=tmp_path, env={"NAME": "hello"}, show=True)
    assert str(caught.value) == f"exit code 1 (error: the disk is full); its output: {log}"
    assert sorted(log.read_text().split("\n")) == ["", "error: the disk is full", "hello"]
    assert "hello" in capfd.readouterr().out


def test_a_quiet_command_is_only_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    run_logged([sys.executable, "-c", "print('quiet')"], log, cwd=tmp_path, env={}, show=False)
    assert log.read_text() == "quiet\n"
    assert capfd.readouterr().out == ""


ON_TERMINAL = """
import os, sys
from pathlib import Path
from tools.quickstart.process import run_logged
script = "import os, sys; print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns)"
run_logged([sys.executable, "-c", script], Path(sys.argv[1]), cwd=Path("."), env={}, show=True)
"""


def test_a_command_shown_on_a_terminal_has_its_width(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 123, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-c", ON_TERMINAL, str(log)]
    done = subprocess.run(command, cwd=REPO, env=env, stdin=writer, stdout=writer, stderr=writer, timeout=60)
    os.close(writer)
    output = os.read(reader, 65536)
    os.close(reader)
    assert done.returncode == 0, output
    assert log.read_bytes() == b"True True 123\n"
    assert output == b"True True 123\r\n"


def event(kind: str, iteration: int, **values: Any) -> str:
    return json.dumps({"kind": kind, "iteration": iteration, "time": 0.0, **values}) + "\n"


def test_summary_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(
        event("train", 10, lm_loss=5.0, tokens_per_second=100.0, comm={"dp_grad": {"wire_bytes": 1.0}})
        + event("validation", 10, lm_loss=4.8)
        + event(
            "train",
            20,
            lm_loss=4.0,
            tokens_per_second=300.0,
            comm={"pp_fwd": {"wire_bytes": 2e6}, "pp_bwd": {"wire_bytes": 5e5}},
        )
        + event("validation", 20, lm_loss=4.25)
    )
    summary = summarize(log, Unigram(1000, 6.5))
    assert summary.gain == pytest.approx(2.25)
    assert (summary.iteration, summary.validation_loss, summary.tokens_per_second) == (20, 4.25, 200.0)
    summary.write(tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["gain"] == pytest.approx(2.25)
    text = format_summary(summary, {"loss curve": tmp_path / "loss.png"}, "def f():\n    pass\n")
    for expected in ("4.2500", "6.5000", "2.2500", "200 tokens/s", "2.5 MB per iteration", "500 kB", "loss.png"):
        assert expected in text
    assert "less than" not in text
    poor = Summary(20, 200.0, 5.0, 6.5, 1000, {})
    assert "less than the 1.8" in format_summary(poor, {}, "")


def test_a_log_without_figures_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(event("train", 10, lm_loss=5.0, tokens_per_second=100.0))
    with pytest.raises(UserError, match=r"log\.jsonl: no training and validation"):
        summarize(log, Unigram(1000, 6.5))


def test_validation_reads_the_held_out_text_once(tmp_path: Path) -> None:
    quickstart = Quickstart(tmp_path, 100)
    prefix = quickstart.paths.data("heldout")
    prefix.parent.mkdir(parents=True)
    write_tokens(prefix, [[1] * 10_000, [2] * 10_000])
    arguments = quickstart.train_flags()
    values = dict(pairwise(arguments))
    samples = int(values["--eval-iters"]) * int(values["--global-batch-size"])
    available = 19_999 // int(values["--seq-length"])
    assert available - int(values["--global-batch-size"]) < samples <= available


@pytest.mark.parametrize(("iterations", "warmup"), [(1, "0"), (40, "39"), (500, "40")])
def test_warm_up_is_shorter_than_any_run(iterations: int, warmup: str, tmp_path: Path) -> None:
    quickstart = Quickstart(tmp_path, iterations)
    quickstart.paths.data("heldout").parent.mkdir(parents=True)
    write_tokens(quickstart.paths.data("heldout"), [[1] * 10_000])
    run = parse_args(quickstart.train_flags())
    assert str(run.config.optimizer.lr_warmup_iters) == warmup
    assert not any("more than once" in note for note in run.notes)
    run.resolve(4)


def test_a_run_of_other_settings_is_moved_away(tmp_path: Path) -> None:
    quickstart = Quickstart(tmp_path, 100)
    quickstart._start_over_when_changed()
    (quickstart.paths.run / "checkpoint").write_text("1")
    quickstart._start_over_when_changed()
    assert (quickstart.paths.run / "checkpoint").exists()
    (quickstart.paths.run / "made_from").write_text("something else")
    quickstart._start_over_when_changed()
    assert not (quickstart.paths.run / "checkpoint").exists()
    assert [path.read_text() for path in tmp_path.glob("run.*/checkpoint")] == ["1"]


def test_a_longer_run_is_not_cut_short_by_a_later_call(tmp_path: Path) -> None:
    usual = Quickstart(tmp_path).train_iters
    tracker = Quickstart(tmp_path).paths.tracker
    tracker.parent.mkdir(parents=True)
    for text, expected in [(str(usual - 1), usual), (str(usual + 20), usual + 20), ("no number", usual)]:
        tracker.write_text(text)
        assert Quickstart(tmp_path).train_iters == expected
    assert Quickstart(tmp_path, usual + 7).train_iters == usual + 7

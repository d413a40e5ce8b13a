"""A complete cleaning: its output, its resumption, and the files that it leaves alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.base.atomic import hold_lock
from tests.unit.openwebtext.support import ENGLISH, GERMAN, Refusal, read, write
from tools.openwebtext import find_duplicates, pipeline

WORDS = [f"word{number}" for number in range(3000)]


def test_the_pipeline_from_urls_to_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = random.Random(3)
    sentences = [sentence.strip() + "." for sentence in ENGLISH.split(".") if sentence.strip()]

    def story() -> str:
        words = " ".join(generator.choices(sentences, k=12)).split()
        for index in range(0, len(words), 2):
            words[index] = generator.choice(WORDS[:400])
        return " ".join(words)

    rows = [{"url": f"https://example.org/{number}", "text": story()} for number in range(30)]
    rows += [{"url": f"https://copy.org/{number}", "text": rows[number]["text"]} for number in range(5)]
    rows += [{"url": "https://imgur.com/1", "text": story()}, {"url": "https://de.org/1", "text": GERMAN * 8}]
    urls = tmp_path / "urls"
    urls.mkdir()
    (urls / "all.txt").write_text("\n".join(row["url"] for row in rows) + "\n")
    source, out = write(tmp_path / "pages.jsonl.zst", rows), tmp_path / "out"
    flags = ["--json", source, "--urls", str(urls), "--output-path", str(out), "--workers", "1", "--min-tokens", "50"]
    assert pipeline.main(flags) == 0
    documents = read(out / "train_data.json")
    assert {row["url"] for row in documents} == {f"https://example.org/{number}" for number in range(30)}
    assert [row["adlr_id"] for row in documents] == [f"doc-{n:010d}" for n in range(1, 31)]
    assert [row["url"] for row in documents] != sorted(row["url"] for row in documents)
    assert all("cleaning_key" not in row for row in documents)
    assert {entry.name for entry in out.iterdir()} == {"train_data.json", "report.json"}
    report = json.loads((out / "report.json").read_text())
    assert report["merge"]["counts"]["of URLs that are left out"] == 1
    assert report["cleanup_dataset"]["counts"]["in another language"] == 1
    assert report["remove_group_duplicates"]["counts"]["duplicates"] == 5
    capsys.readouterr()
    assert pipeline.main(flags) == 0
    assert capsys.readouterr().out.count("done before") == len(report)
    # With other settings of a late step, files removed between the steps are made again.
    assert pipeline.main([*flags, "--id-prefix", "owt", "--keep"]) == 0
    assert read(out / "train_data.json")[0]["adlr_id"].startswith("owt")
    capsys.readouterr()
    assert pipeline.main([*flags, "--id-prefix", "x", "--keep"]) == 0
    assert capsys.readouterr().out.count("done before") == len(report) - 1


def test_documents_without_a_unique_url_are_distinguished(tmp_path: Path) -> None:
    generator = random.Random(5)
    texts = [ENGLISH * 4 + " ".join(generator.choices(WORDS, k=300)) for _ in range(4)]
    rows = [
        {"url": "", "text": texts[0]},
        {"url": "", "text": texts[1]},
        {"text": texts[2]},
        {"url": "x", "text": texts[0]},
    ]
    rows += [{"url": "x", "text": texts[3]}, {"url": "\ud800", "text": texts[3]}]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [write(tmp_path / name / "pages.jsonl", rows) for name in ("a", "b")]
    assert pipeline.main(["--json", *paths, "--output-path", str(tmp_path / "out"), "--workers", "1"]) == 0
    documents = read(tmp_path / "out" / "train_data.json")
    assert sorted(row["text"] for row in documents) == sorted(texts)


def test_inputs_are_not_overwritten_and_their_changes_are_noticed(tmp_path: Path, refused: Refusal) -> None:
    source = write(tmp_path / "train_data.json", [{"url": "a", "text": ENGLISH * 8}])
    assert "read and overwritten" in refused(
        pipeline, ["--json", source, "--output-path", str(tmp_path), "--workers", "1"]
    )
    assert len(read(source)) == 1
    task = write(tmp_path / "task", [{"q": "nothing of this is anywhere in the text at all, not one word of it"}])
    flags = ["--json", source, "--output-path", str(tmp_path / "out"), "--workers", "1", "--task-files", task, "q"]
    assert pipeline.main(flags) == 0
    assert len(read(tmp_path / "out" / "train_data.json")) == 1
    write(Path(task), [{"q": ENGLISH}])
    assert pipeline.main(flags) == 0
    assert len(read(tmp_path / "out" / "train_data.json")) == 0
    assert pipeline.main([*flags, "--lambada-path", str(tmp_path / "none")]) == 2


def stories(count: int = 3) -> list[dict[str, Any]]:
    """Documents that all steps keep."""
    generator = random.Random(7)
    return [
        {"url": f"u{number}", "text": ENGLISH * 4 + " ".join(generator.choices(WORDS, k=300))}
        for number in range(count)
    ]


def flags_of(source: str, out: Path, *extra: str) -> list[str]:
    return ["--json", source, "--output-path", str(out), "--workers", "1", *extra]


def test_a_finished_cleaning_removes_only_its_own_files(tmp_path: Path, refused: Refusal) -> None:
    out = tmp_path / "out"
    steps = out / "steps"
    steps.mkdir(parents=True)
    for name in ("mine.txt", "filtered.jsonl.zst", "clean_filtered.jsonl.zst"):
        (steps / name).write_text("precious")
    source = write(tmp_path / "in.jsonl", stories())
    inside = write(steps / "in.jsonl", stories())
    assert "move it" in refused(pipeline, flags_of(inside, out))
    assert len(list(steps.iterdir())) == 4
    assert pipeline.main(flags_of(source, out)) == 0
    assert {entry.name for entry in steps.iterdir()} == {"mine.txt", "in.jsonl"}
    assert len(read(out / "train_data.json")) == 3


@pytest.mark.parametrize("report", ['{"my": "training report"}', '{"my": {"stamp": 1}}', "[1]", '{"merge": 3}', "{"])
def test_a_foreign_report_is_left_alone(report: str, tmp_path: Path, refused: Refusal) -> None:
    source, path = write(tmp_path / "in.jsonl", stories(1)), tmp_path / "report.json"
    path.write_text(report)
    assert "is not the report of a cleaning" in refused(pipeline, flags_of(source, tmp_path))
    assert path.read_text() == report
    assert {entry.name for entry in tmp_path.iterdir()} == {"in.jsonl", "report.json"}


def test_a_half_done_step_of_another_cleaning_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(tmp_path / "in.jsonl", stories()), tmp_path / "out"
    first = flags_of(source, out, "--keep")
    assert pipeline.main(first) == 0
    run: Callable[..., Any] = find_duplicates.main.run

    def die(options: Any) -> Any:
        run(options)
        raise KeyboardInterrupt  # after the output, before the report

    with monkeypatch.context() as patched:
        patched.setattr(find_duplicates.main, "run", die)
        assert pipeline.main([*first, "--seed", "1"]) == 130
    capsys.readouterr()
    assert pipeline.main([*first, "--threshold", "0.9"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if line.startswith("find_duplicates")] != ["find_duplicates: done before"]
    assert output[0] == "merge: done before"


@pytest.mark.parametrize(
    ("flags", "step"),
    [
        (["--max-bytes", "1000"], "fetch_pages"),
        (["--ignore-robots"], "fetch_pages"),
        (["--min-tokens", "5"], "cleanup_dataset"),
        (["--vocab-file", "urls/a.txt", "--merge-file", "urls/a.txt"], "every step"),  # they are inputs
        (["--fix-tasks", "remove_512"], "cleanup_fix_dataset"),
        (["--num-bands", "10"], "find_duplicates"),
        (["--seed", "5"], "find_duplicates"),
        (["--threshold", "0.9"], "group_duplicate_url"),
        (["--id-prefix", "x"], "shuffle"),
        (["--workers", "2", "--connections", "3", "--delay", "0", "--timeout", "5", "--user-agent=-x"], "no step"),
        (["--output-path", "elsewhere"], "no step"),
    ],
)
def test_a_change_restarts_at_its_step(flags: list[str], step: str) -> None:
    Path("urls").mkdir()
    Path("urls/a.txt").write_text("https://example.org/\n")

    def stamps(*extra: str) -> dict[str, str]:
        options = pipeline.main.parse(["--urls", "urls", "--output-path", "out", "--workers", "1", *extra])
        steps = pipeline.steps_of(options)
        return dict(zip((step.name for step in steps), pipeline.stamps_of(steps, options), strict=True))

    before, after = stamps(), stamps(*flags)
    order = list(before)
    first = {"every step": 0, "no step": len(order)}[step] if " " in step else order.index(step)
    assert [name for name in order if before[name] != after[name]] == order[first:]


def test_bad_lines_are_named_by_the_input_line(tmp_path: Path, refused: Refusal) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    path.write_text("\n\n".join(map(json.dumps, [*stories(2), {"url": "x"}])) + "\n")
    assert f"{path}, line 5: has no text 'text'" in refused(pipeline, flags_of(str(path), out))
    assert pipeline.main(flags_of(str(path), out, "--skip-bad-lines")) == 0
    assert len(read(out / "train_data.json")) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--threshold", "nan"], "threshold nan"),
        (["--num-bands", "7"], "--num-bands 7"),
        (["--num-seeds", "1000000000"], "--num-seeds 1000000000"),
        (["--seed", "-1"], "--seed -1"),
        (["--language", "english"], "--language english"),
        (["--min-tokens", "-1"], "--min-tokens -1"),
        (["--vocab-file", "in.jsonl"], "--merge-file"),
        (["--vocab-file", "in.jsonl", "--merge-file", "in.jsonl"], "in.jsonl"),
        (["--task-files", "in.jsonl"], "--task-files"),
        (["--task-files", "in.jsonl", "question"], "in.jsonl, line 1: has no text 'question'"),
        (["--report", "in.jsonl"], "read and overwritten"),
        (["--report", "./report.json", "--output-path", "."], "written twice"),
        (["--report", "train_data.json", "--output-path", "."], "written twice"),
        (["--output-path", "in.jsonl"], "in.jsonl"),
        (["--output-path", "/proc/x"], "/proc/x"),
    ],
)
def test_flags_are_checked_before_the_first_step(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(write(Path("in.jsonl"), stories(1)))
    before = source.read_bytes()
    assert pipeline.main([*flags_of("in.jsonl", Path("out")), *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.jsonl"]
    assert source.read_bytes() == before


def test_a_folder_allows_one_cleaning_at_a_time(tmp_path: Path, refused: Refusal) -> None:
    """Two would read each other's files."""
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"text": "a", "url": "b"}) + "\n")
    out = tmp_path / "out"
    out.mkdir()
    with hold_lock(out):
        assert "another cleaning is running there" in refused(
            pipeline, ["--json", str(source), "--output-path", str(out), "--workers", "1"]
        )

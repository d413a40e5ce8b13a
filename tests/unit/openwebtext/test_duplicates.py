"""Fingerprints and duplicates against exact sets, and the whole pipeline."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.openwebtext.test_cleaning import ENGLISH, GERMAN, read, write
from tools.openwebtext import bench, find_duplicates, pipeline
from tools.openwebtext.fingerprints import shingle_hashes, signatures, similarity

WORDS = [f"word{number}" for number in range(3000)]


def runs(text: str) -> set[str]:
    return {text[i : i + 5] for i in range(len(text) - 4)} or {text}


@given(st.text(max_size=60), st.text(max_size=60))
def test_similarities_are_those_of_sets_of_five_characters(a: str, b: str) -> None:
    sets = [np.unique(shingle_hashes(text)) for text in (a, b)]
    first, second = runs(a), runs(b)
    assert [len(one) for one in sets] == [len(first), len(second)]
    shared = len(first & second)
    for kind, whole in (
        ("union", len(first | second)), ("min", min(len(first), len(second))), ("max", max(len(first), len(second))),
    ):  # fmt: skip
        assert similarity(sets[0], sets[1], kind) == pytest.approx(shared / whole)


def test_fingerprints_estimate_similarities() -> None:
    generator = random.Random(1)
    texts = []
    for changed in (0, 10, 40, 100):
        words = [*WORDS[:200]]
        words[:changed] = generator.sample(WORDS[500:], changed)
        texts.append(" ".join(words))
    rows, sizes = signatures(texts, 2000, 7)
    assert sizes.tolist() == [len(text) - 4 for text in texts]
    for row, text in zip(rows[1:], texts[1:], strict=True):
        expected = len(runs(text) & runs(texts[0])) / len(runs(text) | runs(texts[0]))
        assert (row == rows[0]).mean() == pytest.approx(expected, abs=0.04)


def corpus(seed: int, count: int = 120) -> list[dict[str, Any]]:
    """Random texts, every third followed by a copy with a few words changed."""
    generator, rows = random.Random(seed), []
    for number in range(count):
        words = generator.sample(WORDS, 150)
        rows.append({"url": f"u{number}", "text": " ".join(words)})
        if number % 3 == 0:
            words[: generator.randrange(8)] = []
            rows.append({"url": f"u{number}-copy", "text": " ".join(words)})
    generator.shuffle(rows)
    return rows


def exact(rows: list[dict[str, Any]], threshold: float) -> set[tuple[str, str]]:
    sets = [(row["url"], runs(row["text"])) for row in rows]
    return {
        (min(a, b), max(a, b))
        for i, (a, first) in enumerate(sets)
        for b, second in sets[:i]
        if len(first & second) / len(first | second) > threshold
    }


@pytest.mark.parametrize("workers", ["1", "2"])
def test_pairs_are_the_exact_ones(workers: str, tmp_path: Path) -> None:
    rows = corpus(1)
    one, two = write(tmp_path / "a.jsonl.gz", rows[:70]), write(tmp_path / "b.jsonl", rows[70:])
    out = tmp_path / "out.jsonl"
    flags = ["--inputs", one, "url", two, "url", "--output", str(out), "--heuristic-iter", "-1", "--num-bands", "20"]
    assert find_duplicates.main([*flags, "--workers", workers, "--jaccard-parallel"]) == 0
    assert bench.pairs_of(out) == exact(rows, 0.5)
    texts = {row["url"]: runs(row["text"]) for row in rows}
    for row in read(out):
        for key, others in row.items():
            for other, value in ((o, v) for pair in others for o, v in pair.items()):
                a, b = texts[key], texts[other]
                assert value == pytest.approx(len(a & b) / len(a | b), abs=1e-5)
    assert [entry.name for entry in tmp_path.iterdir() if "texts" in entry.name] == []


def test_new_documents_meet_saved_fingerprints(tmp_path: Path) -> None:
    rows = corpus(2, 60)
    old, new = [row for row in rows if "copy" not in row["url"]], [row for row in rows if "copy" in row["url"]]
    saved, out = str(tmp_path / "prints"), tmp_path / "out"
    base = ["--workers", "1", "--num-bands", "20"]
    assert (
        find_duplicates.main([*base, "--inputs", write(tmp_path / "a", old), "url", "--save-fingerprints", saved]) == 0
    )
    flags = [*base, "--inputs", write(tmp_path / "b", new), "url", "--load-fingerprints", saved, "--output", str(out)]
    assert find_duplicates.main([*flags, "--heuristic-iter", "-1"]) == 0
    assert bench.pairs_of(out) == exact(rows, 0.5)
    # Old documents stand first, so that of each group one that is there already is kept.
    assert all("copy" not in key for row in read(out) for key in row)
    assert find_duplicates.main([*flags, "--seed", "5"]) == 2
    whole = Path(saved).read_bytes()
    for damaged in (b"PK", whole[: len(whole) // 2], b""):
        Path(saved).write_bytes(damaged)
        assert find_duplicates.main(flags) == 2


def test_the_first_of_documents_with_one_key_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(WORDS[:100])
    rows = [{"url": "a", "text": text}, {"url": "a", "text": text}, {"url": "b", "text": text}]
    out = tmp_path / "out"
    flags = ["--inputs", write(tmp_path / "in", rows), "url", "--output", str(out), "--workers", "1"]
    assert find_duplicates.main(flags) == 0
    assert "1 repeated names" in capsys.readouterr().out
    assert bench.pairs_of(out) == {("a", "b")}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--inputs", "a"], "--inputs"),
        (["--inputs", "a", "url", "--num-bands", "7"], "--num-bands 7"),
        (["--inputs", "a", "url", "--heuristic-iter", "0"], "--heuristic-iter 0"),
        (["--inputs", "a", "url"], "No such file"),
        ([], "--inputs"),
    ],
)
def test_bad_flags(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_duplicates.main([*flags, "--output", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_pipeline_from_urls_to_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = random.Random(3)
    sentences = [one.strip() + "." for one in ENGLISH.split(".") if one.strip()]

    def story() -> str:
        words = " ".join(generator.choices(sentences, k=12)).split()
        for place in range(0, len(words), 2):
            words[place] = generator.choice(WORDS[:400])
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
    found = read(out / "train_data.json")
    assert {row["url"] for row in found} == {f"https://example.org/{number}" for number in range(30)}
    assert [row["adlr_id"] for row in found] == [f"doc-{n:010d}" for n in range(1, 31)]
    assert [row["url"] for row in found] != sorted(row["url"] for row in found)
    assert all("cleaning_key" not in row for row in found)
    assert {entry.name for entry in out.iterdir()} == {"train_data.json", "report.json"}
    report = json.loads((out / "report.json").read_text())
    assert report["merge"]["counts"]["of URLs that are left out"] == 1
    assert report["cleanup_dataset"]["counts"]["in another language"] == 1
    assert report["remove_group_duplicates"]["counts"]["duplicates"] == 5
    capsys.readouterr()
    assert pipeline.main(flags) == 0
    assert capsys.readouterr().out.count("done before") == len(report)
    # Other settings of a late step: what was removed between the steps is made again.
    assert pipeline.main([*flags, "--id-prefix", "owt", "--keep"]) == 0
    assert read(out / "train_data.json")[0]["adlr_id"].startswith("owt")
    capsys.readouterr()
    assert pipeline.main([*flags, "--id-prefix", "x", "--keep"]) == 0
    assert capsys.readouterr().out.count("done before") == len(report) - 1


def test_documents_without_or_with_the_same_url_are_told_apart(tmp_path: Path) -> None:
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
    found = read(tmp_path / "out" / "train_data.json")
    assert sorted(row["text"] for row in found) == sorted(texts)


def test_the_pipeline_leaves_its_inputs_alone_and_sees_their_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "train_data.json", [{"url": "a", "text": ENGLISH * 8}])
    assert pipeline.main(["--json", source, "--output-path", str(tmp_path), "--workers", "1"]) == 2
    assert "read and overwritten" in capsys.readouterr().err
    assert len(read(source)) == 1
    task = write(tmp_path / "task", [{"q": "nothing of this is anywhere in the text at all, not one word of it"}])
    flags = ["--json", source, "--output-path", str(tmp_path / "out"), "--workers", "1", "--task-files", task, "q"]
    assert pipeline.main(flags) == 0
    assert len(read(tmp_path / "out" / "train_data.json")) == 1
    write(Path(task), [{"q": ENGLISH}])
    assert pipeline.main(flags) == 0
    assert len(read(tmp_path / "out" / "train_data.json")) == 0
    assert pipeline.main([*flags, "--lambada-path", str(tmp_path / "none")]) == 2


def test_the_bench_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasketch")
    assert bench.main(["--documents", "60"]) == 0
    assert "find_duplicates" in capsys.readouterr().out

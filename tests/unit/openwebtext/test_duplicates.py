"""Fingerprints and duplicates against exact sets."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cleaning as bench
from tests.support.disk import largest_file
from tests.unit.openwebtext.support import Refusal, read, write
from tools.openwebtext import find_duplicates, group_duplicate_url, remove_group_duplicates
from tools.openwebtext.cleaning.comparing import similarity
from tools.openwebtext.cleaning.fingerprints import shingle_hashes, signatures

WORDS = [f"word{number}" for number in range(3000)]


def runs(text: str) -> set[str]:
    return {text[i : i + 5] for i in range(len(text) - 4)} or {text}


@given(st.text(max_size=60), st.text(max_size=60))
def test_similarities_compare_sets_of_five_characters(a: str, b: str) -> None:
    sets = [np.unique(shingle_hashes(text)) for text in (a, b)]
    first, second = runs(a), runs(b)
    assert [len(hashes) for hashes in sets] == [len(first), len(second)]
    shared = len(first & second)
    for kind, denominator in (
        ("union", len(first | second)), ("min", min(len(first), len(second))), ("max", max(len(first), len(second))),
    ):  # fmt: skip
        assert similarity(sets[0], sets[1], kind) == pytest.approx(shared / denominator)


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


def test_fingerprints_are_pinned() -> None:
    rows, sizes = signatures(["The old house by the river", "abc"], 4, 1234)
    assert rows.tolist() == [[8765096, 148770431, 183317939, 2536109], [3084181924, 1048407559, 4189813623, 4194449484]]
    assert sizes.tolist() == [22, 1]


def corpus(seed: int, count: int = 120, max_removed: int = 7) -> list[dict[str, Any]]:
    """Random texts, every third followed by a copy with a few words changed."""
    generator, rows = random.Random(seed), []
    for number in range(count):
        words = generator.sample(WORDS, 150)
        rows.append({"url": f"u{number}", "text": " ".join(words)})
        if number % 3 == 0:
            words[: generator.randrange(max_removed + 1)] = []
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


@pytest.mark.parametrize(("workers", "bands", "max_removed"), [("1", "100", 100), ("2", "20", 7)])
def test_pairs_equal_an_exact_search(workers: str, bands: str, max_removed: int, tmp_path: Path) -> None:
    """With as many bands as seeds, barely similar pairs too."""
    rows = corpus(1, max_removed=max_removed)
    first, second = write(tmp_path / "a.jsonl.gz", rows[:70]), write(tmp_path / "b.jsonl", rows[70:])
    out = tmp_path / "out.jsonl"
    flags = [
        "--inputs",
        first,
        "url",
        second,
        "url",
        "--output",
        str(out),
        "--heuristic-iter",
        "-1",
        "--num-bands",
        bands,
    ]
    assert find_duplicates.main([*flags, "--workers", workers, "--jaccard-parallel"]) == 0
    assert bench.read_pairs(out) == exact(rows, 0.5)
    texts = {row["url"]: runs(row["text"]) for row in rows}
    for row in read(out):
        for key, matches in row.items():
            for other, value in ((o, v) for pair in matches for o, v in pair.items()):
                a, b = texts[key], texts[other]
                assert value == pytest.approx(len(a & b) / len(a | b), abs=1e-5)


def test_new_documents_are_compared_with_saved_fingerprints(tmp_path: Path) -> None:
    rows = corpus(2, 60)
    old, new = [row for row in rows if "copy" not in row["url"]], [row for row in rows if "copy" in row["url"]]
    saved, out = str(tmp_path / "prints"), tmp_path / "out"
    base = ["--workers", "1", "--num-bands", "20"]
    assert (
        find_duplicates.main([*base, "--inputs", write(tmp_path / "a", old), "url", "--save-fingerprints", saved]) == 0
    )
    flags = [*base, "--inputs", write(tmp_path / "b", new), "url", "--load-fingerprints", saved, "--output", str(out)]
    assert find_duplicates.main([*flags, "--heuristic-iter", "-1"]) == 0
    assert bench.read_pairs(out) == exact(rows, 0.5)
    # Old documents come first, so each group keeps a document that is already there.
    assert all("copy" not in key for row in read(out) for key in row)
    assert find_duplicates.main([*flags, "--seed", "5"]) == 2
    content = Path(saved).read_bytes()
    for damaged in (b"PK", content[: len(content) // 2], b""):
        Path(saved).write_bytes(damaged)
        assert find_duplicates.main(flags) == 2


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a plain array": lambda saved: saved["rows"],
    "one number": lambda saved: {**saved, "rows": np.uint32(3)},
    "rows of floats": lambda saved: {**saved, "rows": saved["rows"].astype(float)},
    "too few rows": lambda saved: {**saved, "rows": saved["rows"][1:]},
    "too few sizes": lambda saved: {**saved, "sizes": saved["sizes"][1:]},
    "sizes of floats": lambda saved: {**saved, "sizes": saved["sizes"].astype(float)},
    "sizes of 0": lambda saved: {**saved, "sizes": 0 * saved["sizes"]},
    "keys of numbers": lambda saved: {**saved, "keys": np.frombuffer(b"\n".join([b"1"] * 4), np.uint8)},
    "another seed": lambda saved: {**saved, "about": np.frombuffer(b"3", np.uint8)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_fingerprints_of_another_shape_are_refused(name: str, tmp_path: Path, refused: Refusal) -> None:
    source, saved = write(tmp_path / "a", corpus(2, 3)), tmp_path / "prints"
    base = ["--inputs", source, "url", "--workers", "1"]
    assert find_duplicates.main([*base, "--save-fingerprints", str(saved)]) == 0
    with np.load(saved) as archive:
        changed = CHANGES[name](dict(archive))
    with saved.open("wb") as stream:
        np.savez(stream, **changed) if isinstance(changed, dict) else np.save(stream, changed)
    flags = [*base, "--load-fingerprints", str(saved), "--output", str(tmp_path / "out")]
    assert f"--load-fingerprints {saved}" in refused(find_duplicates, flags)


def test_no_texts_are_written_to_the_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    merge_matches = find_duplicates.merge_matches

    def look(pairs: Any) -> Any:
        names.extend(entry.name for entry in tmp_path.iterdir())
        return merge_matches(pairs)

    monkeypatch.setattr(find_duplicates, "merge_matches", look)
    flags = ["--inputs", write(tmp_path / "in", corpus(1, 6)), "url", "--output", str(tmp_path / "out")]
    assert find_duplicates.main([*flags, "--workers", "1"]) == 0
    # A killed process leaves no texts there.
    assert [name for name in names if not name.startswith(".out.")] == ["in"]


def test_a_full_disk_is_one_line(tmp_path: Path, refused: Refusal) -> None:
    source = write(tmp_path / "in", corpus(1, 30))
    flags = ["--inputs", source, "url", "--output", str(tmp_path / "out"), "--workers", "1"]
    with largest_file(10_000):
        error = refused(find_duplicates, flags)
    assert f"{tmp_path}: File too large" in error
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", ["folder", "afile/x", "none/x"])
@pytest.mark.parametrize("flag", ["--output", "--save-fingerprints"])
def test_unwritable_outputs_are_refused(flag: str, name: str, tmp_path: Path, refused: Refusal) -> None:
    (tmp_path / "folder").mkdir()
    source = write(tmp_path / "afile", corpus(1, 6))
    flags = ["--inputs", source, "url", flag, str(tmp_path / name), "--workers", "1"]
    assert str(tmp_path / name.split("/")[0]) in refused(find_duplicates, flags)


def test_outputs_must_differ_from_inputs_and_each_other(tmp_path: Path, refused: Refusal) -> None:
    write(Path("data"), corpus(1, 6))
    write(Path("pairs"), [{"a": [{"b": 0.9}]}])
    write(Path("groups"), [{"0": ["a", "b"]}])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    find = ["--inputs", "data", "url", "--workers", "1"]
    for tool, flags in (
        (find_duplicates, [*find, "--output", "data"]),
        (find_duplicates, [*find, "--output", "x", "--report", "./x"]),
        (find_duplicates, [*find, "--output", "x", "--save-fingerprints", "x"]),
        (find_duplicates, [*find, "--save-fingerprints", "x", "--report", "data"]),
        (group_duplicate_url, ["pairs", "pairs"]),
        (group_duplicate_url, ["pairs", "x", "--report", "pairs"]),
        (remove_group_duplicates, ["groups", "data", "groups"]),
        (remove_group_duplicates, ["groups", "data", "data"]),
        (remove_group_duplicates, ["groups", "data", "x", "--report", "groups"]),
    ):
        assert "name another" in refused(tool, flags)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_only_compared_documents_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, other_text = " ".join(WORDS[:100]), " ".join(WORDS[500:600])
    data = write(
        tmp_path / "in", [{"url": "a", "text": text}, {"url": "b", "text": text}, {"url": "b", "text": other_text}]
    )
    pairs, groups, out = (str(tmp_path / name) for name in ("pairs", "groups", "out"))
    assert find_duplicates.main(["--inputs", data, "url", "--output", pairs, "--workers", "1"]) == 0
    captured = capsys.readouterr()
    assert "1 documents are not compared" in captured.err
    assert "'b'" in captured.err
    assert "1 repeated names" in captured.out
    assert group_duplicate_url.main([pairs, groups]) == 0
    assert remove_group_duplicates.main([groups, data, out]) == 0
    assert [row["text"] for row in read(out)] == [text, other_text]
    assert "1 that repeat a duplicate's name" in capsys.readouterr().out


def test_errors_count_blank_lines_too(tmp_path: Path, refused: Refusal) -> None:
    data, groups, out = tmp_path / "data", tmp_path / "groups", str(tmp_path / "out")
    data.write_text('\n\n{"url": "a", "text": "b"}\n\n{"url": 3, "text": "b"}\n')
    error = refused(find_duplicates, ["--inputs", str(data), "url", "--output", out, "--workers", "1"])
    assert "line 5" in error
    assert "'url' is a number" in error
    assert "line 3" in refused(group_duplicate_url, [str(data), out])
    groups.write_text('{"0": ["a", "b"]}\n\n{"1": 3}\n')
    assert "line 3" in refused(remove_group_duplicates, [str(groups), str(data), out])
    groups.write_text("\n{\n")
    error = refused(remove_group_duplicates, [str(groups), str(data), out])
    assert "line 2" in error
    assert "--skip-bad-lines" not in error  # that flag is for the data


@pytest.mark.parametrize("value", ["1" + "0" * 400, "1e400", "NaN", "-0.5", "true", '"high"', "[]"])
def test_malformed_similarities_are_refused(value: str, tmp_path: Path, refused: Refusal) -> None:
    pairs, out = tmp_path / "pairs", str(tmp_path / "out")
    pairs.write_text('{"a": [{"b": 0.9}]}\n{"c": [{"d": VALUE}]}\n'.replace("VALUE", value))
    assert "line 2" in refused(group_duplicate_url, [str(pairs), out])
    assert group_duplicate_url.main([str(pairs), out, "--skip-bad-lines"]) == 0
    assert read(out) == [{"0": ["a", "b"]}]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--inputs", "a"], "--inputs"),
        (["--inputs", "a", "url", "--num-bands", "7"], "--num-bands 7"),
        (["--inputs", "a", "url", "--heuristic-iter", "0"], "--heuristic-iter 0"),
        (["--inputs", "a", "url"], "No such file"),
        (["--inputs", "a", "url", "--num-seeds", "1000000000"], "--num-seeds 1000000000"),
        (["--inputs", "a", "url", "--seed", "-1"], "--seed -1"),
        (["--inputs", "a", "url", "--seed", str(1 << 64)], "--seed 18446744073709551616"),
        ([], "--inputs"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, tmp_path: Path, refused: Refusal) -> None:
    assert message in refused(find_duplicates, [*flags, "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("count", ["0", "-5", "5"])
def test_the_benchmark_needs_documents(count: str, refused: Refusal) -> None:
    assert f"--documents {count}: give at least 20" in refused(bench, ["--documents", count])


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasketch")
    assert bench.main(["--documents", "60", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    record = json.loads((tmp_path / "rows.json").read_text())
    assert record["header"]["sources"]
    for row in record["rows"]:
        assert row["per_s"] > 0
        assert f"| {row['side']} | " in output
    loop, many_bands, few_bands = record["rows"]
    assert loop["speed_up"] == 1.0
    assert many_bands["found_5"] == many_bands["found_10"] == 1.0
    assert 0 <= few_bands["found_10"] <= 1.0


@pytest.mark.slow
def test_a_failing_bench_step_shows_its_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"failed(.|\n)*add_id: error: .*gone"):
        bench.seconds(
            "add_id", "--input-file", tmp_path / "gone", "--output-file", tmp_path / "out", "--id-prefix", "x"
        )


@pytest.mark.slow
def test_both_names_of_the_grouping_command_work(tmp_path: Path) -> None:
    """Called as programs, from another folder."""
    pairs = tmp_path / "found.jsonl"
    pairs.write_text(json.dumps({"a": [{"b": 0.9}, {"c": 0.4}]}) + "\n")
    for name in ("group_duplicate_url.py", "group_duplicate_urls.py"):
        program = Path(group_duplicate_url.__file__).with_name(name)
        done = subprocess.run([sys.executable, program, pairs, name], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("group_duplicate_url: ")
        assert read(tmp_path / name) == [{"0": ["a", "b"]}]

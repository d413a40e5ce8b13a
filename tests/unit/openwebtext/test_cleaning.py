"""The cleaning tools on small files by their rules, and the faults of the scripts they replace."""

# ruff: noqa: RUF001

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.errors import UserError
from tests.unit.openwebtext.support import ENGLISH, FILL, GERMAN, RUN, Refusal, read, write
from tools.openwebtext import (
    add_id,
    blacklist_urls,
    cleanup_dataset,
    cleanup_fix_dataset,
    download_openwebtext,
    filter_ngrams,
    group_duplicate_url,
    merge_jsons,
    remove_group_duplicates,
)  # fmt: skip

# URLs


URLS = {
    None: (
        *("https://www.example.org/story", "http://example.co.uk/a.b/c.html?x=1.jpg", "https://notyoutube.org/story"),
        *("https://youtube.example.org/story", "http://192.168.0.1/page"),
    ),
    "of a file that is no page": ("https://example.org/picture.JPG", "https://example.org/picture.jpg?size=3"),
    "of a site without texts": ("https://m.youtube.com/watch?v=3", "https://youtube.co.uk/watch"),
    "too short": ("http://a",),
    "malformed": (
        *("ftp://example.org/file", "https:///nothing/here", "https://[::1/broken", "https://with space.org/x"),
    ),
}


def test_urls() -> None:
    lists = ([blacklist_urls.LISTS / f"{name}.txt"] for name in ("domains", "extensions"))
    url_filter = blacklist_urls.url_filter(*lists)
    for reason, urls in URLS.items():
        assert {url: url_filter(url) for url in urls} == dict.fromkeys(urls, reason)


def test_url_lists_are_as_long_as_the_replaced_lists() -> None:
    assert len(blacklist_urls.read_words(blacklist_urls.LISTS / "domains.txt")) >= 110
    assert len(blacklist_urls.read_words(blacklist_urls.LISTS / "extensions.txt")) >= 67


def test_each_url_comes_once(tmp_path: Path) -> None:
    folder = tmp_path / "urls"
    folder.mkdir()
    urls = "\ufeffhttps://example.org/one\nhttps://example.org/two#part\nhttps://imgur.com/x\n"
    (folder / "a.txt").write_text(urls, encoding="utf-8")
    for name in (".txt", "c.txt.", "d.txt.bak"):
        (folder / name).write_text("https://example.org/of-another-kind\n")
    with gzip.open(folder / "b.txt.gz", "wt") as stream:
        stream.write("https://example.org/two\nhttps://example.org/three\n\n")
    out, report = tmp_path / "out.txt", tmp_path / "report.json"
    assert blacklist_urls.main([str(folder), str(out), "--report", str(report)]) == 0
    assert out.read_text().split() == [f"https://example.org/{x}" for x in ("one", "two#part", "three")]
    assert json.loads(report.read_text()) == {"URLs": 5, "written": 3, "of a site without texts": 1, "repeated": 1}


# Documents


@pytest.mark.parametrize("workers", ["1", "2"])
def test_cleanup_repairs_and_keeps_long_english_texts(workers: str, tmp_path: Path) -> None:
    broken = (ENGLISH + "It cost â‚¬5. ") * 4
    rows: list[dict[str, Any]] = [
        {"text": ENGLISH * 4, "url": "kept"},
        {"text": broken, "url": "fixed", "more": 1},
        {"text": ENGLISH, "url": "short"},
        {"text": GERMAN * 8, "url": "german"},
        {"text": "", "url": "empty"},
    ] * 20
    source, out, report = write(tmp_path / "in.gz", rows), tmp_path / "out.zst", tmp_path / "report"
    assert cleanup_dataset.main([source, str(out), "--workers", workers, "--report", str(report)]) == 0
    documents = read(out)
    assert [row["url"] for row in documents] == ["kept", "fixed"] * 20
    assert documents[1]["text"] == broken.replace("â‚¬", "€")
    assert documents[1]["more"] == 1
    counts = json.loads(report.read_text())
    assert counts == {
        "documents": 100, "written": 40, "fixed": 20, "too short": 20, "in another language": 40,
    }  # fmt: skip


def test_length_counts_tokens_if_a_vocabulary_is_given(tmp_path: Path) -> None:
    class Letters:
        def tokenize(self, text: str) -> list[str]:
            return list(text)

    assert not cleanup_dataset.Cleanup("text", "en", 20, None).long_enough("one two three four")
    letters = cleanup_dataset.Cleanup("text", "en", 20, Letters)  # type: ignore[arg-type]
    assert not letters.long_enough("one two three four")
    assert letters.long_enough("one two three four five")
    assert not letters.long_enough("a'b'c'd'e'f'g'h'i")
    assert cleanup_dataset.Cleanup("text", "en", 5, None).long_enough("one, two, three")


def test_fixes_chain_and_files_are_named_after_their_inputs(tmp_path: Path) -> None:
    rows = [
        {"text": "Please enable JavaScript to go on."},
        {"text": "Kurz und auf Deutsch, also fort mit diesem Satz."},
        {"text": "It is short  and English,\nand  costs â‚¬5."},
        {"text": GERMAN * 8},
    ]
    source = write(tmp_path / "a.b.jsonl.gz", rows)
    tasks = ["remove_256_javascript", "remove_512_non_english", "ftfy_fix_text", "general_cleaning"]
    new = tmp_path / "made" / "for it"
    flags = ["--input-files", source, "--output-path", str(new), "--workers", "1"]
    assert cleanup_fix_dataset.main([*flags, "--tasks", *tasks]) == 0
    documents = read(new / "a.b_cleaned.jsonl.gz")
    # The script this replaces returned after its first fix.
    assert documents[0]["text"] == "It is short and English,\nand costs €5."
    assert len(documents) == 2
    assert read(new / "a.b_filtered.jsonl.gz") == rows[:2]


def test_inputs_are_not_overwritten(tmp_path: Path, refused: Refusal) -> None:
    sources = [write(tmp_path / name, [{"text": ENGLISH * 4}]) for name in ("a.jsonl", "a_cleaned.jsonl")]
    flags = ["--input-files", *sources, "--output-path", str(tmp_path), "--tasks", "remove_512"]
    assert "read and overwritten" in refused(cleanup_fix_dataset, flags)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_missing_input_is_refused_before_cleaning_starts(tmp_path: Path, refused: Refusal) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": ENGLISH * 4}])
    new = str(tmp_path / "new")
    flags = ["--input-files", source, str(tmp_path / "none"), "--output-path", new, "--tasks", "remove_512"]
    assert "none: No such file" in refused(cleanup_fix_dataset, [*flags, "--workers", "1"])
    assert len(list(tmp_path.iterdir())) == 1


def test_an_impossible_output_folder_is_one_line(tmp_path: Path, refused: Refusal) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": ENGLISH * 4}])
    for folder in (source, f"{source}/inside"):
        flags = ["--input-files", source, "--output-path", folder, "--tasks", "remove_512"]
        assert f"--output-path {folder}: " in refused(cleanup_fix_dataset, flags)


def test_line_breaks_after_words_become_spaces() -> None:
    fix = cleanup_fix_dataset.Fix("text", ("general_cleaning",))
    assert fix.repair("one\n\ntwo\n three.\nfour   five") == "one two three.\nfour five"


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "not JSON"), ("[1]", "not a JSON object"), ('{"txt": "a"}', "'text'"), ('{"text": 3}', "'text'")],
)
def test_malformed_documents_are_named_or_counted(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refusal
) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps({"text": ENGLISH * 4}) + f"\n{line}\n")
    error = refused(cleanup_dataset, [str(path), str(out), "--workers", "2"])
    assert "line 2" in error
    assert message in error
    assert not out.exists()
    assert cleanup_dataset.main([str(path), str(out), "--workers", "1", "--skip-bad-lines"]) == 0
    assert "1 bad lines skipped" in capsys.readouterr().out
    assert len(read(out)) == 1


# Groups of duplicates


def test_groups_are_chains_of_links_and_keep_one_document(tmp_path: Path) -> None:
    pairs = [
        {"a": [{"b": 0.9}, {"x": 0.6}]},
        {"c": [{"d": 0.8}]},
        {"d": [{"b": 0.7}]},
        {"e": [{"f": 0.75}]},
        {"z": [{"z": 1.0}]},
    ]
    duplicates, groups = write(tmp_path / "pairs", pairs), tmp_path / "groups"
    assert group_duplicate_url.main([duplicates, str(groups)]) == 0
    assert read(groups) == [{"0": ["a", "b", "c", "d"]}, {"1": ["e", "f"]}]
    data = write(tmp_path / "data", [{"url": url, "text": "t"} for url in "abcdefgx"])
    assert remove_group_duplicates.main([str(groups), data, str(tmp_path / "out")]) == 0
    assert [row["url"] for row in read(tmp_path / "out")] == ["a", "e", "g", "x"]
    assert group_duplicate_url.main([duplicates, str(groups), "0.5"]) == 0
    assert len(read(groups)[0]["0"]) == 5
    assert group_duplicate_url.main([data, str(groups)]) == 2


# Runs of words


def _filter(tmp_path: Path, texts: list[str], tasks: list[str], *flags: str) -> list[dict[str, Any]]:
    data = write(tmp_path / "data", [{"text": text, "n": number} for number, text in enumerate(texts)])
    task, out = write(tmp_path / "task", [{"q": text} for text in tasks]), tmp_path / "out"
    base = ["--task-files", task, "q", "--dedup-dataset", data, "text", "--output", str(out), "--num-threads", "1"]
    assert filter_ngrams.main([*base, *flags]) == 0
    return read(out)


def test_a_leak_is_cut_out_to_the_ends_of_sentences(tmp_path: Path) -> None:
    leak = f"{FILL}We ask: {RUN.upper()}, then? {FILL}"
    pieces = _filter(tmp_path, [leak, FILL], [f"{RUN} tell me"])
    assert [row["n"] for row in pieces] == [0, 0, 1]
    assert "split_id" not in pieces[2]
    assert [row["split_id"] for row in pieces[:2]] == [0, 1]
    for row in pieces[:2]:
        assert "painted" not in row["text"].lower()
        assert row["text"].startswith("Nothing")
        assert row["text"].endswith(".")
        assert 200 < len(row["text"]) < len(FILL)


def test_a_leak_longer_than_a_run_is_cut_to_its_end(tmp_path: Path) -> None:
    # LAMBADA's shape: the last words of a passage are the answer.
    passage = " ".join(f"z{number}" for number in range(50)) + ". Then it was the young man called Gabriel"
    pieces = _filter(tmp_path, [f"{FILL * 2}{passage}. {FILL * 2}"], [passage])
    assert len(pieces) == 2
    assert not any("Gabriel" in row["text"] or "z4" in row["text"] for row in pieces)


def test_short_runs_are_counted_within_long_ones(tmp_path: Path) -> None:
    eight = "one two three four five six seven eight"
    long = f"{eight} nine ten eleven twelve thirteen"
    texts = [f"{FILL}{long}. {FILL}"] * 10 + [f"{FILL}{eight}. {FILL}"]
    # Both are phrases, though the short run never stands alone ten times.
    assert len(_filter(tmp_path, texts, [eight, long])) == 11


def test_short_tasks_count_from_eight_words_and_phrases_stay(tmp_path: Path) -> None:
    eight = "one two three four five six seven eight"
    texts = [f"{FILL}{eight}. {FILL}"]
    assert len(_filter(tmp_path, texts, [eight])) == 2
    assert len(_filter(tmp_path, texts, ["two three four five six seven eight", RUN])) == 1
    assert len(_filter(tmp_path, texts * 9, [eight])) == 18
    assert len(_filter(tmp_path, texts * 10, [eight])) == 10
    assert len(_filter(tmp_path, texts * 10, [eight], "--key-threshold", "11")) == 20


def test_documents_in_too_many_or_no_pieces_are_dropped(tmp_path: Path) -> None:
    assert _filter(tmp_path, [f"Short. {RUN}. Short."], [RUN]) == []
    many = f"{FILL * 2}{RUN}. " * 11 + FILL
    assert _filter(tmp_path, [many], [RUN], "--key-threshold", "100") == []
    assert len(_filter(tmp_path, [many], [RUN], "--key-threshold", "100", "--splits-count", "12")) == 12


def test_dictionaries_are_saved_with_their_counts(tmp_path: Path) -> None:
    saved = tmp_path / "dictionary.json"
    texts = [f"{FILL}{RUN}. {FILL}"]
    first = _filter(tmp_path, texts, [RUN], "--save-dictionary", str(saved))
    counts = json.loads(saved.read_text())
    assert len(counts) == 1
    assert set(counts.values()) == {1}
    assert _filter(tmp_path, texts, [], "--load-dictionary", str(saved)) == first


@given(st.text(alphabet="ab .!?\n", max_size=300), st.integers(0, 30), st.integers(0, 20))
def test_pieces_hold_no_hits(text: str, each_side: int, least: int) -> None:
    cut = filter_ngrams.NgramCut("text", frozenset(["a b a", "b b"]), each_side, least, 10)
    pieces = cut.pieces(text)
    if pieces is None:
        assert not list(cut.hits(text))
        return
    for piece in pieces:
        assert len(piece) > least
        assert piece in text
    if each_side:
        assert not any(list(cut.hits(piece)) for piece in pieces)


# Merging, numbering and downloading


def test_numbers_and_merged_files(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    write(folder / "b.json", [{"n": 2}])
    write(folder / "a.jsonl.zst", [{"n": 0}, {"n": 1}])
    (folder / "notes.txt").write_text("no")
    write(folder / "a_filtered.jsonl", [{"n": 7}])
    merged = folder / "merged_output.json"
    for _ in range(2):  # its own output is no input
        assert merge_jsons.main(["--json_path", str(folder), "--output_file", str(merged)]) == 0
    assert [row["n"] for row in read(merged)] == [0, 1, 2]
    numbered = tmp_path / "numbered"
    merged.write_bytes(b"\xef\xbb\xbf" + merged.read_bytes())
    assert add_id.main(["--input-file", str(merged), "--output-file", str(numbered), "--id-prefix", "owt"]) == 0
    assert numbered.read_bytes().startswith(b'{"n": 0')
    assert [row["adlr_id"] for row in read(numbered)] == [f"owt-{n:010d}" for n in (1, 2, 3)]


def test_datasets_come_through_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refusal) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "owt"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two", "url": "u"}\n{"text": "three"}\n')
    out = tmp_path / "out.jsonl"
    assert download_openwebtext.main(["--dataset", str(folder), "--output", str(out), "--limit", "2"]) == 0
    rows = read(out)
    assert rows[0]["url"] == "owt/train/0"
    assert [row["text"] for row in rows] == ["one", "two"]
    assert "--dataset" in refused(download_openwebtext, ["--dataset", str(tmp_path / "no"), "--output", str(out)])


@pytest.mark.parametrize(
    ("dataset", "flag", "name"),
    [
        ("owt", "--output", "owt/train.jsonl"),
        ("owt", "--output", "owt/data/new.jsonl"),
        ("owt/", "--output", "link/train.jsonl"),
        ("link", "--report", "owt/report.json"),
        ("owt", "--output", "elsewhere.jsonl"),
        ("owt/train.jsonl", "--output", "owt/train.jsonl"),
    ],
)
def test_a_local_dataset_is_not_written_into(
    dataset: str, flag: str, name: str, monkeypatch: pytest.MonkeyPatch, refused: Refusal
) -> None:
    monkeypatch.setattr(download_openwebtext, "rows", lambda _: pytest.fail("the data set is read"))
    Path("owt", "data").mkdir(parents=True)
    Path("link").symlink_to("owt")
    for file in (Path("owt/train.jsonl"), Path("elsewhere.jsonl")):
        file.write_text('{"text": "one"}\n')
    Path("owt/more.jsonl").symlink_to("../elsewhere.jsonl")
    outputs = {"--output": "out.jsonl", flag: name}
    flags = [word for pair in outputs.items() for word in pair]
    assert f"{flag} {name}" in refused(download_openwebtext, ["--dataset", dataset, *flags])
    assert sorted(str(path) for path in Path().rglob("*.json*")) == [
        "elsewhere.jsonl", "owt/more.jsonl", "owt/train.jsonl",
    ]  # fmt: skip
    assert Path("owt/train.jsonl").read_text() == Path("elsewhere.jsonl").read_text() == '{"text": "one"}\n'


def test_rows_are_converted_to_json() -> None:
    day = dt.datetime(2020, 1, 2, 3, 4, 5)
    row = {"text": "ä", "at": day, "parts": [{"day": day.date(), "price": decimal.Decimal("1.50")}]}
    assert json.loads(download_openwebtext.line_of(row)) == {
        "text": "ä", "at": "2020-01-02 03:04:05", "parts": [{"day": "2020-01-02", "price": "1.50"}],
    }  # fmt: skip
    with pytest.raises(UserError, match=r"column 'picture' .* bytes"):
        download_openwebtext.line_of({"text": "a", "picture": [b"x"]})


@pytest.mark.parametrize(
    ("tool", "flags", "message"),
    [
        (cleanup_dataset, ["none.jsonl", "out", "--workers", "1"], "No such file"),
        (cleanup_dataset, ["none.jsonl", "out", "--workers", "0"], "--workers 0"),
        (cleanup_dataset, ["none.jsonl", "out", "--vocab-file", "v"], "--merge-file"),
        (cleanup_dataset, ["none.jsonl", "out", "--language", "english"], "--language english is not known"),
        (cleanup_dataset, ["none.jsonl", "out", "--min-tokens", "-1"], "--min-tokens -1"),
        (cleanup_dataset, ["none.jsonl", "nowhere/out"], "there is no folder"),
        (download_openwebtext, ["--output", "out", "--limit", "-1"], "--limit -1"),
        (blacklist_urls, [".", "out"], "no .txt files"),
        (group_duplicate_url, ["none", "out", "7"], "threshold 7"),
        (merge_jsons, ["--json_path", "."], "holds no .json"),
        (filter_ngrams, ["--dedup-dataset", "a", "text", "--output", "b"], "nothing to look for"),
        (filter_ngrams, ["--tasks", "lambada", "--dedup-dataset", "a", "text", "--output", "b"], "--lambada-path"),
    ],
)
def test_bad_flags_are_one_line(tool: Any, flags: list[str], message: str, tmp_path: Path, refused: Refusal) -> None:
    error = refused(tool, flags)
    assert message in error
    assert list(tmp_path.iterdir()) == []

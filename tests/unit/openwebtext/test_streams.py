"""Files are read and written complete, in several processes, and failures are one line."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.data.lines import check_output, lines, numbered_lines, writing
from tests.support.disk import largest_file
from tests.unit.openwebtext.support import Refusal, read, write
from tools.openwebtext import (
    add_id,
    blacklist_urls,
    cleanup_dataset,
    cleanup_fix_dataset,
    download_openwebtext,
    fetch_pages,
    filter_ngrams,
    find_duplicates,
    merge_jsons,
    pipeline,
)  # fmt: skip
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart
from tools.openwebtext.cleaning.filtering import Judged, encode, judge_all

TEXT = "The old house by the river had been empty for many years when the new family came. " * 4


# Reading


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_compression_follows_the_file_name(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.jsonl{ending}"
    rows = [{"text": "ä\n" * number, "n": number} for number in range(2000)]
    write(path, rows)
    assert read(path) == rows
    raw = path.read_bytes()
    if ending:
        plain = gzip.decompress(raw) if ending == ".gz" else zstandard.ZstdDecompressor().stream_reader(raw).read()
        assert plain.count(b"\n") == 2000
        path.write_bytes(raw[: len(raw) // 2])
        with pytest.raises(UserError, match=r"data\.jsonl.*damaged"):
            list(lines(path))


def test_files_of_several_frames_and_damaged_frames(tmp_path: Path) -> None:
    for ending in (".gz", ".zst"):
        first, second = tmp_path / f"one{ending}", tmp_path / f"two{ending}"
        write(first, [{"n": 1}] * 500)
        write(second, [{"n": 2}])
        content = first.read_bytes() + second.read_bytes()
        first.write_bytes(content)
        assert len(read(first)) == 501
        first.write_bytes(content[:30] + bytes([content[30] ^ 0xFF]) + content[31:])
        with pytest.raises(UserError, match="damaged"):
            list(lines(first))


def test_halves_of_characters_stay_escaped() -> None:
    line = encode({"a": "ä", "b": "\ud800"})
    assert json.loads(line.decode("utf-8")) == {"a": "ä", "b": "\ud800"}
    assert encode({"a": "ä"}) == '{"a": "ä"}'.encode()


def test_a_byte_order_mark_is_stripped(tmp_path: Path) -> None:
    path = tmp_path / "data.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf{"n": 1}\n\xef\xbb\xbf\n'))
    assert list(lines(path)) == [b'{"n": 1}', b"\xef\xbb\xbf"]


def _number(row: dict[str, Any], line: bytes, location: str) -> Judged:
    return Judged((location.rpartition(" ")[2].encode(),))


def test_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b'\n{"n": 1}\r\n\n\n{"n": 2}\n{\n')
    assert [number for number, _ in numbered_lines(path)] == [2, 5, 6]
    with pytest.raises(UserError, match="line 6: is not JSON"):
        judge_all(_number, [path], lambda line: None, skip_bad=False)
    numbers: list[bytes] = []
    judge_all(_number, [path], numbers.append, skip_bad=True)
    assert numbers == [b"2", b"5"]


@given(count=st.integers(0, 300), seed=st.integers(0, 5))
def test_the_shuffle_keeps_every_line(count: int, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.mktemp("shuffle") / "data", [{"n": number} for number in range(count)])
    out = list(pipeline.shuffled(Path(path), seed))
    assert out == list(pipeline.shuffled(Path(path), seed))
    assert sorted(out) == sorted(lines(path))
    if count > 100:
        assert out != list(lines(path))
    assert [entry.name for entry in Path(path).parent.iterdir()] == ["data"]


# Writing


@pytest.mark.parametrize(("ending", "size"), [("", 10), ("", 1_000_000), (".gz", 10), (".zst", 1_000_000)])
def test_a_full_disk_is_one_error_and_leaves_nothing(
    ending: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"n": os.urandom(200).hex()} for _ in range(3 + size // 100)]
    with largest_file(size), pytest.raises(UserError, match=r"out.*: File too large"):
        write(tmp_path / f"out{ending}", rows)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_failed_step_leaves_nothing(ending: str, tmp_path: Path) -> None:
    def fail() -> None:
        with writing(tmp_path / f"out{ending}") as line:
            line(b"{}")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_stale_partial_files_are_removed_and_others_stay(tmp_path: Path) -> None:
    path, stale = tmp_path / "out.jsonl", tmp_path / ".out.jsonl.999999999.partial"
    other = tmp_path / ".out.json.1.partial"
    for partial in (stale, other):
        partial.write_bytes(b"half")
    with writing(path) as line:
        line(b"{}")
        assert not stale.exists()
        assert len(list(tmp_path.glob(".out.jsonl.*.partial"))) == 1
        with pytest.raises(UserError, match="another run"), writing(path):
            pass
    assert read(path) == [{}]
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, other.name}


def test_writing_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(folder / "file")
    for rows in ([{"n": 1}], [{"n": 2}]):
        write(link, rows)
        assert link.is_symlink()
        assert read(folder / "file") == rows
    assert [entry.name for entry in folder.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is a folder"),
        (".", "is a folder"),
        ("folder", "is a folder"),
        ("folder/", "is a folder"),
        ("nowhere/out", "there is no folder"),
        ("file/out", "there is no folder"),
        ("x" * 300, "File name too long"),
        ("pipe", "is not a regular file"),
        ("/dev/null", "is not a regular file"),
        ("/proc/out", "/proc/out: "),
        ("loop", "symbolic links"),
        ("out.jsonl.bz2", r"\.gz or \.zst"),
        ("out.xz", r"\.gz or \.zst"),
    ],
)
def test_unwritable_outputs_are_refused_at_once(name: str, message: str, tmp_path: Path) -> None:
    Path("folder").mkdir()
    Path("file").write_bytes(b"")
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    for tried in (check_output, lambda name: writing(name).__enter__()):
        with pytest.raises(UserError, match=message) as caught:
            tried(name)
        assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_long_names_are_written(tmp_path: Path) -> None:
    if (longest := os.pathconf(tmp_path, "PC_NAME_MAX")) < 255:
        pytest.skip(f"names on this file system have at most {longest} bytes")
    for name in ("x" * 255, "ä" * 127, "x" * 250 + ".gz"):
        write(tmp_path / name, [{"n": 1}])
        assert read(tmp_path / name) == [{"n": 1}]


def test_unknown_compressions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in.bz2").write_bytes(b"BZh9")
    with pytest.raises(UserError, match=r"\.gz or \.zst"):
        list(lines(tmp_path / "in.bz2"))


def test_outputs_must_differ_from_inputs_and_each_other(tmp_path: Path) -> None:
    Path("link").symlink_to("a")
    check_apart(["a", None], [None, "b", None, "c"])
    for name in ("a", "./a", "link", str(tmp_path / "a")):
        with pytest.raises(UserError, match="read and overwritten"):
            check_apart(["a", "b"], ["c", name])
        with pytest.raises(UserError, match="written twice"):
            check_apart([], ["a", None, name])


NUMERALS = ["9" * 5000, "-" + "8" * 1_000_000, "1e400", "1.50", "-0", "0.1000000000000000000001", "7", "0.5"]


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        (add_id, ["--input-file", "a.jsonl", "--output-file", "out", "--id-prefix", "x"]),
        (cleanup_dataset, ["a.jsonl", "out", "--min-tokens", "1", "--workers", "1"]),
        (
            filter_ngrams,
            ["--task-files", "t.jsonl", "text", "--dedup-dataset", "a.jsonl", "text", "--output", "out", "--workers=1"],
        ),
    ],
)
def test_numbers_in_other_fields_keep_their_spelling(module: Any, flags: list[str], tmp_path: Path) -> None:
    """Each of these tools rewrites the line: with a number, a repaired text, a text without a piece."""
    leak = "one two three four five six seven eight nine ten eleven twelve thirteen."
    write(tmp_path / "t.jsonl", [{"text": leak}])
    numerals = ", ".join(NUMERALS)
    text = json.dumps(f"The house\u2019s door \u00e2\u20ac\u2122 was open. {TEXT * 2} {leak} {TEXT * 2}")
    Path("a.jsonl").write_text(f'{{"n": [{numerals}], "of": {{"n": {NUMERALS[0]}}}, "text": {text}}}\n')
    assert module.main(flags) == 0
    written = Path("out").read_text().splitlines()
    assert written
    for line in written:
        assert line != Path("a.jsonl").read_text().rstrip("\n")
        assert line.startswith(f'{{"n": [{numerals}], "of": {{"n": {NUMERALS[0]}}}, "text": "')


def test_the_last_pipeline_step_keeps_the_spelling_of_numbers(tmp_path: Path) -> None:
    numerals, source = ", ".join(NUMERALS), tmp_path / "a.jsonl"
    source.write_text(f'{{"n": [{numerals}], "{pipeline.KEY}": "1"}}\n')
    pipeline.shuffle_and_number(source, tmp_path / "out", "x", 1)
    assert (tmp_path / "out").read_text() == f'{{"n": [{numerals}], "adlr_id": "x-0000000001"}}\n'


def test_a_number_instead_of_a_text_is_named(tmp_path: Path, refused: Refusal) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": {"9" * 5000}}}\n')
    assert "a.jsonl, line 1: 'text' is a number, not a text" in refused(
        cleanup_dataset, [str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "--workers", "1"]
    )


# Tools


def tool(flags: list[str]) -> int:
    def run(options: argparse.Namespace) -> Report:
        raise AssertionError("the work has begun")

    def add_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--output")
        add_common(parser)

    return Tool("tool.py", "", add_flags, run)(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "0"], "--workers 0: give at least 1"),
        (["--workers", "1000"], "--workers 1000: give at most"),
        (["--report", "nowhere/report"], "there is no folder"),
        (["--output", "folder"], "folder: is a folder"),
        (["--output", "same", "--report", "same"], "same would be written twice"),
    ],
)
def test_flags_are_checked_before_the_work(flags: list[str], message: str, error_line: Callable[[], str]) -> None:
    Path("folder").mkdir()
    assert tool(flags) == 2
    assert message in error_line()


@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        (add_id, ["--input-file", "a.jsonl", "--output-file", "{}", "--id-prefix", "x"]),
        (cleanup_dataset, ["a.jsonl", "{}", "--workers", "1"]),
        (cleanup_fix_dataset, ["--input-files", "a.jsonl", "--output-path", ".", "--tasks", "remove_512"]),
        (merge_jsons, ["--json_path", ".", "--output_file", "b.jsonl"]),
        (blacklist_urls, [".", "out", "--domains-file", "a.jsonl"]),
    ],
)
def test_no_tool_overwrites_its_input(tool: Any, flags: list[str], tmp_path: Path, refused: Refusal) -> None:
    write(Path("a.jsonl"), [{"text": TEXT}])
    Path("a.txt").write_text("https://example.org/one\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    outputs = [("a.jsonl", "report"), ("out", "a.jsonl")] if "{}" in flags else [("out", "a.jsonl")]
    for output, report in outputs:
        arguments = [output if flag == "{}" else flag for flag in flags]
        assert "read and overwritten" in refused(tool, [*arguments, "--report", report])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


FETCH = ["a.txt", "out", "--allow-private-hosts", "--delay", "0", "--workers", "1"]


@pytest.mark.parametrize(
    ("library", "tool", "flags"),
    [
        ("ftfy", cleanup_dataset, ["a.jsonl", "out", "--workers", "1"]),
        ("py3langid", cleanup_dataset, ["a.jsonl", "out", "--workers", "1"]),
        ("tldextract", blacklist_urls, [".", "out"]),
        ("zstandard", add_id, ["--input-file", "a.jsonl", "--output-file", "out.zst", "--id-prefix", "x"]),
        ("datasets", download_openwebtext, ["--output", "out"]),
        ("rensa", find_duplicates, ["--inputs", "a.jsonl", "url", "--output", "out", "--workers", "1"]),
        ("requests", fetch_pages, FETCH),
        ("trafilatura", fetch_pages, FETCH),
    ],
)
def test_tools_name_the_missing_library(
    library: str, tool: Any, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refusal
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "tools.openwebtext.cleaning.fetching", raising=False)
    blacklist_urls._host_parser.cache_clear()
    write(Path("a.jsonl"), [{"text": TEXT, "url": "u"}])
    Path("a.txt").write_text("http://127.0.0.1:9/\n")
    assert refused(tool, flags).endswith(f"error: {library} is missing: pip install -e '.[cleaning]'")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.txt"]

"""The preprocessing command: equal files for every way of reading, bad lines, kills, and flags."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.data.indexed import IndexedDataset
from megatron.data.lines import writing
from megatron.data.preprocess import pipeline
from megatron.data.preprocess.command import main
from megatron.data.preprocess.reading import InputRange, divide, expand_inputs, read_blocks
from megatron.data.preprocess.sentences import sentence_splitter
from tests.support.cli import REPO
from tests.support.disk import largest_file

EOD = 99
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(EOD)]


def lines_of(documents: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


def run(folder: Path, *flags: str, text: str | None = None) -> int:
    """Run the command on `folder`/in.jsonl, with output prefix `folder`/out."""
    if text is not None:
        (folder / "in.jsonl").write_text(text, encoding="utf-8")
    words = list(flags) if "--input" in flags else ["--input", str(folder / "in.jsonl"), *flags]
    return main([*words, "--output-prefix", str(folder / "out"), *NULL])


def stored(prefix: Path) -> list[list[list[int]]]:
    """Documents of sequences of ids."""
    dataset = IndexedDataset(prefix)
    bounds = dataset.doc_idx.tolist()
    return [[dataset[i].tolist() for i in range(a, b)] for a, b in itertools.pairwise(bounds)]


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name.startswith("out")}


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"text": " ".join(str((i * 7 + j) % EOD) for j in range(i % 5)), "n": i} for i in range(count)]


def expected(count: int) -> list[list[list[int]]]:
    ids = [[(i * 7 + j) % EOD for j in range(i % 5)] for i in range(count)]
    return [[[*tokens, EOD]] if tokens else [] for tokens in ids]


def test_documents_eod_and_empty_documents(tmp_path: Path) -> None:
    assert run(tmp_path, "--append-eod", text=lines_of(numbered(23))) == 0
    assert stored(tmp_path / "out_text_document") == expected(23)
    assert run(tmp_path, text=lines_of(numbered(23))) == 0
    without = [[sequence[:-1] for sequence in document] for document in expected(23)]
    assert stored(tmp_path / "out_text_document") == without
    assert IndexedDataset(tmp_path / "out_text_document").dtype.name == "uint16"


def test_every_key_is_written(tmp_path: Path) -> None:
    text = lines_of([{"a": "1 2", "b": "3", "c": "x"}, {"b": "4 5 6", "a": ""}])
    for flag in ("--json-keys", "--json-key", "--json_keys"):
        assert run(tmp_path, flag, "a", "b", text=text) == 0
        assert stored(tmp_path / "out_a_document") == [[[1, 2]], []]
        assert stored(tmp_path / "out_b_document") == [[[3]], [[4, 5, 6]]]
        for path in tmp_path.glob("out*"):
            path.unlink()


@pytest.mark.parametrize("impl", ["mmap", "lazy", "cached"])
def test_formats(tmp_path: Path, impl: str) -> None:
    assert run(tmp_path, "--append-eod", "--dataset-impl", impl, text=lines_of(numbered(9))) == 0
    assert stored(tmp_path / "out_text_document") == expected(9)
    magic = (tmp_path / "out_text_document.idx").read_bytes()[:6]
    assert magic == (b"MMIDID" if impl == "mmap" else b"TNTIDX")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, bytes]]:
    """3,000 documents as text, and the files of a single worker."""
    folder = tmp_path_factory.mktemp("reference")
    text = lines_of(numbered(3000))
    assert run(folder, "--append-eod", text=text) == 0
    assert stored(folder / "out_text_document") == expected(3000)
    return text, outputs(folder)


def from_several_files(folder: Path, text: str) -> list[str]:
    lines = text.splitlines(keepends=True)
    for number, start in enumerate(range(0, 3000, 700)):
        (folder / f"part{number}.jsonl").write_text("".join(lines[start : start + 700]))
    return [str(folder / "part*.jsonl")]


def from_gzip(folder: Path, text: str) -> list[str]:
    with gzip.open(folder / "in.jsonl.gz", "wt") as stream:
        stream.write(text)
    return [str(folder / "in.jsonl.gz")]


def from_zstd(folder: Path, text: str) -> list[str]:
    with writing(folder / "in.jsonl.zst") as write:
        for line in text.splitlines():
            write(line.encode())
    return [str(folder / "in.jsonl.zst")]


def from_two_kinds(folder: Path, text: str) -> list[str]:
    lines = text.splitlines(keepends=True)
    first = from_gzip(folder, "".join(lines[:1000]))
    (folder / "rest.jsonl").write_text("".join(lines[1000:]).rstrip("\n"))
    return [*first, str(folder / "rest.jsonl")]


@pytest.mark.parametrize("make", [from_several_files, from_gzip, from_zstd, from_two_kinds])
def test_input_kinds_give_the_same_files(
    tmp_path: Path, reference: tuple[str, dict[str, bytes]], make: Callable[[Path, str], list[str]]
) -> None:
    assert run(tmp_path, "--input", *make(tmp_path, reference[0]), "--append-eod") == 0
    assert outputs(tmp_path) == reference[1]


@pytest.mark.parametrize("flags", [["--workers", "2"], ["--partitions", "3", "--workers", "2"]])
def test_processes_give_the_same_files(
    tmp_path: Path, reference: tuple[str, dict[str, bytes]], flags: list[str]
) -> None:
    assert run(tmp_path, "--append-eod", *flags, text=reference[0]) == 0
    assert outputs(tmp_path) == reference[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", *sorted(reference[1])]


def command(folder: Path, *flags: str) -> list[str]:
    return [
        sys.executable,
        str(REPO / "tools" / "preprocess_data.py"),
        *flags,
        "--output-prefix",
        str(folder / "out"),
        *NULL,
    ]


def test_standard_input_and_progress_lines(tmp_path: Path, reference: tuple[str, dict[str, bytes]]) -> None:
    done = subprocess.run(
        command(tmp_path, "--input", "-", "--append-eod", "--log-interval", "1000"),
        input=reference[0],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path) == reference[1]
    report = done.stderr.splitlines()
    assert [line.split(" (")[0] for line in report[:3]] == [f"Processed {n} documents" for n in (1000, 2000, 3000)]
    assert all("docs/s" in line and "MB/s" in line for line in report[:4])
    assert report[3].startswith("3000 documents, 2400 sequences, 8400 tokens")


BAD_LINES = [
    (b'{"text": "1 2"', "broken JSON"),
    (b"[" * 100_000, "broken JSON"),
    (b'{"txt": "1"}', "no key 'text' (there are: 'txt')"),
    (b'{"text": 5}', "JSON number where a string belongs"),
    (b'{"text": null}', "JSON null"),
    (b'{"text": ["1"]}', "JSON array"),
    (b'"text"', "JSON string where an object belongs"),
    (b'{"text": "\xff"}', "invalid UTF-8 at byte 11"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    (b'{"text": "1 x"}', "must be integers"),
]


@pytest.mark.parametrize(("line", "why"), BAD_LINES)
def test_a_bad_line_stops_the_run_and_writes_nothing(
    tmp_path: Path, error_line: Callable[[], str], line: bytes, why: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "1"}\n\n{"text": "2"}\n' + line + b'\n{"text": "3"}\n')
    assert run(tmp_path) == 2
    error = error_line()
    assert f"{path}:4: " in error
    assert why in error
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("flags", [[], ["--workers", "2"], ["--partitions", "2"]])
def test_bad_lines_are_skipped_and_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str]) -> None:
    good = [b'{"text": "%d"}' % number for number in range(10)]
    lines = [line for pair in zip(good, [bad for bad, _ in BAD_LINES], strict=True) for line in pair]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    assert run(tmp_path, "--on-error", "skip", *flags) == 0
    assert stored(tmp_path / "out_text_document") == [[[number]] for number in range(10)]
    error = capfd.readouterr().err
    assert "10 bad lines skipped" in error
    for number, (_, why) in enumerate(BAD_LINES):
        assert any(f":{2 * number + 2}: " in line and why in line for line in error.splitlines())


def test_a_bad_line_in_a_later_partition_stops_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = lines_of(numbered(900)) + "{\n" + lines_of(numbered(50))
    assert run(tmp_path, "--partitions", "3", text=text) == 2
    assert f"{tmp_path / 'in.jsonl'}:901: broken JSON" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_other_partitions_stop_after_a_bad_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One partition after another here: the second one finds the stop after its first block, and reports nothing."""
    results: list[Any] = []

    def run_in_turn(function: Callable[[Any], Any], items: Any, workers: int, idle: Any = None) -> list[Any]:
        outputs = list(map(function, items))
        if idle is not None:  # of partitions, not of blocks
            results.extend(outputs)
        return outputs

    monkeypatch.setattr(pipeline, "map_in_processes", run_in_turn)
    assert run(tmp_path, "--partitions", "2", text="{\n" + lines_of(numbered(900))) == 2
    assert "broken JSON" in str(results[0])
    assert str(results[1]) == "stopped because of another part of the input"


@pytest.mark.parametrize("flags", [[], ["--workers", "2"], ["--partitions", "2"]])
def test_a_full_disk_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str]) -> None:
    (tmp_path / "in.jsonl").write_text(lines_of(numbered(3000)))
    with largest_file(2000):
        assert run(tmp_path, *flags) == 2
    error = capfd.readouterr().err
    assert error.splitlines()[-1] == "error: output: File too large. Nothing was written"
    assert "Traceback" not in error
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_a_failed_run_leaves_the_earlier_files(tmp_path: Path) -> None:
    assert run(tmp_path, text=lines_of(numbered(5))) == 0
    before = outputs(tmp_path)
    assert run(tmp_path, text=lines_of(numbered(7)) + "{") == 2
    assert outputs(tmp_path) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_the_earlier_files(tmp_path: Path, number: signal.Signals) -> None:
    assert run(tmp_path, text=lines_of(numbered(5))) == 0
    before = {name: content for name, content in outputs(tmp_path).items() if not name.endswith(".partial")}
    process = subprocess.Popen(
        command(tmp_path, "--input", "-", "--workers", "2", "--log-interval", "1"),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(lines_of(numbered(20_000)).encode())
    process.stdin.flush()
    # Documents are written; the command waits for more.
    assert b"Processed" in process.stderr.readline()
    process.send_signal(number)
    process.stdin.close()
    assert process.wait(timeout=60) != 0
    process.stderr.close()
    after = {name: content for name, content in outputs(tmp_path).items() if not name.endswith(".partial")}
    assert after == before
    if number == signal.SIGTERM:
        assert outputs(tmp_path) == before
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if run(tmp_path, text=lines_of(numbered(6))) == 0:
            break
        time.sleep(0.1)
    assert len(stored(tmp_path / "out_text_document")) == 6
    assert not list(tmp_path.glob("*.partial"))


def test_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a downloaded model, as a note says."""
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nothing"))
    nltk_data = pytest.importorskip("nltk.data")
    monkeypatch.setattr(nltk_data, "path", [])
    monkeypatch.setattr("megatron.data.preprocess.encoding.build_tokenizer", lambda options: Lengths())
    text = lines_of([{"text": "One two. Three four five! Six?"}, {"text": ""}, {"text": "Alone"}])
    assert run(tmp_path, "--split-sentences", "--append-eod", text=text) == 0
    assert stored(tmp_path / "out_text_sentence") == [[[8], [16], [4, EOD]], [], [[5, EOD]]]
    assert "no Punkt model for english" in capsys.readouterr().err


class Lengths:
    """Tokenizer whose only token of a text is its length."""

    vocab_size, eod = EOD + 1, EOD

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        return [[len(text)] if text else [] for text in texts]


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(["One. ", "Two!\n\n", " and", "\n", "Mr. X", "3.5 ", "?", " "])).map("".join))
def test_sentences_with_white_space_add_up_to_the_text(text: str) -> None:
    pytest.importorskip("nltk")
    assert "".join(sentence_splitter("no such language", keep_newlines=True)(text)) == text
    bare = sentence_splitter("no such language", keep_newlines=False)(text)
    assert all(bare)
    # White space between sentences is dropped; only the first sentence may begin with some.
    assert all(sentence == sentence.lstrip() for sentence in bare[1:])
    assert "".join("".join(bare).split()) == "".join(text.split())


@settings(max_examples=100, deadline=None)
@given(
    files=st.lists(st.lists(st.text("ab", max_size=9), max_size=8), min_size=1, max_size=4),
    count=st.integers(1, 7),
    ends=st.booleans(),
)
def test_partitions_hold_every_line_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], count: int, ends: bool
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    names, expected_lines = [], []
    for number, lines in enumerate(files):
        path = folder / str(number)
        text = "\n".join(lines) + ("\n" if ends else "")
        path.write_text(text)
        names.append(str(path))
        expected_lines += [(str(path), n + 1, line) for n, line in enumerate(text.splitlines())]
    pieces = divide(names, count)
    assert len(pieces) <= count
    lines_read = [
        (block.source.name, block.source.line_number(block.first + i), line.decode().rstrip("\n"))
        for piece in pieces
        for block in read_blocks(piece)
        for i, line in enumerate(block.lines)
    ]
    assert lines_read == expected_lines


def test_a_broken_archive_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl.gz"
    with gzip.open(path, "wt") as stream:
        stream.write(lines_of(numbered(500)))
    path.write_bytes(path.read_bytes()[:-200])
    assert run(tmp_path, "--input", str(path)) == 2
    assert f"{path}:" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in.jsonl.gz"]


def test_a_missing_archive_library_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "in.zst").touch()
    assert run(tmp_path, "--input", str(tmp_path / "in.zst")) == 2
    assert "in.zst: zstandard is missing: pip install zstandard" in capsys.readouterr().err.splitlines()[-1]


def test_inputs(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("")
    assert expand_inputs([str(tmp_path / "c.txt"), str(tmp_path / "*.jsonl")]) == [
        str(tmp_path / name) for name in ("c.txt", "a.jsonl", "b.jsonl")
    ]
    for values, message in (
        (["nothing"], "is not a file"),
        (["no*thing"], "matches no file"),
        (["-", "-"], "only once"),
    ):
        with pytest.raises(UserError, match=message):
            expand_inputs(values)
    assert list(read_blocks([InputRange(str(tmp_path / "c.txt"))])) == []


def test_an_input_without_documents_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, text="\n \n") == 2
    assert "no document" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("flags", [[], ["--partitions", "2"], ["--workers", "2"], ["--append-eod"]])
def test_an_input_without_tokens_is_refused(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *flags, text='{"text": ""}\n' * 5) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --json-keys text: all texts of the input are")
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("flags", [[], ["--partitions", "2"]])
def test_a_key_without_tokens_is_named(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = '{"text": "1 2", "title": ""}\n' * 5
    assert run(tmp_path, "--json-keys", "text", "title", *flags, text=text) == 2
    assert "error: --json-keys title: all texts" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_long_integers_are_parsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digits = "7" * 5000
    assert run(tmp_path, text=f'{{"id": {digits}, "text": "1 2", "more": [-{digits}]}}\n') == 0
    assert stored(tmp_path / "out_text_document") == [[[1, 2]]]
    assert run(tmp_path, text=f'{{"text": {digits}}}\n') == 2
    assert "holds a JSON number where a string belongs" in capsys.readouterr().err
    assert run(tmp_path, text=f'{{"id": {digits}, "text": "1 2"\n') == 2
    assert "broken JSON" in capsys.readouterr().err

"""Joined datasets hold all documents, byte for byte; refusals take a single line."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.idx_format import DTYPES, IndexTable, read_index
from megatron.data.indexed import IndexedDataset, IndexedWriter
from megatron.data.merge_command import main


def write(prefix: Path, dtype: Any, seed: int, impl: str = "mmap", documents: int = 5) -> list[list[list[int]]]:
    """Write documents of several sequences, including an empty one; returns their tokens."""
    random = np.random.RandomState(seed)
    contents = []
    with IndexedWriter.like(_table(np.dtype(dtype), impl), prefix) as writer:
        for number in range(documents):
            lengths = random.randint(1, 6, size=number % 3).tolist()
            tokens = random.randint(0, 100, size=sum(lengths)).astype(dtype)
            writer.add_documents(tokens, lengths, [len(lengths)])
            contents.append(
                [sequence.tolist() for sequence in np.split(tokens, np.cumsum(lengths)[:-1])] if lengths else []
            )
    return contents


def _table(dtype: np.dtype[Any], impl: str) -> IndexTable:
    nothing = np.zeros(0, dtype=np.int64)
    return IndexTable(impl != "mmap", dtype, nothing.astype(np.int32), nothing, nothing)


def read(prefix: Path) -> list[list[list[int]]]:
    indexed = IndexedDataset(prefix)
    bounds = indexed.doc_idx.tolist()
    return [
        [indexed.get(n, 0, int(indexed.lengths[n])).tolist() for n in range(begin, end)]
        for begin, end in pairwise(bounds)
    ]


@pytest.mark.parametrize("impl", ["mmap", "lazy"])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_documents_are_joined_in_the_order_of_file_names(tmp_path: Path, dtype: Any, impl: str) -> None:
    folder = tmp_path / "parts"
    documents = [write(folder / f"part{number}", dtype, number, impl) for number in range(3)]
    assert main(["--input", str(folder), "--output-prefix", str(folder / "all")]) == 0
    assert read(folder / "all") == [document for file_documents in documents for document in file_documents]
    table, first = read_index(folder / "all.idx"), read_index(folder / "part0.idx")
    assert (table.dtype, table.legacy) == (first.dtype, first.legacy)
    joined = b"".join((folder / f"part{number}.bin").read_bytes() for number in range(3))
    assert (folder / "all.bin").read_bytes() == joined
    before = (folder / "all.bin").read_bytes(), (folder / "all.idx").read_bytes()
    assert main(["--input", str(folder), "--output_prefix", str(folder / "all")]) == 0  # its own output is not read
    assert before == ((folder / "all.bin").read_bytes(), (folder / "all.idx").read_bytes())


def test_a_list_of_prefixes_keeps_its_order(tmp_path: Path) -> None:
    first, second = write(tmp_path / "b", "uint16", 1), write(tmp_path / "a", "uint16", 2)
    flags = ["--prefixes", str(tmp_path / "b"), str(tmp_path / "a"), "--output-prefix", str(tmp_path / "deep" / "all")]
    assert main(flags) == 0
    assert read(tmp_path / "deep" / "all") == [*first, *second]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--input {0}/mixed", "two.idx: holds int32 tokens and cannot join the uint16 ones of"),
        ("--input {0}/formats", "two.idx: is in the legacy lazy/cached format and cannot join"),
        ("--input {0}/half", "half: one has no one.bin; copy it there, or remove the other file"),
        ("--input {0}/nowhere", "nowhere: No such file or directory; name a folder"),
        ("--input {0}/empty", "empty: holds no .bin/.idx pair to join"),
        ("--prefixes {0}/mixed/one {0}/nothing", "nothing.idx: no such index"),
        ("--prefixes {0}/damaged", "damaged.idx: "),
        ("--prefixes {0}/out {0}/mixed/one", "--output-prefix {0}/out: is one of the data sets to join"),
        ("--prefixes {0}/out.idx {0}/mixed/one", "--output-prefix {0}/out: is one of the data sets to join"),
        ("--input {0}/mixed --prefixes a", "argument --prefixes: not allowed with argument --input"),
        ("", "not given but required: --input or --prefixes"),
        ("--prefixes {0}/mixed/one --multimodal", "--multimodal: "),
        ("--prefixes {0}/mixed/one --unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_datasets_that_cannot_be_joined_are_refused(
    tmp_path: Path, error_line: Callable[[], str], words: str, message: str
) -> None:
    write(tmp_path / "mixed" / "one", "uint16", 1)
    write(tmp_path / "mixed" / "two", "int32", 2)
    write(tmp_path / "formats" / "one", "int32", 1)
    write(tmp_path / "formats" / "two", "int32", 2, "lazy")
    write(tmp_path / "half" / "one", "int32", 1)
    (tmp_path / "half" / "one.bin").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.idx").write_bytes(b"MMIDIDX\x00\x00 and no more")
    (tmp_path / "damaged.bin").write_bytes(b"")
    before = sorted(os.listdir(tmp_path))
    assert main([*words.format(tmp_path).split(), "--output-prefix", str(tmp_path / "out")]) == 2
    line = error_line()
    assert line.startswith("error: ")
    assert message.format(tmp_path) in line
    assert sorted(os.listdir(tmp_path)) == before


def test_a_dataset_in_the_folder_is_not_overwritten(tmp_path: Path, error_line: Callable[[], str]) -> None:
    """A dataset other than the join of the others would be lost."""
    documents = [write(tmp_path / f"part{number}", "int32", number) for number in range(2)]
    flags = ["--input", str(tmp_path), "--output-prefix"]
    assert main([*flags, str(tmp_path / "part1")]) == 2
    line = error_line()
    assert line.startswith(f"error: --output-prefix {tmp_path}/part1: is a data set in --input {tmp_path}, but not")
    assert read(tmp_path / "part1") == documents[1]
    for name in ("all", "all", "all.bin", "all.idx"):
        assert main([*flags, str(tmp_path / name)]) == 0
        assert read(tmp_path / "all") == documents[0] + documents[1]
    write(tmp_path / "part2", "int32", 5)
    assert main([*flags, str(tmp_path / "all")]) == 2, "it has become another data set's prefix"


@pytest.mark.parametrize("prefix", ["", "folder/", ".", "folder/.."])
def test_an_output_without_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prefix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("part0"), "int32", 1)
    before = sorted(tmp_path.iterdir())
    assert main(["--prefixes", "part0", "--output-prefix", prefix]) == 2
    assert capsys.readouterr().err == f"error: --output-prefix {prefix}: names no file; give a name such as data/all\n"
    assert sorted(tmp_path.iterdir()) == before


def test_missing_flags_are_named_together(error_line: Callable[[], str]) -> None:
    assert main([]) == 2
    line = error_line()
    assert "--input" in line
    assert "--prefixes" in line
    assert "--output-prefix" in line


def test_tokens_are_copied_in_pieces(tmp_path: Path) -> None:
    tokens = np.zeros(4_000_000, dtype=np.int32)
    with IndexedWriter(tmp_path / "large") as writer:
        for _ in range(4):
            writer.add_document(tokens)
    del tokens
    tracemalloc.start()
    try:
        flags = ["--prefixes", str(tmp_path / "large"), str(tmp_path / "large")]
        assert main([*flags, "--output-prefix", str(tmp_path / "all")]) == 0
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "all.bin").stat().st_size == 2 * (tmp_path / "large.bin").stat().st_size == 128_000_000

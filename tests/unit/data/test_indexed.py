"""Indexed files: round trips, the layout on disk, and damage detected at opening."""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.data.idx_format import best_dtype
from megatron.data.indexed import IndexedDataset, IndexedWriter
from tests.support.shared import shared_path

SHORT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DOCUMENTS = [[[5, 6, 7], [8]], [], [[1, 2]], [[9, 9, 9, 9]]]


def write(prefix: Path, documents: list[list[list[int]]], impl: str = "mmap", dtype: str = "uint16") -> Path:
    with IndexedWriter(prefix, dtype=np.dtype(dtype), impl=impl) as writer:
        for document in documents:
            flat = [token for sequence in document for token in sequence]
            writer.add_document(flat, [len(sequence) for sequence in document])
    return prefix


def read(dataset: IndexedDataset) -> list[list[list[int]]]:
    bounds = dataset.doc_idx.tolist()
    return [[dataset[i].tolist() for i in range(start, end)] for start, end in pairwise(bounds)]


@SHORT
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=4), max_size=6),
    impl=st.sampled_from(["mmap", "lazy", "cached"]),
    dtype=st.sampled_from(["uint16", "int32", "int64"]),
)
def test_round_trip(tmp_path: Path, documents: list[list[list[int]]], impl: str, dtype: str) -> None:
    prefix = write(tmp_path / "data", documents, impl, dtype)
    for chosen in {"infer", impl, "lazy" if impl == "cached" else impl}:
        dataset = IndexedDataset(prefix, chosen)
        assert read(dataset) == documents
        assert dataset.dtype.name == ("int32" if impl != "mmap" else dtype)
        assert dataset.num_documents == len(documents)


def test_layout_of_the_mmap_index(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", DOCUMENTS)
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    expected += struct.pack("<4i", 3, 1, 2, 4) + struct.pack("<4q", 0, 6, 8, 12) + struct.pack("<5q", 0, 2, 2, 3, 4)
    assert prefix.with_suffix(".idx").read_bytes() == expected
    assert prefix.with_suffix(".bin").read_bytes() == struct.pack("<10H", 5, 6, 7, 8, 1, 2, 9, 9, 9, 9)


def test_layout_of_the_legacy_index(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", DOCUMENTS, "cached")
    expected = b"TNTIDX\0\0" + struct.pack("<6Q", 1, 4, 4, 4, 4, 5)
    expected += struct.pack("<5q", 0, 1, 2, 3, 4) + struct.pack("<5q", 0, 3, 4, 6, 10)
    expected += struct.pack("<4q", 3, 1, 2, 4) + struct.pack("<5q", 0, 2, 2, 3, 4)
    assert prefix.with_suffix(".idx").read_bytes() == expected


def test_get_reads_a_slice_of_a_sequence(tmp_path: Path) -> None:
    for impl in ("mmap", "lazy", "cached"):
        dataset = IndexedDataset(write(tmp_path / impl, DOCUMENTS, impl))
        assert dataset.get(0, 1).tolist() == [6, 7]
        assert dataset.get(3, 1, 2).tolist() == [9, 9]
        for index, offset, length in ((0, 2, 2), (4, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 4, None)):
            with pytest.raises(IndexError):
                dataset.get(index, offset, length)


def test_dtype_by_vocabulary() -> None:
    assert best_dtype(65499).name == "uint16"
    assert best_dtype(65500).name == "int32"
    assert best_dtype(None).name == "int32"


def test_merge_appends_documents(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", DOCUMENTS), write(tmp_path / "b", [[], [[4]], []])
    with IndexedWriter(tmp_path / "c", dtype=np.dtype("uint16")) as writer:
        writer.merge(first)
        writer.add_document([11])
        writer.merge(second)
    assert read(IndexedDataset(tmp_path / "c")) == [*DOCUMENTS, [[11]], [], [[4]], []]


@pytest.mark.parametrize("impl", ["mmap", "cached"])
@pytest.mark.parametrize("ending", [".idx", ".bin"])
def test_every_truncation_is_refused(tmp_path: Path, impl: str, ending: str) -> None:
    path = write(tmp_path / "data", DOCUMENTS, impl).with_suffix(ending)
    content = path.read_bytes()
    for size in [*range(len(content)), len(content) + 1]:
        path.write_bytes((content + b"\0")[:size])
        with pytest.raises(UserError, match=path.name):
            IndexedDataset(tmp_path / "data")


@pytest.mark.parametrize("impl", ["mmap", "cached"])
def test_every_flipped_bit_of_the_index_is_refused_or_harmless(tmp_path: Path, impl: str) -> None:
    prefix = write(tmp_path / "data", DOCUMENTS, impl)
    path = prefix.with_suffix(".idx")
    content = path.read_bytes()
    accepted, messages = 0, []
    for bit in range(len(content) * 8):
        broken = bytearray(content)
        broken[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(bytes(broken))
        try:
            read(IndexedDataset(prefix))
            accepted += 1
        except UserError as error:
            messages.append(str(error))
    assert all("data." in message and "\n" not in message for message in messages)
    # The accepted flips: another type of the same size, and a document start that still lies between its
    # neighbors.
    assert accepted < 12


def change(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"X", "magic"),
        (9, b"\2", "version 2"),
        (17, b"\x63", "dtype code 99"),
        (18, b"\5", "truncated"),
        (34, struct.pack("<i", -3), "negative length at sequence 0"),
        (34, struct.pack("<i", 4), "offset at sequence 1"),
        (46, struct.pack("<i", 5), "data.bin: is truncated"),
        (50 + 8, struct.pack("<q", 7), "offset at sequence 1"),
        (82, struct.pack("<q", 1), "document starts"),
        (82 + 32, struct.pack("<q", 3), "document starts"),
        (82 + 8, struct.pack("<q", 4), "document starts that decrease"),
    ],
)
def test_each_kind_of_damage_is_named(tmp_path: Path, offset: int, data: bytes, message: str) -> None:
    prefix = write(tmp_path / "data", DOCUMENTS)
    change(prefix.with_suffix(".idx"), offset, data)
    with pytest.raises(UserError, match=message):
        IndexedDataset(prefix)


def test_missing_files_and_wrong_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing.idx: no such index"):
        IndexedDataset(tmp_path / "nothing")
    prefix = write(tmp_path / "data", DOCUMENTS)
    for impl in ("lazy", "cached"):
        with pytest.raises(UserError, match=f"--data-impl is {impl}"):
            IndexedDataset(prefix, impl)
    legacy = write(tmp_path / "legacy", DOCUMENTS, "lazy")
    with pytest.raises(UserError, match="legacy"):
        IndexedDataset(legacy, "mmap")
    os.unlink(prefix.with_suffix(".bin"))
    with pytest.raises(UserError, match=r"data.bin: the tokens of data.idx are missing"):
        IndexedDataset(prefix)


def test_tokens_beyond_the_vocabulary_are_found(tmp_path: Path) -> None:
    for impl, dtype in (("mmap", "uint16"), ("mmap", "int32"), ("lazy", "int32")):
        dataset = IndexedDataset(write(tmp_path / f"{impl}{dtype}", DOCUMENTS, impl, dtype))
        dataset.check_token_range(10)
        with pytest.raises(UserError, match=f"{impl}{dtype}.bin: token id 9 in sequence 3"):
            dataset.check_token_range(9)
        with pytest.raises(UserError, match="token id 5 in sequence 0"):
            dataset.check_token_range(5)
    negative = IndexedDataset(write(tmp_path / "negative", [[[1, 2]], [[-4]]], dtype="int32"))
    with pytest.raises(UserError, match="token id -4 in sequence 1"):
        negative.check_token_range(10)


def test_a_clean_check_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write(tmp_path / "data", DOCUMENTS)
    scans: list[int] = []
    scan = IndexedDataset._scan_tokens

    def counted(self: IndexedDataset, vocab_size: int) -> None:
        scans.append(vocab_size)
        scan(self, vocab_size)

    monkeypatch.setattr(IndexedDataset, "_scan_tokens", counted)
    for vocab_size in (10, 10, 11, 10):
        IndexedDataset(prefix).check_token_range(vocab_size, tmp_path / "cache")
    assert scans == [10, 11]
    with pytest.raises(UserError):
        IndexedDataset(prefix).check_token_range(9, tmp_path / "cache")
    with pytest.raises(UserError):
        IndexedDataset(prefix).check_token_range(9, tmp_path / "cache")
    write(prefix, [[[3] * 10]])
    os.utime(prefix.with_suffix(".bin"), ns=(1, 1))
    IndexedDataset(prefix).check_token_range(10, tmp_path / "cache")
    assert scans == [10, 11, 9, 9, 10]


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="add up"), IndexedWriter(prefix) as writer:
        writer.add_documents([1, 2, 3], [2], [1])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "data") as writer:
        writer.add_document([1])
        with pytest.raises(UserError, match="another process"):
            IndexedWriter(tmp_path / "data")
    assert read(IndexedDataset(tmp_path / "data")) == [[[1]]]


@pytest.mark.parametrize("token", [-1, 70000])
def test_a_token_that_does_not_fit_is_refused(tmp_path: Path, token: int) -> None:
    writer = IndexedWriter(tmp_path / "data", dtype=np.dtype("uint16"))
    with pytest.raises(UserError, match=str(token)):
        writer.add_document([1, token])
    writer.abort()


def test_real_index(tmp_path: Path) -> None:
    """A real corpus: 790 documents, 2,340,256 tokens of uint16; written again, it is the same file."""
    index_path = shared_path("data/oscar_text_document.idx")
    if index_path is None:
        pytest.skip("no real index here")
    (tmp_path / "oscar.idx").write_bytes(index_path.read_bytes())
    with open(tmp_path / "oscar.bin", "wb") as stream:
        stream.truncate(4_680_512)
    dataset = IndexedDataset(tmp_path / "oscar")
    assert (len(dataset), dataset.num_documents, dataset.lengths.sum(dtype=np.int64)) == (790, 790, 2_340_256)
    assert dataset.dtype.name == "uint16"
    assert (dataset.lengths.min(), dataset.lengths.max()) == (1025, 140_519)
    dataset.check_token_range(50257)
    with IndexedWriter(tmp_path / "again", dtype=np.dtype("uint16")) as writer:
        writer.add_documents(np.zeros(2_340_256, dtype=np.uint16), dataset.lengths, np.diff(dataset.doc_idx))
    assert (tmp_path / "again.idx").read_bytes() == index_path.read_bytes()


def test_dtype_codes_of_all_types(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7}
    for dtype, code in {**numbers, "uint16": 8}.items():
        prefix = tmp_path / dtype
        if dtype.startswith("float"):
            write(prefix, [[[1, 2]]], dtype=dtype.replace("float", "int"))
            change(prefix.with_suffix(".idx"), 17, bytes([code]))
            with pytest.raises(UserError, match="not token ids"):
                IndexedDataset(prefix).check_token_range(100)
        else:
            write(prefix, [[[1, 2]]], dtype=dtype)
            assert prefix.with_suffix(".idx").read_bytes()[17] == code
            IndexedDataset(prefix).check_token_range(100)

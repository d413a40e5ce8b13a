"""From flags to datasets: splits, blends, and refusals."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.config.data import parse_split
from megatron.data.build import Dataset, split_bounds
from megatron.data.indexed import IndexedDataset, IndexedWriter
from tests.support.shared import shared_path
from tests.unit.data.cases import build, build_train, flags, present, rows, write


def tokens_of(dataset: Dataset | None) -> set[int]:
    return {int(t) for row_t in rows(present(dataset)) for t in row_t}


@pytest.mark.parametrize("order", ["lazy", "megatron"])
def test_splits_take_separate_documents(tmp_path: Path, order: str) -> None:
    path = write(tmp_path / "data", [10] * 20, 0)
    splits = build(flags(data_path=[path], split="7,2,1", sample_order=order), [60, 20, 9])
    split_tokens = [tokens_of(split) for split in splits]
    # Documents 0 to 13, 14 to 17, 18 and 19. Every token is read, except the tail of an epoch.
    for tokens, (start, end) in zip(split_tokens, [(0, 140), (140, 180), (180, 200)], strict=True):
        assert tokens <= set(range(start, end))
        assert len(tokens) > (end - start) - 8


def test_split_of_the_real_index(tmp_path: Path) -> None:
    index_path = shared_path("data/oscar_text_document.idx")
    if index_path is None:
        pytest.skip("no real index here")
    (tmp_path / "oscar.idx").write_bytes(index_path.read_bytes())
    with open(tmp_path / "oscar.bin", "wb") as stream:
        stream.truncate(4_680_512)
    lengths = IndexedDataset(tmp_path / "oscar").lengths
    bounds = [(round(a * 790), round(b * 790)) for a, b in filter(None, split_bounds(parse_split("7,3,1")))]
    assert bounds == [(0, 503), (503, 718), (718, 790)]
    assert [int(lengths[a:b].sum()) for a, b in bounds] == [1_528_901, 642_952, 168_403]
    splits = build(
        flags(data_path=[str(tmp_path / "oscar")], split="7,3,1", sample_order="lazy"),
        [300_000_000, None, None],
        seq_length=2048,
        vocab_size=50257,
    )
    assert [len(split) for split in splits if split is not None] == [300_000_000, 642_951 // 2048, 168_402 // 2048]
    assert present(splits[0])[299_999_999].shape == (2049,)


@settings(max_examples=60, deadline=None)
@given(shares=st.lists(st.just(0.0) | st.floats(1e-3, 1000), min_size=1, max_size=3).filter(any))
def test_split_bounds_cover_everything_once(shares: list[float]) -> None:
    bounds = split_bounds(parse_split(",".join(map(str, shares))))
    assert [bound is None for bound in bounds] == [share == 0 for share in [*shares, 0.0, 0.0][:3]]
    inside = [bound for bound in bounds if bound is not None]
    assert inside[0][0] == 0
    assert inside[-1][1] == pytest.approx(1)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(inside))


def test_separate_paths(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, [10] * 5, start) for name, start in (("a", 0), ("b", 100), ("c", 200))]
    data = flags(train_data_path=paths[:1], test_data_path=paths[2:], sample_order="lazy")
    train, valid, test = build(data, [30, 5, 5])
    assert valid is None
    assert tokens_of(train) == set(range(50))
    assert tokens_of(test) <= set(range(200, 250))


@pytest.mark.parametrize("order", ["lazy", "megatron"])
def test_blend_by_weight(tmp_path: Path, order: str) -> None:
    paths = [write(tmp_path / name, [50] * 8, start) for name, start in (("a", 0), ("b", 1000))]
    data = flags(data_path=["3", paths[0], "1", paths[1]], split="1,0,0", sample_order=order)
    train = build_train(data, 400)
    for prefix in (40, 100, 400):
        share = sum(int(train[i][0]) < 1000 for i in range(prefix)) / prefix
        assert share == pytest.approx(0.75, abs=0.03)
    ids = [train.sample_id(i) for i in range(400)]
    assert len(set(ids)) == 400
    assert {train.sample_id(i) % 2 for i in range(400) if int(train[i][0]) < 1000} == {0}


def test_lazy_blend_without_weights_follows_the_sizes(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a", [60] * 10, 0), write(tmp_path / "b", [60] * 30, 1000)]
    data = flags(data_path=paths, split="1,0,0", sample_order="lazy")
    train = build_train(data, None, seq_length=6)
    assert len(train) == 99 + 299
    assert sum(int(train[i][0]) < 1000 for i in range(len(train))) == pytest.approx(99, abs=1)
    assert len(build_train(data, 1000)) == 1000


def test_two_uses_of_one_file_differ(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [40] * 20, 0)
    train = build_train(flags(data_path=["1", path, "1", path], split="1,0,0", sample_order="lazy"), 100)
    first, second = ([train[i].tolist() for i in range(start, 100, 2)] for start in (0, 1))
    assert first != second


def test_small_corpora_have_no_validation(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [40] * 4, 0)
    train, valid, test = build(flags(data_path=[path], sample_order="lazy"), [10, 5, 5])
    assert train is not None
    assert valid is test is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "no dataset: give its prefix"),
        ({"data_path": ["P"], "valid_data_path": ["P"]}, "exclude each other"),
        ({"data_path": ["P"], "sample_order": "random"}, "--sample-order random"),
        ({"data_path": ["P"], "data_impl": "raw"}, "--data-impl raw"),
        ({"data_path": ["P", "0.5"]}, "0.5.idx: no such index"),
        ({"data_path": ["P"], "split": "0,1,0", "train_data_path": []}, ""),
        ({"data_path": ["EMPTY"], "split": "1,0,0"}, "leaves it no tokens"),
        ({"data_path": ["1", "P", "1", "EMPTY"], "split": "1,0,0"}, "empty \\(train\\)"),
        ({"data_path": ["P", "P"], "split": "1,0,0", "sample_order": "megatron"}, "Give each path a weight"),
    ],
)
def test_invalid_flags_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    names = {"P": write(tmp_path / "full", [40] * 4, 0), "EMPTY": write(tmp_path / "empty", [0, 0], 0)}
    paths = {
        name: [names.get(value, value) for value in changes.get(name, [])] for name in ("data_path", "valid_data_path")
    }
    data = flags(**{"sample_order": "lazy", **changes, **paths})
    if not message:
        assert build(data, [10, 1, 0])[0] is None
        return
    with pytest.raises(UserError, match=message) as caught:
        build(data, [100, 1, 0])
    assert "\n" not in str(caught.value)


def test_tokens_beyond_the_vocabulary_stop_the_start(tmp_path: Path) -> None:
    path = write(tmp_path / "data", [40] * 4, 0)
    data = flags(data_path=[path], sample_order="lazy")
    build(data, [10, 0, 0], vocab_size=160)
    with pytest.raises(UserError, match=r"data.bin: token id 159 in sequence 3 is outside the vocabulary of 159"):
        build(data, [10, 0, 0], vocab_size=159)
    build(data, [10, 0, 0], vocab_size=159, check_tokens=False)


def test_legacy_files_serve_the_same_samples(tmp_path: Path) -> None:
    source = IndexedDataset(write(tmp_path / "mmap", [13, 40, 7, 22], 0))
    with IndexedWriter(tmp_path / "legacy", impl="lazy") as writer:
        for index in range(len(source)):
            writer.add_document(source[index])
    served = []
    for name, impl in (("mmap", "infer"), ("legacy", "infer"), ("legacy", "lazy"), ("legacy", "cached")):
        data = flags(data_path=[str(tmp_path / name)], split="1,0,0", data_impl=impl, sample_order="lazy")
        served.append(rows(build_train(data, 40)))
    assert served[0] == served[1] == served[2] == served[3]

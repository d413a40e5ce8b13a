"""Micro-batches: the same samples in the same order on any layout, after any resume, at any speed."""

from __future__ import annotations

import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.data.batch import Batch, CollateOptions, collate
from megatron.data.build import Dataset
from megatron.data.gpt_dataset import GPTDataset
from tests.unit.data.cases import build_train, flags, load, present, write

SHORT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def dataset(folder: Path, samples: int = 64, **given_flags: Any) -> Dataset:
    lengths = np.random.RandomState(1).randint(1, 40, 60).tolist()
    path = write(folder / "data", lengths, 0)
    data = flags(**{"data_path": [path], "split": "1,0,0", "sample_order": "lazy", **given_flags})
    return build_train(data, samples, eod_token=3)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return dataset(tmp_path_factory.mktemp("loader"))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory, train: Dataset) -> dict[str, Dataset]:
    """The training set by --dataloader-type."""
    return {"single": train, "cyclic": dataset(tmp_path_factory.mktemp("cyclic"), dataloader_type="cyclic")}


def stream(train: Dataset, micro: int, ranks: int, consumed: int, count: int, **options: Any) -> dict[int, list[int]]:
    """Tokens by draw, of `count` micro-batches of all ranks."""
    rows_by_draw: dict[int, list[int]] = {}
    for rank in range(ranks):
        with load(train, micro, consumed, rank, ranks, **options) as loader:
            for number in range(count):
                batch = next(loader)
                start = consumed + number * micro * ranks + rank * micro
                assert batch.draw_ids_b.tolist() == list(range(start, start + micro))
                samples = zip(batch.sample_ids_b.tolist(), present(batch.tokens_bs).tolist(), strict=True)
                for draw, (sample_id, tokens) in zip(batch.draw_ids_b.tolist(), samples, strict=True):
                    assert draw not in rows_by_draw
                    rows_by_draw[draw] = [sample_id, *tokens]
    return rows_by_draw


@SHORT
@given(
    layout=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (8, 1), (1, 8)]),
    consumed=st.sampled_from([0, 8, 16, 24]),
    workers=st.sampled_from([0, 1, 3]),
    kind=st.sampled_from(["single", "cyclic"]),
)
def test_same_samples_on_any_layout_after_any_resume(
    sets: dict[str, Dataset], layout: tuple[int, int], consumed: int, workers: int, kind: str
) -> None:
    micro, ranks = layout
    train = sets[kind]
    expected = stream(train, 1, 1, 0, 64, num_workers=0)
    rows_by_draw = stream(train, micro, ranks, consumed, (64 - consumed) // (micro * ranks), num_workers=workers)
    assert rows_by_draw == {draw: sample for draw, sample in expected.items() if draw >= consumed}


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("islands", [1, 2, 3])
def test_an_island_has_the_same_samples_on_any_layout(train: Dataset, islands: int, micro: int, ranks: int) -> None:
    """Islands have equal shares of each global batch, and together all of it."""
    size, consumed = 24, 12
    for island in range(islands):
        loaders = [
            load(train, micro, consumed, rank, ranks, num_workers=0, island=island, islands=islands)
            for rank in range(ranks)
        ]
        for batch in range(2):
            count = size // (micro * ranks * islands)
            draws = [draw for loader in loaders for _ in range(count) for draw in next(loader).draw_ids_b.tolist()]
            start = consumed + batch * size
            assert sorted(draws) == list(range(start + island, start + size, islands))


def test_batch_holds_the_samples_of_the_dataset(train: Dataset) -> None:
    batch = next(load(train, 3, consumed=4, rank=1, ranks=2, num_workers=0))
    tokens_bs, labels_bs = present(batch.tokens_bs), present(batch.labels_bs)
    for row, index in enumerate((7, 8, 9)):
        sample_t = train[index]
        assert tokens_bs[row].tolist() == sample_t[:-1].tolist()
        assert labels_bs[row].tolist() == sample_t[1:].tolist()
        assert batch.sample_ids_b[row] == train.sample_id(index)
    assert (tokens_bs.dtype, batch.sample_ids_b.dtype) == (torch.int64, torch.int64)
    assert present(batch.loss_mask_bs).dtype == torch.float32
    assert batch.segment_ids_bs is None


def test_without_tokens_the_ids_are_the_same(train: Dataset) -> None:
    loaders = [load(train, 4, ranks=2, needs_tokens=needed) for needed in (True, False)]
    batches: list[list[Batch]] = [list(loader) for loader in loaders]
    assert len(batches[0]) == len(batches[1]) == 8
    for full, bare in zip(*batches, strict=True):
        assert full.sample_ids_b.tolist() == bare.sample_ids_b.tolist()
        assert full.draw_ids_b.tolist() == bare.draw_ids_b.tolist()
        assert full.tokens_bs is not None
        assert bare.tokens_bs is bare.labels_bs is bare.position_ids_bs is None


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stream_ends_for_all_ranks_together(train: Dataset, workers: int) -> None:
    loaders = [load(train, 5, 1, rank, 4, num_workers=workers) for rank in range(4)]
    assert [len(list(loader)) for loader in loaders] == [3, 3, 3, 3]


class Failing(GPTDataset):
    """Cannot read draw 9."""

    def read(self, index: int, out_t: Any) -> None:
        if index == 9:
            raise OSError("disk gone")
        super().read(index, out_t)


@pytest.mark.parametrize("workers", [0, 3])
def test_an_error_is_raised_at_its_batch(train: Dataset, workers: int) -> None:
    assert isinstance(train, GPTDataset)
    broken = Failing(train.indexed, train.order, train.seq_length, train.collate_options)
    loader = load(broken, 2, num_workers=workers)
    assert [next(loader).draw_ids_b.tolist() for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(OSError, match="disk gone"):
        next(loader)


def test_close_ends_the_threads(train: Dataset) -> None:
    before = threading.active_count()
    loader = load(train, 1, num_workers=4)
    next(loader)
    assert threading.active_count() > before
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(loader)


def test_a_consumed_dataset_is_refused(train: Dataset) -> None:
    with pytest.raises(UserError, match="60 of 64 samples are consumed"):
        load(train, 3, consumed=60, ranks=2)


@SHORT
@given(
    rows=st.integers(1, 4).flatmap(
        lambda b: st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=b, max_size=b)
    ),
    switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_collate_token_by_token(rows: list[list[int]], switches: tuple[bool, bool, bool]) -> None:
    reset_positions, reset_attention, mask_loss = switches
    ids = np.arange(len(rows), dtype=np.int64)
    batch = collate(np.array(rows), ids, ids, CollateOptions(0, reset_positions, reset_attention, mask_loss))
    assert batch.position_ids_bs is not None
    assert batch.loss_mask_bs is not None
    for row, sample in enumerate(rows):
        position, segment = 0, 0
        for at, token in enumerate(sample[:-1]):
            assert batch.position_ids_bs[row, at] == (position if reset_positions else at)
            assert batch.loss_mask_bs[row, at] == (0.0 if mask_loss and token == 0 else 1.0)
            if reset_attention:
                assert batch.segment_ids_bs is not None
                assert batch.segment_ids_bs[row, at] == segment
                assert batch.segment_ids_bs.dtype == torch.int32
            else:
                assert batch.segment_ids_bs is None
            position, segment = (0, segment + 1) if token == 0 else (position + 1, segment)


def test_batch_moves_all_but_its_ids() -> None:
    ids = torch.zeros(1, dtype=torch.int64)
    names = [field.name for field in fields(Batch)]
    batch = Batch(**dict.fromkeys(names, ids)).to("meta")
    on_host = [name for name in names if getattr(batch, name).device.type == "cpu"]
    assert on_host == ["sample_ids_b", "draw_ids_b"]
    assert Batch(ids, ids).to("meta").tokens_bs is None

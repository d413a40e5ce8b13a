"""Sample orders: guarantees of both, cost of the lazy order, and cache of the eager order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.data.blend import MegatronBlend
from megatron.data.fixed_order import FixedOrder
from megatron.data.gpt_index import Documents, LazyOrder, MegatronOrder, SampleOrder
from megatron.data.permute import Permutation, mix
from tests.support.disk import largest_file
from tests.support.shared import shared_path

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 0)


def documents(lengths: list[int], first: int = 0) -> Documents:
    return Documents(np.array(lengths, dtype=np.int32), first, "some documents")


def positions(order: SampleOrder, sample_id: int) -> list[tuple[int, int]]:
    """(document, place in it) of each token."""
    return [(doc, offset + i) for doc, offset, length in order.spans(sample_id) for i in range(length)]


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, seq_length=st.integers(1, 40), epochs=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_lazy_epochs_hold_every_token_once(lengths: list[int], seq_length: int, epochs: int, seed: int) -> None:
    """Put end to end, the samples are epochs of entire documents; neighbors share a token."""
    total = sum(lengths)
    samples = (epochs * total - 1) // seq_length
    order = LazyOrder(documents(lengths, 100), seq_length, seed, samples)
    stream: list[tuple[int, int]] = []
    for sample_id in range(samples):
        sample = positions(order, sample_id)
        assert len(sample) == seq_length + 1
        assert not stream or sample[0] == stream[-1]
        stream += sample[1:] if stream else sample
    for start in range(0, len(stream) - total + 1, total):
        epoch = stream[start : start + total]
        assert Counter(epoch) == Counter((100 + doc, i) for doc, n in enumerate(lengths) for i in range(n))
        # A document is read from its first token to its last.
        assert all(b == (a[0], a[1] + 1) or b[1] == 0 for a, b in pairwise(epoch))


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, seq_length=st.integers(1, 20), epochs=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_lazy_draws_each_epoch_completely_before_the_next(
    lengths: list[int], seq_length: int, epochs: int, seed: int
) -> None:
    total = sum(lengths)
    order = LazyOrder(documents(lengths), seq_length, seed, (epochs * total - 1) // seq_length)
    drawn = [order.sample_id(index) for index in range(len(order))]
    start = 0
    for epoch in range(1, epochs + 1):
        end = (epoch * total - 1) // seq_length
        assert sorted(drawn[start:end]) == list(range(start, end))
        start = end
    with pytest.raises(IndexError):
        order.sample_id(len(order))


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq_length=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_fixed_epochs_hold_the_same_samples_in_their_lanes(lengths: list[int], seq_length: int, seed: int) -> None:
    order = FixedOrder(documents(lengths), seq_length, seed, 500)
    size, lanes = order.epoch_samples, order.lanes
    blocks = (sum(lengths) - 1) // seq_length
    assert blocks - lanes < size <= blocks
    assert (blocks - size) * 16 <= blocks
    drawn = [order.sample_id(index) for index in range(500 if size else 0)]
    for start in range(0, len(drawn) - size + 1, max(size, 1)):
        assert sorted(drawn[start : start + size]) == list(range(size))
    assert all(sample % lanes == index % lanes for index, sample in enumerate(drawn))
    if size:
        lazy = LazyOrder(documents(lengths), seq_length, seed, None)
        assert positions(order, size - 1) == positions(lazy, size - 1)


def test_fixed_epochs_are_shuffled_anew() -> None:
    order, longer = (FixedOrder(documents([600]), 1, 3, samples) for samples in (64, 10**6))
    epoch = [order.sample_id(i) for i in range(64)]
    assert [longer.sample_id(i) for i in range(64)] == epoch
    assert [longer.sample_id(longer.epoch_samples + i) for i in range(64)] != epoch


def test_lazy_order_is_independent_of_the_run_length() -> None:
    short, long = (LazyOrder(documents([9, 30, 4, 18]), 5, 3, n) for n in (17, 4000))
    assert [short.sample_id(i) for i in range(17)] == [long.sample_id(i) for i in range(17)]


def test_lazy_order_shuffles_by_seed() -> None:
    lengths = [50] * 40
    orders = [LazyOrder(documents(lengths), 10, seed, 400) for seed in (1, 2)]
    drawn = [[order.sample_id(i) for i in range(199)] for order in orders]
    assert drawn[0] != drawn[1]
    assert drawn[0] != sorted(drawn[0])
    first, second = (positions(orders[0], 0), positions(orders[0], 200))
    assert first != positions(orders[1], 0)
    assert first != second


PINNED_IDS = [9, 6, 7, 8, 0, 2, 11, 4, 1, 5, 10, 3, 18, 21]
PINNED_STARTS = [
    *((2, 0), (0, 1), (0, 5), (3, 2), (3, 6), (3, 10), (3, 14)),
    *((3, 18), (1, 2), (1, 6), (1, 10), (4, 2), (4, 6), (1, 1)),
]


def test_lazy_order_is_pinned() -> None:
    """A run resumed by a later version must continue in the same order."""
    order = LazyOrder(documents([7, 12, 3, 20, 9]), 4, 1234, 30)
    assert [order.sample_id(i) for i in range(14)] == PINNED_IDS
    assert [next(iter(order.spans(i)))[:2] for i in range(14)] == PINNED_STARTS


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(n: int, key: int) -> None:
    permutation = Permutation(n, key)
    assert sorted(map(permutation, range(n))) == list(range(n))
    for outside in (-1, n):
        with pytest.raises(IndexError):
            permutation(outside)


def test_permutation_mixes() -> None:
    """No position is favored: over many keys each input reaches each output about equally often."""
    n, keys = 13, 6000
    counts = np.zeros((n, n))
    for key in range(keys):
        permutation = Permutation(n, mix(key))
        for i in range(n):
            counts[i, permutation(i)] += 1
    expected = keys / n
    # Chi-square with (n - 1)^2 = 144 degrees of freedom: mean 144, standard deviation 17.
    assert float(((counts - expected) ** 2 / expected).sum()) < 144 + 6 * 17


def test_300_million_samples_start_at_once(tmp_path: Path) -> None:
    """Memory of the first samples beyond the imports, in a fresh process. An index would take gigabytes."""
    index_path = shared_path("data/oscar_text_document.idx")
    lengths = "np.random.RandomState(0).randint(1025, 4900, 790).astype(np.int32)"
    if index_path is not None:
        lengths = f"read_index(Path({str(index_path)!r})).lengths"
    script = f"""
import resource
from pathlib import Path
import numpy as np
from megatron.data.blend import MegatronBlend
from megatron.data.fixed_order import FixedOrder
from megatron.data.gpt_index import Documents, LazyOrder
from megatron.data.idx_format import read_index
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
order = LazyOrder(Documents({lengths}, 0, "real"), 2048, 42, 300_000_000)
for index in (0, 1, 150_000_000, 299_999_999):
    assert sum(length for _, _, length in order.spans(order.sample_id(index))) == 2049
print(len(order), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    count, kib = done.stdout.split()
    assert int(count) == 300_000_000
    assert int(kib) < 100 * 1024


def test_documents_without_tokens_are_refused() -> None:
    for make in (LazyOrder, MegatronOrder):
        with pytest.raises(UserError, match="some documents: has no tokens"):
            make(documents([0, 0]), 4, 1, 3)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq_length=st.integers(1, 20), samples=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
def test_megatron_order_serves_every_sample_once(lengths: list[int], seq_length: int, samples: int, seed: int) -> None:
    order = MegatronOrder(documents(lengths, 50), seq_length, seed, samples)
    assert len(order) >= samples
    assert sorted(order.sample_id(index) for index in range(len(order))) == list(range(len(order)))
    stream: list[tuple[int, int]] = []
    for sample_id in range(len(order)):
        sample = positions(order, sample_id)
        assert len(sample) == seq_length + 1
        assert not stream or sample[0] == stream[-1]
        stream += sample[1:] if stream else sample
    # The remainder of the last epoch is shorter than a sample.
    epochs = -(-len(stream) // sum(lengths))
    assert epochs * sum(lengths) - len(stream) < seq_length
    assert len(order.document_index) == epochs * len(lengths)


def test_megatron_arrays_come_from_the_cache(tmp_path: Path) -> None:
    def make(**identity: int) -> MegatronOrder:
        return MegatronOrder(documents([5, 9, 30]), 4, 1, 40, tmp_path, identity)

    first = make(file=1)
    names = {path.name for path in tmp_path.iterdir()}
    again = make(file=1)
    assert {path.name for path in tmp_path.iterdir()} == names
    assert isinstance(again.shuffle_index, np.memmap)
    assert again.shuffle_index.tolist() == first.shuffle_index.tolist()
    make(file=2)
    assert len({path.name for path in tmp_path.iterdir()}) == 2 * len(names)


@pytest.mark.parametrize("damage", ["truncate", "remove", "garbage", "value", "fifo", "deep"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, damage: str) -> None:
    def make() -> MegatronOrder:
        return MegatronOrder(documents([5, 9, 30]), 4, 1, 40, tmp_path, {"file": 1})

    expected = make().shuffle_index.tolist()
    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        if damage in ("remove", "fifo"):
            path.unlink()
            if damage == "fifo":
                os.mkfifo(path)
        elif damage == "value":
            path.write_bytes(content[:-4] + bytes([content[-4] ^ 1]) + content[-3:])
        elif damage == "deep":
            path.write_bytes(b"[" * 100_000)
        else:
            path.write_bytes(content[: len(content) // 2] if damage == "truncate" else b"garbage")
        assert make().shuffle_index.tolist() == expected
        assert path.read_bytes() == content


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A file in its place, a folder that takes no files, and a full disk; nothing is left half-written."""

    def make(folder: Path) -> MegatronOrder:
        return MegatronOrder(documents([50] * 400), 4, 1, 4000, folder, {"file": 1})

    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/nothing"), Path("/proc")):
        with pytest.raises(UserError, match=f"--data-cache-path {folder}.*(written|folder)"):
            make(folder)
    with largest_file(5000), pytest.raises(UserError, match=r"--data-cache-path .*full: cannot be written.*make room"):
        make(tmp_path / "full")
    assert all(path.suffix == ".npy" and np.load(path).size for path in (tmp_path / "full").iterdir())
    assert len(make(tmp_path / "full")) == len(make(tmp_path / "full"))


def test_an_order_larger_than_memory_is_refused_before_it_is_built() -> None:
    with pytest.raises(UserError, match=r"--sample-order megatron holds .* 100_000_\d+_\d+_\d+ samples .* use --samp"):
        MegatronOrder(documents([5, 9, 30]), 4, 1, 10**14)
    with pytest.raises(UserError, match="a blend: --sample-order megatron"):
        MegatronBlend([0.5, 0.5], 10**14)

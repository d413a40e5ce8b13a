"""Documents of sentences, and their cut into samples of consecutive sentences.

A sample takes sentences of a single document until their tokens reach a target length: the maximum that fits, or
occasionally a shorter target, so that the model also sees short texts. The last sentence of a document joins the
preceding sample, and is a separate sample only if it is the entire document. Documents with too few sentences are
skipped, and so are documents of several sentences that contain a very long sentence (text that is not prose).

``cut_in_order`` draws the targets sequentially, as megatron-core does. ``cut_at_once`` derives each target from the
first sentence of its sample, and cuts many documents in parallel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import UserError
from megatron.data.cache import check_memory
from megatron.data.mersenne import mersenne_32
from megatron.data.permute import hash_array

# Maximum length of a sentence in tokens, as in megatron-core.
_MAX_SENTENCE = 512
_CHUNK_SENTENCES = 1 << 20
_SAMPLE_BYTES = 12


@dataclass(frozen=True)
class SentenceDocuments:
    """The documents of a file that belong to a split.

    Args:
        lengths_s: int32, tokens of every sentence of the file.
        starts_d: int64 [documents + 1], index of the first sentence of each document, and the end of the last document.
        name: name in messages.
    """

    lengths_s: NDArray[np.int32]
    starts_d: NDArray[np.int64]
    name: str


@dataclass(frozen=True)
class Cut:
    """Parameters of the cut of documents into samples.

    Args:
        max_tokens: maximum tokens per sample.
        min_sentences: minimum sentences per document and per sample: 2 for sentence pairs.
        short_probability: fraction of samples with a target below ``max_tokens``.
    """

    max_tokens: int
    min_sentences: int
    short_probability: float


@dataclass(frozen=True)
class _Chunk:
    """Adjacent documents of a file that are cut together.

    Args:
        offset: index of the chunk's first sentence in the file.
        firsts_d, lasts_d: first sentence and end of the last sentence of each document, relative to ``offset``.
        ends_s: tokens before each sentence of the chunk, followed by the total.
    """

    offset: int
    firsts_d: NDArray[np.int64]
    lasts_d: NDArray[np.int64]
    ends_s: NDArray[np.int64]


def _chunks(documents: SentenceDocuments, cut: Cut) -> list[_Chunk]:
    starts_d = documents.starts_d
    counts_d = np.diff(starts_d)
    usable_d = counts_d >= cut.min_sentences
    low, high = int(starts_d[0]), int(starts_d[-1])
    long_s = np.flatnonzero(documents.lengths_s[low:high] > _MAX_SENTENCE) + low
    with_long_d = np.searchsorted(starts_d, long_s, side="right") - 1
    usable_d[with_long_d[counts_d[with_long_d] > 1]] = False
    chunks = []
    numbers_d = np.flatnonzero(usable_d)
    chunk_d = (starts_d[numbers_d] - starts_d[0]) // _CHUNK_SENTENCES
    for numbers in np.split(numbers_d, np.flatnonzero(np.diff(chunk_d)) + 1):
        if not len(numbers):
            continue
        offset, end = int(starts_d[numbers[0]]), int(starts_d[numbers[-1] + 1])
        ends_s = np.zeros(end - offset + 1, dtype=np.int64)
        np.cumsum(documents.lengths_s[offset:end], dtype=np.int64, out=ends_s[1:])
        chunks.append(_Chunk(offset, starts_d[numbers] - offset, starts_d[numbers + 1] - offset, ends_s))
    return chunks


def _as_rows(columns: list[NDArray[np.int64]], documents: SentenceDocuments) -> NDArray[Any]:
    dtype = np.uint32 if len(documents.lengths_s) < 1 << 32 else np.int64
    return np.stack(columns, axis=1).astype(dtype)


def _no_samples_error(documents: SentenceDocuments, cut: Cut) -> UserError:
    """Error for documents that yield no samples."""
    if cut.min_sentences > 1 and int(np.diff(documents.starts_d).max(initial=0)) < 2:
        return UserError(
            f"{documents.name}: every document is one sentence, but sentence order needs two. Write it with "
            f"tools/preprocess_data.py --split-sentences, or give --bert-no-binary-head"
        )
    return UserError(
        f"{documents.name}: no document has {cut.min_sentences} or more sentences, none of them above "
        f"{_MAX_SENTENCE} tokens. Write it with tools/preprocess_data.py --split-sentences"
    )


def check_split(documents: SentenceDocuments, max_tokens: int) -> None:
    """Check that the documents are split into sentences.

    Raises:
        UserError: when each is a single sequence and some do not fit into a sample: the excess would never be read.
    """
    starts_d = documents.starts_d
    lengths_s = documents.lengths_s[int(starts_d[0]) : int(starts_d[-1])]
    longest = int(lengths_s.max(initial=0))
    if longest > max_tokens and int(np.diff(starts_d).max(initial=0)) < 2:
        raise UserError(
            f"{documents.name}: every document is one sequence, of up to {longest} tokens, so its text was not split "
            f"into sentences. Write it with tools/preprocess_data.py --split-sentences"
        )


def cut_in_order(documents: SentenceDocuments, cut: Cut, seed: int, num_samples: int | None) -> NDArray[Any]:
    """megatron-core's samples before the shuffle: complete epochs, until there are ``num_samples`` (None: an epoch).

    Returns:
        uint32 or int64 [samples, 3]: first sentence, end of the last sentence, target length.

    Raises:
        UserError: when the documents yield no samples, or the samples do not fit into memory.
    """
    check_memory(_SAMPLE_BYTES * (num_samples or 0), documents.name, num_samples or 0)
    chunks = _chunks(documents, cut)
    draw = chain.from_iterable(_targets_in_order(cut, seed)).__next__
    row_blocks: list[NDArray[Any]] = []
    count = 0
    while not row_blocks or (num_samples is not None and count < num_samples):
        epoch = [_as_rows(_cut_chunk_in_order(chunk, cut.min_sentences, draw), documents) for chunk in chunks]
        if not epoch:
            raise _no_samples_error(documents, cut)
        row_blocks += epoch
        count += sum(map(len, epoch))
    return np.concatenate(row_blocks)


def _targets_in_order(cut: Cut, seed: int) -> Iterator[list[int]]:
    """Targets drawn with std::mt19937: a number divisible by an integer ratio is a short target."""
    ratio = int(np.floor(1.0 / cut.short_probability + 0.5)) if cut.short_probability > 0 else 0
    if not ratio:
        while True:
            yield [cut.max_tokens] * 1024
    for block in mersenne_32(seed):
        numbers = block.astype(np.int64)
        yield np.where(numbers % ratio == 0, 2 + numbers % (cut.max_tokens - 1), cut.max_tokens).tolist()


def _cut_chunk_in_order(chunk: _Chunk, min_sentences: int, draw: Callable[[], int]) -> list[NDArray[np.int64]]:
    """Cut a chunk sequentially; each document draws an extra target after its last sample."""
    ends = chunk.ends_s.tolist()
    begins: list[int] = []
    finishes: list[int] = []
    targets: list[int] = []
    for first, last in zip(chunk.firsts_d.tolist(), chunk.lasts_d.tolist(), strict=True):
        begin, target = first, draw()
        while begin < last:
            end, low, high = last, begin + min_sentences, last - 1
            if low < high:
                boundary = bisect_left(ends, ends[begin] + target, low, high)
                end = boundary if boundary < high else last
            begins.append(begin)
            finishes.append(end)
            targets.append(target)
            begin, target = end, draw()
    return [np.array(begins) + chunk.offset, np.array(finishes) + chunk.offset, np.array(targets)]


def cut_at_once(documents: SentenceDocuments, cut: Cut, seed: int) -> NDArray[Any]:
    """Samples of an epoch in file order; the target of a sample depends on its first sentence and the seed.

    Returns:
        As ``cut_in_order``.

    Raises:
        UserError: when the documents yield no samples.
    """
    row_blocks = []
    for chunk in _chunks(documents, cut):
        # Each step cuts a sample of every document that has sentences left.
        begin_d, last_d, ends_s = chunk.firsts_d, chunk.lasts_d, chunk.ends_s
        columns: list[list[NDArray[np.int64]]] = [[], [], []]
        while len(begin_d):
            numbers = hash_array((begin_d + chunk.offset).astype(np.uint64), seed)
            # The upper bits decide whether a target is short, the lower bits set its length.
            short = (numbers >> np.uint64(32)) < np.uint64(int(cut.short_probability * (1 << 32)))
            lengths = 2 + (numbers & np.uint64(0xFFFFFFFF)) % np.uint64(cut.max_tokens - 1)
            target_d = np.where(short, lengths, np.uint64(cut.max_tokens)).astype(np.int64)
            end_d = np.searchsorted(ends_s, ends_s[begin_d] + target_d, side="left")
            end_d = np.maximum(end_d, begin_d + cut.min_sentences)
            end_d = np.where(end_d < last_d - 1, end_d, last_d)
            for column, values in zip(columns, (begin_d + chunk.offset, end_d + chunk.offset, target_d), strict=True):
                column.append(values)
            left_d = end_d < last_d
            begin_d, last_d = end_d[left_d], last_d[left_d]
        joined_columns = [np.concatenate(column) for column in columns]
        order = np.argsort(joined_columns[0], kind="stable")
        row_blocks.append(_as_rows([column[order] for column in joined_columns], documents))
    if not row_blocks:
        raise _no_samples_error(documents, cut)
    return np.concatenate(row_blocks)

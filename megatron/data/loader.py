"""Micro-batch loader of a data-parallel rank.

Draw t of a run is the same sample on every layout. Micro-batch m of rank d takes the draws
consumed + m * b * D + [d * b, (d + 1) * b), with micro-batch size b and D ranks. A global batch is therefore the same
set of samples on every layout, and a resumed run continues at ``consumed_samples``.

With K islands, island k takes the draws consumed + K * i + k, and its ranks divide the indices i in the same way, so
the samples of an island do not depend on its layout either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
import torch

from megatron.base.errors import UserError
from megatron.data.batch import Batch
from megatron.data.source import SampleSource

# Micro-batches prefetched per thread.
_AHEAD = 2


class MicroBatches(Iterator[Batch]):
    """Iterator over the micro-batches of data-parallel rank ``dp_rank``, starting at draw ``consumed_samples``.

    It takes the draws of the dataset in order, and stops when fewer than a micro-batch per rank remain. Threads
    prefetch micro-batches. ``next`` raises the error of a thread when it reaches that micro-batch. ``close``, leaving
    the context manager, and the end of the stream stop the threads.

    Args:
        dataset: a dataset of ``build_datasets``.
        consumed_samples: draws that the run has consumed, over all ranks.
        micro_batch_size: samples per micro-batch.
        dp_rank, dp_size: data-parallel rank and size.
        num_workers: prefetch threads; 0 builds each micro-batch on request.
        needs_tokens: False omits the token tensors, for pipeline stages that only need the ids.
        island, islands: index of this rank's island, and number of islands.

    Raises:
        UserError: when no micro-batch remains.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int = 2,
        needs_tokens: bool = True,
        island: int = 0,
        islands: int = 1,
    ) -> None:
        if (
            micro_batch_size < 1
            or not 0 <= dp_rank < dp_size
            or not 0 <= island < islands
            or num_workers < 0
            or consumed_samples < 0
        ):
            raise ValueError(
                f"micro_batch_size {micro_batch_size}, dp_rank {dp_rank} of {dp_size}, island {island} of {islands}, "
                f"num_workers {num_workers}, consumed_samples {consumed_samples}: out of range"
            )
        if len(dataset) == 0:
            raise UserError("the dataset has no sample: give it more text, or a shorter --seq-length")
        if consumed_samples + micro_batch_size * dp_size * islands > len(dataset):
            raise UserError(
                f"no micro-batch is left: {consumed_samples} of {len(dataset)} samples are consumed. "
                f"Raise --train-iters or --train-samples, or start afresh without --load"
            )
        self._dataset = dataset
        self._first = consumed_samples + dp_rank * micro_batch_size * islands + island
        self._micro_batch_size = micro_batch_size
        self._islands = islands
        self._stride = micro_batch_size * dp_size * islands
        self._needs_tokens = needs_tokens
        # Complete rounds only: every rank stops after the same micro-batch.
        self._count = (len(dataset) - consumed_samples) // self._stride
        self._next_number = 0
        self._pool = ThreadPoolExecutor(num_workers, "data") if num_workers and needs_tokens else None
        self._pending: deque[Future[Batch]] = deque()
        self._ahead = _AHEAD * num_workers
        self._closed = False

    def __len__(self) -> int:
        """Micro-batches in the whole stream, the same on every rank."""
        return self._count

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._pool is None:
            if self._next_number >= self._count:
                self.close()
                raise StopIteration
            self._next_number += 1
            return self._make(self._next_number - 1)
        while len(self._pending) < self._ahead and self._next_number < self._count:
            self._pending.append(self._pool.submit(self._make, self._next_number))
            self._next_number += 1
        if not self._pending:
            self.close()
            raise StopIteration
        try:
            return self._pending.popleft().result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the threads and end the iteration. May be called more than once."""
        self._closed = True
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> MicroBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            self.close()

    def _make(self, number: int) -> Batch:
        start = self._first + number * self._stride
        draws_b = np.arange(start, start + self._micro_batch_size * self._islands, self._islands, dtype=np.int64)
        draws = draws_b.tolist()
        ids_b = np.array([self._dataset.sample_id(draw) for draw in draws], dtype=np.int64)
        if not self._needs_tokens:
            return Batch(sample_ids_b=torch.from_numpy(ids_b), draw_ids_b=torch.from_numpy(draws_b))
        rows_bt = np.empty((len(draws), self._dataset.row_length), dtype=np.int64)
        for row_t, draw in zip(rows_bt, draws, strict=True):
            self._dataset.read(draw, row_t)
        return self._dataset.collate(rows_bt, ids_b, draws_b)

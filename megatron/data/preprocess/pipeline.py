"""The encoding pipeline: blocks of lines through one or many workers into indexed files, in the order of the input."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.data.indexed import IndexedWriter, dataset_files
from megatron.data.preprocess.encoding import BadLine, Encoded, EncodeOptions, Encoder
from megatron.data.preprocess.reading import Block, InputRange, read_blocks

# Blocks under way for each worker: enough to keep it busy, and little memory.
_AHEAD = 3


@dataclass(frozen=True)
class EncodingJob:
    """A run of encoding: options, output format, and what to do about bad lines."""

    options: EncodeOptions
    dataset_impl: str
    skip_bad_lines: bool
    workers: int


@dataclass
class Totals:
    """Totals of a run so far."""

    documents: int = 0
    size: int = 0
    skipped: int = 0
    sequences: int = 0
    tokens: int = 0


# Called after every block with the totals so far and the messages about lines skipped in it.
Report = Callable[[Totals, list[str]], None]


def output_prefixes(output_prefix: str, options: EncodeOptions) -> list[str]:
    """The prefix of each key's files."""
    level = "sentence" if options.split_sentences else "document"
    return [f"{output_prefix}_{key}_{level}" for key in options.json_keys]


def run(
    job: EncodingJob, sources: list[InputRange], prefixes: list[str], report: Report, *, may_be_empty: bool = False
) -> Totals:
    """Encodes all sources into one pair of files for each key. The files appear when all is done, or not at
    all.

    Raises:
        UserError: when a line is bad and bad lines are not skipped, input cannot be read, or there is no document.
    """
    totals = Totals()
    with ExitStack() as stack:
        encoder = Encoder(job.options)
        writers = [
            stack.enter_context(IndexedWriter(prefix, dtype=encoder.dtype, impl=job.dataset_impl))
            for prefix in prefixes
        ]
        for result in _encoded(job, encoder, read_blocks(sources)):
            messages = [_describe(result.source, bad) for bad in result.bad]
            if messages and not job.skip_bad_lines:
                raise UserError(f"{messages[0]}. Mend the line, or skip such lines with --on-error skip")
            for writer, tokens in zip(writers, result.by_key, strict=True):
                writer.add_documents(tokens.tokens, tokens.lengths, tokens.sequences)
                totals.sequences += len(tokens.lengths)
                totals.tokens += len(tokens.tokens)
            totals.documents += result.documents
            totals.size += result.size
            totals.skipped += len(messages)
            report(totals, messages)
        if not may_be_empty:
            _require_documents(totals)
    return totals


def run_partitions(job: EncodingJob, parts: list[list[InputRange]], prefixes: list[str], report: Report) -> Totals:
    """Runs like ``run``, with a process and an equal share of the workers for each part of the input.

    Each writes shards; they are joined in the order of the input and removed.
    """
    shards = [[f"{prefix}.part{number}" for prefix in prefixes] for number in range(len(parts))]
    share = EncodingJob(job.options, job.dataset_impl, job.skip_bad_lines, max(1, job.workers // len(parts)))
    context = multiprocessing.get_context("spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    try:
        with ProcessPoolExecutor(
            len(parts), mp_context=context, initializer=_start_partition, initargs=(messages, stop)
        ) as pool:
            futures = [
                pool.submit(_run_partition, number, share, part, shards[number]) for number, part in enumerate(parts)
            ]
            totals = _watch(futures, messages, stop, report)
        _require_documents(totals)
        with ExitStack() as stack:
            dtype = Encoder(job.options).dtype
            for place, prefix in enumerate(prefixes):
                writer = stack.enter_context(IndexedWriter(prefix, dtype=dtype, impl=job.dataset_impl))
                for shard in shards:
                    writer.merge(shard[place])
        return totals
    finally:
        for prefix in (prefix for shard in shards for prefix in shard):
            for path in dataset_files(prefix):
                path.unlink(missing_ok=True)
                Path(f"{path}.partial").unlink(missing_ok=True)


def _encoded(job: EncodingJob, encoder: Encoder, blocks: Iterator[Block]) -> Iterator[Encoded]:
    """Encodes blocks in order, in this process or in ``job.workers`` others."""
    if job.workers == 1:
        yield from map(encoder, blocks)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(job.workers, mp_context=context, initializer=_start_worker, initargs=(job.options,))
    pending: deque[Future[Encoded]] = deque()
    try:
        for block in blocks:
            pending.append(pool.submit(_encode_block, block))
            if len(pending) >= _AHEAD * job.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError("a worker process died (out of memory?): use fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _require_documents(totals: Totals) -> None:
    if totals.documents == 0:
        skipped = f" ({totals.skipped} bad lines were skipped)" if totals.skipped else ""
        raise UserError(f"the input holds no document{skipped}: nothing was written. Check --input")


def _describe(source: InputRange, bad: BadLine) -> str:
    return f"{source.label}:{source.line_number(bad.index)}: {bad.why}"


# State of a worker process, set once when it starts.
_worker: dict[str, Any] = {}


def _start_worker(options: EncodeOptions) -> None:
    _end_with_parent()
    _worker["encoder"] = Encoder(options)


def _encode_block(block: Block) -> Encoded:
    encoded: Encoded = _worker["encoder"](block)
    return encoded


def _start_partition(messages: Any, stop: Any) -> None:
    _end_with_parent()
    _worker["messages"] = messages
    _worker["stop"] = stop


def _run_partition(number: int, job: EncodingJob, sources: list[InputRange], prefixes: list[str]) -> Totals:
    def report(totals: Totals, skipped: list[str]) -> None:
        if _worker["stop"].is_set():
            raise UserError("stopped because of another part of the input")
        _worker["messages"].put((number, Totals(**vars(totals)), skipped))

    return run(job, sources, prefixes, report, may_be_empty=True)


def _watch(futures: list[Future[Totals]], messages: Any, stop: Any, report: Report) -> Totals:
    """Passes the partitions' reports on until each has ended; raises the error of the first that failed."""
    latest = [Totals() for _ in futures]
    failed: Future[Totals] | None = None
    try:
        while not all(future.done() for future in futures) or not messages.empty():
            if messages.empty():
                time.sleep(0.02)
            else:
                number, latest[number], skipped = messages.get()
                report(_sum(latest), skipped)
            if failed is None:
                failed = next((f for f in futures if f.done() and f.exception() is not None), None)
                if failed is not None:
                    stop.set()
        if failed is not None:
            failed.result()
        return _sum([future.result() for future in futures])
    except BrokenProcessPool:
        raise UserError("a partition's process died (out of memory?): use fewer --partitions") from None
    finally:
        # After an exception here the partitions may still be at work: a full queue must not block their end.
        stop.set()
        while not all(future.done() for future in futures):
            time.sleep(0.02)
            while not messages.empty():
                messages.get()


def _sum(parts: list[Totals]) -> Totals:
    result = Totals()
    for part in parts:
        for name, value in vars(part).items():
            setattr(result, name, getattr(result, name) + value)
    return result


def _end_with_parent() -> None:
    """Ends this process when the main process is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

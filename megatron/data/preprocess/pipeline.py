"""Encoding pipeline: encodes blocks of lines in parallel, and writes indexed files in input order."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.data.indexed import IndexedWriter, dataset_files
from megatron.data.preprocess.encoding import EncodeOptions, Encoder
from megatron.data.preprocess.reading import InputRange, read_blocks
from megatron.data.processes import ProcessKilled, map_in_processes


@dataclass(frozen=True)
class EncodingJob:
    """Parameters of an encoding run: options, output format, handling of bad lines, and number of workers."""

    options: EncodeOptions
    dataset_impl: str
    skip_bad_lines: bool
    workers: int


@dataclass
class Totals:
    """Running totals of an encoding run; ``size`` is in bytes of input."""

    documents: int = 0
    size: int = 0
    skipped: int = 0
    sequences: int = 0
    tokens: int = 0


# Called after every block with the running totals and the messages about its skipped lines.
Report = Callable[[Totals, list[str]], None]


def run(
    job: EncodingJob, sources: list[InputRange], prefixes: list[str], report: Report, *, may_be_empty: bool = False
) -> Totals:
    """Encode all sources into a pair of files per key. The files appear only after everything succeeded.

    Raises:
        UserError: when a line is bad and bad lines are not skipped, input cannot be read, there is no document, or a
            key has no tokens.
    """
    totals = Totals()
    encoder = Encoder(job.options)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(prefix, dtype=encoder.dtype, impl=job.dataset_impl))
            for prefix in prefixes
        ]
        try:
            for result in map_in_processes(encoder, read_blocks(sources), job.workers):
                source = result.source
                messages = [f"{source.label}:{source.line_number(bad.index)}: {bad.reason}" for bad in result.bad]
                if messages and not job.skip_bad_lines:
                    raise UserError(f"{messages[0]}. Correct the line, or skip such lines with --on-error skip")
                for writer, tokens in zip(writers, result.by_key, strict=True):
                    writer.add_documents(tokens.tokens, tokens.lengths, tokens.sequences)
                    totals.sequences += len(tokens.lengths)
                    totals.tokens += len(tokens.tokens)
                totals.documents += result.documents
                totals.size += result.size
                totals.skipped += len(messages)
                report(totals, messages)
        except ProcessKilled:
            raise UserError("a worker process died (out of memory?): use fewer --workers") from None
        if not may_be_empty:
            _require_documents(totals)
            _require_tokens(job.options, writers)
    return totals


def run_partitions(job: EncodingJob, parts: list[list[InputRange]], prefixes: list[str], report: Report) -> Totals:
    """Like ``run``, with a process and an equal share of the workers per part of the input.

    Each part writes shards, which are merged in input order and removed.
    """
    shards = [[f"{prefix}.part{number}" for prefix in prefixes] for number in range(len(parts))]
    partition_job = replace(job, workers=max(1, job.workers // len(parts)))
    context = multiprocessing.get_context("spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    latest = [Totals() for _ in parts]

    def forward_reports() -> None:
        while not messages.empty():
            number, latest[number], skipped = messages.get()
            report(_sum_totals(latest), skipped)

    run_partition = partial(_run_partition, partition_job, messages, stop)
    partitions = [_Partition(number, sources, shards[number]) for number, sources in enumerate(parts)]
    try:
        results = list(map_in_processes(run_partition, partitions, len(parts), idle=forward_reports))
        forward_reports()
        errors = [result for result in results if not isinstance(result, Totals)]
        if errors:
            raise next((error for error in errors if not isinstance(error, _Stopped)), errors[0])
        totals = _sum_totals([result for result in results if isinstance(result, Totals)])
        _require_documents(totals)
        with ExitStack() as stack:
            dtype = Encoder(job.options).dtype
            writers = []
            for key_index, prefix in enumerate(prefixes):
                writer = stack.enter_context(IndexedWriter(prefix, dtype=dtype, impl=job.dataset_impl))
                writers.append(writer)
                for shard in shards:
                    writer.merge(shard[key_index])
            _require_tokens(job.options, writers)
        return totals
    except ProcessKilled:
        raise UserError("a partition's process died (out of memory?): use fewer --partitions") from None
    finally:
        for prefix in (prefix for shard in shards for prefix in shard):
            for path in dataset_files(prefix):
                path.unlink(missing_ok=True)
                Path(f"{path}.partial").unlink(missing_ok=True)


def _require_documents(totals: Totals) -> None:
    if totals.documents == 0:
        skipped = f" ({totals.skipped} bad lines were skipped)" if totals.skipped else ""
        raise UserError(f"the input holds no document{skipped}: nothing was written. Check --input")


def _require_tokens(options: EncodeOptions, writers: Sequence[IndexedWriter]) -> None:
    for key, writer in zip(options.json_keys, writers, strict=True):
        if not writer.num_sequences:
            raise UserError(
                f"--json-keys {key}: all texts of the input are empty, so there is no token to train on: nothing was "
                "written. Check --input, or leave the key out"
            )


@dataclass(frozen=True)
class _Partition:
    """A part of the input."""

    number: int
    sources: list[InputRange]
    prefixes: list[str]


class _Stopped(UserError):
    """Raised in a partition after another partition failed."""


def _run_partition(job: EncodingJob, messages: Any, stop: Any, partition: _Partition) -> Totals | UserError | OSError:
    """Encode a part, and send its running totals; return the totals, or the error, after which all parts stop."""

    def report(totals: Totals, skipped: list[str]) -> None:
        if stop.is_set():
            raise _Stopped("stopped because of another part of the input")
        messages.put((partition.number, replace(totals), skipped))

    try:
        return run(job, partition.sources, partition.prefixes, report, may_be_empty=True)
    except (UserError, OSError) as error:
        stop.set()
        return error


def _sum_totals(running_totals: list[Totals]) -> Totals:
    result = Totals()
    for totals in running_totals:
        for name, value in vars(totals).items():
            setattr(result, name, getattr(result, name) + value)
    return result

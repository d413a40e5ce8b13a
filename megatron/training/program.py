"""Execution of a command on every rank, with a clear error message on each rank when it fails."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from megatron.base.errors import UserError, describe_failure, first_line
from megatron.base.start import launcher_pid
from megatron.compression.options import CompressorFault
from megatron.distributed.errors import CommunicationError
from megatron.distributed.health import EXIT_PEER_LOST, GRACE_SECONDS, SILENT_SECONDS, FailureDetector
from megatron.distributed.process_group import (
    LaunchEnvironment,
    init_process_group,
    open_queues,
    shutdown,
    write_error_file,
)
from megatron.training.config_agreement import LEAVE_SECONDS, RankAgreement
from megatron.training.identity import identity_of

EXIT_BAD_INPUT = 2
EXIT_BUG = 1
EXIT_NOTHING_LEARNED = 4
EXIT_DIVERGED = 5
_RANK_0_PRINTS_SECONDS = 1.0
_OUT_OF_MEMORY_TEXTS = (
    *("can't allocate memory", "not enough memory", "Storage size calculation overflowed"),
    *("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
"""Messages of torch's CPU allocator, CUDA and its libraries when memory has run out."""
_NOT_DETERMINISTIC = "does not have a deterministic implementation"
"""Message with which torch refuses an operation under ``torch.use_deterministic_algorithms``."""
_SIZE = r"([0-9.]+ (?:[KMGT]i)?B|[0-9]+ bytes)"
_GPU_OUT_OF_MEMORY = re.compile(
    rf"Tried to allocate {_SIZE}.*? GPU ([0-9]+) has a total capacity of {_SIZE} of which {_SIZE} is free", re.DOTALL
)
"""Message with which torch reports that a GPU's memory has run out."""


class TrainingFailedError(RuntimeError):
    """Raised on every rank when a run ends in order, but training has failed. The message is a single line.

    ``status`` is the exit status of the program.
    """

    status = EXIT_BUG


class NothingLearnedError(TrainingFailedError):
    """Raised when a run ends without any update of the weights."""

    status = EXIT_NOTHING_LEARNED


class DivergedError(TrainingFailedError):
    """Raised when a run ends because it has diverged."""

    status = EXIT_DIVERGED


class Ranks:
    """The ranks of a command, as seen from this rank.

    Attributes:
        env: rank and world size of this process, from the launcher.
        started: ``time.monotonic()`` at the start of the command.
        detector: heartbeat monitor of the other ranks; None before ``join``.
        agreement: the exchange in which all ranks agreed on their settings; None before ``join``.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.env = LaunchEnvironment.read()
        self._note = open_queues()
        self.detector: FailureDetector | None = None
        self.agreement: RankAgreement | None = None

    def join(
        self,
        backend: str,
        timeout_minutes: float,
        sections: Mapping[str, Any],
        notes: Sequence[str] = (),
        peer_timeout_seconds: float = SILENT_SECONDS,
    ) -> None:
        """Join the other ranks, if any, in a process group; rank 0 prints the notes on the flags.

        Args:
            backend, timeout_minutes: backend and time-out of the process group.
            sections: sections of the command's flags, by name, which must be the same on all ranks.
            notes: notes on the flags.
            peer_timeout_seconds: longest time without a heartbeat of a rank before the other ranks end.

        Raises:
            UserError: on every rank, when flags, code or files differ, or another rank refuses.
            CommunicationError: when a rank is missing.
        """
        env, launcher = self.env, launcher_pid()
        if env.world_size > 1:
            identity = identity_of(sections)
            self.agreement = RankAgreement(env, timeout_minutes)
            self.agreement.agree(identity)
        store = self.agreement.store if self.agreement is not None else None
        if store is not None or launcher is not None:
            detector = FailureDetector(
                env.rank,
                env.world_size,
                silent_seconds=peer_timeout_seconds,
                grace_seconds=0.0 if backend == "nccl" else GRACE_SECONDS,
                launcher=launcher,
            )
            try:
                detector.start(store, os.environ.get("MASTER_ADDR", "localhost"), local=env.one_machine)
            except (RuntimeError, OSError) as error:
                raise CommunicationError(f"rank {env.rank} cannot meet its neighbors: {first_line(error)}") from error
            self.detector = detector
        if store is not None:
            init_process_group(env, backend, timeout_minutes, store)
        if self.env.rank == 0:
            for note in [*notes, *([self._note] if self._note and backend == "nccl" else [])]:
                print(f"note: {note}", file=sys.stderr)

    def leave(self) -> None:
        """Stop the watch and leave the process group, at the end of a command that has succeeded."""
        if self.detector is not None:
            self.detector.stop()
        shutdown()

    def fail(self, text: str, status: int, reason: str | None = None) -> int:
        """Print the reason, tell the other ranks, and leave.

        Rank 0 prints the bad input of any rank. The other ranks leave a little later, so that the launcher does not end
        rank 0 before it has printed.
        """
        printed = prints = status != EXIT_BAD_INPUT or self.env.rank == 0
        if prints:
            print(text, file=sys.stderr, flush=True)
        if self.agreement is None and status in (EXIT_BAD_INPUT, EXIT_BUG) and self.env.world_size > 1:
            try:
                agreement = RankAgreement(self.env, LEAVE_SECONDS / 60)
                delivered = agreement.refuse(reason or text, bad_input=status == EXIT_BAD_INPUT)
            except (UserError, CommunicationError):
                delivered = False
            if not delivered and not prints:
                print(text, file=sys.stderr, flush=True)
                printed = True
        if not prints:
            time.sleep(_RANK_0_PRINTS_SECONDS)
        write_error_file(f"rank {self.env.rank} failed: {reason}" if status == EXIT_BUG and reason else text, printed)
        if self.detector is not None:
            if status != EXIT_PEER_LOST:
                self.detector.report(reason or text)
            sys.stdout.flush()
            os._exit(status)  # threads of a broken process group can block an orderly exit
        return status


def run_program(body: Callable[[Ranks], None]) -> int:
    """Run a command on this rank.

    Args:
        body: the command; it joins the other ranks after checking its flags.

    Returns:
        The exit status. A rank that fails leaves at once, without waiting for ranks that may be stuck.
    """
    try:
        ranks = Ranks()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        write_error_file(f"error: {error}")
        return EXIT_BAD_INPUT
    try:
        body(ranks)
        ranks.leave()
        return 0
    except UserError as error:
        return ranks.fail(f"error: {error}", EXIT_BAD_INPUT, reason=str(error))
    except CommunicationError as error:
        if error.__cause__ is not None and is_out_of_memory(error.__cause__):
            return ranks.fail(f"rank {ranks.env.rank}: {explain_out_of_memory(error.__cause__)}", EXIT_BUG)
        lost = ranks.detector.explain() if ranks.detector is not None else None
        why = f"{lost} ({error})" if lost else str(error)
        return ranks.fail(f"rank {ranks.env.rank}: {why}", EXIT_PEER_LOST)
    except CompressorFault as error:
        return ranks.fail(f"rank {ranks.env.rank}: {error}", EXIT_BUG)
    except TrainingFailedError as error:
        ranks.leave()
        if ranks.env.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        write_error_file(f"error: {error}", printed=ranks.env.rank == 0)
        return error.status
    except KeyboardInterrupt:
        return ranks.fail(f"rank {ranks.env.rank}: interrupted", 130)
    except Exception as error:
        if is_out_of_memory(error):
            return ranks.fail(f"rank {ranks.env.rank}: {explain_out_of_memory(error)}", EXIT_BUG)
        if _NOT_DETERMINISTIC in str(error):
            operation = str(error).partition(_NOT_DETERMINISTIC)[0].strip()[:100]
            why = (
                f"--deterministic-mode: torch's {operation} {_NOT_DETERMINISTIC} on this device; leave out what uses "
                "it, or the flag"
            )
            return ranks.fail(f"rank {ranks.env.rank}: {why}", EXIT_BUG)
        text = f"rank {ranks.env.rank} failed:\n{traceback.format_exc()}"
        return ranks.fail(text, EXIT_BUG, reason=describe_failure(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, of Python, NumPy, or torch on any device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY_TEXTS)


def explain_out_of_memory(error: BaseException) -> str:
    """Explain a failed allocation in a single line."""
    reason = first_line(error)[:300]
    match = _GPU_OUT_OF_MEMORY.search(str(error))
    if match is not None:
        needed, index, total, free = match.groups()
        name = ""
        with suppress(RuntimeError, AssertionError):  # a GPU in this state may not answer
            name = f" ({torch.cuda.get_device_name(int(index))})"
        reason = f"GPU {index}{name} needed {needed} more, and {free} of its {total} are free"
    return (
        f"out of memory: {reason}; lower --micro-batch-size or --seq-length, recompute "
        "activations (--recompute-granularity full), or split the model over more processes "
        "(--tensor-model-parallel-size, --pipeline-model-parallel-size)"
    )

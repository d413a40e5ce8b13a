"""Starts a program's ranks as torchrun does; when they fail, the last line says why.

    python tools/launch.py --nproc-per-node 4 pretrain_gpt.py ...

All flags but those of islands are torchrun's (``--help`` lists them): --nnodes, --node-rank, --master-addr,
--max-restarts ... ``--islands 2 --nproc-per-node 4`` starts two islands of two ranks, each under a launcher of its own:
one that fails leaves the other, and the exit status is 0 when one of them has come to the end. The exit status is
that of the rank that failed first: 1 for an error, 2 for bad input, 3 when a rank or machine is gone, 4 when every step
was skipped, 128 plus the signal's number for a rank that was killed. LOGLEVEL=WARNING or INFO also shows torchrun's own
messages.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.base.errors import first_line
from megatron.topology.errors import CommunicationError
from megatron.topology.launch_islands import (
    launch_islands,
    launch_parser,
    prepare_island,
    starts_islands,
    wrong_islands,
)

NO_FILE = "<N/A>"
"""torch's name for the missing error file of a process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = launch_parser().parse_args(words)
    wrong = _wrong(arguments) or wrong_islands(arguments)
    if wrong is not None:
        _print_error(wrong)
        return 2
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # of this process alone
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack of C++ for each connection that a peer ended
    if starts_islands(arguments):
        return launch_islands(words, arguments, _print_error)
    try:
        kept = prepare_island(arguments)
    except CommunicationError as error:
        _print_error(str(error))
        return 1
    threading.Thread(target=_continue_the_stopped, name="stopped", daemon=True).start()
    try:
        run.run(arguments)
    except ChildFailedError as error:
        line = _explain(error)
        if line is not None:
            _print_error(line)
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        _print_error(f"ended by {error.sigval.name}")
        return 128 + error.sigval
    except KeyboardInterrupt:
        _print_error("interrupted")
        return 128 + signal.SIGINT
    except Exception as error:  # a rendezvous that fails, flags that contradict each other
        _print_error(f"the ranks cannot be started: {first_line(error)}")
        return 1
    finally:
        del kept  # which serves the islands
    return 0


def _wrong(arguments: argparse.Namespace) -> str | None:
    """A problem of flags that torch would fail on without a reason, or hang on; None when there is none."""
    processes = f"--nproc-per-node {arguments.nproc_per_node}"
    try:
        if run.determine_local_world_size(arguments.nproc_per_node) < 1:
            return f"{processes}: give at least 1"
    except ValueError as error:
        return f"{processes}: {str(error).rstrip('.')}; give a number, or cpu, gpu or auto"
    try:
        least, most = run.parse_min_max_nnodes(arguments.nnodes)
    except (ValueError, RuntimeError):
        least = most = 0
    if not 1 <= least <= most:
        return f"--nnodes {arguments.nnodes}: give a number of at least 1, or the fewest and the most as MIN:MAX"
    numbered = arguments.rdzv_backend == "static" and not arguments.standalone
    if numbered and not 0 <= arguments.node_rank < most:
        return f"--node-rank {arguments.node_rank} with --nnodes {arguments.nnodes}: nodes count from 0 to {most - 1}"
    return None


def _continue_the_stopped() -> None:
    """Continues ranks that are stopped (SIGSTOP) and asked to end, for which torchrun would wait. Linux only."""
    while True:
        time.sleep(1.0)
        for pid in stopped_and_asked_to_end(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def stopped_and_asked_to_end(parent: int) -> list[int]:
    """Children of a process that are stopped and have a SIGTERM waiting for them."""
    found = []
    with suppress(OSError):
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                asked = int(status["ShdPnd"], 16) >> (signal.SIGTERM - 1) & 1
                if status["State"].startswith("T") and asked:
                    found.append(int(pid))
    return found


def _explain(error: ChildFailedError) -> str | None:
    """The reason why the first rank failed; None when the last line on the screen is that reason."""
    rank, failure = error.get_first_failure()
    message = str(_left(failure).get("message", ""))
    reason = message.removeprefix("error: ")
    # One rank prints the reason that all ranks end with as its last line, maybe with the name of the rank that it is
    # about. Other lines are printed among those of other ranks.
    left = [_left(each) for each in error.failures.values()]
    printed = any(one.get("extraInfo", {}).get("printed") and reason in str(one.get("message", "")) for one in left)
    if message.startswith("error: ") and printed:
        return None
    if message:
        return reason
    who = f"rank {rank} (process {failure.pid})"
    if failure.exitcode < 0:
        hint = "; it may have needed more memory than there is" if -failure.exitcode == signal.SIGKILL else ""
        return f"{who} was ended by {failure.signal_name()}{hint}"
    return f"{who} ended with status {failure.exitcode}"


def _left(failure: ProcessFailure) -> dict[str, Any]:
    """Content of a rank's error file."""
    message: object = failure.message if failure.error_file != NO_FILE else None
    return message if isinstance(message, dict) else {}


def _print_error(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)

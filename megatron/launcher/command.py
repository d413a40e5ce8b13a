"""Launcher of a program's ranks, like torchrun; if they fail, its last line gives the reason.

    python tools/launch.py --nproc-per-node 4 pretrain_gpt.py ...

Besides the flags of islands it takes torchrun's (``--help`` lists them): --nnodes, --node-rank, --master-addr,
--max-restarts ... On a single machine, only loopback addresses are listened on; with several, the first machine listens
on --master-addr (docs/guides/security.md). ``--islands 2 --nproc-per-node 4`` starts two islands of two ranks, each
under its own launcher: if an island fails, the other continues, and the exit status is 0 if either finishes.

SIGTERM and SIGUSR1 are forwarded to the ranks as SIGTERM. With --exit-signal-handler the ranks save and exit, and the
launcher exits with status 0; a second signal gives them --shutdown-timeout seconds. The exit status is that of the rank
that failed first: 1 for an error, 2 for bad input, 3 when a rank or machine is lost, 4 when every step was skipped, 5
when the run has diverged, 128 plus the signal's number for a killed rank. LOGLEVEL=WARNING or INFO also shows
torchrun's own messages.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.base.errors import UserError, first_line
from megatron.base.start import ONE_TERMINAL
from megatron.distributed.errors import CommunicationError
from megatron.distributed.health import EXIT_PEER_LOST, parse_blamed_ranks
from megatron.distributed.rendezvous import STATIC, rendezvous_address, use_rendezvous
from megatron.launcher.islands import (
    find_islands_problem,
    launch_islands,
    launch_parser,
    prepare_island,
    starts_islands,
)
from megatron.launcher.signals import STOP_SIGNALS, StopSignals, restore_process_state

NO_FILE = "<N/A>"
"""torch's name for the missing error file of a process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = launch_parser().parse_args(words)
    problem = _find_problem(arguments) or find_islands_problem(arguments)
    if problem is not None:
        _print_error(problem)
        return 2
    with restore_process_state():
        return _launch(words, arguments)


def _launch(words: list[str], arguments: argparse.Namespace) -> int:
    """Start the ranks, or a launcher for each island, and wait for them; return the exit status."""
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # in this process only
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stack trace for each connection closed by a peer
    if starts_islands(arguments):
        return launch_islands(words, arguments, _print_error)
    try:
        island_store = prepare_island(arguments)
    except (UserError, CommunicationError) as error:
        _print_error(str(error))
        return 2 if isinstance(error, UserError) else 1
    try:
        with StopSignals() as signals:
            names = [name.strip() for name in arguments.signals_to_handle.split(",")]
            stop_names = {stop_signal.name for stop_signal in STOP_SIGNALS}  # torch's launcher must not handle them
            arguments.signals_to_handle = ",".join(name for name in names if name not in stop_names)
            use_rendezvous(arguments, signals.install)
            run.run(arguments)
    except ChildFailedError as error:
        return _report(error, signals.received)
    except SignalException as error:
        _print_error(f"ended by {error.sigval.name}")
        return 128 + error.sigval
    except KeyboardInterrupt:
        _print_error("interrupted")
        return 128 + signal.SIGINT
    except Exception as error:  # a rendezvous that fails, flags that contradict each other
        _print_error(f"the ranks cannot be started: {first_line(error)}")
        return 2 if isinstance(error, UserError) else 1
    finally:
        del island_store  # it served the islands until now
    return 0


def _find_problem(arguments: argparse.Namespace) -> str | None:
    """Find an error on which torch would fail without giving a reason, or hang; None if there is none."""
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
        return f"--nnodes {arguments.nnodes}: give a number of at least 1"
    try:
        address = rendezvous_address(arguments)
    except ValueError as error:
        return str(error)
    has_number = arguments.rdzv_backend == STATIC and not arguments.standalone
    if has_number and not 0 <= arguments.node_rank < address.nodes:
        return f"--node-rank {arguments.node_rank} with --nnodes {address.nodes}: nodes count from 0 to {most - 1}"
    script = arguments.training_script
    if not (arguments.module or arguments.no_python or arguments.run_path or os.path.exists(script)):
        return f"{script}: no such script; give its path relative to {os.getcwd()}"
    return None


def _report(error: ChildFailedError, received: signal.Signals | None) -> int:
    """Print the reason why the ranks failed, and return the exit status.

    ``received`` is the signal that asked the ranks to end, if any.
    """
    # The rank that failed first: a rank that the others blame, else the first rank that torch saw exit. torch's times
    # are in whole seconds; for a killed rank, it is the time at which torch noticed. The other ranks may have exited
    # before that, and torch itself terminates the remaining ranks with SIGTERM.
    failures = error.failures
    by_time = sorted(failures.items(), key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp))
    rank, first = by_time[0]
    if first.exitcode == EXIT_PEER_LOST:
        messages = (str(_error_file_content(failure).get("message", "")) for _, failure in by_time)
        blamed_ranks = (each for message in messages for each in parse_blamed_ranks(message))
        rank = next((each for each in blamed_ranks if each in failures), rank)
    failure = failures[rank]
    if received is not None and failure.exitcode == -signal.SIGTERM:
        _print_error(f"ended by {received.name}")
        return 128 + received
    line = _explain(error, rank, failure)
    if line is not None:
        _print_error(line)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _explain(error: ChildFailedError, rank: int, failure: ProcessFailure) -> str | None:
    """Explain why a rank failed; None if the last line on the screen already gives the reason."""
    message = str(_error_file_content(failure).get("message", ""))
    reason = message.removeprefix("error: ")
    # A reason common to all ranks is printed by a single rank, perhaps of another machine, as its last line, perhaps
    # with the name of the failing rank. Other reasons are printed among the lines of other ranks.
    error_files = [_error_file_content(each) for each in error.failures.values()]
    printed = any(
        content.get("extraInfo", {}).get("printed") and reason in str(content.get("message", ""))
        for content in error_files
    )
    if message.startswith("error: ") and (printed or ONE_TERMINAL in os.environ):
        return None
    if message:
        return reason
    rank_name = f"rank {rank} (process {failure.pid})"
    if failure.exitcode < 0:
        hint = "; it may have run out of memory" if -failure.exitcode == signal.SIGKILL else ""
        return f"{rank_name} was ended by {failure.signal_name()}{hint}"
    return f"{rank_name} ended with status {failure.exitcode}"


def _error_file_content(failure: ProcessFailure) -> dict[str, Any]:
    """Content of a rank's error file; empty if there is none."""
    message: object = failure.message if failure.error_file != NO_FILE else None
    return message if isinstance(message, dict) else {}


def _print_error(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)

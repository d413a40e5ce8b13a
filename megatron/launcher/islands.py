"""Launch of several islands on a machine: a launcher for each, and the islands' store, served by this process."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from types import FrameType

import torch
from torch.distributed import run

from megatron.base.addresses import EXAMPLE, read_address, write_address
from megatron.base.start import ISLANDS_LAUNCHER
from megatron.base.user_text import flag_of
from megatron.config.islands import ADDRESS_VARIABLE, ISLAND_VARIABLE
from megatron.diloco.store import note_end, serve
from megatron.distributed.errors import CommunicationError
from megatron.distributed.store import check_reachable
from megatron.launcher.signals import STOP_SIGNALS

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ISLAND_FLAGS = (
    "islands",
    "nproc-per-node",
    "nproc_per_node",
    "standalone",
    "serve-islands",
    "island",
    "islands-address",
)

PrintError = Callable[[str], None]


def launch_parser() -> argparse.ArgumentParser:
    """torchrun's parser, plus flags of islands."""
    parser = run.get_args_parser()
    group = parser.add_argument_group("islands")
    group.add_argument(
        "--islands",
        type=int,
        help="Number of islands. Without --island, all start on this machine, with equal shares of --nproc-per-node.",
    )
    group.add_argument(
        "--serve-islands",
        metavar="HOST:PORT",
        help="Serve the islands' store, on one of several machines; the others must be able to reach HOST.",
    )
    group.add_argument("--island", type=int, help="Number of the island to start here, on one of several machines.")
    group.add_argument("--islands-address", metavar="HOST:PORT", help="Address of the store on another machine.")
    return parser


def find_islands_problem(arguments: argparse.Namespace) -> str | None:
    """Find an error in the flags of islands; None if there is none."""
    count, processes = arguments.islands, arguments.nproc_per_node
    for name in ("serve_islands", "islands_address"):
        address = getattr(arguments, name)
        try:
            host = read_address(address)[0] if address is not None else ""
        except ValueError:
            return f"{flag_of(name)} {address[:200]}: {EXAMPLE}"
        if host in ("0.0.0.0", "::"):
            return f"{flag_of(name)} {address}: give the address at which other machines reach this one"
    if arguments.island is not None and count is not None and not 0 <= arguments.island < count:
        return f"--island {arguments.island} with --islands {count}: islands count from 0 to {count - 1}"
    if count is None or arguments.island is not None:
        return None
    if count < 1:
        return f"--islands {count}: give at least 1"
    if not processes.isdecimal() or int(processes) % count:
        return f"--islands {count} does not divide --nproc-per-node {processes}; start a multiple of {count} processes"
    if arguments.nnodes not in ("1", "1:1"):
        return f"--islands {count} with --nnodes {arguments.nnodes}: start each machine's island by --island NUMBER"
    return None


def starts_islands(arguments: argparse.Namespace) -> bool:
    """Return whether to start several launchers."""
    return arguments.islands is not None and arguments.islands > 1 and arguments.island is None


def prepare_island(arguments: argparse.Namespace) -> object:
    """Set the environment of an island's ranks, and serve the store if requested.

    Returns:
        The store, which must live as long as this process; None if it is served elsewhere.

    Raises:
        UserError: when other machines cannot reach the store at its address.
        CommunicationError: when the address cannot be used.
    """
    end_with_parent()
    if arguments.island is not None:
        os.environ[ISLAND_VARIABLE] = str(arguments.island)
    address = arguments.islands_address or arguments.serve_islands
    if address is not None:
        os.environ[ADDRESS_VARIABLE] = address
    if arguments.islands is not None:
        arguments.training_script_args += ["--islands", str(arguments.islands)]
    if arguments.serve_islands is None:
        return None
    host, port = read_address(arguments.serve_islands)
    check_reachable(host, "give the address that others use (--serve-islands)")
    return serve(host, port)


def launch_islands(argv: Sequence[str], arguments: argparse.Namespace, print_error: PrintError) -> int:
    """Start a launcher for each island, and wait for all of them; a failing island does not stop the others.

    Returns:
        0 if any island finished; otherwise the status of the first that failed.
    """
    host, port = read_address(arguments.serve_islands) if arguments.serve_islands else ("127.0.0.1", 0)
    try:
        store = serve(host, port)
    except CommunicationError as error:
        print_error(str(error))
        return 1
    script = [arguments.training_script, *arguments.training_script_args]
    words = [*_drop_island_flags(argv[: len(argv) - len(script)]), "--standalone"]
    processes = int(arguments.nproc_per_node) // arguments.islands
    words += [f"--nproc-per-node={processes}", f"--islands={arguments.islands}"]
    islands = []
    gpus = visible_gpus()
    for number in range(arguments.islands):
        env = os.environ | {ISLANDS_LAUNCHER: str(os.getpid()), ADDRESS_VARIABLE: write_address(host, store.port)}
        env |= gpus_of(number, processes, gpus)
        islands.append(subprocess.Popen([sys.executable, sys.argv[0], *words, f"--island={number}", *script], env=env))

    def forward(number: int, frame: FrameType | None) -> None:
        for process in islands:
            if process.poll() is None:
                process.send_signal(number)

    for stop_signal in (*STOP_SIGNALS, signal.SIGINT, signal.SIGHUP):
        signal.signal(stop_signal, forward)
    return _wait(islands, print_error, partial(note_end, store))


def visible_gpus() -> list[str]:
    """Names of the GPUs of this machine that its ranks may use, as in CUDA_VISIBLE_DEVICES."""
    variable = os.environ.get(_VISIBLE)
    if variable is None:
        return [str(number) for number in range(torch.cuda.device_count())]
    names = (word.strip() for word in variable.split(","))
    return list(takewhile(lambda name: name and not name.startswith("-"), names))  # as CUDA reads it


def gpus_of(number: int, processes: int, gpus: Sequence[str]) -> dict[str, str]:
    """Environment variable that gives an island's ranks the GPUs after those of the preceding islands.

    Args:
        number: number of the island.
        processes: number of its ranks.
        gpus: GPUs of the machine; ranks share them if there are fewer GPUs than ranks.
    """
    if not gpus:
        return {}
    island_gpus = [gpus[(number * processes + rank) % len(gpus)] for rank in range(processes)]
    return {_VISIBLE: ",".join(dict.fromkeys(island_gpus))}


def _wait(
    islands: Sequence[subprocess.Popen[bytes]], print_error: PrintError, on_failure: Callable[[int], object]
) -> int:
    """Wait for the launchers of islands; call ``on_failure`` with the number of each island that fails."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(islands):
        for number, process in enumerate(islands):
            status = process.poll()
            if status is None or number in statuses:
                continue
            statuses[number] = status if status >= 0 else 128 - status
            if status:
                on_failure(number)
                print_error(f"island {number} ended with status {statuses[number]}")
        time.sleep(0.1)
    return 0 if 0 in statuses.values() else next(iter(statuses.values()))


def _drop_island_flags(words: Sequence[str]) -> list[str]:
    """Drop the flags that are set separately for each island, and a -- before the script: more flags follow."""
    remaining_words: list[str] = []
    skip = False
    for word in words:
        name, equals, _ = word.lstrip("-").partition("=")
        if skip:
            skip = False
        elif word.startswith("--") and name in _ISLAND_FLAGS:
            skip = not equals and name != "standalone"
        elif word != "--":
            remaining_words.append(word)
    return remaining_words


def end_with_parent() -> None:
    """Terminate this launcher soon after the launcher of all islands, if there is one."""
    parent = os.environ.pop(ISLANDS_LAUNCHER, None)
    if parent is None or not parent.isdecimal() or sys.platform == "linux":  # on Linux, the kernel sends a signal
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.5)
        with suppress(ProcessLookupError):
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()

"""Runs a function on N ranks, and reports on every rank when a rank fails or hangs.

Ranks are forked from a server process that has torch imported already (``forkserver``), so four of them start
in a fraction of a second instead of several. They meet at a store that this process holds, on a port that the
system chose: nobody else can take it in between.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.base.start import launcher_pid
from megatron.distributed.store import serve_store
from megatron.training import program
from tests.support.cleanup import die_with_parent
from tests.support.device import VARIABLE, backend_of_tests, own_device, rank_variables

STACK_SIGNAL = signal.SIGQUIT
"""Asks a rank for its stack; no test uses it for anything else."""

GRACE_SECONDS = 5.0
"""How long the other ranks may go on after a failure: long enough to notice a closed connection."""

LOG_TAIL_CHARACTERS = 3000

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # the first optimizer of a process imports it: two seconds
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "megatron.config.check_compression",
    "megatron.training.pretrain",
    "pytest",
    "tests.support.cli",
    "tests.support.corpus",
    "tests.support.tiny",
    "tests.support.preloaded",  # must be last
)


class RankFailure(AssertionError):
    """At least one rank failed; the message shows every rank."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    init: bool = True,
) -> list[Any]:
    """Runs ``fn(*args)`` on every rank of a world and returns the results by rank.

    A rank asks torch.distributed who it is. Each has one thread, RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*,
    and (with ``init``) the default process group. Without ``init`` the function may make it by ``env://``.

    Args:
        world_size: the number of processes.
        fn: a function of a module (not a closure: it is pickled by name).
        args: its arguments; pickled.
        timeout: seconds, for the whole run and for each collective; None for a minute, or two where ranks share a GPU.
        env: environment variables added in every rank.
        init: make the process group before calling ``fn``.

    Raises:
        RankFailure: when a rank raised, died or did not finish in time.
    """
    context = context_of_tests()
    if timeout is None:
        timeout = 60.0 if backend_of_tests() == "gloo" else 120.0
    store = serve_store("127.0.0.1", 0, seconds=300.0)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder_name:
        folder = Path(folder_name)
        (folder / "call").write_bytes(pickle.dumps((fn, args)))
        rank_env = rendezvous_env(world_size, store.port) | dict(env or {})
        processes = [
            context.Process(target=_rank_main, args=(r, world_size, str(folder), rank_env, timeout, init), daemon=True)
            for r in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            first_failed, late = _wait(processes, folder, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        if first_failed is None and not late:
            return [pickle.loads((folder / f"result{r}").read_bytes()) for r in range(world_size)]
        raise RankFailure(_report(processes, folder, late, first_failed, fn, timeout))


def rendezvous_env(world_size: int, port: int) -> dict[str, str]:
    """The launcher's variables that every rank shares, for a store that the launcher itself holds."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is a client of the store too
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        VARIABLE: os.environ.get(VARIABLE, "cpu"),
    }


def context_of_tests() -> Any:
    """A start method for ranks: ``forkserver``, unless MEGATRON_TEST_START_METHOD names another."""
    method = os.environ.get("MEGATRON_TEST_START_METHOD", "forkserver")
    if method not in multiprocessing.get_all_start_methods():
        method = "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(list(PRELOAD))
    return context


def end_at_once_without_a_launcher() -> None:
    """Ranks that have failed do not give rank 0 time to print, where nothing ends rank 0 before it has."""
    if launcher_pid() is None:
        program._RANK_0_PRINTS_SECONDS = 0.0


def _rank_main(rank: int, world_size: int, folder_name: str, env: dict[str, str], timeout: float, init: bool) -> None:
    """The body of a rank; leaves ``result<rank>`` or ``error<rank>`` in the folder."""
    folder = Path(folder_name)
    die_with_parent()
    _redirect_output(folder / f"log{rank}")
    with (folder / f"stack{rank}").open("w") as stack_file:
        faulthandler.enable(stack_file)
        faulthandler.register(STACK_SIGNAL, stack_file, all_threads=True)
        os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(rank_variables(rank))
        end_at_once_without_a_launcher()
        torch.set_num_threads(1)
        try:
            fn, args = pickle.loads((folder / "call").read_bytes())
            if init:
                own_device(rank)
                dist.init_process_group(backend_of_tests(), timeout=timedelta(seconds=timeout))
                if dist.get_backend() == "gloo":  # a rank that ends before its peers have connected to it fails them
                    dist.barrier()
            result = pickle.dumps(fn(*args))
        except BaseException:
            (folder / f"error{rank}").write_text(traceback.format_exc())
            sys.stdout.flush()
            os._exit(1)  # without waiting for peers that may hang
        (folder / f"result{rank}").write_bytes(result)
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        faulthandler.unregister(STACK_SIGNAL)
        faulthandler.disable()


def _redirect_output(path: Path) -> None:
    """Sends this process's stdout and stderr, those of C++ included, to a file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _wait(processes: list[Any], folder: Path, timeout: float) -> tuple[int | None, set[int]]:
    """Waits until all ranks ended, the time is over, or the grace after a first failure is.

    Returns:
        The rank that failed first (None: none did) and the ranks still running, their stacks asked for.
    """
    deadline = time.monotonic() + timeout
    first_failed: int | None = None
    while running := {p.sentinel: r for r, p in enumerate(processes) if p.exitcode is None}:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            break
        for sentinel in connection.wait(list(running), seconds_left):
            rank = running[sentinel]
            processes[rank].join()
            failed = processes[rank].exitcode != 0 or not (folder / f"result{rank}").exists()
            if failed and first_failed is None:
                first_failed = rank
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    late = set(running.values())
    for rank in late:
        os.kill(processes[rank].pid, STACK_SIGNAL)
    if late:
        time.sleep(0.5)  # the handler writes at once, but a rank may be waiting for the processor
    return first_failed, late


def _report(
    processes: list[Any],
    folder: Path,
    late: set[int],
    first_failed: int | None,
    fn: Callable[..., Any],
    timeout: float,
) -> str:
    name = getattr(fn, "__name__", repr(fn))
    why = f"did not finish in {timeout:g} s" if first_failed is None else f"failed, rank {first_failed} first"
    sections = [f"{name} on {len(processes)} ranks {why}"]
    for rank, process in enumerate(processes):
        state = _state(process.exitcode, rank in late, folder / f"error{rank}", folder / f"result{rank}")
        sections.append(f"--- rank {rank}: {state}")
        sections += [_tail(folder / f"{kind}{rank}", kind) for kind in ("error", "stack", "log")]
    return "\n".join(section for section in sections if section)


def _state(exitcode: int, late: bool, error: Path, result: Path) -> str:
    if late:
        return "still running, stopped; its stack:"
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    if error.exists():
        return "raised"
    if exitcode == 0 and result.exists():
        return "finished"
    return f"left with exit code {exitcode} without a result"


def _tail(path: Path, kind: str) -> str:
    text = path.read_text(errors="replace").rstrip() if path.exists() else ""
    if kind == "log" and text:
        text = "output:\n" + text[-LOG_TAIL_CHARACTERS:]
    return text

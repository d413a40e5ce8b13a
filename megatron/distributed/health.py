"""Detection of peers that have died, hung or lost their network.

A dead process cannot report its death, and a collective that fails names a socket, not a rank. So every rank sends its
neighbors (``neighbor_mesh.py``) a heartbeat each second. The first rank to miss a heartbeat, or to see a
connection end, tells the others which rank is gone, and a rank that fails reports why. No rank is essential: rank 0,
its store and the launcher may themselves be gone. ``explain`` returns the diagnosis when a collective breaks; a rank
with its main thread stuck in a collective ends by itself.

Heartbeats come from a separate thread, so a rank may compute, compile, wait for a disk or sit in pdb for any length of
time. Anything that stops the whole process for longer than the limit (SIGSTOP, a debugger attached from outside, C
code that holds the interpreter's lock) counts as gone.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from megatron.base.start import outlive_launcher
from megatron.distributed.errors import format_ranks
from megatron.distributed.neighbor_mesh import LONGEST_LINE, Mesh, Peer
from megatron.distributed.process_group import write_error_file

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 20.0
"""Silence after which a neighbor counts as gone."""
EXPLAIN_SECONDS = 6.0
"""Time for which ``explain`` waits for a diagnosis of a broken collective."""
GRACE_SECONDS = 5.0
"""Time in which the main thread may end by itself, once a lost rank is known."""
FAILING_SECONDS = 30.0
"""The same for a main thread that is already ending."""

EXIT_PEER_LOST = 3
"""Exit status of a rank that ends itself because another rank or the launcher is gone."""
_BLAME = re.compile(r"ranks? ([0-9, ]+)(?: and [0-9]+ more)?(?: on [^ ,]+(?:, | stopped answering)| failed: )")

_SILENT = "no sign of life"
_DONE = "done"
_NEWS = "news "


class FailureDetector:
    """Sender of this rank's heartbeats, and monitor of those of its neighbors.

    Args:
        rank, world_size: this rank's number and the number of ranks.
        silent_seconds: longest time without a heartbeat of a neighbor.
        grace_seconds: time in which the main thread may end by itself once a lost rank is known. On CUDA it may be
            waiting for the device, and cannot; NCCL then ends the process in its own way.
        launcher: process id of the launcher, which this process must not outlive; None without a launcher.
        leave: ends this process.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        silent_seconds: float = SILENT_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        launcher: int | None = None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._silent_beats = max(1, round(silent_seconds / HEARTBEAT_SECONDS))
        self._grace_seconds = grace_seconds
        self._launcher = launcher
        self._leave = leave
        self._mesh: Mesh | None = None
        self._lock = threading.Lock()
        """Held for calls that do not block, never while waiting."""
        self._verdict: str | None = None
        self._known = threading.Event()
        self._exit_at = float("inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watch", daemon=True)
        self._beat = 0
        self._last_heard: dict[int, int] = {}
        """This rank's beat number when each neighbor was last heard."""
        self._done: set[int] = set()

    def start(self, store: dist.Store | None = None, master: str = "localhost", local: bool = False) -> None:
        """Connect to the neighbors and start to send heartbeats; must be called in the main thread.

        Args:
            store: the rendezvous store; used here only, and not at all by a single rank.
            master, local: the arguments of ``Mesh``.

        Raises:
            RuntimeError, OSError: when the store fails, or this machine has no address.
        """
        if self.world_size > 1:
            assert store is not None
            self._mesh = Mesh(self.rank, self.world_size, master, socket.gethostname(), local)
            for problem in self._mesh.connect(store):
                self._print(f"note: rank {self.rank}: {problem}; if it dies, other ranks must notice it")
        self._thread.start()
        if self._launcher is not None:
            outlive_launcher()  # the watch detects its end, and reports it

    def stop(self) -> None:
        """Tell the neighbors that this rank is done, and stop."""
        self._stop.set()
        if self._mesh is not None:
            self._mesh.wake()
        self._thread.join()
        if self._mesh is not None:
            self._mesh.tell(_DONE)
            self._mesh.close()

    def report(self, reason: str) -> None:
        """Tell the others why this rank fails, unless an earlier reason is known."""
        self._spread_verdict(f"rank {self.rank} failed: {(reason.splitlines() or [''])[0]}", FAILING_SECONDS)

    def explain(self) -> str | None:
        """Name the peer that broke a collective; None when every peer still answers.

        Takes up to ``EXPLAIN_SECONDS``, and a little longer if only another rank suspects a peer.
        """
        with self._lock:
            self._exit_at = time.monotonic() + FAILING_SECONDS  # the caller is about to end this process
            self._grace_seconds = max(self._grace_seconds, GRACE_SECONDS)
        if not self._known.wait(EXPLAIN_SECONDS):
            with self._lock:
                silent = self._silent_peers(round(EXPLAIN_SECONDS / HEARTBEAT_SECONDS) - 1)
            if silent:
                self._spread_verdict(self._describe(silent), FAILING_SECONDS)
            else:
                self._known.wait(2 * HEARTBEAT_SECONDS)
        return self._verdict

    def _spread_verdict(self, verdict: str, grace: float) -> None:
        """Spread a verdict, unless an earlier one is known; this process has ``grace`` seconds to end by itself."""
        with self._lock:
            if self._verdict is None:
                self._verdict = verdict
                self._exit_at = min(self._exit_at, time.monotonic() + grace)
                if self._mesh is not None:
                    self._mesh.tell(_NEWS + verdict[: LONGEST_LINE // 5])  # a character has up to four bytes
        self._known.set()

    def _loop(self) -> None:
        next_beat = time.monotonic()
        while not self._stop.is_set():
            current_time = time.monotonic()
            if current_time >= next_beat:
                next_beat = current_time + HEARTBEAT_SECONDS
                # Time is counted in this rank's own beats: a process or machine that was stopped could not see anyone
                # die.
                self._beat += 1
                if self._launcher is not None and os.getppid() != self._launcher:
                    self._spread_verdict(f"rank {self.rank} failed: its launcher is gone", 0.0)
                if self._mesh is not None:
                    with self._lock:
                        self._mesh.tell("")
                        silent = self._silent_peers(self._silent_beats)
                    if silent:
                        self._spread_verdict(self._describe(self._silent_peers(self._silent_beats - 2)), 0.0)
            if current_time >= self._exit_at:
                text = f"rank {self.rank}: {self._verdict}"
                write_error_file(text)
                self._print(text)
                self._leave(EXIT_PEER_LOST)
                return
            if self._mesh is None:
                self._stop.wait(HEARTBEAT_SECONDS)
            else:
                self._mesh.wait_for_data(max(min(next_beat, self._exit_at) - time.monotonic(), 0.0))
                for verdict in self._read_messages():
                    self._spread_verdict(verdict, self._grace_seconds)

    def _read_messages(self) -> list[str]:
        """Read the neighbors' messages; return the resulting verdicts."""
        assert self._mesh is not None
        verdicts = []
        with self._lock:
            for peer in self._mesh.peers.values():
                if peer.lines or peer.rank not in self._last_heard:
                    self._last_heard[peer.rank] = self._beat
                if _DONE in peer.lines:
                    self._done.add(peer.rank)
                verdicts += [line.removeprefix(_NEWS) for line in peer.lines if line.startswith(_NEWS)]
                peer.lines.clear()
                if peer.closed and peer.rank not in self._done:
                    verdicts.append(
                        f"rank {peer.rank} on {peer.host} stopped answering: killed, or crashed (its connection ended)"
                    )
        return verdicts

    def _silent_peers(self, beats: int) -> list[Peer]:
        """Neighbors without a heartbeat for the given number of this rank's beats."""
        if self._mesh is None:
            return []
        return [
            self._mesh.peers[rank]
            for rank, heard in self._last_heard.items()
            if rank not in self._done and self._beat - heard >= beats
        ]

    def _describe(self, silent: list[Peer]) -> str:
        hosts: dict[str, list[int]] = defaultdict(list)
        for peer in silent:
            hosts[peer.host].append(peer.rank)
        names = ", ".join(f"{format_ranks(sorted(ranks))} on {host}" for host, ranks in hosts.items())
        seconds = max(self._beat - self._last_heard[peer.rank] for peer in silent) * HEARTBEAT_SECONDS
        return f"{names} stopped answering: {_SILENT} for {seconds:.0f} s (hung, or the machine or network is gone)"

    def _print(self, text: str) -> None:
        def write() -> None:
            with suppress(OSError, ValueError):  # the reader is gone
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()

        # A pipe that nobody reads must not keep this process alive.
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(HEARTBEAT_SECONDS)


def parse_blamed_ranks(text: str) -> list[int]:
    """Ranks that a message of ``FailureDetector`` reports as gone or failed; empty for hung ranks."""
    if _SILENT in text:
        return []
    return [int(number) for blamed in _BLAME.finditer(text) for number in blamed[1].split(",")]

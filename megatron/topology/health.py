"""Detects peers that have died, hung or lost their network.

A dead process cannot say so, and a collective that fails names a socket, not a rank. So every rank gives its neighbors
(``megatron/topology/mesh.py``) a heartbeat each second. The first to miss one, or to see its connection end, tells
the others who is gone, and a rank that fails tells why. No rank is needed for this: rank 0, the store that it keeps and
the launcher may be what is gone. ``explain`` says what was heard when a collective breaks; a rank whose main thread is
stuck in one ends by itself.

Heartbeats come from a thread of their own, so a rank may compute, compile, wait for a disk or stand in pdb as long
as it likes. What stops the whole process for longer than the limit (SIGSTOP, a debugger attached from outside, C code
that keeps the interpreter's lock) counts as gone.
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
from megatron.topology.errors import ranks_text
from megatron.topology.launch import leave_reason
from megatron.topology.mesh import LONGEST_LINE, Mesh, Peer

BEAT_SECONDS = 1.0
SILENT_SECONDS = 20.0
"""A neighbor without a heartbeat for this long is gone."""
EXPLAIN_SECONDS = 6.0
"""Time for which ``explain`` listens for what may have broken a collective."""
GRACE_SECONDS = 5.0
"""Time in which the main thread may end by itself, once it is known who is gone."""
FAILING_SECONDS = 30.0
"""The same for a main thread that is ending already."""

EXIT_PEER_LOST = 3
"""Exit status of a rank that ends because another one is gone."""
_BLAME = re.compile(r"ranks? ([0-9, ]+)(?: and [0-9]+ more)?(?: on [^ ,]+(?:, | stopped answering)| failed: )")

_SILENT = "no sign of life"
_DONE = "done"
_NEWS = "news "


class Watch:
    """The watch over peers: sends this rank's heartbeats, and checks those of its neighbors.

    Args:
        rank, world_size: this rank's number and how many there are.
        silent_seconds: longest time without a heartbeat of a neighbor.
        exit_status: exit status of a rank that ends itself because a peer or the launcher is gone.
        grace_seconds: time in which the main thread may end by itself once it is known who is gone. On CUDA it may wait
            for the device, and cannot; NCCL then ends the process in its own way.
        launcher: the process id of the launcher that this process must not outlive, if any.
        leave: ends this process.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        silent_seconds: float = SILENT_SECONDS,
        exit_status: int,
        grace_seconds: float = GRACE_SECONDS,
        launcher: int | None = None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.exit_status = exit_status
        self._silent_beats = max(1, round(silent_seconds / BEAT_SECONDS))
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
        self._heard: dict[int, int] = {}
        """The own beat at which each neighbor was last heard."""
        self._done: set[int] = set()

    def start(self, store: dist.Store | None = None, master: str = "localhost", local: bool = False) -> None:
        """Connects to the neighbors and starts to send heartbeats; to be called in the main thread.

        Args:
            store: where the ranks find each other; used here only, and not at all by a rank that is alone.
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
            outlive_launcher()  # the watch sees that it is gone, and says so

    def stop(self) -> None:
        """Tells the neighbors that this rank is done, and stops."""
        self._stop.set()
        if self._mesh is not None:
            self._mesh.wake()
        self._thread.join()
        if self._mesh is not None:
            self._mesh.tell(_DONE)
            self._mesh.close()

    def report(self, reason: str) -> None:
        """Tells the others why this rank fails, unless they know an earlier reason."""
        self._conclude(f"rank {self.rank} failed: {(reason.splitlines() or [''])[0]}", FAILING_SECONDS)

    def explain(self) -> str | None:
        """Names the peer that broke a collective; None when every peer still answers.

        Takes up to ``EXPLAIN_SECONDS``, and a little longer where the suspicion is another rank's.
        """
        with self._lock:
            self._exit_at = time.monotonic() + FAILING_SECONDS  # the caller is about to end this process
            self._grace_seconds = max(self._grace_seconds, GRACE_SECONDS)
        if not self._known.wait(EXPLAIN_SECONDS):
            with self._lock:
                silent = self._silent(round(EXPLAIN_SECONDS / BEAT_SECONDS) - 1)
            if silent:
                self._conclude(self._name(silent), FAILING_SECONDS)
            else:
                self._known.wait(2 * BEAT_SECONDS)
        return self._verdict

    def _conclude(self, verdict: str, grace: float) -> None:
        """Passes on a verdict; the first one that a rank hears of is the one that it keeps.

        Args:
            verdict: what is known, in words.
            grace: seconds until this process is ended, if it does not end by itself.
        """
        with self._lock:
            if self._verdict is None:
                self._verdict = verdict
                self._exit_at = min(self._exit_at, time.monotonic() + grace)
                if self._mesh is not None:
                    self._mesh.tell(_NEWS + verdict[: LONGEST_LINE // 5])  # a character has up to four bytes
        self._known.set()

    def _loop(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= due:
                due = now + BEAT_SECONDS
                self._on_beat()
            if now >= self._exit_at:
                text = f"rank {self.rank}: {self._verdict}"
                leave_reason(text)
                self._print(text)
                self._leave(self.exit_status)
                return
            if self._mesh is None:
                self._stop.wait(BEAT_SECONDS)
            else:
                self._mesh.wait(max(min(due, self._exit_at) - time.monotonic(), 0.0))
                for verdict in self._take_in():
                    self._conclude(verdict, self._grace_seconds)

    def _on_beat(self) -> None:
        # Time is counted in this rank's own beats: a process or machine that was stopped has not seen anyone die.
        self._beat += 1
        if self._launcher is not None and os.getppid() != self._launcher:
            self._conclude(f"rank {self.rank} failed: its launcher is gone", 0.0)
        if self._mesh is not None:
            with self._lock:
                self._mesh.tell("")
                silent = self._silent(self._silent_beats)
            if silent:
                self._conclude(self._name(self._silent(self._silent_beats - 2)), 0.0)

    def _take_in(self) -> list[str]:
        """Reads the neighbors' messages; returns the verdicts that follow."""
        assert self._mesh is not None
        verdicts = []
        with self._lock:
            for peer in self._mesh.peers.values():
                if peer.lines or peer.rank not in self._heard:
                    self._heard[peer.rank] = self._beat
                self._done |= {peer.rank} if _DONE in peer.lines else set()
                verdicts += [line.removeprefix(_NEWS) for line in peer.lines if line.startswith(_NEWS)]
                peer.lines.clear()
                if peer.closed and peer.rank not in self._done:
                    verdicts.append(
                        f"rank {peer.rank} on {peer.host} stopped answering: killed, or crashed (its connection ended)"
                    )
        return verdicts

    def _silent(self, beats: int) -> list[Peer]:
        """Neighbors without a heartbeat for that many of this rank's own beats."""
        if self._mesh is None:
            return []
        return [
            self._mesh.peers[rank]
            for rank, heard in self._heard.items()
            if rank not in self._done and self._beat - heard >= beats
        ]

    def _name(self, silent: list[Peer]) -> str:
        hosts: dict[str, list[int]] = defaultdict(list)
        for peer in silent:
            hosts[peer.host].append(peer.rank)
        who = ", ".join(f"{ranks_text(sorted(ranks))} on {host}" for host, ranks in hosts.items())
        seconds = max(self._beat - self._heard[peer.rank] for peer in silent) * BEAT_SECONDS
        return f"{who} stopped answering: {_SILENT} for {seconds:.0f} s (hung, or the machine or network is gone)"

    def _print(self, text: str) -> None:
        def write() -> None:
            with suppress(OSError, ValueError):  # whoever read it has gone
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()

        # A pipe that nobody reads must not keep this process alive.
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(BEAT_SECONDS)


def ranks_blamed(text: str) -> list[int]:
    """The ranks of which a message of ``Watch`` says that they are gone or have failed; a rank that hangs has not."""
    if _SILENT in text:
        return []
    return [int(number) for blamed in _BLAME.finditer(text) for number in blamed[1].split(",")]

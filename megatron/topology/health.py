"""Finds out which peer is gone.

A dead process cannot say so, and a collective that fails names a socket, not a rank. So every rank counts a heartbeat
in the rendezvous store, and a rank that fails leaves its reason there. When a collective breaks, ``explain`` reads
both; and a rank that is stuck while a peer has long been silent ends itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

BEAT_SECONDS = 1.0
SILENT_SECONDS = 20.0
"""A peer whose heartbeat stands still for this long is taken for dead."""
EXPLAIN_SECONDS = 6.0
"""How long ``explain`` watches heartbeats."""
WATCH_ALL_UP_TO = 64
"""Above this many ranks each watches its next one only."""

_DONE = "done"


class Watch:
    """This rank's heartbeat, and its view of the others'.

    Args:
        rank, world_size: this process's.
        exit_status: of a rank that ends itself because a peer is silent.
    """

    def __init__(self, rank: int, world_size: int, exit_status: int = 3) -> None:
        self.rank = rank
        self.world_size = world_size
        self.exit_status = exit_status
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"megatron-watch/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watch", daemon=True)
        self._store = self._connect()
        self._store_lock = threading.Lock()

    def _connect(self) -> dist.TCPStore:
        """A connection of its own: the default store's may be busy in a blocking call."""
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=10),
        )

    def start(self) -> None:
        """Begins to beat and to watch."""
        self._beat("0")
        self._thread.start()

    def stop(self) -> None:
        """Says that this rank is done, and stops."""
        self._stop.set()
        self._thread.join()
        with suppress(RuntimeError):  # the store may have gone with the rank that kept it
            self._beat(_DONE)

    def report(self, reason: str) -> None:
        """Leaves the reason why this rank fails; the first reason of all ranks is kept."""
        text = f"rank {self.rank} failed: {(reason.splitlines() or [''])[0]}"
        with suppress(RuntimeError), self._store_lock:
            self._store.compare_set(f"{self._prefix}/failed", "", text)

    def explain(self) -> str | None:
        """Which peer broke a collective, in words; None when every peer still answers.

        Takes up to ``EXPLAIN_SECONDS``.
        """
        try:
            before = self._beats()
            deadline = time.monotonic() + EXPLAIN_SECONDS
            silent = set(before)
            while time.monotonic() < deadline and silent:
                failed = self._first_failure()
                if failed is not None:
                    return failed
                time.sleep(BEAT_SECONDS / 2)
                silent = {r for r, beat in self._beats().items() if beat == before.get(r) != _DONE}
            return _name(sorted(silent)) if silent else None
        except RuntimeError:
            return "the rank or launcher that keeps the rendezvous store is gone"

    def _beat(self, value: str) -> None:
        with self._store_lock:
            self._store.set(f"{self._prefix}/beat/{self.rank}", value)

    def _first_failure(self) -> str | None:
        key = f"{self._prefix}/failed"
        with self._store_lock:
            return self._store.get(key).decode() if self._store.check([key]) else None

    def _beats(self) -> dict[int, str]:
        """Heartbeats of the ranks that this one watches and that have begun to beat."""
        if self.world_size <= WATCH_ALL_UP_TO:
            watched = [r for r in range(self.world_size) if r != self.rank]
        else:
            watched = [(self.rank + 1) % self.world_size]
        beats = {}
        for r in watched:
            key = f"{self._prefix}/beat/{r}"
            with self._store_lock:
                if self._store.check([key]):
                    beats[r] = self._store.get(key).decode()
        return beats

    def _loop(self) -> None:
        beat = 0
        standing: dict[int, tuple[str, int]] = {}
        while not self._stop.wait(BEAT_SECONDS):
            beat += 1
            try:
                self._beat(str(beat))
                current = self._beats()
            except RuntimeError:
                return  # the store is gone; the collectives will fail, and explain will say so
            for r, value in current.items():
                # Counted in own beats, not in wall-clock time: a machine that slept has not seen anyone die.
                same, since = standing.get(r, ("", beat))
                standing[r] = (value, since if value == same else beat)
            limit = SILENT_SECONDS / BEAT_SECONDS
            silent = [r for r, (value, since) in standing.items() if value != _DONE and beat - since >= limit]
            if silent:
                sys.stderr.write(f"rank {self.rank}: {_name(silent)}\n")
                sys.stderr.flush()
                os._exit(self.exit_status)


def _name(ranks: list[int]) -> str:
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"{which} stopped answering (killed, or hung)"

"""The start of a generation of islands: which islands begin, and from which checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.diloco.store import HEARTBEAT_SECONDS, POLL_SECONDS, HeartbeatMonitor, IslandStore
from megatron.diloco.waiting import WaitNotice, describe_islands
from megatron.distributed.agreement import rank_of, take_from_rank_0
from megatron.distributed.errors import CommunicationError

_PROBE_HEARTBEATS = 3
LOCAL = "local"
"""Key set once the islands no longer synchronize every step."""


class QuorumError(CommunicationError):
    """Raised on every rank of an island when too few islands report to a round, or a round fails repeatedly."""


def finish_key(island: int) -> str:
    """Key of an island's final iteration and the folder of its last checkpoint."""
    return f"finished/{island}"


def read_finish(value: Sequence[Any]) -> tuple[int, str]:
    """Decode the value of ``finish_key``; raise ValueError if it is malformed."""
    iteration, folder = value
    return int(iteration), str(folder)


def refusal_key(island: int) -> str:
    """Key of the reason why an island refuses to start."""
    return f"refused/{island}"


@dataclass(frozen=True)
class StartLimits:
    """Limits of a start.

    Args:
        count: number of islands.
        quorum: minimum number of islands that begin.
        seconds: maximum time to wait for the others.
    """

    count: int
    quorum: int
    seconds: float

    def missing(self, arrived: Mapping[int, Any]) -> list[int]:
        """The islands that have not arrived."""
        return [k for k in range(self.count) if k not in arrived]

    def fail_start(self, missing: Sequence[int]) -> Start:
        """Make the start that fails because islands are missing."""
        limit = f"{self.seconds:g} s (--distributed-timeout-minutes)"
        return Start(
            problem=f"{describe_islands(missing)} did not come within {limit}, or ended before; start all of them, or "
            "lower the quorum"
        )


@dataclass(frozen=True)
class Start:
    """The decision on how a generation begins.

    Args:
        members: the islands that begin the generation.
        problem: the reason why no island may begin; empty if they may.
        iteration: iteration of the checkpoint from which islands continue; None if no island has a checkpoint.
        behind: the islands that arrived with an older state; they receive the members' state before the first step.
        in_step: whether islands synchronize every step from that state on.
    """

    members: tuple[int, ...] = ()
    problem: str = ""
    iteration: int | None = None
    behind: tuple[int, ...] = ()
    in_step: bool = False

    @staticmethod
    def decode(value: Mapping[str, Any]) -> Start:
        """Decode a start; raise ValueError if it is malformed."""
        members, behind = (tuple(map(int, value[name])) for name in ("members", "behind"))
        iteration = value["iteration"]
        return Start(members, str(value["problem"]), iteration and int(iteration), behind, bool(value["in_step"]))


def choose_iteration(entries: Mapping[int, Sequence[int]], limits: StartLimits, all_below: float) -> Start:
    """Choose the newest checkpoint that enough islands have: all islands in the synchronous warm-up, else a quorum.

    If there is none, choose the newest of the most common checkpoints. Islands that lack the chosen checkpoint receive
    its state, and lose the work that they have done since the last checkpoint in common.

    Args:
        entries: checkpoint iterations of the islands that arrived.
        limits: limits of the start.
        all_below: the iteration below which all islands need the checkpoint.
    """
    missing = limits.missing(entries)
    if missing and len(entries) < limits.quorum:
        return limits.fail_start(missing)
    iterations_by_island = {k: set(map(int, iterations)) for k, iterations in entries.items()}
    all_iterations = sorted(set().union(*iterations_by_island.values()), reverse=True)
    if not all_iterations:
        return Start()
    needed = {i: limits.count if i < all_below else limits.quorum for i in all_iterations}
    holders = {i: sum(i in iterations for iterations in iterations_by_island.values()) for i in all_iterations}
    best = next(
        (i for i in all_iterations if holders[i] >= needed[i]), max(all_iterations, key=lambda i: (holders[i], i))
    )
    return Start(iteration=best) if len(entries) >= needed[best] else limits.fail_start(missing)


def choose_start(entries: Mapping[int, Any], limits: StartLimits) -> Start:
    """Decide which islands begin: those with the most iterations, if they agree. They send their state to the others.

    Args:
        entries: by island: its iteration, whether islands synchronize every step from there, its settings that must be
            equal, and a fingerprint of its weights.
        limits: limits of the start.
    """
    first, ahead = min(entries), max(iteration for iteration, *_ in entries.values())
    members = tuple(k for k, (iteration, *_) in sorted(entries.items()) if iteration == ahead)
    in_step = bool(entries[members[0]][1])
    needed = limits.count if in_step else limits.quorum
    for k, (_, _, identity, _) in entries.items():
        for name, value in entries[first][2].items():
            if identity.get(name) != value:
                return Start(
                    problem=f"islands {first} and {k} do not agree: {name} is {value} and {identity.get(name)}"
                )
    missing = limits.missing(entries)
    if missing and len(entries) < needed:
        return limits.fail_start(missing)
    other = next((k for k in members if entries[k][3] != entries[members[0]][3]), None)
    if other is not None:
        return Start(
            problem=f"islands {members[0]} and {other} begin at iteration {ahead} with different weights; load "
            "checkpoints of one run, and for new moments (--no-load-optim, --finetune) those of the end of a round"
        )
    return Start(members, behind=tuple(k for k in sorted(entries) if k not in members), in_step=in_step)


@dataclass(eq=False)
class IslandStart:
    """This island at the start of a generation. Every rank of the island has an instance; all make the same calls.

    Args:
        store: the store of the islands.
        island: number of this island.
        limits: limits of the start.
        run_on_rank_0: runs a call on rank 0 of this island, and returns its result on all ranks.
        tell: prints a line, on rank 0.
    """

    store: IslandStore
    island: int
    limits: StartLimits
    run_on_rank_0: Callable[[Callable[[], Any]], Any]
    tell: Callable[[str], None]
    _may_begin: bool | None = None

    def choose_iteration(self, iterations: Sequence[int], all_below: float) -> int | None:
        """Enter the start of a generation, and agree with the others on the checkpoint to continue from.

        Args:
            iterations: checkpoint iterations of this island.
            all_below: the iteration below which all islands need the checkpoint: the end of the synchronous warm-up.

        Returns:
            See ``choose_iteration``; None if no island has a checkpoint, or if a generation is running, which this
            island joins.

        Raises:
            UserError: on every rank of all islands, when too few of them arrive.
            CommunicationError: when the store is gone.
        """
        if not self._enter(max(iterations, default=0)):
            return None
        choose = partial(choose_iteration, limits=self.limits, all_below=all_below)
        return self._agree("iteration", list(iterations), choose).iteration

    def begin_generation(self, entry: Sequence[Any]) -> Start:
        """Begin a generation with the others; return which islands begin, none if a generation is running.

        Args:
            entry: this island's entry for ``choose_start``.

        Raises:
            UserError: on every rank of all islands, when they cannot train together.
            CommunicationError: when the store is gone.
        """
        if not self._enter():
            return Start()
        return self._agree("start", list(entry), partial(choose_start, limits=self.limits))

    def _enter(self, newest: int | None = None) -> bool:
        """Enter the newest generation, once; return whether it has yet to begin.

        Args:
            newest: iteration of this island's newest checkpoint, 0 without a checkpoint; None if unknown.
        """
        while self._may_begin is None:
            number = int(self.run_on_rank_0(self.store.newest_generation))
            self.store.switch_generation(number)
            state, problem = self.run_on_rank_0(lambda: self._check_running_generation(newest))
            if problem:
                raise UserError(problem)
            if state != "ended":
                self._may_begin = state == "no"
        return self._may_begin

    def _check_running_generation(self, newest: int | None) -> tuple[str, str]:
        """Check whether this generation is running ("yes"), has yet to begin ("no"), or was ended because no island is
        left ("ended"); and why this island cannot enter it or begin another generation, empty if it can.

        Raises:
            CommunicationError: when the generation's islands synchronize every step and do not end.
        """
        if self.store.increment(f"came/{self.island}") > 1:  # this island's earlier process has ended, or still runs
            before = self.store.count_heartbeats([self.island])
            time.sleep(_PROBE_HEARTBEATS * HEARTBEAT_SECONDS)
            if self.store.count_heartbeats([self.island]) != before:
                problem = f"--island {self.island}: there is an island {self.island} already; give each its own number"
                return "yes", problem
        peers = [k for k in range(self.limits.count) if k != self.island]
        if self.store.get("start") is None:
            decision = self.store.get("iteration", Start.decode)
            if decision is None:
                return "no", ""
            if not decision.problem:  # islands agreed on a start; if it never came, all of them ended before it
                earlier_pulse = self.store.count_heartbeats(peers)
                time.sleep(_PROBE_HEARTBEATS * HEARTBEAT_SECONDS)
                if self.store.count_heartbeats(peers) != earlier_pulse:
                    return "no", ""
        monitor, earlier_pulse = HeartbeatMonitor(self.store, peers), self.store.count_heartbeats(peers)
        deadline = time.monotonic() + self.limits.seconds
        announced = False
        while len(silent := monitor.find_silent()) < len(peers):
            # During the synchronous warm-up nobody can join: when any of them is gone, all end.
            if self.store.get(LOCAL) and self.store.count_heartbeats(peers) != earlier_pulse:
                return "yes", ""
            alive = [k for k in peers if k not in silent]
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"{describe_islands(alive)} of the run before have not ended within {self.limits.seconds:g} s; "
                    "end them"
                )
            if not announced:
                self.tell(
                    f"waiting for {describe_islands(alive)} of the run before to end, {self.limits.seconds:g} s at most"
                )
                announced = True
            time.sleep(POLL_SECONDS)
        if newest is not None and self.store.get(finish_key(self.island)) is None:
            ends = {k: end for k in peers if (end := self.store.get(finish_key(k), read_finish)) is not None}
            ahead = max(ends, key=lambda k: ends[k][0], default=self.island)
            iteration, folder = ends.get(ahead, (newest, ""))
            if iteration > newest:
                checkpoint_hint = f"its last checkpoint is in {folder}" if folder else "it has no --save"
                return "ended", (
                    f"island {ahead} has come to the end, iteration {iteration}, and island {self.island} is late, at "
                    f"{newest}; {checkpoint_hint}: copy it to this island's folder and start all of them again "
                    "(--islands-linger-seconds is for late islands to join)"
                )
        self.store.end_generation()
        return "ended", ""

    def _agree(self, key: str, entry: Any, choose: Callable[[Mapping[int, Any]], Start]) -> Start:
        """Agree on a decision with all others, or with those that arrive in time.

        Args:
            key: name of the decision.
            entry: this island's entry.
            choose: decides from the entries of islands, by number.

        Raises:
            UserError: on every rank of all islands, when they cannot train together.
            CommunicationError: when the store is gone.
        """
        start = Start.decode(self.run_on_rank_0(lambda: self._wait_for_all(key, entry, choose)))
        if start.problem:
            raise UserError(start.problem)
        return start

    def _wait_for_all(self, key: str, entry: Any, choose: Callable[[Mapping[int, Any]], Start]) -> dict[str, Any]:
        self.store.put(refusal_key(self.island), "")
        self.store.note_end(self.island, has_ended=False)
        self.store.start_heartbeats(self.island)
        self.store.put(f"{key}/{self.island}", entry)
        deadline = time.monotonic() + self.limits.seconds
        wait_notice = WaitNotice("to come to the start", self.limits.seconds, self.tell)

        def poll() -> None:
            entries = {k: self.store.get(f"{key}/{k}") for k in range(self.limits.count)}
            entries = {k: value for k, value in entries.items() if value is not None}
            wait_notice.update(self.limits.missing(entries))
            refused = {k: why for k in range(self.limits.count) if (why := self.store.get(refusal_key(k)))}
            if refused:
                problem = "; ".join(f"island {k}: {why}" for k, why in refused.items())
                self.store.decide(key, asdict(Start(problem=problem)))
            elif self.store.have_ended(self.limits.missing(entries)) or time.monotonic() > deadline:
                with self.store.decoding(key):
                    start = choose(entries)
                self.store.decide(key, asdict(start))

        decision: dict[str, Any] = self.store.wait_for(key, poll, Start.decode)
        return decision


def run_on_rank_0(control: dist.ProcessGroup | None, call: Callable[[], Any]) -> Any:
    """Run a call on rank 0 of an island; return its result, or raise its error, on all ranks of the island.

    Args:
        control: the ranks of the island over gloo; None for a single rank.
        call: returns a JSON-serializable value.

    Raises:
        QuorumError, CommunicationError: when the call raises them.
    """
    outcome: tuple[str, Any] = "", None
    if rank_of(control) == 0:
        try:
            outcome = "", call()
        except QuorumError as error:
            outcome = "quorum", str(error)
        except CommunicationError as error:
            outcome = "lost", str(error)
    kind, value = take_from_rank_0(control, outcome)
    if kind:
        raise QuorumError(value) if kind == "quorum" else CommunicationError(value)
    return value

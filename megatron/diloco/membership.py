"""Membership of islands: members and outcome of each round. There is no leader; the first writer decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.diloco.groups import CPU, make_island_group
from megatron.diloco.round_decision import Decision, RoundOutcome, RoundReport, Vote, check_mean, select_members
from megatron.diloco.startup import LOCAL, IslandStart, QuorumError, StartLimits, finish_key, run_on_rank_0
from megatron.diloco.store import POLL_SECONDS, HeartbeatMonitor, IslandStore
from megatron.diloco.waiting import WaitNotice, describe_islands
from megatron.distributed.agreement import any_rank, rank_of
from megatron.distributed.errors import CommunicationError
from megatron.distributed.group import Group

_WATCHED_TIME_LIMITS = 3
"""Number of time limits after which an island outside an attempt declares the attempt failed."""


@dataclass(frozen=True)
class JoinReply:
    """Reply to an island that asks to join.

    Args:
        source: island that sends its state.
        round: key of the round after which the state is sent.
        members: islands of that round.
        problem: reason for a refusal; empty if the island may join.
    """

    source: int
    round: str
    members: tuple[int, ...]
    problem: str = ""

    @staticmethod
    def decode(value: Mapping[str, Any]) -> JoinReply:
        """Decode a reply; raise ValueError if it is malformed."""
        members = tuple(map(int, value["members"]))
        if not value["problem"] and value["source"] not in members:
            raise ValueError(f"island {value['source']} is none of islands {members}")
        return JoinReply(int(value["source"]), str(value["round"]), members, str(value["problem"]))


class Islands:
    """This island's view of all islands. All ranks of the island make the same calls.

    Args:
        store: store of the islands.
        island, count: number of this island, and number of islands.
        quorum: minimum number of islands in a round.
        seconds: maximum time for which a round waits for an island.
        start_seconds: maximum time for which the start waits for all islands.
        control: ranks of this island over gloo; None for a single rank.
        device: device of this rank's tensors.
        tell: prints a line, on rank 0.

    ``expected`` are the islands of the last round, initially the islands that began. ``behind`` are islands that had an
    older state at the start. ``starts_synchronously``: whether the first step is in the synchronous warm-up.
    ``last_round`` is the key of the last round that counted, empty before the first.
    """

    def __init__(
        self,
        store: IslandStore,
        island: int,
        count: int,
        quorum: int,
        seconds: float,
        start_seconds: float,
        control: dist.ProcessGroup | None,
        device: torch.device = CPU,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.store, self.island, self.count, self.quorum = store, island, count, quorum
        self.seconds = seconds
        self.control, self.rank = control, rank_of(control)
        self.device, self.tell = device, tell
        self.expected: tuple[int, ...] = ()
        self.behind: tuple[int, ...] = ()
        self.starts_synchronously = False
        self.last_round = ""
        self._group: Group | None = None
        self._identity: Mapping[str, str] = {}
        self._run_on_rank_0 = partial(run_on_rank_0, control)
        self.start = IslandStart(store, island, StartLimits(count, quorum, start_seconds), self._run_on_rank_0, tell)

    def begin_generation(
        self, iteration: int, synchronous: bool, identity: Mapping[str, str], weights: str = ""
    ) -> bool:
        """Begin a generation with the other islands, unless they have a newer state or a generation is running.

        Args:
            iteration: number of iterations that this island has completed.
            synchronous: whether islands synchronize every step from there on, which requires all islands.
            identity: settings that must be the same on all islands, by user-facing name.
            weights: fingerprint of the weights, which must be the same on all islands that begin.

        Returns:
            Whether this island begins with the others; if not, it must ``join``.

        Raises:
            UserError: on every rank of all islands, when their settings or weights differ.
            CommunicationError: when too few islands arrive in time.
        """
        self._identity = identity
        start = self.start.begin_generation([iteration, synchronous, dict(identity), weights])
        self.expected, self.behind, self.starts_synchronously = start.members, start.behind, start.in_step
        return self.island in self.expected

    def report_to_round(
        self,
        key: str,
        arrival: RoundReport,
        last_norm: float = 0.0,
        without: int | None = None,
        outer_param_norm: float = 0.0,
    ) -> Decision:
        """Report to an attempt of a round, and wait for the islands of the last round until the time limit.

        Args:
            key: name of the round and attempt, the same on all islands.
            arrival: this island's report; the report of rank 0 is used.
            last_norm: norm of the last mean; 0 before the first mean.
            without: island to exclude from the attempt, to test whether it spoils the mean.
            outer_param_norm: norm of the outer parameters; 0 if not needed.

        Raises:
            QuorumError: when fewer islands than the quorum report within the time limit.
            CommunicationError: when no pseudo-gradient is finite, or the store is gone.
        """
        decide = partial(select_members, last_norm=last_norm, outer_param_norm=outer_param_norm)
        return Decision.decode(
            self._run_on_rank_0(lambda: self._report_and_decide(key, arrival, lambda a: decide(a).leave_out(without)))
        )

    def _report_and_decide(
        self, key: str, local_report: RoundReport, decide: Callable[[Mapping[int, RoundReport]], Decision]
    ) -> dict[str, Any]:
        self.store.put(LOCAL, True)
        self.store.put(f"{key}/arrived/{self.island}", local_report.encode())
        awaited_islands = [k for k in self._awaited_islands() if k != self.island]
        monitor, deadline = HeartbeatMonitor(self.store, awaited_islands), time.monotonic() + self.seconds
        wait_notice = WaitNotice("to come to a round", self.seconds, self.tell)

        def poll() -> None:
            reports = {k: self.store.get(f"{key}/arrived/{k}", RoundReport.decode) for k in range(self.count)}
            arrivals = {k: arrival for k, arrival in reports.items() if arrival is not None}
            silent_islands = monitor.find_silent()
            joining_islands = {k for k, _ in self._waiting_tickets()}  # they do not report to rounds
            missing = set(awaited_islands) - arrivals.keys() - silent_islands - joining_islands
            wait_notice.update(missing)
            if missing and time.monotonic() < deadline:
                return
            if len(arrivals) < self.quorum:
                if time.monotonic() < deadline:
                    return
                raise QuorumError(
                    f"{len(arrivals)} of {self.count} islands came to a round within {self.seconds:g} s, and "
                    f"--islands-quorum is {self.quorum}: restart the others from their checkpoints"
                )
            try:
                self.store.decide(f"{key}/members", decide(arrivals).encode())
            except ValueError as error:
                raise CommunicationError(f"{error}; lower --lr or outer-lr") from None

        decision: dict[str, Any] = self.store.wait_for(f"{key}/members", poll, Decision.decode)
        return decision

    def _awaited_islands(self) -> set[int]:
        """Islands of the last round, and islands that joined after it; initially all islands at the start."""
        joined_islands = set() if self.last_round else set(self.behind)
        for k in range(self.count):
            ticket = self.store.get(f"joining/{k}", int)
            reply = None if ticket is None else self.store.get(f"welcome/{ticket}", JoinReply.decode)
            if reply is not None and reply.round == self.last_round and not reply.problem:
                joined_islands.add(k)
        return joined_islands | set(self.expected)

    def _waiting_tickets(self) -> list[tuple[int, int]]:
        """Islands that ask to join and have no reply yet, with their tickets."""
        tickets = []
        for k in range(self.count):
            ticket = self.store.get(f"joining/{k}", int)
            if ticket is not None and self.store.get(f"welcome/{ticket}") is None:
                tickets.append((k, ticket))
        return tickets

    def group(self, decision: Decision, key: str) -> Group:
        """Group of this rank on all members, reused until the members change or an attempt fails.

        Raises:
            CommunicationError: when a member does not connect in time.
        """
        if self._group is None or self._group.ranks != decision.members:
            self._group = None
            self._group = self.make_group(decision.members, f"{key}/group", self.seconds)
        return self._group

    def make_group(self, members: Sequence[int], key: str, seconds: float) -> Group:
        """Make a group of this rank and the same rank of other islands."""
        store = dist.PrefixStore(f"{key}/{self.rank}", self.store.box)
        return make_island_group(store, members, self.island, "islands", seconds, self.store.own_address(), self.device)

    def decide_outcome(self, key: str, members: Sequence[int], vote: Vote) -> RoundOutcome:
        """Decide with the other members whether an attempt counts; the same on all of them.

        Args:
            key: name of the round and attempt.
            members: members of the attempt. An island that is not a member waits for their decision.
            vote: this rank's vote. Failure on any rank is failure of the island; the norms of rank 0 are used.
        """
        vote = replace(vote, failed=any_rank(self.control, vote.failed))
        outcome = RoundOutcome(self._run_on_rank_0(lambda: self._vote_and_decide(key, members, vote)))
        if outcome is not RoundOutcome.COUNTS:
            self._group = None
        elif self.island in members:
            self.expected, self.last_round = tuple(members), key
        return outcome

    def _vote_and_decide(self, key: str, members: Sequence[int], vote: Vote) -> str:
        takes_part = self.island in members
        if takes_part:
            self.store.put(f"{key}/ok/{self.island}", vote.encode())
        # Members may need a time limit for the transfer and another for the votes.
        deadline = time.monotonic() + self.seconds * (1 if takes_part else _WATCHED_TIME_LIMITS)

        def poll() -> None:
            votes = [self.store.get(f"{key}/ok/{k}", Vote.decode) for k in members]
            received_votes = [vote for vote in votes if vote is not None]
            if len(received_votes) == len(members):
                self.store.decide(f"{key}/outcome", check_mean(received_votes))
            elif any(vote.failed for vote in received_votes) or time.monotonic() > deadline:
                self.store.decide(f"{key}/outcome", RoundOutcome.FAILED)

        outcome: str = self.store.wait_for(f"{key}/outcome", poll, RoundOutcome)
        return outcome

    def request_to_join(self) -> tuple[int, JoinReply] | None:
        """Wait until this island may join after a round; return ticket and reply, or None if no island is left.

        Raises:
            UserError: on every rank, when the other islands refuse this island.
        """
        self.store.stop_heartbeats()
        self._group = None
        ticket = int(self._run_on_rank_0(self._take_ticket))
        peers = [k for k in range(self.count) if k != self.island]
        monitor = HeartbeatMonitor(self.store, peers)
        if self.rank == 0:
            self.tell(
                f"waiting for {describe_islands(peers)} to admit this island at the end of a round, while any of them "
                "is alive"
            )
        answer: JoinReply | None = None
        # All ranks poll, because a round may take longer than the timeout of the island's process group.
        while answer is None:
            answer = self.store.get(f"welcome/{ticket}", JoinReply.decode)
            if answer is None and self.store.get(f"joining/{self.island}") != ticket:
                why = f"--island {self.island}: another process waits to join as island {self.island}; end one of them"
                answer = JoinReply(self.island, "", (), why)
            if len(monitor.find_silent()) == len(peers) and answer is None:
                break
            time.sleep(POLL_SECONDS)
        if any_rank(self.control, answer is None):
            return None
        assert answer is not None
        if answer.problem:
            raise UserError(answer.problem)
        self.last_round, self.expected = answer.round, answer.members
        if self.rank == 0:
            self.store.start_heartbeats(self.island)
        return ticket, answer

    def _take_ticket(self) -> int:
        ticket = self.store.increment("tickets")
        self.store.put(f"ticket/{ticket}", dict(self._identity))
        self.store.put(f"joining/{self.island}", ticket)
        return ticket

    @property
    def admits_islands(self) -> bool:
        """Whether this island admits others, as the first member of the last round."""
        return bool(self.expected) and self.expected[0] == self.island

    def admit_islands(self) -> list[tuple[int, int]]:
        """Admit waiting islands after a round, if this island is its first member; return (island, ticket) pairs."""
        if not self.admits_islands:
            return []
        return [(k, ticket) for k, ticket in self._run_on_rank_0(self._admit_waiting_islands)]

    def _admit_waiting_islands(self) -> list[tuple[int, int]]:
        admitted_islands = []
        for k, ticket in self._waiting_tickets():
            problem = ""
            for name, value in (self.store.get(f"ticket/{ticket}", dict) or {}).items():
                if self._identity.get(name) != value:
                    local_value = self._identity.get(name)
                    problem = f"island {k} and the others do not agree: {name} is {value} and {local_value}"
            self.store.put(f"welcome/{ticket}", asdict(JoinReply(self.island, self.last_round, self.expected, problem)))
            if not problem:
                admitted_islands.append((k, ticket))
        return admitted_islands

    def make_pair_group(self, ticket: int, source: int, joiner: int) -> Group:
        """Make a group of this rank on the island that sends its state and on the island that joins.

        Raises:
            CommunicationError: when the other island does not connect in time.
        """
        return self.make_group((source, joiner), f"stream/{ticket}", self.seconds)

    def announce_end(self, iteration: int, folder: str) -> list[int]:
        """Record that this island has finished; return the islands that have neither finished nor been members of
        the last round.

        Args:
            iteration: the final iteration.
            folder: folder of this island's checkpoint; empty without a checkpoint.
        """

        def record_end() -> list[int]:
            self.store.put(finish_key(self.island), [iteration, folder])
            return self._late_islands()

        return [int(k) for k in self._run_on_rank_0(record_end)]

    def has_late_islands(self) -> bool:
        """Whether there are late islands for which this island, as the first member of the last round, may wait."""
        return self.admits_islands and bool(self._run_on_rank_0(self._late_islands))

    def _late_islands(self) -> list[int]:
        return [k for k in range(self.count) if k not in self.expected and self.store.get(finish_key(k)) is None]

    def leave(self) -> None:
        """End this island's participation."""
        self.store.stop_heartbeats()

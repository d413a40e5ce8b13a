"""Compares the run configurations of all ranks before any process group is built; they go on only if all agree.

Ranks that compute different things do not fail by themselves: their collectives hang, or mix unrelated values. So every
rank writes its identity, or its reason to refuse, to the rendezvous store. Rank 0 compares, and all ranks end with the
same message if something differs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.base.errors import UserError, first_line
from megatron.distributed.errors import CommunicationError, format_ranks
from megatron.distributed.process_group import LaunchEnvironment, open_rendezvous_store

POLL_SECONDS = 0.02
OTHERS_SECONDS = 3.0
"""Time for which rank 0 waits for further ranks after the first difference, to name them too."""
LEAVE_SECONDS = 15.0
"""Time for which a rank that refuses waits until the other ranks know."""
_PREFIX = "megatron-meeting"
_ARRIVED, _REFUSED, _VERDICT, _ACKNOWLEDGED = "met", "refused", "verdict", "heard"
_MAX_SHOWN = 120

Identity = Mapping[str, str]
"""Values that must be the same on all ranks, by their names for the user, in the order of comparison."""


@dataclass(frozen=True)
class Verdict:
    """Rank 0's decision for all ranks: continue, or end with a problem."""

    problem: str = ""
    bad_input: bool = True

    def encode(self) -> str:
        return json.dumps([self.problem, self.bad_input])

    @staticmethod
    def decode(data: bytes) -> Verdict:
        return Verdict(*json.loads(data))


class RankAgreement:
    """Meeting of a command's ranks in their rendezvous store.

    Args:
        env: this process's place among the ranks.
        timeout_minutes: time to wait for all ranks.

    Raises:
        CommunicationError: when nothing serves the store.
    """

    def __init__(self, env: LaunchEnvironment, timeout_minutes: float) -> None:
        self.env = env
        self.timeout = timedelta(minutes=timeout_minutes)
        self.store = open_rendezvous_store(env, timeout_minutes)
        self._keys = dist.PrefixStore(_PREFIX, self.store)

    def agree(self, identity: Identity) -> None:
        """Wait for every rank, and check that all run the same thing.

        Raises:
            UserError: on every rank, naming the difference and the ranks, or with another rank's reason to refuse.
            CommunicationError: when a rank failed, or did not come.
        """
        try:
            ticket = self._keys.add(_ARRIVED, 1)
            self._keys.set(
                f"{_ARRIVED}/{ticket}",
                json.dumps([self.env.rank, {"WORLD_SIZE": str(self.env.world_size), **identity}]),
            )
            if self.env.rank == 0:
                self._publish(self._compare())
            # Rank 0 gives up at the same time, with a message.
            verdict = self._await_verdict(self.timeout + timedelta(seconds=LEAVE_SECONDS))
        except RuntimeError as error:
            raise CommunicationError(f"rank 0 or the store that it keeps is gone: {first_line(error)}") from error
        if verdict.problem:
            self._leave()
            raise UserError(verdict.problem) if verdict.bad_input else CommunicationError(verdict.problem)

    def refuse(self, problem: str, *, bad_input: bool) -> bool:
        """Tell the other ranks why this rank will not take part, and wait a little until they know.

        Returns:
            Whether rank 0, which prints for all, has read it or has its own reason.
        """
        delivered = False
        with suppress(RuntimeError):
            # Rank 0 reports bad input for all ranks, but its own failures under its name.
            named = problem if self.env.rank == 0 and bad_input else f"rank {self.env.rank}: {problem}"
            verdict = Verdict((named.splitlines() or [""])[0], bad_input)
            if self.env.rank == 0:
                self._publish(verdict)
            else:
                self._keys.compare_set(_REFUSED, "", verdict.encode())
            self._await_verdict(timedelta(seconds=LEAVE_SECONDS))
            delivered = True
        self._leave()
        return delivered

    def _compare(self) -> Verdict:
        """Read the other ranks' identities on rank 0, until all have come or there is a difference."""
        identities: dict[int, Identity] = {}
        deadline = time.monotonic() + self.timeout.total_seconds()
        different = False
        while len(identities) < self.env.world_size and time.monotonic() < deadline:
            key = f"{_ARRIVED}/{len(identities) + 1}"
            if self._keys.check([key]):
                rank, identity = json.loads(self._keys.get(key))
                if rank in identities:
                    return Verdict(f"two processes were started as rank {rank}; give each a RANK of its own")
                identities[rank] = identity
                if not different and first_difference(identities):
                    different, deadline = True, min(deadline, time.monotonic() + OTHERS_SECONDS)
            elif self._keys.check([_REFUSED]):
                return Verdict.decode(self._keys.get(_REFUSED))
            else:
                time.sleep(POLL_SECONDS)
        missing = [rank for rank in range(self.env.world_size) if rank not in identities]
        if missing and not different:
            limit = f"{self.timeout.total_seconds():g} s (--distributed-timeout-minutes)"
            return Verdict(f"{format_ranks(missing)} did not come within {limit}", bad_input=False)
        return Verdict(first_difference(identities) or "")

    def _publish(self, verdict: Verdict) -> None:
        self._keys.compare_set(_VERDICT, "", verdict.encode())

    def _await_verdict(self, timeout: timedelta) -> Verdict:
        self._keys.wait([_VERDICT], timeout)
        return Verdict.decode(self._keys.get(_VERDICT))

    def _leave(self) -> None:
        """Let rank 0 leave last: its store ends with it, and the launcher then ends the other ranks."""
        deadline = time.monotonic() + LEAVE_SECONDS
        with suppress(RuntimeError):
            self._keys.add(_ACKNOWLEDGED, 1)
            while self.env.rank == 0 and time.monotonic() < deadline:
                if self._keys.add(_ACKNOWLEDGED, 0) >= self.env.world_size:
                    return
                time.sleep(POLL_SECONDS)


def first_difference(identities: Mapping[int, Identity]) -> str | None:
    """Return the first difference between ranks, with the values and the ranks; None if all agree.

    Args:
        identities: the ranks' identities, by rank.
    """
    names = dict.fromkeys(name for identity in identities.values() for name in identity)
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, identity in sorted(identities.items()):
            ranks_of.setdefault(identity.get(name, "unknown"), []).append(rank)
        if len(ranks_of) > 1:
            columns = enumerate(zip(*ranks_of, strict=False))
            common_length = next((at for at, column in columns if len(set(column)) > 1), min(map(len, ranks_of)))
            value_texts = []
            for value, ranks in ranks_of.items():
                shown_value = value
                if len(value) > _MAX_SHOWN:  # show the text around the first difference
                    start = max(0, min(common_length - _MAX_SHOWN // 2, len(value) - _MAX_SHOWN))
                    end = start + _MAX_SHOWN
                    shown_value = "..." * (start > 0) + value[start:end] + "..." * (end < len(value))
                value_texts.append(f"{shown_value} on {format_ranks(ranks)}")
            more_text = f" (and {len(value_texts) - 3} more)" if len(value_texts) > 3 else ""
            return (
                f"the ranks do not agree: {name} is {' and '.join(value_texts[:3])}{more_text}; make it the same on "
                "all of them"
            )
    return None

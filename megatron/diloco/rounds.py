"""Rounds of islands: schedule of fragments, and retries of failed attempts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.outer import RoundSchedule
from megatron.diloco.joining import Joining
from megatron.diloco.membership import Islands
from megatron.diloco.outer_sync import InFlightFragment, OuterSync
from megatron.diloco.outlier_search import OutlierSearch
from megatron.diloco.round_decision import Decision, RoundOutcome, RoundReport, Vote
from megatron.diloco.startup import QuorumError
from megatron.diloco.store import POLL_SECONDS
from megatron.diloco.waiting import describe_islands
from megatron.distributed.agreement import any_rank
from megatron.distributed.errors import CommunicationError
from megatron.distributed.group import Group

MAX_ATTEMPTS = 4
"""Maximum number of failed attempts of a round by the same islands before the run ends with an error."""

Tell = Callable[[str, dict[str, Any]], None]
"""Function that prints a line for the user and writes its values to the logs."""


class Rounds:
    """Rounds of this island. Every rank of the island has an instance, and all ranks make the same calls.

    An attempt of a round counts if all ranks of all members have completed it. Only then do compressor states and outer
    parameters change. Otherwise the remaining members try again with the same residuals and, unless training has gone
    on during a delayed transfer, the same pseudo-gradients.

    Args:
        sync: transfers and outer steps on this rank.
        schedule: iterations at which rounds are due.
        islands: membership of the islands; None for a single island.
        tell: reports an event on the rank that logs.
        joining: admits late islands, or joins other islands; None for a single island.
        checkpoint_folder: folder of this island's last checkpoint, for late islands; empty without a checkpoint.
        linger_seconds: maximum time for which this island waits at its end to send its state to late islands.
        left_behind: whether the other islands continued without this island, which must ``join`` them.

    ``synced``: whether a round has just ended. ``stop_request``: this island's reason to end the run, reported in the
    next round. ``stop_reason``: the common reason of all islands to end.
    """

    def __init__(
        self,
        sync: OuterSync,
        schedule: RoundSchedule,
        islands: Islands | None,
        tell: Tell,
        joining: Joining | None = None,
        checkpoint_folder: str = "",
        linger_seconds: float = 0.0,
        left_behind: bool = False,
    ) -> None:
        self.sync, self.schedule, self.islands, self.tell = sync, schedule, islands, tell
        self.joining = joining
        self.checkpoint_folder, self.linger_seconds = checkpoint_folder, linger_seconds
        self.left_behind, self.synced = left_behind, False
        self.stop_request = self.stop_reason = 0
        self._losses: list[float] = []
        self._absent_islands: list[int] = []
        # ``time.monotonic()`` at the start of the latest transfer, and the seconds that training has waited for it.
        self._sent_at = self._waited_seconds = 0.0

    def before_step(self, iteration: int) -> None:
        """Copy the outer parameters before the first local step (0-based)."""
        if self.schedule.is_local(iteration) and not self.sync.outer.has_outer_params:
            self.sync.outer.copy_params()
            for state in self.sync.states():
                state.tensors.pop(RESIDUAL, None)  # a residual of gradients

    @property
    def takes_local_steps(self) -> bool:
        """Whether islands take local steps and communicate only in rounds."""
        return self.islands is not None and self.sync.outer.has_outer_params

    def after_step(self, done: int, loss: float) -> None:
        """Send and apply the fragments that are due after ``done`` iterations.

        Args:
            done: number of iterations.
            loss: training loss of the last iteration.

        Raises:
            QuorumError: when fewer islands than the quorum remain.
            CommunicationError: when communication fails without other islands, or the store is gone.
        """
        if not self.sync.outer.has_outer_params:
            return
        if math.isfinite(loss):
            self._losses.append(loss)
        in_flight = self.sync.in_flight
        if in_flight is not None and done >= self.schedule.applied_at(in_flight.sent):
            self._apply_fragment(in_flight)
        elif in_flight is not None and not in_flight.arrived and not in_flight.failed:
            reducer = self.sync.fragments[in_flight.fragment].reducer
            in_flight.failed = not self._run_guarded(partial(reducer.exchange, wait=False))
        self.catch_up(done)

    def is_round_overdue(self, done: int) -> bool:
        """Whether a round is due after ``done`` iterations and has not been run."""
        return (
            self.sync.outer.has_outer_params
            and self.sync.last_round_iteration < done
            and bool(self.schedule.due_fragments(done))
        )

    def catch_up(self, done: int) -> None:
        """Run the rounds that are due after ``done`` iterations, unless they have been run; see ``after_step``."""
        if self.sync.outer.has_outer_params and self.sync.last_round_iteration < done:
            fragments, is_delayed = self.schedule.due_fragments(done), self.schedule.applied_at(done) > done
            for fragment in fragments:
                in_flight = None if self.left_behind else self._begin_attempt(fragment, done, 0)
                if in_flight is not None and (in_flight.failed or not is_delayed):
                    self._apply_fragment(in_flight)
            if fragments:
                self.sync.last_round_iteration = done
                self._losses.clear()
                if done == self.schedule.end or self.sync.options.ends_in_sync:
                    self.sync.last_sync_iteration = done
        if self.synced and self.joining is not None and not self.left_behind:
            self.joining.admit_islands()
        self.synced = False

    def finish_transfer(self) -> None:
        """Wait for the fragment in flight before a checkpoint is saved. The checkpoint holds the fragment's mean, which
        ``after_step`` applies later."""
        in_flight = self.sync.in_flight
        if in_flight is not None and not in_flight.arrived:
            self._finish_transfer(in_flight)

    def drop_in_flight(self) -> None:
        """Drop the fragment in flight. The fragment's next round sends its contents."""
        if self.sync.in_flight is not None:
            self.sync.fragments[self.sync.in_flight.fragment].reducer.discard()
            self.sync.in_flight = None

    def join(self) -> bool:
        """Join the other islands at the end of a round. This island copies all their state except the data position.

        Returns:
            Whether it joined; False if no island is left.
        """
        assert self.joining is not None
        self.drop_in_flight()
        self._losses.clear()
        self.left_behind = self.synced = False
        return self.joining.join()

    def finish(self, iteration: int) -> None:
        """End the run after its last checkpoint: tell late islands the checkpoint's folder, and let them join."""
        islands, joining, folder = self.islands, self.joining, self.checkpoint_folder
        if islands is None or joining is None or not self.sync.outer.has_outer_params:
            return
        try:
            late = islands.announce_end(iteration, folder)
            if not late:
                return
            location = f"its state is in {folder}" if folder else "no checkpoint is saved (no --save)"
            self.tell(
                f"{describe_islands(late)} did not finish with this island at iteration {iteration}: {location}", {}
            )
            deadline = time.monotonic() + self.linger_seconds
            if self.linger_seconds:
                self.tell(f"waiting for {describe_islands(late)} to join, {self.linger_seconds:g} s at most", {})
            while islands.has_late_islands() and not any_rank(islands.control, time.monotonic() > deadline):
                joining.admit_islands()
                time.sleep(POLL_SECONDS)
        except CommunicationError as error:  # only late islands are affected: the checkpoint is complete
            self.tell(f"late islands can no longer join: {error}", {})

    def _begin_attempt(
        self, fragment: int, done: int, attempt: int, without: int | None = None
    ) -> InFlightFragment | None:
        """Begin an attempt; None if the other islands continue without this island."""
        key = f"{done}/{fragment}/{attempt}"
        arrival = RoundReport(
            self.sync.collect_pseudo_gradient(fragment),
            fmean(self._losses) if self._losses else math.nan,
            self.stop_request,
        )
        decision = Decision((0,), {0: arrival})
        if self.islands is not None:
            expected = self.islands.expected
            last_norm = self.sync.norms[fragment]
            outer_param_norm = 0.0 if last_norm else self.sync.outer_param_norm(fragment)
            decision = self.islands.report_to_round(key, arrival, last_norm, without, outer_param_norm)
            # Islands of the last round that did not report to this round.
            absent = [k for k in expected if k not in decision.arrivals]
            if absent and absent != self._absent_islands:
                peers = [k for k in decision.members if k != self.islands.island]
                with_whom = f"with {describe_islands(peers)}" if peers else "alone"
                verb = "is" if len(absent) == 1 else "are"
                self.tell(f"warning: {describe_islands(absent)} {verb} gone; continuing {with_whom}", {})
            self._absent_islands = absent
        for island, reason in decision.left_out.items():
            self.tell(f"warning: island {island} is left out of the round at iteration {done}: {reason}", {})
        watches = self.islands is not None and self.islands.island == decision.excluded_island
        if self.islands is not None and self.islands.island not in decision.members and not watches:
            self._leave()
            return None
        self.stop_reason = max(self.stop_reason, decision.stop)
        losses, norm = (arrival.loss, decision.mean_loss), arrival.norm
        in_flight = InFlightFragment(
            fragment, done, attempt, decision.members, *losses, norm, excluded_island=decision.excluded_island
        )
        self.sync.in_flight = in_flight
        self._sent_at, self._waited_seconds = time.monotonic(), 0.0
        if not watches:
            in_flight.failed = not self._run_guarded(partial(self._start_transfer, in_flight, decision, key))
        return in_flight

    def _leave(self) -> None:
        """Record that the other islands continue without this island."""
        self.tell("warning: the other islands continued without this one; its steps since the last round are lost", {})
        self.left_behind, self.sync.in_flight = True, None

    def _start_transfer(self, in_flight: InFlightFragment, decision: Decision, key: str) -> None:
        if self.islands is None:
            group = Group(None, (0,), 0, "islands", "none")
        else:
            group = self.islands.group(decision, key)
        self.sync.start_transfer(in_flight.fragment, group, in_flight.sent - 1)

    def _run_guarded(self, call: Callable[[], object]) -> bool:
        """Call a function that communicates with other islands; return False if it fails."""
        began = time.monotonic()
        try:
            call()
        except CommunicationError:
            if self.islands is None:
                raise
            return False
        finally:
            self._waited_seconds += time.monotonic() - began
        return True

    def _finish_transfer(self, in_flight: InFlightFragment) -> InFlightFragment | None:
        """Finish the transfer of a fragment, with retries; None if the other islands continue without this island."""
        failures, suspects = 0, OutlierSearch()
        while True:
            islands, fragment = self.islands, in_flight.fragment
            if islands is None:
                self.sync.finish_transfer(fragment)
                outcome = RoundOutcome.COUNTS
            elif islands.island not in in_flight.members:
                outcome = islands.decide_outcome(in_flight.key, in_flight.members, Vote(False))
            else:
                failed = in_flight.failed or not self._run_guarded(partial(self.sync.finish_transfer, fragment))
                mean_norm = self.sync.mean_norm(fragment, len(in_flight.members), not failed)
                usual_norm = max(in_flight.norm, self.sync.norms[fragment])
                in_flight.mean_norm = mean_norm
                outcome = islands.decide_outcome(in_flight.key, in_flight.members, Vote(failed, mean_norm, usual_norm))
            if outcome is RoundOutcome.COUNTS:
                if in_flight.excluded_island is not None:
                    self.tell(
                        f"warning: island {in_flight.excluded_island} is left out of the round at iteration "
                        f"{in_flight.sent}: the mean is within limits without its contribution",
                        {},
                    )
                if self.islands is not None and self.islands.island == in_flight.excluded_island:
                    self._leave()
                    return None
                self.sync.accept_mean(in_flight.fragment, len(in_flight.members))
                self.sync.norms[in_flight.fragment] = in_flight.mean_norm
                in_flight.arrived = True
                return in_flight
            self.sync.fragments[in_flight.fragment].reducer.discard()
            if outcome is RoundOutcome.SPOILED:
                suspects.next_suspect(in_flight.members)
                self.tell(f"warning: {suspects.describe(in_flight.sent)}", {})
            else:
                failures += 1
                assert self.islands is not None
                if failures == MAX_ATTEMPTS:
                    raise QuorumError(
                        f"a round of islands {_format_members(in_flight)} has failed {failures} times: each transfer "
                        f"must end within --islands-timeout-seconds {self.islands.seconds:g}; raise that, or send less "
                        "at a time"
                    )
                self.tell(f"warning: a round of islands {_format_members(in_flight)} has failed; trying again", {})
            retry = self._begin_attempt(in_flight.fragment, in_flight.sent, in_flight.attempt + 1, suspects.suspect)
            if retry is None:
                return None
            if retry.members != in_flight.members:
                failures = 0
            in_flight = retry

    def _apply_fragment(self, in_flight: InFlightFragment) -> None:
        """Wait for the transfer of a fragment, and apply the fragment."""
        complete_fragment = in_flight if in_flight.arrived else self._finish_transfer(in_flight)
        if complete_fragment is None:
            return
        last = complete_fragment.sent == self.schedule.end
        self.sync.apply_mean(complete_fragment.fragment, 0.0 if last else self.sync.options.mixing)
        self.sync.publish_params()
        self.sync.in_flight = None
        self.synced = True
        options = self.sync.options
        fields = [
            f" round of islands at iteration {complete_fragment.sent:8d}",
            f"islands: {_format_members(complete_fragment)}",
        ]
        values: dict[str, Any] = {"members": list(complete_fragment.members), "fragment": complete_fragment.fragment}
        if options.fragments > 1:
            fields.append(f"fragment: {complete_fragment.fragment}")
        for name, value in (
            ("own loss", complete_fragment.own_loss),
            ("mean loss", complete_fragment.mean_loss),
            ("norm", complete_fragment.norm),
        ):
            fields.append(f"{name}: {value:.6E}")
            values[name.replace(" ", "_")] = value
        if options.delay and not last:
            in_transit = time.monotonic() - self._sent_at
            values["hidden"] = max(0.0, 1.0 - self._waited_seconds / in_transit) if in_transit > 0 else 0.0
            fields.append(f"transfer hidden: {values['hidden']:.0%}")
        self.tell(" | ".join(fields) + " |", {"iteration": complete_fragment.sent, **values})


def _format_members(in_flight: InFlightFragment) -> str:
    return ", ".join(map(str, in_flight.members))

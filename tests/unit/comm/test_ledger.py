"""The ledger's arithmetic."""

from __future__ import annotations

import contextlib
import time

from megatron.comm.ledger import Ledger
from megatron.compression.points import Point
from megatron.topology.group import Pending


def test_accounts_add_up_by_point() -> None:
    ledger = Ledger()
    ledger.sent(Point.DP_GRAD, 10, 40)
    ledger.sent(Point.DP_GRAD, 5)
    ledger.sent(Point.PP_FWD, 7, 7)
    taken = ledger.take()
    assert sorted(taken) == ["dp-grad", "pp-forward"]
    assert (taken["dp-grad"]["messages"], taken["dp-grad"]["wire_bytes"], taken["dp-grad"]["raw_bytes"]) == (2, 15, 45)
    assert ledger.take() == {}


def _fails_late() -> None:
    time.sleep(0.01)
    raise RuntimeError


def test_waits_and_codecs_are_timed_even_when_they_fail() -> None:
    ledger = Ledger()
    ledger.sent(Point.TP_FWD, 1)
    with contextlib.suppress(RuntimeError):
        ledger.wait(Point.TP_FWD, Pending(None, 1, "send to rank 1", finish=_fails_late))
    for timed in (ledger.encoding, ledger.decoding):
        with contextlib.suppress(RuntimeError), timed(Point.TP_FWD):
            _fails_late()
    account = ledger.take()["tp-forward"]
    assert account["waited_s"] >= 0.01
    assert account["coded_s"] >= 0.02


def test_a_rank_that_only_receives_has_an_account() -> None:
    """The last stage sends no activations, but it waits for them and decodes them."""
    ledger = Ledger()
    ledger.wait(Point.PP_FWD, Pending(None, 0, "receive"))
    with ledger.decoding(Point.PP_FWD):
        pass
    taken = ledger.take()
    assert taken.keys() == {"pp-forward"}
    assert taken["pp-forward"]["waited_s"] > 0
    assert taken["pp-forward"]["messages"] == 0
    assert ledger.take() == {}

"""Accounts and times of the ledger."""

from __future__ import annotations

import contextlib
import time

from megatron.compression.points import Point
from megatron.distributed.clock import HostClock
from megatron.distributed.group import NOTHING, Pending
from megatron.distributed.ledger import Ledger
from tests.support.fake_device import FakeDevice, never_waited_for


def test_accounts_add_up_by_point() -> None:
    ledger = Ledger()
    ledger.count_message(Point.DP_GRAD, 10, 40)
    ledger.count_message(Point.DP_GRAD, 5)
    ledger.count_message(Point.PP_FWD, 7, 7)
    totals = ledger.take_totals()
    assert sorted(totals) == ["dp-grad", "pp-forward"]
    assert (totals["dp-grad"]["messages"], totals["dp-grad"]["wire_bytes"], totals["dp-grad"]["raw_bytes"]) == (
        2,
        15,
        45,
    )
    assert ledger.take_totals() == {}


def _fails_late() -> None:
    time.sleep(0.01)
    raise RuntimeError


def test_waits_and_codecs_are_timed_even_when_they_fail() -> None:
    ledger = Ledger()
    ledger.count_message(Point.TP_FWD, 1)
    with contextlib.suppress(RuntimeError):
        ledger.wait_for(Point.TP_FWD, Pending(None, 1, "send to rank 1", finish=_fails_late))
    for timed in (ledger.encoding, ledger.decoding):
        with contextlib.suppress(RuntimeError), timed(Point.TP_FWD):
            _fails_late()
    account = ledger.take_totals()["tp-forward"]
    assert account["waited_s"] >= 0.01
    assert account["coded_s"] >= 0.02


def test_a_rank_that_only_receives_has_an_account() -> None:
    """The last stage sends no activations, but waits for them and decodes them."""
    ledger = Ledger()
    ledger.wait_for(Point.PP_FWD, Pending(None, 0, "receive"))
    with ledger.decoding(Point.PP_FWD):
        pass
    totals = ledger.take_totals()
    assert totals.keys() == {"pp-forward"}
    assert totals["pp-forward"]["waited_s"] > 0
    assert totals["pp-forward"]["messages"] == 0
    assert ledger.take_totals() == {}


def _landing(device: FakeDevice, moment: float) -> Pending:
    """A message that the stream of the device, not the host, waits for."""
    return Pending(None, 1, "receive from rank 1", finish=lambda: device.wait_for(moment))


def _step(ledger: Ledger, device: FakeDevice) -> None:
    """Queue 1 s of computing, a wait of 2 s, a decoding of 0.5 s and 2 s of computing."""
    with ledger.computing():
        device.launch(1.0)
        ledger.wait_for(Point.PP_FWD, _landing(device, device.free + 2.0))
        with ledger.decoding(Point.PP_FWD):
            device.launch(0.5)
        device.launch(2.0)


def test_times_of_a_device_are_those_of_its_stream() -> None:
    device = FakeDevice()
    ledger = Ledger(clock=device.clock())
    with never_waited_for(device):
        _step(ledger, device)
        assert ledger.take_totals()["pp-forward"]["waited_s"] == 0.0  # nothing has happened yet
        device.now = 3.2  # within the decoding
        assert (ledger.take_computed(), ledger.take_totals()["pp-forward"]["waited_s"]) == (1.0, 2.0)
        device.now = 9.0
    ledger.clock.report_known()
    assert ledger.accounts[Point.PP_FWD].coded_s == 0.5
    assert ledger.take_computed() == 2.0
    assert ledger.take_totals() == {}


def test_nested_blocks_do_not_count_twice() -> None:
    seconds = [0.0]
    ledger = Ledger(clock=HostClock(lambda: seconds[0]))
    ledger.count_message(Point.TP_BWD, 1)
    with ledger.computing():
        seconds[0] += 1.0
        with ledger.encoding(Point.TP_BWD):
            seconds[0] += 10.0
            ledger.wait_for(
                Point.TP_BWD, Pending(None, 1, "send", finish=lambda: seconds.__setitem__(0, seconds[0] + 100.0))
            )
            seconds[0] += 20.0
        seconds[0] += 2.0
    account = ledger.take_totals()["tp-backward"]
    assert (ledger.take_computed(), account["coded_s"], account["waited_s"]) == (3.0, 30.0, 100.0)
    assert ledger.take_computed() == 0.0


def test_uncounted_blocks_do_not_count_even_if_read_late() -> None:
    device = FakeDevice()
    ledger = Ledger(clock=device.clock())
    ledger.count_message(Point.PP_FWD, 5)
    _step(ledger, device)
    with ledger.uncounted():
        ledger.count_message(Point.PP_FWD, 70)
        _step(ledger, device)
    device.now = 99.0
    account = ledger.take_totals()["pp-forward"]
    assert (account["wire_bytes"], account["waited_s"], ledger.take_computed()) == (5, 2.0, 3.0)


def test_a_cleared_ledger_forgets_times_read_late() -> None:
    device = FakeDevice()
    ledger = Ledger(clock=device.clock())
    _step(ledger, device)
    ledger.clear()
    device.now = 99.0
    assert (ledger.take_totals(), ledger.take_computed()) == ({}, 0.0)


def test_decoding_counts_without_a_wait() -> None:
    """The message had already arrived."""
    seconds = [0.0]
    ledger = Ledger(clock=HostClock(lambda: seconds[0]))
    ledger.wait_for(Point.PP_BWD, Pending(None, 0, "receive from rank 1"))
    with ledger.decoding(Point.PP_BWD):
        seconds[0] += 1.0
    assert ledger.take_totals()["pp-backward"]["coded_s"] == 1.0


def test_a_point_without_traffic_has_no_account() -> None:
    ledger = Ledger()
    with ledger.encoding(Point.DP_GRAD):
        pass
    assert ledger.take_totals() == {}


def test_a_group_of_a_single_rank_does_not_wait() -> None:
    ledger = Ledger()
    ledger.wait_for(Point.DP_GRAD, Pending(None, 0, NOTHING))
    assert ledger.take_totals() == {}


def test_everything_sent_is_counted_whatever_the_accounts_exclude() -> None:
    ledger = Ledger()
    ledger.count_message(Point.DP_GRAD, 100)
    ledger.take_totals()
    with ledger.uncounted():
        ledger.count_message(Point.PP_FWD, 10)
    ledger.clear()
    assert ledger.sent_bytes == {Point.DP_GRAD: 100, Point.PP_FWD: 10}
    assert ledger.sent_messages == 2

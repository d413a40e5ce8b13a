"""What the network laboratory is asked for, and what it says where it cannot be had."""

from __future__ import annotations

import shutil

import pytest

from tools import netlab
from tools.netlab import LabError, Traffic, describe, parse_rate, parse_rates


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 10**8), ("2.5gbit", 2_500_000_000), ("64kbit", 64_000), ("5000bit", 5000), ("none", None)],
)
def test_rates(text: str, bits: int | None) -> None:
    assert parse_rate(text) == bits
    assert parse_rate(describe(bits)) == bits if bits else describe(bits) == "unshaped"


@pytest.mark.parametrize("text", ["", "fast", "100", "100mb", "-1mbit", "0gbit", "1bit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(LabError, match="--rate"):
        parse_rate(text)


def test_one_host_may_have_a_rate_of_its_own() -> None:
    assert parse_rates(["1gbit", "2=100mbit"], 3) == [10**9, 10**9, 10**8]
    assert parse_rates([], 2) == [None, None]
    for word in ("3=1gbit", "x=1gbit", "-1=1gbit"):
        with pytest.raises(LabError, match="hosts 0 to 2"):
            parse_rates([word], 3)


def test_where_it_cannot_be_had_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(LabError, match="install iproute2"):
        netlab.check_permission()
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="sudo"):
        netlab.check_permission()
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 0)

    def refuse(*words: str) -> str:
        raise LabError("Operation not permitted")

    monkeypatch.setattr(netlab, "call", refuse)
    with pytest.raises(LabError, match="--cap-add NET_ADMIN"):
        netlab.check_permission()


def test_the_report() -> None:
    text = netlab.report([10**8, None], [Traffic(25_000_000, 5), Traffic(0, 0)], 2.0)
    assert "100mbit" in text
    assert "unshaped" in text
    assert "100.0" in text

"""Addresses as text."""

from __future__ import annotations

import pytest

from megatron.base.addresses import read_address, write_address


@pytest.mark.parametrize(
    ("text", "address"),
    [("host:29600", ("host", 29600)), ("[::1]:29711", ("::1", 29711)), ("10.0.0.1:65535", ("10.0.0.1", 65535))],
)
def test_an_address_is_read_and_written(text: str, address: tuple[str, int]) -> None:
    assert read_address(text) == address
    assert write_address(*address) == text


@pytest.mark.parametrize(
    "text",
    ["host", "host:", ":1", "host:0", "host:65536", "host:99999", "::1:29711", "[host]:1", "[]:1", "a:b"],
)
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write HOST:PORT, such as .* with a port from 1 to 65535"):
        read_address(text)

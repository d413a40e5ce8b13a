"""Network addresses as text: HOST:PORT, or [ADDRESS]:PORT if the address contains colons."""

from __future__ import annotations

import ipaddress

from megatron.base.parse_numbers import read_whole

EXAMPLE = "write HOST:PORT, such as 10.0.0.1:29600 or [fd00::1]:29600, with a port from 1 to 65535"


def read_address(text: str) -> tuple[str, int]:
    """Parse a host and a port.

    Raises:
        ValueError: when the text is not an address.
    """
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        number = read_whole(port)
    except ValueError:
        raise ValueError(EXAMPLE) from None
    if not bare or (":" in bare) != (bare != host) or not 0 < number < 1 << 16:
        raise ValueError(EXAMPLE)
    return bare, number


def write_address(host: str, port: int) -> str:
    """Format an address as text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host name or address always refers to this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")

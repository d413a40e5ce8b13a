"""Network addresses as text: HOST:PORT, and [ADDRESS]:PORT where the address has colons itself."""

from __future__ import annotations

import ipaddress

from megatron.base.numerals import read_whole

EXAMPLE = "write HOST:PORT, such as 10.0.0.1:29600 or [fd00::1]:29600, with a port from 1 to 65535"


def read_address(text: str) -> tuple[str, int]:
    """The host and the port.

    Raises:
        ValueError: for anything else.
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
    """The text of an address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a name or an address always means this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")

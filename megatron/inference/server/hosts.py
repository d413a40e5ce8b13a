"""Validation of Host headers, against DNS rebinding."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron.base.addresses import is_loopback
from megatron.base.errors import UserError
from megatron.inference.server.answers import error_response

ANY = "*"
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\s:/@\[\]]+))(?::\d{0,5})?")


def host_name(header: str) -> str | None:
    """Name or address in a Host header, in lower case and without the port; None if the header is invalid."""
    match = _HOST.fullmatch(header.strip().lower())
    if match is None:
        return None
    return match["v6"] or match["name"].rstrip(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class AllowedHosts:
    """Host headers that the server accepts.

    A page of another site can have its own name resolved to this server's address (DNS rebinding). A browser then
    treats the server as the page's origin, but its requests still carry that site's name. A server that listens only on
    loopback accepts loopback names. A server that other machines reach also accepts every IP address, since an address
    cannot be rebound, and the machine's name.

    Args:
        bound: address or name that the server listens at.
        hosts: additional names; ``*`` allows any.

    Raises:
        UserError: when an additional name is not a host name.
    """

    def __init__(self, bound: str, hosts: Sequence[str] = ()) -> None:
        self._any = ANY in hosts
        self._names: set[str] = set()
        for host in hosts:
            name = host.strip().lower().rstrip(".")
            if name != ANY and _address(name) is None and (":" in name or host_name(name) is None):
                raise UserError(
                    f"--allowed-host {host!r} is not a host name; give one such as models.example.org, without a port"
                )
            self._names.add(name)
        bound = bound.strip().lower()
        self._addresses = not is_loopback(bound)
        if self._addresses:
            machine = socket.gethostname().lower()
            self._names |= {bound, machine, machine.split(".")[0]}

    def allows(self, header: str) -> bool:
        """Return whether a request with this Host header is meant for the server."""
        name = host_name(header)
        if self._any or (name is not None and (name in self._names or is_loopback(name))):
            return True
        return self._addresses and name is not None and _address(name) is not None


@dataclass(eq=False)
class HostCheck:
    """Middleware that rejects requests with a foreign Host header before any other processing.

    Args:
        app: application that handles accepted requests.
        hosts: accepted names.
    """

    app: ASGIApp
    hosts: AllowedHosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Only HTTP/1.0, which no browser uses, permits requests without the header.
        header = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if header is not None and not self.hosts.allows(header):
            name = host_name(header) or header
            refusal = error_response(
                f"this server does not accept the name {name}; start it with --allowed-host {name} to allow it", 403
            )
            await refusal(scope, receive, send)
            return
        await self.app(scope, receive, send)

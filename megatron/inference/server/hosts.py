"""Allowed names of a server, so that no foreign page reaches it under a name of its own."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron.base.addresses import is_loopback
from megatron.base.errors import UserError
from megatron.inference.server.answers import error_response

ANY = "*"
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\s:/@\[\]]+))(?::\d{0,5})?")


def host_name(header: str) -> str | None:
    """The name or address in a Host header, in lower case and without its port; None when the header is invalid."""
    found = _HOST.fullmatch(header.strip().lower())
    if found is None:
        return None
    return found["v6"] or found["name"].rstrip(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _plain_name(given: str) -> str:
    """A name without a port.

    Raises:
        UserError: when it is not a name.
    """
    name = given.strip().lower().rstrip(".")
    if name != ANY and _address(name) is None and (":" in name or host_name(name) is None):
        raise UserError(
            f"--allowed-host {given!r} is no name of a host; give one such as models.example.org, without a port"
        )
    return name


class AllowedHosts:
    """The Host headers that name this server.

    A page of another site can have its own name resolved to this server's address (DNS rebinding), and is then of the
    server's own origin to a browser; but its requests still name that site. A server that listens to this machine
    alone goes by its loopback names. One that others reach goes by every address too, since an address cannot be
    resolved to another, and by the machine's name.

    Args:
        bound: address or name that the server listens at.
        given: further names; ``*`` is every one.

    Raises:
        UserError: when a given one is not a name.
    """

    def __init__(self, bound: str, given: Sequence[str] = ()) -> None:
        self._any = ANY in given
        self._names: set[str] = set()
        for one in given:
            self._names.add(_plain_name(one))
        bound = bound.strip().lower()
        self._addresses = not is_loopback(bound)
        if self._addresses:
            machine = socket.gethostname().lower()
            self._names |= {bound, machine, machine.split(".")[0]}

    def allows(self, header: str) -> bool:
        """Whether a request with this Host header is meant for the server."""
        name = host_name(header)
        if self._any or (name is not None and (name in self._names or is_loopback(name))):
            return True
        return self._addresses and name is not None and _address(name) is not None


class HostCheck:
    """Middleware that refuses requests for another server, before anything else looks at them.

    Args:
        app: application that answers the others.
        hosts: names of the server.
    """

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Only HTTP/1.0, which no browser speaks, leaves the header out.
        given = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if given is not None and not self.hosts.allows(given):
            name = host_name(given) or given
            refusal = error_response(
                f"this server does not go by the name {name}; start it with --allowed-host {name} if it should", 403
            )
            await refusal(scope, receive, send)
            return
        await self.app(scope, receive, send)

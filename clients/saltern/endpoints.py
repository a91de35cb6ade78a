"""Endpoints, ``HOST:PORT``: parsed, printed and judged in one place, for those who listen and those who call."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

from saltern.errors import FailedPreconditionError, InvalidArgumentError

_ENDPOINT = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.%a-z]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})", re.ASCII)
_PORT_MAX = 65535


class Endpoint(NamedTuple):
    """A host name or address and a TCP port; to listen on port 0 is to take any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it; a name other than ``localhost`` is taken to be reachable."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def advertised(self, host: str = "") -> Endpoint:
        """What clients are told to call: at ``host`` if one is given, never at a wildcard address."""
        if not host and self.host in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
            host = socket.gethostname()
        return Endpoint(host or self.host, self.port)


def parse_endpoint(text: str, *, what: str = "endpoint", port_min: int = 0) -> Endpoint:
    """Parse ``HOST:PORT`` or ``[IPV6]:PORT``; callers, who cannot use port 0, pass ``port_min=1``.

    Raises:
        InvalidArgumentError: INVALID_ENDPOINT: anything else.
    """
    match = _ENDPOINT.fullmatch(text) if isinstance(text, str) else None
    if match is None or not port_min <= int(match["port"]) <= _PORT_MAX:
        raise InvalidArgumentError(
            f"{what} {str(text)[:128]!r} is not HOST:PORT",
            reason="INVALID_ENDPOINT",
            hint="write it like 127.0.0.1:7700, without a scheme",
        )
    return Endpoint(match["ipv6"] or match["host"], int(match["port"]))


def check_plaintext(listen: Endpoint, *, allow_plaintext: bool, what: str) -> None:
    """Refuse to carry credentials in the clear beyond this host, unless the operator says so.

    Raises:
        FailedPreconditionError: PLAINTEXT_REFUSED.
    """
    if not listen.is_loopback and not allow_plaintext:
        raise FailedPreconditionError(
            f"refusing {what} {listen}: API keys, tokens and blocks would cross the network in plain text",
            reason="PLAINTEXT_REFUSED",
            hint="listen on 127.0.0.1, use TLS where there is --tls-cert for it, or pass --allow-plaintext on a network"
            " that is trusted as a whole",
        )

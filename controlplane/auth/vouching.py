"""Whose address a call of the console is from: the browser's, on the console's word and on nobody else's (I11).

The console calls the services of its own process on behalf of a browser. For the audit trail to name the person's
address, it sends that along, with a secret that was drawn when the process began and never leaves it. Without that very
secret the word of an address is not looked at: whoever else calls is where their connection comes from.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any, Final

SECRET_BYTES: Final = 32
_VOUCHER_KEY: Final = "saltern-console-bin"
_ADDRESS_KEY: Final = "saltern-console-address"
_ADDRESS_MAX_CHARS: Final = 64
#: What gRPC says of a caller on a unix socket, which is how the console calls; others are not asked for a voucher.
_UNIX: Final = "unix:"


class Voucher:
    """The secret that the console and the door of one process share."""

    __slots__ = ("_secret",)

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES)

    def __repr__(self) -> str:
        return "Voucher(<secret>)"

    def metadata(self, address: str) -> tuple[tuple[str, str | bytes], ...]:
        """What the console sends with a call for a browser at ``address``, such as ``192.0.2.7:50412``."""
        return ((_VOUCHER_KEY, self._secret), (_ADDRESS_KEY, address[:_ADDRESS_MAX_CHARS]))

    def peer_of(self, context: Any) -> str:
        """Where a call comes from, in the form of gRPC: what the console vouches for, else the connection's own end."""
        peer: str = context.peer()
        if not peer.startswith(_UNIX):
            return peer
        told = {entry[0]: entry[1] for entry in context.invocation_metadata() or ()}
        shown, address = told.get(_VOUCHER_KEY), told.get(_ADDRESS_KEY)
        if not isinstance(shown, bytes) or not isinstance(address, str):
            return peer
        if not hmac.compare_digest(shown, self._secret):
            return peer
        return f"{'ipv6' if address.startswith('[') else 'ipv4'}:{address}"

"""Whose word of an address the door believes (I11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from controlplane.auth.vouching import Voucher

ADDRESS = "203.0.113.9:50412"


@dataclass
class Call:
    """A call as the door sees it."""

    seen: str
    metadata: tuple[tuple[str, Any], ...]

    def peer(self) -> str:
        return self.seen

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        return self.metadata


@pytest.mark.parametrize(
    ("address", "told"), [(ADDRESS, f"ipv4:{ADDRESS}"), ("[2001:db8::1]:9", "ipv6:[2001:db8::1]:9")]
)
def test_the_console_of_the_same_process_is_believed(address: str, told: str) -> None:
    voucher = Voucher()
    assert voucher.peer_of(Call("unix:", voucher.metadata(address))) == told


def test_i11_nobody_else_is_believed_where_a_call_is_from() -> None:
    voucher, other = Voucher(), Voucher()
    (key, secret), (address_key, _) = voucher.metadata(ADDRESS)
    for metadata in (
        other.metadata(ADDRESS),
        ((address_key, ADDRESS),),
        ((key, secret),),
        ((key, b""), (address_key, ADDRESS)),
        ((key, secret[:-1]), (address_key, ADDRESS)),
        ((key, "text"), (address_key, ADDRESS)),
        (),
    ):
        assert voucher.peer_of(Call("unix:", metadata)) == "unix:"
    # Not even the right secret counts from elsewhere: the console calls over its own socket alone.
    assert voucher.peer_of(Call("ipv4:192.0.2.7:1", voucher.metadata(ADDRESS))) == "ipv4:192.0.2.7:1"
    assert str(secret) not in repr(voucher)

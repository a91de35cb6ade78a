"""Keys and values that say whose they are."""

from __future__ import annotations

import hashlib

from tests.isolation.adapter import KEY_BYTES


def key_of(number: int) -> bytes:
    """The nth key; every tenant uses the same, so that nothing but the tenant keeps entries apart."""
    return number.to_bytes(KEY_BYTES, "big")


def value_of(owner: str, number: int, size_bytes: int) -> bytes:
    """Bytes that only this owner and number have, in each 32 of them."""
    tag = hashlib.blake2b(f"{owner}\n{number}".encode(), digest_size=32).digest()
    return (tag * (size_bytes // 32 + 1))[:size_bytes]

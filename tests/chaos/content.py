"""Keys and what must lie under them: bytes follow from the key alone, so that anybody can tell right from wrong.

The SDK and the node compare checksums; this does not: it makes the right bytes anew and compares those.
"""

from __future__ import annotations

import hashlib

from saltern.keys import BlockKey

#: Lengths of entries, in bytes: below, at and above a page, and a block of the namespace.
SIZES_BYTES = (1, 100, 4096, 10_000, 30_000, 65_536)
BLOCK_BYTES = 65_536


def key_of(tenant: str, number: int) -> BlockKey:
    """The key of a tenant's entry ``number``."""
    return BlockKey(hashlib.blake2b(f"{tenant}/{number}".encode(), digest_size=32).digest())


def content_of(key: BlockKey) -> bytes:
    """The bytes that belong under ``key``; no other key has the same at any place."""
    return hashlib.shake_128(key).digest(SIZES_BYTES[key[0] % len(SIZES_BYTES)])


def is_right(key: BlockKey, payload: memoryview) -> bool:
    """Whether a hit's payload is what belongs under ``key``."""
    return bytes(payload) == content_of(key)

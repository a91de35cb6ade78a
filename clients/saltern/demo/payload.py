"""Bytes of a block: the same on every call, different for every tenant and block, and different at every position.

AES-128 in counter mode over zeros, with the digest of (tenant, block id) as the first counter: as unlike each other as
random bytes, so that a foreign, stale, shifted or cut block cannot compare equal, at about a gigabyte per second.
"""

from __future__ import annotations

import hashlib
from typing import Final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from saltern.keys import BlockHash

#: Fixed: the bytes stand for a model's KV cache and are no secret.
_KEY: Final = hashlib.sha256(b"saltern/demo/payload/1").digest()[:16]
_COUNTER_BYTES: Final = 16


def block_payload(tenant: str, block_id: int, size_bytes: int) -> bytes:
    """The ``size_bytes`` bytes that ``tenant`` stores for ``block_id``."""
    counter = hashlib.blake2b(f"{tenant}/{block_id}".encode(), digest_size=_COUNTER_BYTES).digest()
    return Cipher(algorithms.AES(_KEY), modes.CTR(counter)).encryptor().update(bytes(size_bytes))


def engine_block_hash(block_id: int) -> BlockHash:
    """What an engine would call the block: without a salt it is the same for every tenant, as with real engines."""
    return BlockHash(hashlib.sha256(b"saltern/demo/block/%d" % block_id).digest())


def differing_bytes(expected: bytes, actual: memoryview) -> int:
    """How many bytes of ``actual`` are not what was put; a missing or surplus byte is a wrong one."""
    if actual == expected:
        return 0
    wrong = sum(1 for a, b in zip(expected, actual, strict=False) if a != b)
    return wrong + abs(len(expected) - actual.nbytes)

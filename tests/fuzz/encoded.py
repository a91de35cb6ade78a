"""Encoded requests that are damaged, or hold what no schema names."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

Damage = Callable[[bytes, random.Random], bytes]


def _unknown_fields(encoded: bytes, rng: random.Random) -> bytes:
    tag = _varint(rng.randint(1000, 2**29 - 1) << 3 | 2)
    return encoded + tag + _varint(5) + b"\xff\x00abc"


def _unknown_numbers(encoded: bytes, rng: random.Random) -> bytes:
    number = rng.randint(1000, 2**20) << 3
    return (
        encoded
        + _varint(number)
        + b"\xff" * 9
        + b"\x01"
        + _varint(number | 1)
        + bytes(8)
        + _varint(number | 5)
        + bytes(4)
    )


def _group(encoded: bytes, rng: random.Random) -> bytes:
    depth = rng.choice((1, 20, 5000))
    return encoded + b"\x0b" * depth + b"\x0c" * depth


def _twice(encoded: bytes, rng: random.Random) -> bytes:
    """Every field set twice: of a oneof both ways, of a message merged."""
    return encoded + encoded


def _wrong_wire_type(encoded: bytes, rng: random.Random) -> bytes:
    return _varint(rng.randint(1, 8) << 3 | rng.choice((0, 1, 2, 5))) + struct.pack("<Q", rng.getrandbits(64)) + encoded


def _flipped(encoded: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(encoded or b"\x0a")
    for _ in range(rng.randint(1, 3)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _cut(encoded: bytes, rng: random.Random) -> bytes:
    return encoded[: rng.randrange(len(encoded) + 1)]


def _not_utf8(encoded: bytes, rng: random.Random) -> bytes:
    return encoded + _varint(rng.randint(1, 4) << 3 | 2) + b"\x03\xff\xfe\xfd"


def _endless_length(encoded: bytes, rng: random.Random) -> bytes:
    return encoded + _varint(rng.randint(1, 8) << 3 | 2) + b"\xff\xff\xff\xff\x0f"


def _nested(encoded: bytes, rng: random.Random) -> bytes:
    inner = b""
    for _ in range(rng.choice((10, 120, 400))):
        inner = _varint(rng.randint(1, 4) << 3 | 2) + _varint(len(inner)) + inner
    return encoded + inner


def _many_fields(encoded: bytes, rng: random.Random) -> bytes:
    return encoded + b"\x12\x00" * rng.choice((63, 64, 65, 20_000))


def _noise(encoded: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 7, 64, 1000)))


DAMAGES: tuple[Damage, ...] = (
    _unknown_fields, _unknown_numbers, _group, _twice, _wrong_wire_type, _flipped, _cut, _not_utf8, _endless_length,
    _nested, _many_fields, _noise,
)  # fmt: skip


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])

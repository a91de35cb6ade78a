"""What the seal of a record binds: whoever keeps it can make nothing else of it, nor another's (I2, I7)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.segments import (
    BLOCK_BYTES,
    BadFormatError,
    SegmentCipher,
    SegmentNumber,
    partition_identity,
    record_blocks,
)
from dataplane.io.ssd_disk import Wanted, open_record
from saltern import wire
from saltern.keys import BlockKey

KEY, OTHER_KEY = BlockKey(bytes(range(32))), BlockKey(bytes(32))
SALT = bytes(range(100, 132))
DATA_KEY = bytes(range(50, 82))
NUMBER = SegmentNumber(7)
IDENTITY = partition_identity("uid-1", 1)
payloads = st.binary(min_size=1, max_size=3 * BLOCK_BYTES)
blocks = st.integers(1, 2**20)


def cipher_of(
    *, data_key: bytes = DATA_KEY, number: int = NUMBER, salt: bytes = SALT, identity: bytes = IDENTITY
) -> SegmentCipher:
    return SegmentCipher(data_key, SegmentNumber(number), salt, identity)


def seal(cipher: SegmentCipher, block: int, payload: bytes, key: BlockKey = KEY) -> bytearray:
    place = bytearray(record_blocks(len(payload)) * BLOCK_BYTES)
    cipher.seal_record(memoryview(place), block, key, payload, wire.checksum(payload))
    return place


def opened(cipher: SegmentCipher, block: int, sealed: bytes | bytearray, size_bytes: int, key: BlockKey = KEY) -> bytes:
    """What a read of the record gives; raises BadFormatError."""
    memory = memoryview(bytearray(sealed))
    wanted = Wanted(block, key, size_bytes, memory[BLOCK_BYTES:])
    checksum = open_record(cipher, memory[:BLOCK_BYTES], wanted)
    payload = bytes(memory[BLOCK_BYTES : BLOCK_BYTES + size_bytes])
    assert checksum == wire.checksum(payload)
    return payload


@settings(deadline=None, max_examples=60)
@given(payload=payloads, block=blocks)
def test_i7_what_was_sealed_opens(payload: bytes, block: int) -> None:
    cipher = cipher_of()
    assert opened(cipher, block, seal(cipher, block, payload), len(payload)) == payload


@settings(deadline=None, max_examples=60)
@given(payload=payloads, block=blocks, data=st.data())
def test_i7_no_bit_of_it_can_be_turned(payload: bytes, block: int, data: st.DataObject) -> None:
    """But in the padding, which nobody reads: it is behind the payload, or behind the head's own tag."""
    cipher = cipher_of()
    sealed = seal(cipher, block, payload)
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    try:
        found = opened(cipher, block, sealed, len(payload))
    except BadFormatError:
        return
    assert found == payload
    is_in_head_padding = 8 + 60 + 16 <= bit // 8 < BLOCK_BYTES
    assert is_in_head_padding or bit // 8 >= BLOCK_BYTES + len(payload)


@settings(deadline=None, max_examples=60)
@given(payload=payloads, block=blocks, other=payloads)
def test_i7_no_other_length_and_no_other_content(payload: bytes, block: int, other: bytes) -> None:
    cipher = cipher_of()
    sealed = seal(cipher, block, payload)
    for size_bytes in {len(payload) - 1, len(payload) + 1, len(other)} - {len(payload), 0}:
        if record_blocks(size_bytes) * BLOCK_BYTES <= len(sealed):
            with pytest.raises(BadFormatError):
                opened(cipher, block, sealed, size_bytes)
    if len(other) == len(payload) and other != payload:
        mixed = sealed[:BLOCK_BYTES] + seal(cipher, block + 1, other)[BLOCK_BYTES:]
        with pytest.raises(BadFormatError):
            opened(cipher, block, mixed, len(payload))


@settings(deadline=None, max_examples=60)
@given(payload=payloads, block=blocks, elsewhere=blocks)
def test_i2_it_opens_at_its_own_place_and_for_its_own_owner_alone(payload: bytes, block: int, elsewhere: int) -> None:
    """A record in another's place, one of an earlier life of the same place, and one of another tenant or epoch."""
    cipher = cipher_of()
    sealed = seal(cipher, block, payload)
    with pytest.raises(BadFormatError):
        opened(cipher, block, sealed, len(payload), OTHER_KEY)
    if elsewhere != block:
        with pytest.raises(BadFormatError):
            opened(cipher, elsewhere, sealed, len(payload))
    for foreign in (
        cipher_of(data_key=bytes(32)),
        cipher_of(number=NUMBER + 1),
        cipher_of(salt=bytes(32)),
        cipher_of(identity=partition_identity("uid-2", 1)),
        cipher_of(identity=partition_identity("uid-1", 2)),
    ):
        with pytest.raises(BadFormatError):
            opened(foreign, block, sealed, len(payload))


@settings(deadline=None, max_examples=60)
@given(payload=payloads, first=blocks, second=blocks)
def test_i7_no_two_records_have_a_nonce_in_common(payload: bytes, first: int, second: int) -> None:
    """Under one key equal nonces show equal bytes and let tags be forged; a salt is one segment's, a place is once."""
    cipher = cipher_of()
    body = slice(BLOCK_BYTES, BLOCK_BYTES + len(payload))
    places = {(c, b) for c in (cipher, cipher_of(salt=bytes(32))) for b in (first, second)}
    sealed = [bytes(seal(c, b, payload)[body]) for c, b in places]
    assert len(payload) < 16 or len(set(sealed)) == len(sealed) == (4 if first != second else 2)


@settings(deadline=None, max_examples=60)
@given(block=blocks, other=blocks)
def test_i2_names_say_nothing_and_cannot_be_foreseen(block: int, other: int) -> None:
    cipher, stranger = cipher_of(), cipher_of(data_key=bytes(32))
    assert (cipher.object_name(block) == cipher.object_name(other)) == (block == other)
    assert cipher.object_name(block).startswith(f"{cipher.name}/") and stranger.name == cipher.name
    assert stranger.object_name(block) != cipher.object_name(block), "who has the salt alone cannot tell the next name"
    assert "uid" not in cipher.object_name(block) and KEY.hex() not in cipher.object_name(block)

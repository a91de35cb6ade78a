"""The format of SSD segments: what was written comes back, and nothing else ever does (I7)."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.segments import (
    BLOCK_BYTES,
    TOMBSTONES_MAX,
    BadFormatError,
    DataRecord,
    OtherVersionError,
    SegmentCipher,
    SegmentNumber,
    Tombstones,
    footer_blocks,
    partition_identity,
    record_blocks,
)
from saltern.keys import BlockKey

DATA_KEY = bytes(range(32))
SALT = bytes(range(100, 132))
IDENTITY = partition_identity("uid-1", 1)
NUMBER = SegmentNumber(7)
NONCE = b"n" * 12

payloads = st.one_of(st.binary(min_size=1, max_size=300), st.integers(1, 3 * BLOCK_BYTES + 5).map(lambda n: b"x" * n))
block_keys = st.binary(min_size=32, max_size=32).map(BlockKey)


def make_cipher(
    data_key: bytes = DATA_KEY, number: int = NUMBER, salt: bytes = SALT, identity: bytes = IDENTITY
) -> SegmentCipher:
    return SegmentCipher(data_key, SegmentNumber(number), salt, identity)


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(number.to_bytes(8, "little")).digest())


def sealed_record(payload: bytes, key: BlockKey, block: int = 1, checksum: int = 5) -> bytearray:
    memory = bytearray(b"\xaa" * record_blocks(len(payload)) * BLOCK_BYTES)
    make_cipher().seal_record(memoryview(memory), block, key, payload, checksum)
    return memory


def open_record(memory: bytearray, cipher: SegmentCipher | None = None, block: int = 1) -> tuple[DataRecord, bytes]:
    cipher = cipher or make_cipher()
    record = cipher.open_record_head(memory[:BLOCK_BYTES], block)
    assert isinstance(record, DataRecord)
    payload = memoryview(bytearray(memory))[BLOCK_BYTES : BLOCK_BYTES + record.size_bytes]
    cipher.open_payload(payload, block, record)
    return record, bytes(payload)


@given(payloads, block_keys, st.integers(1, 2**40), st.integers(0, 2**64 - 1))
def test_i7_a_record_comes_back_whole(payload: bytes, key: BlockKey, block: int, checksum: int) -> None:
    record, opened = open_record(sealed_record(payload, key, block, checksum), block=block)
    assert opened == payload
    assert (record.key, record.size_bytes, record.checksum) == (key, len(payload), checksum)


@given(payloads)
def test_a_record_may_be_sealed_where_it_lies(payload: bytes) -> None:
    memory = memoryview(bytearray(record_blocks(len(payload)) * BLOCK_BYTES))
    inside = memory[BLOCK_BYTES : BLOCK_BYTES + len(payload)]
    inside[:] = payload
    make_cipher().seal_record(memory, 1, key_of(1), inside, 5)
    assert memory == sealed_record(payload, key_of(1))


@given(payloads, st.data())
def test_i7_any_flipped_bit_of_a_record_is_noticed(payload: bytes, data: st.DataObject) -> None:
    memory = sealed_record(payload, key_of(1))
    sealed_head_bytes = 8 + 60 + 16
    at = data.draw(
        st.one_of(st.integers(0, sealed_head_bytes - 1), st.integers(BLOCK_BYTES, BLOCK_BYTES + len(payload) - 1))
    )
    memory[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadFormatError):
        open_record(memory)


@given(payloads)
def test_i7_a_record_opens_only_where_and_for_whom_it_was_written(payload: bytes) -> None:
    memory = sealed_record(payload, key_of(1))
    strangers = [
        make_cipher(data_key=bytes(32)),
        make_cipher(number=8),
        make_cipher(salt=bytes(32)),
        make_cipher(identity=partition_identity("uid-2", 1)),
        make_cipher(identity=partition_identity("uid-1", 2)),
    ]
    for stranger in strangers:
        with pytest.raises(BadFormatError):
            open_record(memory, stranger)
    with pytest.raises(BadFormatError):
        open_record(memory, block=2)


def test_i7_payloads_of_two_records_cannot_be_swapped() -> None:
    one, other = sealed_record(b"1" * 5000, key_of(1)), sealed_record(b"2" * 5000, key_of(2), block=4)
    one[BLOCK_BYTES:], other[BLOCK_BYTES:] = other[BLOCK_BYTES:], one[BLOCK_BYTES:]
    for memory, block in ((one, 1), (other, 4)):
        with pytest.raises(BadFormatError):
            open_record(memory, block=block)


@given(payloads)
def test_i2_what_follows_a_payload_is_zero_and_the_payload_unreadable(payload: bytes) -> None:
    memory = sealed_record(payload, key_of(1))
    assert not any(memory[BLOCK_BYTES + len(payload) :])
    assert b"\xaa" * 16 not in memory
    assert key_of(1) not in memory
    if len(payload) > 16:
        assert payload not in memory


@given(st.lists(block_keys, max_size=TOMBSTONES_MAX))
def test_tombstones_come_back(keys: list[BlockKey]) -> None:
    block = make_cipher().seal_tombstones(3, keys)
    assert len(block) == BLOCK_BYTES
    assert make_cipher().open_record_head(block, 3) == Tombstones(tuple(keys))


@given(st.lists(st.tuples(block_keys, st.integers(1, 90), st.integers(1, 9000)), max_size=300), st.lists(block_keys))
def test_a_footer_comes_back(rows: list[tuple[BlockKey, int, int]], tombstones: list[BlockKey]) -> None:
    cipher = make_cipher()
    footer = cipher.seal_footer(rows, tombstones, NONCE)
    assert len(footer) == footer_blocks(len(rows), len(tombstones)) * BLOCK_BYTES
    assert cipher.footer_size_blocks(footer[-BLOCK_BYTES:]) * BLOCK_BYTES == len(footer)
    opened = cipher.open_footer(footer, data_end_block=100)
    assert (list(opened.rows), list(opened.tombstones)) == (rows, tombstones)


@given(st.data())
def test_i7_any_flipped_bit_of_a_footer_is_noticed(data: st.DataObject) -> None:
    cipher = make_cipher()
    footer = bytearray(cipher.seal_footer([(key_of(n), 1 + n, 100) for n in range(50)], [key_of(9)], NONCE))
    body_bytes = 8 + 50 * 40 + 32 + 16
    at = data.draw(st.one_of(st.integers(0, body_bytes - 1), st.integers(len(footer) - 28, len(footer) - 1)))
    footer[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadFormatError):
        cipher.footer_size_blocks(footer[-BLOCK_BYTES:])
        cipher.open_footer(footer, data_end_block=100)


def test_i7_a_footer_lists_nothing_outside_its_segment() -> None:
    cipher = make_cipher()
    for row in [(key_of(1), 9, 4096), (key_of(1), 0, 1), (key_of(1), 1, 0), (key_of(1), 2**32 - 1, 2**32 - 1)]:
        with pytest.raises(BadFormatError):
            cipher.open_footer(cipher.seal_footer([row], [], NONCE), data_end_block=10)


def test_a_segment_head_names_its_version_number_and_partition() -> None:
    head = make_cipher().encode_head()
    assert len(head) == BLOCK_BYTES
    opened = SegmentCipher.open_head(head, DATA_KEY, NUMBER, IDENTITY)
    assert open_record(sealed_record(b"payload", key_of(1)), opened)[1] == b"payload"
    with pytest.raises(BadFormatError):
        SegmentCipher.open_head(head, DATA_KEY, SegmentNumber(8), IDENTITY)
    with pytest.raises(BadFormatError):
        SegmentCipher.open_head(head, bytes(32), NUMBER, IDENTITY)
    with pytest.raises(BadFormatError):
        SegmentCipher.open_head(head, DATA_KEY, NUMBER, partition_identity("uid-1", 2))
    other = bytearray(head)
    other[8] = 2
    with pytest.raises(OtherVersionError):
        SegmentCipher.open_head(other, DATA_KEY, NUMBER, IDENTITY)


hostile = st.one_of(
    st.binary(max_size=3 * BLOCK_BYTES),
    st.tuples(st.sampled_from([b"SALTSEGM", b"SREC\x01\x00", b"SREC\x02\x00"]), st.binary(max_size=80)).map(
        lambda parts: b"".join(parts).ljust(BLOCK_BYTES, b"\xff")
    ),
    st.binary(max_size=24).map(lambda end: (end + b"\x01\x00\x00\x00SALTFOOT").rjust(BLOCK_BYTES, b"\xfe")),
)


@given(hostile)
def test_hostile_bytes_raise_nothing_else(raw: bytes) -> None:
    cipher = make_cipher()
    for attempt in (
        lambda: SegmentCipher.open_head(raw, DATA_KEY, NUMBER, IDENTITY),
        lambda: cipher.open_record_head(raw, 1),
        lambda: cipher.open_record_head(raw[:BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0"), 1),
        lambda: cipher.footer_size_blocks(raw[-BLOCK_BYTES:]),
        lambda: cipher.open_footer(raw, data_end_block=100),
    ):
        try:
            attempt()
        except BadFormatError:
            continue
        except Exception as error:  # pragma: no cover
            raise AssertionError(f"{type(error).__name__} escaped") from error
        # A trailer that is well-formed has a length, whatever else is wrong with it.
        assert raw.endswith(b"SALTFOOT")

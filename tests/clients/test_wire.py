"""The wire codec: what it encodes it decodes, and no bytes make it raise anything but ProtocolError."""

from __future__ import annotations

import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltern import wire
from saltern.errors import ProtocolError, SalternError, StatusCode, error_from_status

KINDS: list[type[msgspec.Struct]] = [
    wire.Hello, wire.HelloReply, wire.Refresh, wire.RefreshReply, wire.Put, wire.PutReply, wire.Get, wire.GetReply,
    wire.Lookup, wire.LookupReply, wire.Delete, wire.DeleteReply, wire.Register, wire.Unregister, wire.Empty,
    wire.Connect, wire.ConnectReply, wire.ErrorBody,
]  # fmt: skip


def header(**changes: int | bytes) -> bytes:
    """A good header with some fields replaced."""
    fields: dict[str, int | bytes] = {
        "magic": wire.MAGIC, "version": 1, "opcode": 9, "flags": 0, "request_id": 1, "body": 1, "status": 0,
        "payload": 0,
    }  # fmt: skip
    return wire.HEADER.pack(*(fields | changes).values())


@given(st.binary(min_size=wire.HEADER_BYTES, max_size=wire.HEADER_BYTES) | st.binary(max_size=100))
def test_hostile_header_bytes_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_header(data)


@given(
    version=st.integers(0, 2),
    opcode=st.integers(0, 255),
    flags=st.sampled_from([0, 0, 0, 1, 0x8000]),
    request_id=st.integers(0, 2**64 - 1),
    body=st.sampled_from([0, 1, wire.BODY_MAX_BYTES, wire.BODY_MAX_BYTES + 1, 2**32 - 1]),
    status=st.integers(0, 2**32 - 1),
    payload=st.sampled_from([0, 1, wire.PAYLOAD_MAX_BYTES, wire.PAYLOAD_MAX_BYTES + 1, 2**64 - 1]),
)
def test_almost_good_headers_decode_or_are_a_protocol_error(**fields: int) -> None:
    try:
        decoded = wire.decode_header(header(**fields))
    except ProtocolError:
        good = (
            fields["version"] == 1
            and fields["opcode"] & 0x7F in set(wire.Opcode)
            and fields["flags"] == 0
            and fields["body"] <= wire.BODY_MAX_BYTES
            and fields["payload"] <= wire.PAYLOAD_MAX_BYTES
        )
        assert not good
    else:
        assert decoded.request_id == fields["request_id"]
        assert decoded.is_reply == (fields["opcode"] >= 0x80)
        assert decoded.opcode in set(wire.Opcode)
        assert (decoded.body_bytes, decoded.payload_bytes) == (fields["body"], fields["payload"])
        assert decoded.status == fields["status"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": b"HTTP"}, "BAD_MAGIC"),
        ({"version": 2}, "UNSUPPORTED_VERSION"),
        ({"opcode": 0x7F}, "UNKNOWN_OPCODE"),
        ({"opcode": 0}, "UNKNOWN_OPCODE"),
        ({"flags": 1}, "RESERVED_BITS"),
        ({"body": wire.BODY_MAX_BYTES + 1}, "BODY_TOO_LARGE"),
        ({"payload": wire.PAYLOAD_MAX_BYTES + 1}, "PAYLOAD_TOO_LARGE"),
    ],
)
def test_each_broken_field_has_its_reason(changes: dict[str, int | bytes], reason: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.decode_header(header(**changes))
    assert caught.value.reason == reason
    assert caught.value.hint


def test_bodies_are_smaller_before_hello() -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.decode_header(header(body=wire.HELLO_BODY_MAX_BYTES + 1), body_max_bytes=wire.HELLO_BODY_MAX_BYTES)
    assert caught.value.reason == "BODY_TOO_LARGE"


@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_hostile_body_bytes_decode_or_are_a_protocol_error(kind: type[msgspec.Struct], data: bytes) -> None:
    try:
        wire.decode_body(kind, data)
    except ProtocolError as error:
        assert error.reason == "MALFORMED_BODY"
        assert len(error.message) < 300


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({field for kind in KINDS for field in kind.__struct_fields__})


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), anything, max_size=9))
def test_maps_with_fields_of_any_type_decode_or_are_a_protocol_error(
    kind: type[msgspec.Struct], fields: dict[str, object]
) -> None:
    try:
        body = wire.decode_body(kind, msgspec.msgpack.encode(fields))
    except ProtocolError:
        return
    assert wire.decode_body(kind, wire.encode_body(body)) == body
    for check in (wire.check_put, wire.check_get):
        try:
            if isinstance(body, wire.Put if check is wire.check_put else wire.Get):
                check(body, 0)  # type: ignore[arg-type]
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\x80" * 2,
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x81\xa4keys\xc6\xff\xff\xff\xff",
        b"\x81\xa5sizes\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x81\xa1a" * 5000,
        b"\xc1",
        b"\xc7\x01\x05a",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_counts_and_depths_cost_no_memory(kind: type[msgspec.Struct], data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            wire.decode_body(kind, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ProtocolError):
        wire.decode_body(wire.Refresh, b"\x81\xa5token\xa2\xff\xfe")


def test_unknown_fields_are_ignored() -> None:
    data = msgspec.msgpack.encode({"token": "t", "new": [1, {"deep": None}]})
    assert wire.decode_body(wire.Refresh, data) == wire.Refresh("t")


keys = st.integers(0, 5).flatmap(lambda count: st.binary(min_size=32 * count, max_size=32 * count))


@given(keys, st.lists(st.integers(-5, 2**64), max_size=6), st.binary(max_size=48), st.integers(0, 100))
def test_checked_puts_are_consistent(keys: bytes, sizes: list[int], sums: bytes, payload_bytes: int) -> None:
    try:
        wire.check_put(wire.Put(keys, sizes, sums), payload_bytes)
    except ProtocolError:
        return
    assert len(keys) == 32 * len(sizes) == 4 * len(sums)
    assert all(1 <= size <= wire.ENTRY_MAX_BYTES for size in sizes)
    assert payload_bytes == sum(sizes)


@pytest.mark.parametrize(
    ("put", "payload_bytes", "reason"),
    [
        (wire.Put(bytes(31), [1], bytes(8)), 1, "MALFORMED_BODY"),
        (wire.Put(bytes(32), [], bytes(8)), 0, "MALFORMED_BODY"),
        (wire.Put(bytes(32), [1], bytes(7)), 1, "MALFORMED_BODY"),
        (wire.Put(bytes(32), [0], bytes(8)), 0, "ENTRY_SIZE_OUT_OF_RANGE"),
        (wire.Put(bytes(32), [-1], bytes(8)), 0, "ENTRY_SIZE_OUT_OF_RANGE"),
        (wire.Put(bytes(32), [wire.ENTRY_MAX_BYTES + 1], bytes(8)), 1, "ENTRY_SIZE_OUT_OF_RANGE"),
        (wire.Put(bytes(32), [5], bytes(8)), 4, "LENGTH_MISMATCH"),
        (wire.Put(bytes(32), [5], bytes(8), 0, [0]), 5, "LENGTH_MISMATCH"),
        (wire.Put(bytes(32), [5], bytes(8), 0, []), 0, "MALFORMED_BODY"),
        (wire.Put(bytes(32), [5], bytes(8), None, [0]), 5, "MALFORMED_BODY"),
        (wire.Put(bytes(32), [5], bytes(8), 0, [-1]), 0, "OUT_OF_REGION"),
        (wire.Put(bytes(32 * 4097), [1] * 4097, bytes(8 * 4097)), 4097, "TOO_MANY_KEYS"),
    ],
)
def test_each_inconsistency_of_a_put_has_its_reason(put: wire.Put, payload_bytes: int, reason: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.check_put(put, payload_bytes)
    assert caught.value.reason == reason


def test_a_get_carries_no_payload() -> None:
    wire.check_get(wire.Get(bytes(32), [1]), 0)
    with pytest.raises(ProtocolError) as caught:
        wire.check_get(wire.Get(bytes(32), [1]), 1)
    assert caught.value.reason == "LENGTH_MISMATCH"


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=20))
def test_keys_split_as_they_were_joined(keys: list[bytes]) -> None:
    assert wire.split_keys(b"".join(keys)) == keys


def test_key_lists_out_of_range_are_refused() -> None:
    for data, reason in ((bytes(33), "MALFORMED_BODY"), (bytes(32 * 4097), "TOO_MANY_KEYS")):
        with pytest.raises(ProtocolError) as caught:
            wire.split_keys(data)
        assert caught.value.reason == reason


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_sums_split_as_they_were_joined(sums: list[int]) -> None:
    assert wire.split_sums(wire.join_sums(sums)) == sums


def test_the_checksum_is_xxh3_64() -> None:
    """Known answers of the XXH3-64 specification, seed 0, so that another library can be compared."""
    assert wire.checksum(b"") == 0x2D06800538D394C2
    assert wire.checksum(bytearray(b"saltern")) == wire.checksum(memoryview(b"saltern")) == wire.checksum(b"saltern")
    assert wire.checksum(b"saltern") != wire.checksum(b"salterm")


@given(
    st.sampled_from([code for code in StatusCode if code is not StatusCode.OK]),
    st.text(max_size=40),
    st.text("ABC_", min_size=1, max_size=9),
    st.text(max_size=20),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    st.none() | st.integers(0, 10**6),
)
def test_errors_cross_the_wire_whole(
    code: StatusCode, message: str, reason: str, hint: str, metadata: dict[str, str], retry_after_ms: int | None
) -> None:
    error = error_from_status(code, message, reason=reason, hint=hint, metadata=metadata, retry_after_ms=retry_after_ms)
    frame = wire.encode_error_reply(wire.Opcode.PUT, 7, error)
    head = wire.decode_header(frame[: wire.HEADER_BYTES])
    assert (head.status, head.is_reply, head.payload_bytes) == (code, True, 0)
    received = wire.error_from_body(wire.decode_body(wire.ErrorBody, frame[wire.HEADER_BYTES :]), head.status)
    assert type(received) is type(error)
    assert vars(received) == vars(error)


@given(st.integers(-(2**31), 2**31), st.text(max_size=20))
def test_unknown_codes_become_an_error_of_the_tree(code: int, reason: str) -> None:
    assert isinstance(error_from_status(code, "message", reason=reason), SalternError)


def test_the_header_is_laid_out_as_documented() -> None:
    frame = wire.encode_request(wire.Opcode.GET, 0x0102030405060708, b"body", 0x1112131415161718)
    expected = b"SLTN" + bytes([1, 4, 0, 0]) + struct.pack("<QIIQ", 0x0102030405060708, 4, 0, 0x1112131415161718)
    assert frame == expected + b"body"

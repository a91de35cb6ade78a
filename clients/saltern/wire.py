"""The data-plane wire protocol of ``proto/WIRE.md``: frames and bodies as values, no I/O.

Client and node share this module: what one encodes the other decodes. Decoding is strict: every length is checked
against a limit before anything is allocated for it, and any deviation is a :class:`~saltern.errors.ProtocolError`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, TypeVar

import msgspec
import xxhash

from saltern.errors import ProtocolError, SalternError, StatusCode, error_from_status
from saltern.keys import KEY_BYTES, BlockKey

MAGIC: Final = b"SLTN"
VERSION: Final = 1
#: magic, version, opcode, flags, request id, body bytes, status, payload bytes; little-endian.
HEADER: Final = struct.Struct("<4sBBHQIIQ")
HEADER_BYTES: Final = HEADER.size
REPLY_BIT: Final = 0x80

HELLO_BODY_MAX_BYTES: Final = 16 * 1024
BODY_MAX_BYTES: Final = 1024 * 1024
PAYLOAD_MAX_BYTES: Final = 256 * 1024 * 1024
KEYS_MAX: Final = 4096
ENTRY_MAX_BYTES: Final = 64 * 1024 * 1024
REGIONS_MAX: Final = 16
REGION_MAX_BYTES: Final = 64 * 1024 * 1024 * 1024
#: A put reply explains at most this many refusals in words; the codes are complete.
PUT_ERRORS_MAX: Final = 16
SUM_BYTES: Final = 8


class Opcode(IntEnum):
    HELLO = 0x01
    REFRESH = 0x02
    PUT = 0x03
    GET = 0x04
    LOOKUP = 0x05
    DELETE = 0x06
    REGISTER = 0x07
    UNREGISTER = 0x08
    PING = 0x09
    CONNECT = 0x0A


_OPCODES: Final = frozenset(Opcode)
_LENGTHS_HINT: Final = "see proto/WIRE.md for what belongs to each request, and how long it is"


class Header(msgspec.Struct, frozen=True, array_like=True):
    """A decoded frame header. ``status`` is 0 in requests; in replies a :class:`StatusCode`."""

    opcode: int
    request_id: int
    body_bytes: int
    payload_bytes: int
    status: int = 0
    is_reply: bool = False


class Hello(msgspec.Struct, omit_defaults=True):
    """Opens a session. The tenant is the token's; there is no field to name one (I1).

    ``group`` is the uid of a sharing group whose salt the keys are derived with; the policy of the token's own
    namespace says whether it is a member (I2).
    """

    token: str
    namespace: str
    epoch: int
    client: str = ""
    group: str = ""


class HelloReply(msgspec.Struct, omit_defaults=True):
    """``rdma``: whether the node takes CONNECT."""

    node: str
    host: str
    tenant: str
    namespace: str
    epoch: int
    expires_ms: int
    entry_max_bytes: int
    rdma: bool = False


class Refresh(msgspec.Struct):
    token: str


class RefreshReply(msgspec.Struct):
    expires_ms: int


class Put(msgspec.Struct):
    """``keys`` 32*n bytes, ``sizes`` n entry sizes in bytes, ``sums`` 8*n bytes: XXH3-64 of each entry, little-endian.

    Without ``region`` the entries follow as the frame's payload, in order. With it, entry i lies at ``offsets[i]`` of
    that registered region and the frame has no payload.
    """

    keys: bytes
    sizes: list[int]
    sums: bytes
    region: int | None = None
    offsets: list[int] = []


class PutError(msgspec.Struct):
    """Why entry ``index`` was refused."""

    index: int
    error: ErrorBody


class PutReply(msgspec.Struct):
    """``codes`` n bytes of StatusCode (0 stored, 6 was there already); ``errors`` explains the first refusals."""

    codes: bytes
    errors: list[PutError] = []


class Get(msgspec.Struct):
    """``max_sizes[i]`` is what the caller has room for; a longer entry is answered OUT OF ROOM (code 9)."""

    keys: bytes
    max_sizes: list[int]
    region: int | None = None
    offsets: list[int] = []


class GetReply(msgspec.Struct):
    """``codes`` n bytes (0 hit, 5 miss, 9 no room); ``sizes`` n sizes, 0 unless a hit; ``sums`` 8*n bytes.

    Without a region the hits follow as payload, in order.
    """

    codes: bytes
    sizes: list[int]
    sums: bytes


class Lookup(msgspec.Struct):
    keys: bytes


class LookupReply(msgspec.Struct):
    """``prefix`` keys from the first on without a gap; ``found`` n bytes of 0 or 1."""

    prefix: int
    found: bytes


class Delete(msgspec.Struct):
    keys: bytes


class DeleteReply(msgspec.Struct):
    deleted: int


class Register(msgspec.Struct, omit_defaults=True):
    """Registers a region: a memfd that travels as SCM_RIGHTS with the frame (unix socket only), or RDMA memory.

    Of RDMA memory, ``address`` and ``key`` are those of the client's own registration.
    """

    region: int
    region_bytes: int
    address: int | None = None
    key: int | None = None


class Unregister(msgspec.Struct):
    region: int


class Connect(msgspec.Struct):
    """Sets up the session's RDMA queue pair; ``endpoint`` is the client's, 28 bytes (WIRE.md 10)."""

    endpoint: bytes


class ConnectReply(msgspec.Struct):
    """``endpoint`` is the node's."""

    endpoint: bytes


class Empty(msgspec.Struct):
    pass


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """Body of a reply whose status is not 0."""

    reason: str
    message: str
    hint: str = ""
    metadata: dict[str, str] = {}
    retry_after_ms: int | None = None
    code: int = 0


BodyT = TypeVar("BodyT", bound=msgspec.Struct)
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final[dict[type[msgspec.Struct], msgspec.msgpack.Decoder[msgspec.Struct]]] = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (
        Hello, HelloReply, Refresh, RefreshReply, Put, PutReply, Get, GetReply, Lookup, LookupReply,
        Delete, DeleteReply, Register, Unregister, Connect, ConnectReply, Empty, ErrorBody,
    )
}  # fmt: skip


def encode_body(body: msgspec.Struct) -> bytes:
    return _ENCODER.encode(body)


def decode_body(kind: type[BodyT], data: bytes | bytearray | memoryview) -> BodyT:
    """Decode a msgpack body; raises ProtocolError (reason MALFORMED_BODY) for anything that is not a ``kind``."""
    try:
        body = _DECODERS[kind].decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"body is not a valid {kind.__name__}: {str(error)[:200]}",
            reason="MALFORMED_BODY",
            hint="encode the body as proto/WIRE.md says",
        ) from None
    assert isinstance(body, kind)
    return body


def encode_request(opcode: int, request_id: int, body: bytes, payload_bytes: int = 0) -> bytes:
    """Encode header and body of a request; the payload, if any, follows separately and is not copied."""
    return HEADER.pack(MAGIC, VERSION, opcode, 0, request_id, len(body), 0, payload_bytes) + body


def encode_reply(opcode: int, request_id: int, body: bytes, payload_bytes: int = 0) -> bytes:
    """Encode header and body of a successful reply."""
    return HEADER.pack(MAGIC, VERSION, opcode | REPLY_BIT, 0, request_id, len(body), 0, payload_bytes) + body


def encode_error_reply(opcode: int, request_id: int, error: SalternError) -> bytes:
    """Encode a reply that carries an error and no payload."""
    body = encode_body(error_body(error))
    head = HEADER.pack(MAGIC, VERSION, (opcode | REPLY_BIT) & 0xFF, 0, request_id, len(body), error.code, 0)
    return head + body


def error_body(error: SalternError) -> ErrorBody:
    return ErrorBody(
        reason=error.reason,
        message=error.message,
        hint=error.hint,
        metadata=error.metadata,
        retry_after_ms=error.retry_after_ms,
        code=error.code,
    )


def error_from_body(body: ErrorBody, status: int) -> SalternError:
    return error_from_status(
        status,
        body.message,
        reason=body.reason,
        hint=body.hint,
        metadata=body.metadata,
        retry_after_ms=body.retry_after_ms,
    )


def decode_header(data: bytes | bytearray | memoryview, *, body_max_bytes: int = BODY_MAX_BYTES) -> Header:
    """Decode and check 32 header bytes.

    Raises:
        ProtocolError: reasons BAD_MAGIC, UNSUPPORTED_VERSION, UNKNOWN_OPCODE, RESERVED_BITS, BODY_TOO_LARGE,
            PAYLOAD_TOO_LARGE; LENGTH_MISMATCH for anything but 32 bytes.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(
            f"a header of {len(data)} bytes, not {HEADER_BYTES}", reason="LENGTH_MISMATCH", hint=_LENGTHS_HINT
        )
    magic, version, opcode, flags, request_id, body_bytes, status, payload_bytes = HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(
            "the peer does not speak the Saltern wire protocol",
            reason="BAD_MAGIC",
            hint="check that the port is a node's wire endpoint, not its gRPC endpoint",
        )
    if version != VERSION:
        raise ProtocolError(
            f"wire protocol version {version} is not supported",
            reason="UNSUPPORTED_VERSION",
            hint=f"speak version {VERSION}",
            metadata={"supported": str(VERSION)},
        )
    if opcode & ~REPLY_BIT not in _OPCODES:
        raise ProtocolError(f"unknown opcode {opcode:#04x}", reason="UNKNOWN_OPCODE", hint="see proto/WIRE.md")
    if flags != 0:
        raise ProtocolError(f"reserved flags {flags:#06x} are set", reason="RESERVED_BITS", hint="send 0")
    if body_bytes > body_max_bytes:
        raise _too_large("body", body_bytes, body_max_bytes)
    if payload_bytes > PAYLOAD_MAX_BYTES:
        raise _too_large("payload", payload_bytes, PAYLOAD_MAX_BYTES)
    return Header(opcode & ~REPLY_BIT, request_id, body_bytes, payload_bytes, status, opcode >= REPLY_BIT)


def _too_large(what: str, given_bytes: int, limit_bytes: int) -> ProtocolError:
    return ProtocolError(
        f"frame {what} of {given_bytes} bytes is above the limit of {limit_bytes}",
        reason=f"{what.upper()}_TOO_LARGE",
        hint="split the batch",
        metadata={"limit_bytes": str(limit_bytes)},
    )


def split_keys(keys: bytes) -> list[BlockKey]:
    """Split concatenated 32-byte keys.

    Raises:
        ProtocolError: the length is no multiple of 32 (MALFORMED_BODY) or there are over 4096 (TOO_MANY_KEYS).
    """
    length = len(keys)
    if length % KEY_BYTES:
        raise ProtocolError(
            f"keys are {length} bytes, no multiple of {KEY_BYTES}",
            reason="MALFORMED_BODY",
            hint=f"join keys of {KEY_BYTES} bytes each",
        )
    if length > KEYS_MAX * KEY_BYTES:
        raise ProtocolError(
            f"{length // KEY_BYTES} keys in one request, above the limit of {KEYS_MAX}",
            reason="TOO_MANY_KEYS",
            hint="split the batch",
            metadata={"limit_keys": str(KEYS_MAX)},
        )
    # One call of C for the whole batch: six times as fast as slicing.
    return list(struct.unpack(f"{KEY_BYTES}s" * (length // KEY_BYTES), keys))


def check_put(put: Put, payload_bytes: int) -> None:
    """Check the lengths of a put against each other and against the limits; raises ProtocolError."""
    count = _check_batch(put.keys, put.sizes, put.region, put.offsets, "sizes")
    if len(put.sums) != count * SUM_BYTES:
        raise ProtocolError(
            f"{len(put.sums)} bytes of sums for {count} keys", reason="MALFORMED_BODY", hint=_LENGTHS_HINT
        )
    total_bytes = sum(put.sizes)
    if total_bytes > PAYLOAD_MAX_BYTES:
        raise _too_large("payload", total_bytes, PAYLOAD_MAX_BYTES)
    expected_bytes = total_bytes if put.region is None else 0
    if payload_bytes != expected_bytes:
        raise ProtocolError(
            f"payload is {payload_bytes} bytes but the sizes add up to {expected_bytes}",
            reason="LENGTH_MISMATCH",
            hint="send the entries one after another, each as long as its size says",
        )


def check_get(get: Get, payload_bytes: int) -> None:
    """Check the lengths of a get against each other and against the limits; raises ProtocolError."""
    _check_batch(get.keys, get.max_sizes, get.region, get.offsets, "max_sizes")
    if payload_bytes:
        raise ProtocolError(
            f"a get carries a payload of {payload_bytes} bytes", reason="LENGTH_MISMATCH", hint="send no payload"
        )


def _check_batch(keys: bytes, sizes: list[int], region: int | None, offsets: list[int], what: str) -> int:
    count, remainder = divmod(len(keys), KEY_BYTES)
    if remainder or count != len(sizes):
        raise ProtocolError(
            f"{len(keys)} bytes of keys and {len(sizes)} {what} disagree", reason="MALFORMED_BODY", hint=_LENGTHS_HINT
        )
    if count > KEYS_MAX:
        raise ProtocolError(
            f"{count} keys in one request, above the limit of {KEYS_MAX}",
            reason="TOO_MANY_KEYS",
            hint="split the batch",
            metadata={"limit_keys": str(KEYS_MAX)},
        )
    if count and not (min(sizes) >= 1 and max(sizes) <= ENTRY_MAX_BYTES):
        raise ProtocolError(
            f"an entry size is outside 1..{ENTRY_MAX_BYTES} bytes",
            reason="ENTRY_SIZE_OUT_OF_RANGE",
            hint="put no empty blocks, and split larger ones",
        )
    if len(offsets) != (0 if region is None else count):
        raise ProtocolError(
            f"{len(offsets)} offsets for {count} keys",
            reason="MALFORMED_BODY",
            hint="give a region and an offset for each key, or neither",
        )
    if offsets and min(offsets) < 0:
        raise ProtocolError("an offset is negative", reason="OUT_OF_REGION", hint="count from the region's first byte")
    return count


def split_sums(sums: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(sums) // SUM_BYTES}Q", sums))


def join_sums(sums: list[int]) -> bytes:
    return struct.pack(f"<{len(sums)}Q", *sums)


def checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of an entry: finds bit rot and torn writes (I7); no defence against tampering."""
    return int(xxhash.xxh3_64_intdigest(data))


def immediate_of(request_id: int) -> int:
    """The 32 bits that end the WRITEs of a get over RDMA: the low half of its request id."""
    return request_id & 0xFFFF_FFFF


def is_ok(status: int) -> bool:
    return status == StatusCode.OK

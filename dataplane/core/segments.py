"""Format of an SSD segment: one append-only file of sealed records, made of whole blocks of 4 KiB.

::

    block 0     head      magic, version, number, salt                      | keyed digest of these
    block n     record    magic, kind, length of body | sealed body | zeros | payload blocks, sealed, zero-padded
    ...
    last blocks footer    sealed index of the segment | trailer             only once the segment is sealed

Every segment has keys of its own, derived from the partition's data key and the segment's random salt, so that a block
number is a nonce: a block of a segment is written once. Whoever writes must keep to that: after a failed write the
segment takes no further record. A payload is bound to its block, key, length, checksum and partition (namespace uid and
epoch) as associated data: one that was moved, cut, swapped or has rotted does not open, and is a miss (I7).

Everything here is pure: no clock, no randomness, no files. Bytes that do not decode raise :class:`BadFormatError`.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NewType, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from saltern.keys import KEY_BYTES, BlockKey, frame

Buffer = bytes | bytearray | memoryview
SegmentNumber = NewType("SegmentNumber", int)  #: ascending on a node, whatever the tenant: a lower one is older

FORMAT_VERSION: Final = 1
BLOCK_BYTES: Final = 4096
#: Blocks of a segment whatever it holds: its head and its smallest footer.
FIXED_BLOCKS: Final = 2
SALT_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16

_SEGMENT_MAGIC: Final = b"SALTSEGM"
_RECORD_MAGIC: Final = b"SREC"
_FOOTER_MAGIC: Final = b"SALTFOOT"
_HEAD: Final = struct.Struct("<8sHHIQ32s")
_RECORD: Final = struct.Struct("<4sBBH")
_DATA: Final = struct.Struct(f"<{KEY_BYTES}sIQ{TAG_BYTES}s")
_ROW: Final = struct.Struct(f"<{KEY_BYTES}sII")
_COUNTS: Final = struct.Struct("<II")
_TRAILER: Final = struct.Struct(f"<{NONCE_BYTES}sIHH8s")
_KIND_DATA: Final = 1
_KIND_TOMBSTONES: Final = 2
#: Keys that one tombstone record can name.
TOMBSTONES_MAX: Final = (BLOCK_BYTES - _RECORD.size - TAG_BYTES) // KEY_BYTES


class BadFormatError(Exception):
    """Bytes on disk are not what this version writes: torn, rotten, foreign or forged. Never leaves the data plane."""


class GoneError(BadFormatError):
    """A record that whoever keeps it has not any more: nothing is wrong with what is there."""


class OtherVersionError(BadFormatError):
    """A segment that another version of Saltern has written; it is left alone."""


#: A record as the footer lists it: its key, its first block, the length of its payload. A plain tuple: a recovery
#: reads millions of them.
Row = tuple[BlockKey, int, int]


@dataclass(frozen=True, slots=True)
class DataRecord:
    """What a record's head says of its payload.

    Attributes:
        checksum: XXH3-64 of the plain payload, which clients compare too.
        tag: of the sealed payload.
    """

    key: BlockKey
    size_bytes: int
    checksum: int
    tag: bytes


@dataclass(frozen=True, slots=True)
class Tombstones:
    """Keys that were deleted: every record of them that was written before is dead."""

    keys: tuple[BlockKey, ...]


class Rows:
    """Rows of a footer, decoded as they are asked for: 40 bytes each until then, and a recovery has millions."""

    __slots__ = ("_packed",)

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed) // _ROW.size

    def __iter__(self) -> Iterator[Row]:
        return cast("Iterator[Row]", _ROW.iter_unpack(self._packed))


@dataclass(frozen=True, slots=True)
class Footer:
    """Index of a sealed segment.

    Attributes:
        rows: the records that were alive when it was sealed, by block.
        tombstones: keys of which every record in an *older* segment is dead.
    """

    rows: Rows
    tombstones: Sequence[BlockKey]


def payload_blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)


def record_blocks(size_bytes: int) -> int:
    """Blocks that a record with a payload of ``size_bytes`` takes: one for its head, and the payload's."""
    return 1 + payload_blocks(size_bytes)


def footer_blocks(row_count: int, tombstone_count: int) -> int:
    """Blocks that the footer of a segment takes."""
    body_bytes = _COUNTS.size + row_count * _ROW.size + tombstone_count * KEY_BYTES
    return -(-(body_bytes + TAG_BYTES + _TRAILER.size) // BLOCK_BYTES)


def partition_identity(storage_uid: str, epoch: int) -> bytes:
    """The partition as associated data; no two partitions of a tenant share it."""
    return frame("saltern/ssd-partition/1", storage_uid, epoch)


def segment_name(salt: bytes) -> str:
    """See :attr:`SegmentCipher.name`; it takes no key, so that what is left of a destroyed partition can be named."""
    return hashlib.blake2b(salt, person=b"segment name", digest_size=16).hexdigest()


def salt_of(head: Buffer) -> bytes:
    """The salt that the head of a segment tells, not verified. Raises BadFormatError."""
    raw = bytes(head)
    if len(raw) < _HEAD.size or not raw.startswith(_SEGMENT_MAGIC):
        raise BadFormatError("not a segment")
    salt: bytes = _HEAD.unpack_from(raw)[-1]
    return salt


class SegmentCipher:
    """Seals and opens the parts of one segment.

    Args:
        data_key: 32 bytes, of the partition (I12: destroyed with it).
        salt: 32 random bytes, of this segment alone.
        identity: see :func:`partition_identity`.
    """

    __slots__ = ("_footers", "_heads", "_identity", "_number", "_payloads", "_salt", "_signing_key")

    def __init__(self, data_key: bytes, number: SegmentNumber, salt: bytes, identity: bytes) -> None:
        def derive(purpose: bytes) -> bytes:
            return hashlib.blake2b(salt + identity, key=data_key, person=purpose, digest_size=32).digest()

        self._number = number
        self._salt = salt
        self._identity = identity
        self._signing_key = derive(b"segment head")
        self._heads = AESGCM(derive(b"record head"))
        self._payloads = algorithms.AES(derive(b"payload"))
        self._footers = AESGCM(derive(b"footer"))

    # ---- names

    @property
    def name(self) -> str:
        """What the segment is called where others may look on: it says nothing of whose it is."""
        return segment_name(self._salt)

    def object_name(self, block: int) -> str:
        """What an object that begins at ``block`` is called there; only who has the data key can foresee it."""
        spelled = hashlib.blake2b(_nonce(block), key=self._signing_key, person=b"object name", digest_size=16)
        return f"{self.name}/{spelled.hexdigest()}"

    # ---- segment head

    def encode_head(self) -> bytes:
        """Block 0."""
        plain = _HEAD.pack(_SEGMENT_MAGIC, FORMAT_VERSION, 0, BLOCK_BYTES, self._number, self._salt)
        return (plain + self._sign(plain)).ljust(BLOCK_BYTES, b"\0")

    @classmethod
    def open_head(cls, block: Buffer, data_key: bytes, number: SegmentNumber, identity: bytes) -> SegmentCipher:
        """The cipher of the segment whose block 0 is given.

        Raises:
            OtherVersionError: written by another version.
            BadFormatError: not a segment, not number ``number``, or not of this partition.
        """
        raw = bytes(block)
        if len(raw) != BLOCK_BYTES or not raw.startswith(_SEGMENT_MAGIC):
            raise BadFormatError("not a segment")
        _, version, _, block_bytes, found_number, salt = _HEAD.unpack_from(raw)
        if version != FORMAT_VERSION:
            raise OtherVersionError(f"format version {version}, not {FORMAT_VERSION}")
        cipher = cls(data_key, number, salt, identity)
        plain = raw[: _HEAD.size]
        signature = raw[_HEAD.size : _HEAD.size + TAG_BYTES]
        if (
            found_number != number
            or block_bytes != BLOCK_BYTES
            or not hmac.compare_digest(signature, cipher._sign(plain))
        ):
            raise BadFormatError("the head of the segment does not verify")
        return cipher

    def _sign(self, plain: bytes) -> bytes:
        return hashlib.blake2b(plain, key=self._signing_key, digest_size=TAG_BYTES).digest()

    # ---- records

    def seal_record(self, place: memoryview, block: int, key: BlockKey, payload: Buffer, checksum: int) -> None:
        """Write the sealed record that begins at ``block`` to ``place``.

        Args:
            place: ``record_blocks(len(payload))`` blocks. What follows the payload is set to zero: memory of others
                must not reach the disk (I2).
            payload: plain; elsewhere, or already in ``place`` from its second block on. Sealing costs hardly more than
                the copy that would bring it there.
        """
        size_bytes = len(payload)
        end = BLOCK_BYTES + size_bytes
        place[end:] = bytes(len(place) - end)
        encryptor = Cipher(self._payloads, modes.GCM(_nonce(block))).encryptor()
        encryptor.authenticate_additional_data(self._associated(block, key, size_bytes, checksum))
        encryptor.update_into(payload, place[BLOCK_BYTES:end])
        encryptor.finalize()
        place[:BLOCK_BYTES] = self._seal_head(block, _KIND_DATA, _DATA.pack(key, size_bytes, checksum, encryptor.tag))

    def seal_tombstones(self, block: int, keys: Sequence[BlockKey]) -> bytes:
        """A record of one block that declares at most TOMBSTONES_MAX keys deleted."""
        return self._seal_head(block, _KIND_TOMBSTONES, b"".join(keys))

    def open_record_head(self, head: Buffer, block: int) -> DataRecord | Tombstones:
        """Read the first block of a record. Raises BadFormatError."""
        raw = bytes(head)
        if len(raw) != BLOCK_BYTES or not raw.startswith(_RECORD_MAGIC):
            raise BadFormatError("not a record")
        _, kind, _, body_bytes = _RECORD.unpack_from(raw)
        body = self._unseal(self._heads, _nonce(block), raw[_RECORD.size :], body_bytes, raw[: _RECORD.size])
        if kind == _KIND_DATA and body_bytes == _DATA.size:
            key, size_bytes, checksum, tag = _DATA.unpack(body)
            if size_bytes:
                return DataRecord(BlockKey(key), size_bytes, checksum, tag)
        elif kind == _KIND_TOMBSTONES and body_bytes % KEY_BYTES == 0:
            return Tombstones(tuple(_split_keys(body)))
        raise BadFormatError(f"a record of kind {kind} with {body_bytes} bytes")

    def open_payload(self, payload: memoryview, block: int, record: DataRecord) -> None:
        """Open, in place, the sealed payload of the record that begins at ``block``.

        Args:
            payload: writable, exactly ``record.size_bytes`` long.

        Raises:
            BadFormatError: it is not what was sealed (I7). What ``payload`` then holds is no entry of anybody.
        """
        if len(payload) != record.size_bytes:
            raise BadFormatError(f"{len(payload)} bytes instead of {record.size_bytes}")
        decryptor = Cipher(self._payloads, modes.GCM(_nonce(block), record.tag)).decryptor()
        decryptor.authenticate_additional_data(self._associated(block, record.key, record.size_bytes, record.checksum))
        decryptor.update_into(payload, payload)
        try:
            decryptor.finalize()
        except InvalidTag:
            raise BadFormatError("the payload does not verify") from None

    def _seal_head(self, block: int, kind: int, body: bytes) -> bytes:
        plain = _RECORD.pack(_RECORD_MAGIC, kind, 0, len(body))
        return (plain + self._heads.encrypt(_nonce(block), body, plain)).ljust(BLOCK_BYTES, b"\0")

    def _associated(self, block: int, key: BlockKey, size_bytes: int, checksum: int) -> bytes:
        return struct.pack("<QQIQ", self._number, block, size_bytes, checksum) + key + self._identity

    # ---- footer

    def seal_footer(self, rows: Iterable[Row], tombstones: Sequence[BlockKey], nonce: bytes) -> bytes:
        """The last blocks of a segment; ``nonce`` is random, because a recovery may seal a segment a second time."""
        listed = b"".join(_ROW.pack(*row) for row in rows)
        body = _COUNTS.pack(len(listed) // _ROW.size, len(tombstones)) + listed
        body += b"".join(tombstones)
        trailer = _TRAILER.pack(nonce, len(body), FORMAT_VERSION, 0, _FOOTER_MAGIC)
        sealed = self._footers.encrypt(nonce, body, trailer)
        blocks = -(-(len(sealed) + len(trailer)) // BLOCK_BYTES)
        return sealed.ljust(blocks * BLOCK_BYTES - len(trailer), b"\0") + trailer

    @staticmethod
    def footer_size_blocks(last_block: Buffer) -> int:
        """How many blocks the footer takes whose last block is given. Raises BadFormatError if it is none."""
        return -(-(_open_trailer(bytes(last_block))[1] + TAG_BYTES + _TRAILER.size) // BLOCK_BYTES)

    def open_footer(self, footer: Buffer, *, data_end_block: int) -> Footer:
        """Read a whole footer.

        Args:
            data_end_block: the block that the footer begins at; no row may reach beyond it.

        Raises:
            BadFormatError: it does not verify, or lists what cannot be.
        """
        raw = bytes(footer)
        nonce, body_bytes, trailer = _open_trailer(raw)
        body = self._unseal(self._footers, nonce, raw[: -_TRAILER.size], body_bytes, trailer)
        if body_bytes < _COUNTS.size:
            raise BadFormatError("a footer without counts")
        row_count, tombstone_count = _COUNTS.unpack_from(body)
        rows_end = _COUNTS.size + row_count * _ROW.size
        if rows_end + tombstone_count * KEY_BYTES != body_bytes:
            raise BadFormatError("a footer whose counts do not add up")
        rows = Rows(body[_COUNTS.size : rows_end])
        if any(
            not block or not size or block + 1 + -(-size // BLOCK_BYTES) > data_end_block for _, block, size in rows
        ):
            raise BadFormatError("a footer that lists a record outside its segment")
        return Footer(rows, _split_keys(body[rows_end:]))

    @staticmethod
    def _unseal(cipher: AESGCM, nonce: bytes, sealed: bytes, body_bytes: int, associated: bytes) -> bytes:
        if body_bytes + TAG_BYTES > len(sealed):
            raise BadFormatError("a length beyond the end")
        try:
            return cipher.decrypt(nonce, sealed[: body_bytes + TAG_BYTES], associated)
        except InvalidTag:
            raise BadFormatError("a sealed part does not verify") from None


def _split_keys(joined: bytes) -> list[BlockKey]:
    return [BlockKey(joined[at : at + KEY_BYTES]) for at in range(0, len(joined), KEY_BYTES)]


def _nonce(block: int) -> bytes:
    return block.to_bytes(NONCE_BYTES, "little")


def _open_trailer(raw: bytes) -> tuple[bytes, int, bytes]:
    """(nonce, length of body, trailer) of a footer, of which at least the last block is given."""
    if len(raw) < BLOCK_BYTES or len(raw) % BLOCK_BYTES or not raw.endswith(_FOOTER_MAGIC):
        raise BadFormatError("not a footer")
    trailer = raw[-_TRAILER.size :]
    nonce, body_bytes, version, _, _ = _TRAILER.unpack(trailer)
    if version != FORMAT_VERSION:
        raise OtherVersionError(f"footer version {version}, not {FORMAT_VERSION}")
    return nonce, body_bytes, trailer

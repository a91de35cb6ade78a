"""Deltas that are kept beside a kept snapshot, one after the other, so that a change of one tenant writes no other.

::

    "SALTERN-DELTAS-1\\n" | digest of the snapshot (32 bytes) | SHA-256 of both (32)        the head
    length (4, little endian) | CRC-32 of it (4) | SHA-256 (32) | PolicyDelta             a record

A record's SHA-256 is over the one before (the head's, for the first), its length and its content, so that no record can
be left out, doubled or put elsewhere. Records are appended; a process that is killed while it does so leaves the
beginning of one, which nobody was told of, and which is not read. Anything else that does not verify is damage: going
by what is before it would bring back shares that were given away since (I4).

The sums find damage, not forgery: whoever may write the file may run the node.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Final

from google.protobuf.message import DecodeError

from saltern.node.v1 import node_pb2

DIGEST_BYTES: Final = 32
_MAGIC: Final = b"SALTERN-DELTAS-1\n"
_HEAD_BYTES: Final = len(_MAGIC) + 2 * DIGEST_BYTES
_LENGTH_BYTES: Final = 4
_RECORD_HEAD_BYTES: Final = 2 * _LENGTH_BYTES + DIGEST_BYTES


class DamagedLogError(ValueError):
    """The log is not as it was written, beyond a record that was not finished."""


def encode_head(snapshot_digest: bytes) -> tuple[bytes, bytes]:
    """The head of a log that goes on from a snapshot; and the digest that its first record goes on from."""
    head = _MAGIC + snapshot_digest
    digest = hashlib.sha256(head).digest()
    return head + digest, digest


def encode_record(previous: bytes, delta: node_pb2.PolicyDelta) -> tuple[bytes, bytes]:
    """A record that follows the one with the digest ``previous``; and its own digest."""
    content = delta.SerializeToString()
    length = len(content).to_bytes(_LENGTH_BYTES, "little")
    digest = hashlib.sha256(previous + length + content).digest()
    return length + _crc(length) + digest + content, digest


def decode_log(log: bytes, snapshot_digest: bytes) -> Iterator[node_pb2.PolicyDelta]:
    """The deltas that were kept whole, in order; none where the log belongs to an earlier snapshot.

    Raises:
        DamagedLogError: it is not as it was written.
    """
    head, digest = log[:_HEAD_BYTES], log[_HEAD_BYTES - DIGEST_BYTES : _HEAD_BYTES]
    if not head.startswith(_MAGIC) or hashlib.sha256(head[:-DIGEST_BYTES]).digest() != digest:
        raise DamagedLogError("the head of the log does not verify")
    if head[len(_MAGIC) : -DIGEST_BYTES] != snapshot_digest:
        return  # a newer snapshot came, and the process ended before it could remove what it covers
    at = _HEAD_BYTES
    while len(log) - at >= 2 * _LENGTH_BYTES:
        length = log[at : at + _LENGTH_BYTES]
        if _crc(length) != log[at + _LENGTH_BYTES : at + 2 * _LENGTH_BYTES]:
            raise DamagedLogError("the length of a record does not verify")
        begin = at + _RECORD_HEAD_BYTES
        end = begin + int.from_bytes(length, "little")
        if end > len(log):
            return
        previous, digest, content = digest, log[begin - DIGEST_BYTES : begin], log[begin:end]
        if hashlib.sha256(previous + length + content).digest() != digest:
            raise DamagedLogError("a record does not verify")
        try:
            yield node_pb2.PolicyDelta.FromString(content)
        except DecodeError:
            raise DamagedLogError("a record holds no delta") from None
        at = end


def merge(snapshot: node_pb2.PolicySnapshot, deltas: Iterable[node_pb2.PolicyDelta]) -> node_pb2.PolicySnapshot:
    """The snapshot that deltas make of one.

    Raises:
        DamagedLogError: one does not go on from the version before.
    """
    deltas = list(deltas)
    if not deltas:
        return snapshot
    tenants = {tenant.tenant_id: tenant for tenant in snapshot.tenants}
    version = snapshot.version
    for delta in deltas:
        if delta.base_version != version or delta.version <= version:
            raise DamagedLogError("a delta does not follow the one before")
        version = delta.version
        for tenant_id in delta.removed_tenant_ids:
            tenants.pop(tenant_id, None)
        tenants.update((tenant.tenant_id, tenant) for tenant in delta.tenants)
    newest = deltas[-1]
    return node_pb2.PolicySnapshot(
        version=version,
        create_time=newest.create_time,
        key_set=newest.key_set,
        tenants=tenants.values(),
        lease_duration=newest.lease_duration if newest.HasField("lease_duration") else None,
    )


def _crc(length: bytes) -> bytes:
    return zlib.crc32(length).to_bytes(_LENGTH_BYTES, "little")

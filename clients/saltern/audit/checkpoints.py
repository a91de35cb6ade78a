"""Signed checkpoints: where a chain stood at a time, kept where whoever can change the database cannot reach (I11).

::

    signed(k) = frame("saltern/audit-checkpoint/1", key id, chain, sequence, hash, time, digest(k-1))
    digest(k) = SHA-256(signed(k) || signature(k))            digest(0) = 32 zero bytes

The signature is Ed25519 (RFC 8032). An event's hash covers all before it, so one checkpoint fixes the whole chain
up to its sequence; the digests chain the checkpoints of one folder, so that none can be taken out of its middle.

A file of checkpoints is JSON Lines: append-only, one line each, names sorted, bytes as hexadecimal digits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NewType

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from saltern.audit.chain import HASH_BYTES, ChainHead, EventHash
from saltern.errors import DataLossError
from saltern.keys import frame

CheckpointDigest = NewType("CheckpointDigest", bytes)  #: 32 bytes
#: What the first checkpoint of a folder continues.
NO_DIGEST: Final = CheckpointDigest(bytes(HASH_BYTES))
_LABEL: Final = "saltern/audit-checkpoint/1"
_KEY_ID_LABEL: Final = "saltern/audit-checkpoint-key/1"
_KEY_ID_BYTES: Final = 8
_FORMAT: Final = 1
_ENCODER: Final = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A chain's head at a time, signed.

    Attributes:
        time_us: when it was signed, Unix microseconds.
        previous: digest of the checkpoint of the same chain and folder before it.
        signature: 64 bytes.
    """

    chain: str
    head: ChainHead
    time_us: int
    previous: CheckpointDigest
    key_id: str
    signature: bytes

    @property
    def digest(self) -> CheckpointDigest:
        """What the next checkpoint continues."""
        signed = _signed_bytes(self.key_id, self.chain, self.head, self.time_us, self.previous)
        return CheckpointDigest(hashlib.sha256(signed + self.signature).digest())


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON form of a checkpoint."""

    chain: str
    format: int
    hash: str
    key_id: str
    previous: str
    sequence: int
    signature: str
    time_us: int


_DECODER: Final = msgspec.json.Decoder(_Line)


def key_id_of(public_key: Ed25519PublicKey) -> str:
    """How checkpoints name the key that signed them: 16 hexadecimal digits of its hash."""
    framed = frame(_KEY_ID_LABEL, public_key.public_bytes_raw())
    return hashlib.sha256(framed).digest()[:_KEY_ID_BYTES].hex()


def sign_checkpoint(
    key: Ed25519PrivateKey, chain: str, head: ChainHead, *, time_us: int, previous: CheckpointDigest
) -> Checkpoint:
    """Sign that ``chain`` stood at ``head``."""
    key_id = key_id_of(key.public_key())
    signature = key.sign(_signed_bytes(key_id, chain, head, time_us, previous))
    return Checkpoint(chain, head, time_us, previous, key_id, signature)


def is_authentic(checkpoint: Checkpoint, keys: Mapping[str, Ed25519PublicKey]) -> bool:
    """Whether one of ``keys`` (by key id) signed ``checkpoint`` as it stands."""
    key = keys.get(checkpoint.key_id)
    if key is None:
        return False
    signed = _signed_bytes(
        checkpoint.key_id, checkpoint.chain, checkpoint.head, checkpoint.time_us, checkpoint.previous
    )
    try:
        key.verify(checkpoint.signature, signed)
    except InvalidSignature:
        return False
    return True


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The line of ``checkpoint``, with its line feed."""
    line = _Line(
        chain=checkpoint.chain,
        format=_FORMAT,
        hash=checkpoint.head.hash.hex(),
        key_id=checkpoint.key_id,
        previous=checkpoint.previous.hex(),
        sequence=checkpoint.head.sequence,
        signature=checkpoint.signature.hex(),
        time_us=checkpoint.time_us,
    )
    return _ENCODER.encode(line) + b"\n"


def decode_checkpoint(line: bytes) -> Checkpoint:
    """The checkpoint of a line, not verified yet.

    Raises:
        DataLossError: reason CHECKPOINT_DAMAGED: it is none, or of a later format.
    """
    try:
        decoded = _DECODER.decode(line)
        hash_, previous = bytes.fromhex(decoded.hash), bytes.fromhex(decoded.previous)
        signature = bytes.fromhex(decoded.signature)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise _damaged() from None
    numbers = (decoded.sequence, decoded.time_us)
    if (
        decoded.format != _FORMAT
        or {len(hash_), len(previous)} != {HASH_BYTES}
        or not all(0 <= n < 2**63 for n in numbers)
    ):
        raise _damaged()
    head = ChainHead(decoded.sequence, EventHash(hash_))
    return Checkpoint(decoded.chain, head, decoded.time_us, CheckpointDigest(previous), decoded.key_id, signature)


def _signed_bytes(key_id: str, chain: str, head: ChainHead, time_us: int, previous: CheckpointDigest) -> bytes:
    return frame(_LABEL, key_id, chain, head.sequence, head.hash, time_us, previous)


def _damaged() -> DataLossError:
    return DataLossError("a line is not a checkpoint of an audit chain", reason="CHECKPOINT_DAMAGED")

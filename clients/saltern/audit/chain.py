"""The audit hash chain: what an event's bytes are, what its hash is, and how to find what was changed afterwards (I11).

::

    hash(0)  = SHA-256(frame("saltern/audit/1/genesis", chain))
    hash(n)  = SHA-256(frame("saltern/audit/<format>", chain, n, hash(n-1), canonical(event n)))

``canonical`` is JSON with sorted names, no spaces, no escapes that UTF-8 does not need, and integers only: the same
event has one encoding, whoever writes it. Whoever edits, removes, inserts or reorders events must recompute every later
hash; a head that is kept elsewhere (``saltern.audit.checkpoints``) shows that, and a cut-off tail, too.

The format is one of each event, so that a chain may go from one to the next: format 1 has the fields of
``_RecordOfFormat1``, format 2 adds ``actor_role``, ``peer`` and ``policy_version``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NewType

import msgspec

from saltern.errors import InvalidArgumentError
from saltern.keys import frame

EventHash = NewType("EventHash", bytes)  #: 32 bytes

HASH_FORMAT_NEWEST: Final = 2
HASH_BYTES: Final = 32
_GENESIS_LABEL: Final = "saltern/audit/1/genesis"
_LABELS: Final = {1: "saltern/audit/1", 2: "saltern/audit/2"}
_INTEGER_MAX: Final = 2**53  # what JSON readers and google.protobuf.Struct hold exactly
_DEPTH_MAX: Final = 16
#: ``frame(sequence, previous hash, canonical form)`` up to the bytes of the canonical form; faster than ``frame``.
_PLACE: Final = struct.Struct(f"<cQQcQ{HASH_BYTES}scQ")
#: Names of objects sorted; fields in the order in which they are declared, which below is sorted too.
_ENCODER: Final = msgspec.json.Encoder(order="deterministic")


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one event says; its fields are declared in the order of the canonical form.

    Attributes:
        after, before: the resource as JSON values.
        event_time_us: Unix microseconds.
        peer: network address of the call. policy_version: after the act. Both, and ``actor_role``, from format 2 on.
    """

    actor: str
    actor_role: str = ""
    after: Mapping[str, Any] | None
    before: Mapping[str, Any] | None
    event_time_us: int
    method: str
    outcome: str
    peer: str = ""
    policy_version: int = 0
    reason: str
    request_id: str
    resource: str


class _RecordOfFormat1(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    actor: str
    after: Mapping[str, Any] | None
    before: Mapping[str, Any] | None
    event_time_us: int
    method: str
    outcome: str
    reason: str
    request_id: str
    resource: str


class ChainedRecord(msgspec.Struct, frozen=True, gc=False):
    """One event in its place in a chain."""

    sequence: int
    record: AuditRecord
    previous_hash: EventHash
    hash: EventHash
    hash_format: int = HASH_FORMAT_NEWEST


class ChainHead(msgspec.Struct, frozen=True, gc=False):
    """The last event of a chain: its sequence (0: none yet) and hash."""

    sequence: int
    hash: EventHash


class FaultKind(StrEnum):
    """What is wrong at one place of a chain."""

    EDITED = "edited"  #: the event does not have the hash that it is stored with
    MISSING = "missing"  #: events before this one are not there
    OUT_OF_ORDER = "out-of-order"  #: the event stands after one of the same or a higher sequence
    UNLINKED = "unlinked"  #: the event does not continue the one before it
    TRUNCATED = "truncated"  #: the chain ends elsewhere than it is known to have reached


@dataclass(frozen=True, slots=True)
class ChainFault:
    """One fault, at the event of ``sequence``."""

    sequence: int
    kind: FaultKind


def genesis(chain: str) -> ChainHead:
    """The head of a chain without events; each chain has its own, so that no event fits another chain."""
    return ChainHead(0, EventHash(hashlib.sha256(frame(_GENESIS_LABEL, chain)).digest()))


def append(chain: str, head: ChainHead, record: AuditRecord) -> ChainedRecord:
    """The event that continues ``head``; raises InvalidArgumentError for a value that has no canonical form."""
    return next(append_many(chain, head, (record,)))


def append_many(chain: str, head: ChainHead, records: Iterable[AuditRecord]) -> Iterator[ChainedRecord]:
    """As :func:`append`, for several in a row."""
    prefix = frame(_LABELS[HASH_FORMAT_NEWEST], chain)
    sequence, previous_hash = head.sequence, head.hash
    for record in records:
        require_canonical(record.before)
        require_canonical(record.after)
        sequence += 1
        hash_ = _hash_in_place(prefix, sequence, previous_hash, canonical_bytes(record))
        yield ChainedRecord(sequence, record, previous_hash, hash_)
        previous_hash = hash_


def event_hash(
    chain: str, sequence: int, previous_hash: EventHash, record: AuditRecord, hash_format: int = HASH_FORMAT_NEWEST
) -> EventHash:
    """The hash of ``record`` in its place."""
    framed = frame(_LABELS[hash_format], chain, sequence, previous_hash, canonical_bytes(record, hash_format))
    return EventHash(hashlib.sha256(framed).digest())


def _hash_in_place(prefix: bytes, sequence: int, previous_hash: EventHash, canonical: bytes) -> EventHash:
    """As :func:`event_hash`, with the part of the frame that all events of a chain share made once.

    Raises:
        struct.error: no sequence that a frame can hold.
    """
    place = _PLACE.pack(b"i", 8, sequence, b"b", HASH_BYTES, previous_hash, b"b", len(canonical))
    return EventHash(hashlib.sha256(prefix + place + canonical).digest())


def canonical_bytes(record: AuditRecord, hash_format: int = HASH_FORMAT_NEWEST) -> bytes:
    """The one encoding of ``record``.

    ``before`` and ``after`` hold what :func:`require_canonical` lets pass, or what a reader has read back that makes
    integers of whole numbers.

    Raises:
        InvalidArgumentError: a text has no UTF-8 form, the format is not known, or the record has what it lacks.
    """
    encoded: AuditRecord | _RecordOfFormat1 = record
    if hash_format == 1:
        # What the hash does not cover must not be there, or anybody could write it in afterwards.
        if record.actor_role or record.peer or record.policy_version:
            raise _no_canonical_form("fields that its format does not have")
        encoded = _RecordOfFormat1(
            actor=record.actor,
            after=record.after,
            before=record.before,
            event_time_us=record.event_time_us,
            method=record.method,
            outcome=record.outcome,
            reason=record.reason,
            request_id=record.request_id,
            resource=record.resource,
        )
    elif hash_format != HASH_FORMAT_NEWEST:
        raise _no_canonical_form(f"the format {hash_format}, which is not known here")
    try:
        return _ENCODER.encode(encoded)
    except UnicodeEncodeError:
        raise _no_canonical_form("text with lone surrogates") from None
    except RecursionError:
        raise _no_canonical_form("a value nested too deep") from None


def require_canonical(value: object, depth: int = _DEPTH_MAX) -> None:
    """Check a value that is about to be recorded.

    Raises:
        InvalidArgumentError: it holds a fraction, a number not of type int, an integer past 2^53, is nested deeper than
            16, or holds what is of no JSON type.
    """
    if depth < 0:
        raise _no_canonical_form(f"a value nested deeper than {_DEPTH_MAX}")
    match value:
        case None | bool() | str():
            pass
        case int():
            if not -_INTEGER_MAX <= value <= _INTEGER_MAX:
                raise _no_canonical_form("an integer past 2^53")
        case Mapping():
            if not all(isinstance(name, str) for name in value):
                raise _no_canonical_form("a name that is not text")
            for member in value.values():
                require_canonical(member, depth - 1)
        case list() | tuple():
            for member in value:
                require_canonical(member, depth - 1)
        case _:
            raise _no_canonical_form(f"a {type(value).__name__}")


def whole_number(number: float) -> int:
    """``number`` as the canonical form has it: 3.0 and 3 are the same value, which some JSON writers mix up.

    Raises:
        ValueError: it is a fraction, or so large that a double does not hold it exactly.
    """
    if not number.is_integer() or abs(number) > _INTEGER_MAX:
        raise ValueError("an audit event holds integers only")
    return int(number)


class ChainWalk:
    """Goes along a chain, event by event, and says what is wrong with each.

    Attributes:
        at: the event that was looked at last; at first where the walk begins.
    """

    __slots__ = ("_prefixes", "at")

    def __init__(self, chain: str, start: ChainHead | None = None) -> None:
        """``start``: the head that the first event continues; the genesis of ``chain`` if None."""
        self.at = start or genesis(chain)
        self._prefixes = {number: frame(label, chain) for number, label in _LABELS.items()}

    def step(self, event: ChainedRecord) -> tuple[FaultKind, ...]:
        """What is wrong with the next event; nothing for almost all, so this is fast for those."""
        sequence, at = event.sequence, self.at
        if sequence <= at.sequence:
            return (FaultKind.OUT_OF_ORDER,)
        self.at = ChainHead(sequence, event.hash)
        is_next, is_linked = sequence == at.sequence + 1, event.previous_hash == at.hash
        if is_next and is_linked and self._has_its_hash(event):
            return ()
        faults = []
        if not is_next:
            faults.append(FaultKind.MISSING)
        elif not is_linked:
            faults.append(FaultKind.UNLINKED)
        if not self._has_its_hash(event):
            faults.append(FaultKind.EDITED)
        return tuple(faults)

    def _has_its_hash(self, event: ChainedRecord) -> bool:
        """Whether the stored hash is the one that the event has in its place."""
        prefix = self._prefixes.get(event.hash_format)
        if prefix is None or len(event.previous_hash) != HASH_BYTES:
            return False
        try:
            canonical = canonical_bytes(event.record, event.hash_format)
        except InvalidArgumentError:
            return False  # what has no canonical form was never hashed
        try:
            return _hash_in_place(prefix, event.sequence, event.previous_hash, canonical) == event.hash
        except struct.error:
            return False  # no sequence that a frame can hold


def verify(
    chain: str,
    events: Iterable[ChainedRecord],
    *,
    start: ChainHead | None = None,
    head: ChainHead | None = None,
) -> list[ChainFault]:
    """Every fault of a stretch of a chain; empty if there is none.

    Args:
        events: ascending, as stored.
        start: the head that the first event continues; the genesis of ``chain`` if None.
        head: where the chain is known to have ended, from a copy kept elsewhere; None: not known, and then a cut-off
            tail or a whole chain written anew cannot be seen.
    """
    walk = ChainWalk(chain, start)
    faults = [ChainFault(event.sequence, kind) for event in events for kind in walk.step(event)]
    if head is not None and walk.at != head:
        faults.append(ChainFault(walk.at.sequence, FaultKind.TRUNCATED))
    return faults


def _no_canonical_form(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"an audit event cannot hold {what}", reason="UNCANONICAL_AUDIT_VALUE")

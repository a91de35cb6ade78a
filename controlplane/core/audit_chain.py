"""The audit hash chain: what an event's bytes are, what its hash is, and how to find what was changed afterwards (I11).

::

    hash(0)  = SHA-256(frame("saltern/audit/1/genesis", chain))
    hash(n)  = SHA-256(frame("saltern/audit/1", chain, n, hash(n-1), canonical(event n)))

``canonical`` is JSON with sorted names, no spaces, no escapes that UTF-8 does not need, and integers only: the same
event has one encoding, whoever writes it. Whoever edits, removes, inserts or reorders events must recompute every later
hash; a head that is kept elsewhere shows that, and a cut-off tail, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import NewType

from saltern.errors import InvalidArgumentError
from saltern.keys import frame

EventHash = NewType("EventHash", bytes)  #: 32 bytes

_EVENT_LABEL = "saltern/audit/1"
_GENESIS_LABEL = "saltern/audit/1/genesis"
_INTEGER_MAX = 2**53  # what JSON readers and google.protobuf.Struct hold exactly
_DEPTH_MAX = 16


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """What one event says. ``event_time_us``: Unix microseconds. ``before``, ``after``: the resource as JSON values."""

    event_time_us: int
    actor: str
    method: str
    resource: str
    outcome: str
    reason: str
    request_id: str
    before: Mapping[str, object] | None
    after: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class ChainedRecord:
    """One event in its place in a chain."""

    sequence: int
    record: AuditRecord
    previous_hash: EventHash
    hash: EventHash


@dataclass(frozen=True, slots=True)
class ChainHead:
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
    sequence = head.sequence + 1
    return ChainedRecord(sequence, record, head.hash, event_hash(chain, sequence, head.hash, record))


def event_hash(chain: str, sequence: int, previous_hash: EventHash, record: AuditRecord) -> EventHash:
    """The hash of ``record`` in its place."""
    framed = frame(_EVENT_LABEL, chain, sequence, previous_hash, canonical_bytes(record))
    return EventHash(hashlib.sha256(framed).digest())


def canonical_bytes(record: AuditRecord) -> bytes:
    """The one encoding of ``record``.

    Raises:
        InvalidArgumentError: a value is a fraction, an integer past 2^53, text without a UTF-8 form, nested deeper than
            16, or of no JSON type.
    """
    canonical = {name: _canonical(value, _DEPTH_MAX) for name, value in asdict(record).items()}
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise _no_canonical_form("text with lone surrogates") from None


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
    faults: list[ChainFault] = []
    at = start or genesis(chain)
    for event in events:
        if event.sequence <= at.sequence:
            faults.append(ChainFault(event.sequence, FaultKind.OUT_OF_ORDER))
            continue
        if event.sequence > at.sequence + 1:
            faults.append(ChainFault(event.sequence, FaultKind.MISSING))
        elif event.previous_hash != at.hash:
            faults.append(ChainFault(event.sequence, FaultKind.UNLINKED))
        if not _has_its_hash(chain, event):
            faults.append(ChainFault(event.sequence, FaultKind.EDITED))
        at = ChainHead(event.sequence, event.hash)
    if head is not None and at != head:
        faults.append(ChainFault(at.sequence, FaultKind.TRUNCATED))
    return faults


def _has_its_hash(chain: str, event: ChainedRecord) -> bool:
    try:
        return event_hash(chain, event.sequence, event.previous_hash, event.record) == event.hash
    except InvalidArgumentError:
        return False  # what has no canonical form was never hashed


def _canonical(value: object, depth: int) -> object:
    if depth < 0:
        raise _no_canonical_form(f"a value nested deeper than {_DEPTH_MAX}")
    match value:
        case None | bool() | str():
            return value
        case int() | float():
            # google.protobuf.Struct and jsonb give integers back as doubles: 3.0 and 3 are the same value.
            if (isinstance(value, float) and not value.is_integer()) or not -_INTEGER_MAX <= value <= _INTEGER_MAX:
                raise _no_canonical_form("a number that is not an integer of at most 2^53")
            return int(value)
        case Mapping():
            if not all(isinstance(name, str) for name in value):
                raise _no_canonical_form("a name that is not text")
            return {name: _canonical(member, depth - 1) for name, member in value.items()}
        case list() | tuple():
            return [_canonical(member, depth - 1) for member in value]
        case _:
            raise _no_canonical_form(f"a {type(value).__name__}")


def _no_canonical_form(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"an audit event cannot hold {what}", reason="UNCANONICAL_AUDIT_VALUE")

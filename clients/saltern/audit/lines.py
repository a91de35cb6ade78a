"""Events as JSON Lines, the form in which they leave the control plane: one event, one line, one way to write it.

A line is the canonical form of its event (``saltern.audit.chain``) with the event's place in the chain beside it: names
sorted, no spaces, hashes as hexadecimal digits, the time as RFC 3339 in UTC to the microsecond. Since there is one way
only, a line that says a thing twice, or says more than it should, is found by writing it anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import msgspec

from saltern.audit.chain import AuditRecord, ChainedRecord, EventHash, whole_number
from saltern.errors import DataLossError
from saltern.names import TenantId, audit_event_name

#: The chain of the platform's own events; no tenant can have this name.
PLATFORM_CHAIN: Final = "platform"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class ExportedEvent(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One event with its place in its chain; the fields are declared in the order of the line."""

    actor: str
    actor_role: str
    after: Mapping[str, Any] | None
    before: Mapping[str, Any] | None
    chain: str
    event_time: Annotated[datetime, msgspec.Meta(tz=True)]
    hash: str
    hash_format: int
    method: str
    outcome: str
    peer: str
    policy_version: int
    previous_hash: str
    reason: str
    request_id: str
    resource: str
    sequence: int

    @property
    def event_time_us(self) -> int:
        """Unix microseconds."""
        return (self.event_time - _EPOCH) // _MICROSECOND

    @property
    def name(self) -> str:
        """Resource name of the event."""
        return audit_event_name(None if self.chain == PLATFORM_CHAIN else TenantId(self.chain), self.sequence)

    def to_chained_record(self) -> ChainedRecord:
        """The event as the chain takes it; raises ValueError for a hash that is not hexadecimal."""
        return ChainedRecord(
            self.sequence,
            AuditRecord(
                actor=self.actor,
                actor_role=self.actor_role,
                after=self.after,
                before=self.before,
                event_time_us=self.event_time_us,
                method=self.method,
                outcome=self.outcome,
                peer=self.peer,
                policy_version=self.policy_version,
                reason=self.reason,
                request_id=self.request_id,
                resource=self.resource,
            ),
            EventHash(bytes.fromhex(self.previous_hash)),
            EventHash(bytes.fromhex(self.hash)),
            self.hash_format,
        )


_ENCODER: Final = msgspec.json.Encoder(order="deterministic")
_DECODER: Final = msgspec.json.Decoder(ExportedEvent, float_hook=lambda text: whole_number(float(text)))


def time_of(event_time_us: int) -> datetime:
    """The time of Unix microseconds, as :class:`ExportedEvent` holds it."""
    return _EPOCH + timedelta(microseconds=event_time_us)


def encode_event(event: ExportedEvent) -> bytes:
    """The line of ``event``, without its line feed."""
    return _ENCODER.encode(event)


def encode_events(events: list[ExportedEvent]) -> bytes:
    """The lines of ``events``, each with its line feed."""
    return _ENCODER.encode_lines(events)


def decode_event(line: bytes) -> ExportedEvent:
    """The event of a line; more lenient than :func:`is_one_form`.

    Raises:
        DataLossError: reason AUDIT_LINE_DAMAGED: it is no event.
    """
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise DataLossError(
            "a line of the export is not an audit event",
            reason="AUDIT_LINE_DAMAGED",
            hint="export it again; the format is that of `saltern audit export --format jsonl`",
        ) from None


def is_one_form(line: bytes, event: ExportedEvent) -> bool:
    """Whether ``line`` is what :func:`encode_event` writes for what was read from it: nothing twice, no more."""
    try:
        return (
            event.event_time.tzinfo is UTC
            and bytes.fromhex(event.hash).hex() == event.hash
            and bytes.fromhex(event.previous_hash).hex() == event.previous_hash
            and _ENCODER.encode(event) == line
        )
    except (ValueError, RecursionError):  # no UTF-8, no hexadecimal digits
        return False

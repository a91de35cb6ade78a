"""The audit trail as a table, and what its filter asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal
from urllib.parse import urlencode

from google.protobuf.json_format import MessageToDict

from controlplane.console.views import texts
from saltern.admin.v1.audit_pb2 import AuditEvent, ExportAuditEventsRequest, ListAuditEventsRequest
from saltern.errors import InvalidArgumentError

PAGE_EVENTS: Final = 50
OUTCOMES: Final = {"": "any", "success": "success", "denied": "denied"}
_OUTCOME_NUMBERS: Final = {"success": AuditEvent.OUTCOME_SUCCESS, "denied": AuditEvent.OUTCOME_DENIED}


@dataclass(frozen=True, slots=True)
class Filter:
    """What a reader wants to see of a trail; texts as they were typed, empty for everything."""

    since: str = ""
    until: str = ""
    actor: str = ""
    method: str = ""
    outcome: str = ""

    @property
    def is_empty(self) -> bool:
        return self == Filter()

    @property
    def query(self) -> str:
        """For a link that keeps the filter; empty for none."""
        told = {name: value for name in self.__slots__ if (value := getattr(self, name))}
        return urlencode(told)

    def list_request(self, parent: str, page_token: str) -> ListAuditEventsRequest:
        """The page that ``page_token`` names; raises InvalidArgumentError (INVALID_TIME)."""
        request = ListAuditEventsRequest(
            parent=parent, page_size=PAGE_EVENTS, page_token=page_token, actor=self.actor, method=self.method
        )
        if self.outcome in _OUTCOME_NUMBERS:
            request.outcome = _OUTCOME_NUMBERS[self.outcome]
        _set_times(request, self)
        return request

    def export_request(self, parent: str) -> ExportAuditEventsRequest:
        """The stretch between the filter's times: an export has no gaps, so nothing else of the filter counts."""
        request = ExportAuditEventsRequest(parent=parent)
        _set_times(request, self)
        return request


def read_filter(query: Mapping[str, str]) -> Filter:
    """The filter that a query of the page names."""
    return Filter(**{name: query.get(name, "").strip() for name in Filter.__slots__})


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event.

    Attributes:
        actor, resource: without the part that every name of the trail's tenant begins with; ``full_``: whole.
        action: the method without its package.
        before, after: JSON, empty for nothing.
    """

    sequence: str
    time: str
    actor: str
    actor_role: str
    peer: str
    action: str
    resource: str
    full_actor: str
    full_resource: str
    is_denied: bool
    reason: str
    request_id: str
    policy_version: int
    before: str
    after: str
    hash: str


def event_rows(events: Sequence[AuditEvent], parent: str) -> list[EventRow]:
    """``parent``: resource name of the tenant whose trail it is; empty for the platform's."""
    own = f"{parent}/" if parent else ""
    return [_row(event, own) for event in events]


def _row(event: AuditEvent, own: str) -> EventRow:
    return EventRow(
        sequence=texts.last_segment(event.name),
        time=texts.exact_stamp(event.event_time),
        actor=event.actor.removeprefix(own),
        actor_role=event.actor_role,
        peer=event.peer,
        action=event.method.rpartition(".")[2],
        resource=event.resource.removeprefix(own),
        full_actor=event.actor,
        full_resource=event.resource,
        is_denied=event.outcome == AuditEvent.OUTCOME_DENIED,
        reason=event.reason,
        request_id=event.request_id,
        policy_version=event.policy_version,
        before=_json(event, "before"),
        after=_json(event, "after"),
        hash=event.hash.hex(),
    )


def _json(event: AuditEvent, name: Literal["before", "after"]) -> str:
    if not event.HasField(name):
        return ""
    return json.dumps(MessageToDict(getattr(event, name)), indent=2, sort_keys=True)


def _set_times(request: ListAuditEventsRequest | ExportAuditEventsRequest, asked: Filter) -> None:
    for name in ("since", "until"):
        text = getattr(asked, name)
        if text:
            getattr(request, name).FromDatetime(_parse_time(text, name))


def _parse_time(text: str, what: str) -> datetime:
    """A time of a form's field: ``2026-11-30T04:05``, UTC where it names no offset."""
    try:
        time = datetime.fromisoformat(text)
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidArgumentError(
            f"the filter's {what} is no time", reason="INVALID_TIME", hint="write it like 2026-11-30T04:05, in UTC"
        ) from None

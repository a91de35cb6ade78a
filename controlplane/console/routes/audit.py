"""The audit trail: filtered, in pages, and as a file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import structlog
from starlette.responses import Response, StreamingResponse

from controlplane.console.views.audit import OUTCOMES, event_rows, read_filter
from controlplane.console.visit import Visit, page
from saltern.admin.v1.audit_pb2 import ListAuditEventsResponse
from saltern.audit.formats import TEXT_FORMATS
from saltern.audit.lines import PLATFORM_CHAIN
from saltern.errors import NotFoundError, SalternError

_CONTENT_TYPES: Final = {"jsonl": "application/jsonl", "csv": "text/csv; charset=utf-8"}

_log = structlog.get_logger(__name__)


@page
async def list_events(visit: Visit) -> Response:
    asked = read_filter(visit.query)
    request = asked.list_request(visit.parent, visit.query.get("page", ""))
    answer: ListAuditEventsResponse = await visit.calls(visit.services.audit.ListAuditEvents, request)
    return visit.render(
        "audit.html",
        "Audit trail",
        events=event_rows(answer.audit_events, visit.parent),
        asked=asked,
        outcomes=OUTCOMES,
        next_page=answer.next_page_token,
        is_first="page" not in visit.query,
    )


@page
async def export_events(visit: Visit) -> Response:
    """The chain between the filter's times as a file, whole and oldest first, as it comes."""
    format_name = visit.path("format")
    if format_name not in _CONTENT_TYPES:
        raise NotFoundError("the trail is not exported in that form here", hint="choose jsonl or csv")
    chosen = TEXT_FORMATS[format_name]
    request = read_filter(visit.query).export_request(visit.parent)
    answers = visit.calls.stream(visit.services.audit.ExportAuditEvents, request)
    # What refuses the export is a page and no file: so the first events are there before the answer begins.
    first = await anext(answers, None)

    async def content() -> AsyncIterator[bytes]:
        yield chosen.header
        if first is None:
            return
        yield chosen.encode(first.lines)
        try:
            async for answer in answers:
                yield chosen.encode(answer.lines)
        except SalternError as error:
            # Not ended as a whole file is, so that the browser says that the download failed.
            _log.warning("console export broken off", reason=error.reason)
            raise

    name = f"{visit.tenant or PLATFORM_CHAIN}-audit.{format_name}"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(_closing(content(), answers), media_type=_CONTENT_TYPES[format_name], headers=headers)


async def _closing(pieces: AsyncIterator[bytes], source: Any) -> AsyncIterator[bytes]:
    """``pieces``; ends the call behind them when the browser goes."""
    try:
        async for piece in pieces:
            if piece:
                yield piece
    finally:
        await source.aclose()

"""The metrics door of a node: what it serves over HTTP, and under which path."""

from __future__ import annotations

import socket
from collections.abc import Callable
from http import HTTPStatus

import structlog

from dataplane.metrics.exposition import Exposition
from dataplane.metrics.health import Health
from saltern.http_door import Answer, HttpDoor

_log = structlog.get_logger(__name__)


def metrics_door(listener: socket.socket, exposition: Exposition, health: Callable[[], Health]) -> HttpDoor:
    """``/metrics``, ``/livez`` and ``/readyz`` (docs/metrics.md) on a listening socket.

    Args:
        health: judges the node now.
    """

    async def metrics(accept: str) -> Answer:
        page, content_type = await exposition.page(accept)
        return Answer(HTTPStatus.OK, page, content_type)

    async def livez(_accept: str) -> Answer:
        return Answer.of_json(HTTPStatus.OK, {"state": "alive"})

    async def readyz(_accept: str) -> Answer:
        judged = health()
        reasons = [{"reason": finding.reason, "message": finding.message} for finding in judged.findings]
        status = HTTPStatus.OK if judged.is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return Answer.of_json(status, {"state": judged.state.value, "reasons": reasons})

    pages = {"/metrics": metrics, "/livez": livez, "/readyz": readyz}
    return HttpDoor(listener, pages, on_failure=lambda: _log.exception("metrics request failed"))

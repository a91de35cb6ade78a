"""Denied attempts are audited too, in a transaction of their own, and without giving anybody a way to fill the disk.

Anyone on the network can be denied as often as they like. So each minute a chain takes at most ``ROWS_PER_KIND`` rows
of one kind (actor, method, reason), ``ROWS_PER_ACTOR`` of one actor and ``ROWS_PER_CHAIN`` in all; what comes on top is
counted in the log. The bounds are per chain, so that a flood from nowhere (the platform's chain) cannot hide an attempt
from inside a tenant (its own); and per actor, so that no one key, and nobody without one, can hide another's attempts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

import structlog

from controlplane.audit.redaction import redacted
from controlplane.audit.trail import record
from controlplane.clock import Clock, utc_now
from controlplane.db import Database, ServiceScope, ServiceTask, TenantScope
from controlplane.db.models import PLATFORM_CHAIN, AuditOutcome
from saltern.errors import SalternError
from saltern.names import TenantId
from tenants.roles import Role

ROWS_PER_KIND = 5
ROWS_PER_ACTOR = 20
ROWS_PER_CHAIN = 60
ANONYMOUS = "anonymous"
_WINDOW_S = 60
_WINDOWS_MAX = 1024
_TEXT_MAX_CHARS = 256

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Window:
    """What one chain has taken in one minute; ``rows`` has at most ``ROWS_PER_CHAIN`` kinds."""

    number: int
    rows: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    suppressed: int = 0


class DenialLog:
    """Records denied attempts. One for the process: it holds the counts of the current minute."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._database = database
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    async def record_denied(
        self,
        error: SalternError,
        *,
        method: str,
        resource: str = "",
        tenant: TenantId | None = None,
        actor: str = ANONYMOUS,
        role: Role | None = None,
        request_id: str = "",
    ) -> None:
        """Record that ``actor`` of ``tenant`` (None: of the platform, or unknown) was denied ``method`` with ``error``.

        ``role``: the actor's; by default that of the current caller, if that is the actor.

        It never raises: the attempt is denied whether or not it can be recorded, and the log says if it could not.
        """
        now = self._clock()
        chain = tenant or PLATFORM_CHAIN
        if not self._admit(chain, (actor, method, error.reason), now):
            return
        try:
            scope = ServiceScope(ServiceTask.DENIAL) if tenant is None else TenantScope(tenant)
            async with self._database.transaction(scope) as session:
                await record(
                    session,
                    tenant=tenant,
                    actor=actor,
                    role=role,
                    method=_printable(method),
                    resource=_printable(resource),
                    now=now,
                    outcome=AuditOutcome.DENIED,
                    reason=error.reason,
                    request_id=_printable(request_id),
                )
        except Exception as failure:
            _log.error("denied attempt not recorded", chain=chain, method=method, error_type=type(failure).__name__)

    def _admit(self, chain: str, kind: tuple[str, str, str], now: datetime) -> bool:
        number = int(now.timestamp()) // _WINDOW_S
        window = self._windows.get(chain)
        if window is None or window.number != number:
            if len(self._windows) >= _WINDOWS_MAX:
                self._drop_ended(number)
            if window is not None:
                _log_suppressed(chain, window)
            window = self._windows[chain] = _Window(number)
        of_actor = sum(rows for (actor, _, _), rows in window.rows.items() if actor == kind[0])
        if window.rows[kind] >= ROWS_PER_KIND or of_actor >= ROWS_PER_ACTOR or window.rows.total() >= ROWS_PER_CHAIN:
            if window.suppressed == 0:
                _log.warning(
                    "denied attempts are now counted, not recorded", chain=chain, actor=kind[0], reason=kind[2]
                )
            window.suppressed += 1
            return False
        window.rows[kind] += 1
        return True

    def _drop_ended(self, number: int) -> None:
        for chain, window in list(self._windows.items()):
            if window.number != number:
                _log_suppressed(chain, window)
                del self._windows[chain]


def _log_suppressed(chain: str, window: _Window) -> None:
    if window.suppressed:
        _log.warning("denied attempts not recorded in the last window", chain=chain, attempts=window.suppressed)


def _printable(text: str) -> str:
    """What a hostile caller wrote, fit for the database and for a reader: short, no control characters, no secrets."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for character in redacted(text)[:_TEXT_MAX_CHARS]
    )

"""Watches what tenants hold while traffic runs: the most that any report of the node ever said (I4, I8)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from saltern.admin.v1.quotas_pb2 import TIER_DRAM
from saltern.admin.v1.usage_pb2 import GetUsageRequest, Usage
from saltern.admin_client import AdminClient
from saltern.errors import SalternError, UnavailableError
from saltern.names import TenantId, tenant_name

logger = logging.getLogger("saltern")

_POLL_S: Final = 0.2
_FRESH_TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class Watched:
    """What was seen of one tenant: the last report and the largest use of DRAM in any of ``reports`` reports."""

    last: Usage = field(default_factory=Usage)
    used_bytes_max: int = 0
    reports: int = 0


class UsageWatch:
    """Polls the control plane's usage of ``tenants`` in a thread from ``__enter__`` to ``__exit__``."""

    def __init__(self, admin: AdminClient, tenants: Iterable[str]) -> None:
        self._admin = admin
        self.watched = {tenant: Watched() for tenant in tenants}
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def wait_for_reports_after(self, time_s: float) -> dict[str, Usage]:
        """Wait until the node has reported on everybody after ``time_s`` (Unix seconds); return those reports.

        Raises:
            UnavailableError: it has not within 30 s.
        """
        deadline_s = time.monotonic() + _FRESH_TIMEOUT_S

        def fresh() -> bool:
            return all(_report_time_s(watched.last) > time_s for watched in self.watched.values())

        with self._changed:
            while not fresh():
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise UnavailableError(
                        f"the node has not reported its usage for {_FRESH_TIMEOUT_S:g} s",
                        reason="NO_USAGE_REPORT",
                        hint="look at the logs of control plane and node",
                    )
                self._changed.wait(remaining_s)
            return {tenant: watched.last for tenant, watched in self.watched.items()}

    def _run(self) -> None:
        while not self._stopping.wait(_POLL_S):
            for tenant, watched in self.watched.items():
                try:
                    request = GetUsageRequest(tenant=tenant_name(TenantId(tenant)))
                    usage = self._admin.call(self._admin.usage.GetUsage, request)
                except SalternError as error:
                    logger.warning("usage of %s not read: %s", tenant, error.message)
                    continue
                with self._changed:
                    watched.reports += _report_time_s(usage) != _report_time_s(watched.last)
                    watched.last = usage
                    watched.used_bytes_max = max(watched.used_bytes_max, dram_used_bytes(usage))
                    self._changed.notify_all()


def dram_used_bytes(usage: Usage) -> int:
    return sum(tier.used_bytes for tier in usage.tiers if tier.tier == TIER_DRAM)


def _report_time_s(usage: Usage) -> float:
    return usage.report_time.seconds + usage.report_time.nanos / 1e9

"""What those who watch the control plane are told of its console: requests by family of pages, and who is logged in.

Labels are of a fixed set: which pages there are, never a path or a name, so that no visitor can make a series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from time import perf_counter
from typing import TYPE_CHECKING, Final

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.clock import Clock
from controlplane.console.sessions import Sessions
from controlplane.db import Database

if TYPE_CHECKING:  # an extra of the distribution, and the metrics are there without it
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: What ``controlplane.console.visit`` answers to whoever has gone meanwhile.
_GONE: Final = 499


class Pages(StrEnum):
    """Families of pages. Each but the last four is a module of :mod:`controlplane.console.routes`."""

    ENTRANCE = "entrance"
    OVERVIEW = "overview"
    KEYS = "keys"
    SALTS = "salts"
    SHARING = "sharing"
    AUDIT = "audit"
    PLATFORM = "platform"
    LOGIN = "login"  # a credential that was handed in
    STATIC = "static"
    UNKNOWN = "unknown"


class Outcome(StrEnum):
    """How a request was answered."""

    OK = "ok"  # a page, or on to another one
    REFUSED = "refused"  # the browser's doing: 4xx
    FAILED = "failed"  # ours: 5xx, or no answer
    GONE = "gone"  # nobody waited for the answer


class ConsoleMetrics(Collector):
    """Counts requests as the outermost layer of the application, and sessions when somebody scrapes."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._sessions = Sessions(database)
        self._clock = clock
        #: Sessions that had not ended when somebody looked last; None before that.
        self._live: int | None = None
        self._is_up: Callable[[], bool] | None = None
        labels = ("pages", "outcome")
        self._requests = Counter("saltern_control_console_requests", "Requests answered.", labels, registry=None)
        self._seconds = Histogram(
            "saltern_control_console_request_duration_seconds",
            "How long answers took, to their last byte.",
            ("pages",),
            buckets=_BUCKETS_S,
            registry=None,
        )

    def counted(self, app: ASGIApp) -> ASGIApp:
        """``app`` with its requests counted."""

        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            status = 0

            async def noting(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            began_s = perf_counter()
            try:
                await app(scope, receive, noting)
            except Exception:
                status = 0  # an answer that broke off is none
                raise
            finally:
                pages = _pages_of(scope.get("endpoint"))
                self._requests.labels(pages.value, _outcome_of(status).value).inc()
                self._seconds.labels(pages.value).observe(perf_counter() - began_s)

        return counting

    def watch(self, is_up: Callable[[], bool]) -> None:
        """Say from now on whether the console takes connections; of one that is not served nothing is said."""
        self._is_up = is_up

    async def look(self) -> None:
        """Count the sessions of the deployment; raises SQLAlchemyError."""
        self._live = await self._sessions.count(self._clock())

    def collect(self) -> Iterator[Metric]:
        """Metrics, at each scrape."""
        yield from self._requests.collect()
        yield from self._seconds.collect()
        yield GaugeMetricFamily(
            "saltern_control_console_up",
            "1 while the console that is served here takes connections.",
            None if self._is_up is None else float(self._is_up()),
        )
        yield GaugeMetricFamily(
            "saltern_control_console_sessions",
            "Sessions of the whole deployment that have not ended.",
            self._live,
        )


def _pages_of(endpoint: object) -> Pages:
    """The family of the route that was found; UNKNOWN where there was none."""
    module = getattr(endpoint, "__module__", "").rpartition(".")[2]
    if module == "app":
        return Pages.STATIC
    if module == Pages.ENTRANCE and getattr(endpoint, "__name__", "") == "submit_login":
        return Pages.LOGIN
    return Pages(module) if module in frozenset(Pages) else Pages.UNKNOWN


def _outcome_of(status: int) -> Outcome:
    """``status``: 0 for no answer at all."""
    if status == _GONE:
        return Outcome.GONE
    if status == 0 or status >= 500:
        return Outcome.FAILED
    return Outcome.REFUSED if status >= 400 else Outcome.OK

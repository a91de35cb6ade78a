"""Pages of metrics in the two formats that Prometheus reads; one collection at a time, and not too often."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import monotonic
from typing import Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from dataplane.metrics.collector import NodeCollector
from dataplane.metrics.pace import Pace

#: Whoever asks again gets the last page until twenty times its cost has passed: scrapes take at most 5% of the loop.
_KEEP_FACTOR: Final = 20
_OPENMETRICS: Final = "application/openmetrics-text"
_END: Final = b"# EOF\n"
#: Samples that are rendered in one go.
_SAMPLES_AT_ONCE: Final = 200


class Exposition:
    """Renders what the collector collects."""

    def __init__(self, collector: NodeCollector) -> None:
        self._collector = collector
        self._lock = asyncio.Lock()
        self._metrics: list[Metric] = []
        self._pages: dict[bool, bytes] = {}
        self._stale_s = float("-inf")

    async def page(self, accept: str) -> tuple[bytes, str]:
        """A page, and its content type, in the format that an ``Accept`` header prefers: OpenMetrics or plain text."""
        is_open = _OPENMETRICS in accept.lower()
        async with self._lock:
            pace = Pace()
            if monotonic() >= self._stale_s:
                self._metrics = await self._collector.collect(pace)
                self._pages.clear()
            page = self._pages.get(is_open)
            if page is None:
                page = self._pages[is_open] = await _render(self._metrics, pace, is_open=is_open)
                pace.pause()
                self._collector.cost_s = pace.worked_s
                self._stale_s = monotonic() + _KEEP_FACTOR * pace.worked_s
        return page, openmetrics.CONTENT_TYPE_LATEST if is_open else CONTENT_TYPE_PLAIN_0_0_4


class _Single(Collector):
    """One metric as a collector: what the renderers take."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        yield self._metric


async def _render(metrics: list[Metric], pace: Pace, *, is_open: bool) -> bytes:
    render = openmetrics.generate_latest if is_open else generate_latest
    parts = []
    for metric in metrics:
        samples = metric.samples
        for at in range(0, max(1, len(samples)), _SAMPLES_AT_ONCE):
            piece = Metric(metric.name, metric.documentation, metric.type)
            piece.samples = samples[at : at + _SAMPLES_AT_ONCE]
            part = render(_Single(piece)).removesuffix(_END)
            # Name and type stand before the first piece only: a metric must not be declared twice.
            parts.append(part if at == 0 else _without_head(part))
            await pace.breathe()
    return b"".join((*parts, _END)) if is_open else b"".join(parts)


def _without_head(part: bytes) -> bytes:
    """The samples of a rendered metric: what follows its two lines of comment."""
    return part.split(b"\n", 2)[2]

"""The connector's counts as vLLM takes them: ``KVConnectorStats`` between processes, Prometheus metrics at the end.

Imports vLLM; loaded by :mod:`saltern.vllm.connector` alone. Metric names begin with ``vllm:`` so that vLLM unregisters
them between engines as it does its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from saltern.vllm.stats import BUCKETS_S, COUNTERS, DURATIONS, merged, summary


@dataclass
class SalternStats(KVConnectorStats):
    """Counts of one interval, of one side or of several together."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)


class SalternPromMetrics(KVConnectorPromMetrics):
    """Registers ``vllm:saltern_*`` and adds what each interval counted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = {
            counter.name: self._counter_cls(
                name=f"vllm:saltern_{counter.name}", documentation=counter.help, labelnames=self._labelnames
            )
            for counter in COUNTERS
        }
        self._histograms = {
            duration.name: self._histogram_cls(
                name=f"vllm:saltern_{duration.name}",
                documentation=duration.help,
                buckets=BUCKETS_S,
                labelnames=self._labelnames,
            )
            for duration in DURATIONS
        }

        for labels in self.per_engine_labelvalues.values():  # so that what never happened is seen as 0
            for metric in (*self._counters.values(), *self._histograms.values()):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif name in self._histograms:
                histogram = self._histograms[name].labels(*labels)
                for seconds in value:
                    histogram.observe(seconds)

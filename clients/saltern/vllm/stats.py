"""What the connector counts, and under which names it is seen in vLLM's metrics.

Counts are by engine, never by tenant: vLLM's metrics are read by whoever runs the engine, and the exact books of each
tenant are at the nodes (I8). docs/vllm.md says what to do about each.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

#: Observations kept of one interval; a log line or a scrape needs no more.
_OBSERVATIONS_MAX: Final = 1000


class Counter(NamedTuple):
    """A number that only grows."""

    name: str
    help: str


class Duration(NamedTuple):
    """Seconds, as a histogram."""

    name: str
    help: str


COUNTERS: Final = (
    Counter("lookup_requests", "Requests that were looked up."),
    Counter("lookup_blocks", "Blocks of the requests that were looked up."),
    Counter("lookup_hit_blocks", "Blocks that the remote cache had, from the first on."),
    Counter("lookup_failed", "Lookups that were not answered in time or at all; they count as misses."),
    Counter("unused_requests", "Requests without remote cache: no salt, no valid token, or nothing to use it with."),
    Counter("load_blocks", "Blocks loaded from the remote cache."),
    Counter("load_bytes", "Bytes loaded by all workers."),
    Counter("load_failed_blocks", "Blocks that were found and could not be loaded; they were computed."),
    Counter("save_blocks", "Blocks stored in the remote cache by this rank."),
    Counter("save_bytes", "Bytes stored by all workers."),
    Counter("save_known_blocks", "Blocks that were there already when they were to be stored."),
    Counter("save_dropped_blocks", "Blocks not stored because the queue was full or nobody was there to take them."),
    Counter("save_refused_blocks", "Blocks that the cache refused: quota, node away, key revoked."),
)
DURATIONS: Final = (
    Duration("lookup_seconds", "Time of a lookup."),
    Duration("load_seconds", "Time from the start of a request's load to its end."),
    Duration("save_seconds", "Time of storing a batch."),
    Duration("copy_out_seconds", "Time that a step waited for its blocks to be copied out."),
)
#: Upper bounds of the histograms' buckets.
BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

#: Names to numbers, and to lists of seconds.
Counts = dict[str, Any]


class Tally:
    """Counts of one interval. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counts = {}

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._counts[name] = self._counts.get(name, 0) + count

    def took(self, name: str, seconds: float) -> None:
        with self._lock:
            observed = self._counts.setdefault(name, [])
            if len(observed) < _OBSERVATIONS_MAX:
                observed.append(seconds)

    def take(self) -> Counts:
        """The counts since the last call."""
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken


def merged(counts: Mapping[str, Any], more: Mapping[str, Any]) -> Counts:
    """Both together: of two workers, or of two intervals."""
    total = dict(counts)
    for name, value in more.items():
        if isinstance(value, list):
            total[name] = [*total.get(name, ()), *value][:_OBSERVATIONS_MAX]
        else:
            total[name] = total.get(name, 0) + value
    return total


def summary(counts: Mapping[str, Any]) -> dict[str, int | float]:
    """One number for each name, for a log line: sums, and means of durations."""
    return {
        name: round(sum(value) / len(value), 6) if isinstance(value, list) else value
        for name, value in counts.items()
        if not isinstance(value, list) or value
    }

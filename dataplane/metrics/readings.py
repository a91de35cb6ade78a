"""One tenant's books and counters as readings: a number for each series that the tenant has.

A series has no tenant in it: under which one it is exposed is decided later. What follows runs for each of 10,000
tenants at each scrape, so every series that is known beforehand is looked up once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from dataplane.core.usage import SsdUsage, TenantUsage
from dataplane.metrics import catalog
from dataplane.metrics.catalog import Family, Series
from dataplane.metrics.meters import OPERATIONS, Spent

#: Bytes and counts are integers; so are times, in nanoseconds.
Readings: TypeAlias = dict[Series, int]
_KEY_COST_BYTES: Final = 4096

_USED_BYTES_DRAM: Final = catalog.USED_BYTES.series("dram")
_LIMIT_BYTES_DRAM: Final = catalog.LIMIT_BYTES.series("dram")
_RESERVED_BYTES_DRAM: Final = catalog.RESERVED_BYTES.series("dram")
_LENT_BYTES_DRAM: Final = catalog.LENT_BYTES.series("dram")
_BORROWED_BYTES_DRAM: Final = catalog.BORROWED_BYTES.series("dram")
_ENTRIES_DRAM: Final = catalog.ENTRIES.series("dram")
_PROTECTED_BYTES: Final = catalog.PROTECTED_BYTES.series()
_IN_FLIGHT_BYTES: Final = catalog.IN_FLIGHT_BYTES.series()
_HELD_BYTES: Final = catalog.HELD_BYTES.series()
_TENANT_SESSIONS: Final = catalog.TENANT_SESSIONS.series()
_WAITING_REQUESTS: Final = catalog.WAITING_REQUESTS.series()
_USED_BYTES_SSD: Final = catalog.USED_BYTES.series("ssd")
_LIMIT_BYTES_SSD: Final = catalog.LIMIT_BYTES.series("ssd")
_RESERVED_BYTES_SSD: Final = catalog.RESERVED_BYTES.series("ssd")
_LENT_BYTES_SSD: Final = catalog.LENT_BYTES.series("ssd")
_BORROWED_BYTES_SSD: Final = catalog.BORROWED_BYTES.series("ssd")
_ENTRIES_SSD: Final = catalog.ENTRIES.series("ssd")
_SSD_LIVE_BYTES: Final = catalog.SSD_LIVE_BYTES.series()
_SSD_LEAVING_BYTES: Final = catalog.SSD_LEAVING_BYTES.series()
_SSD_SEGMENTS: Final = catalog.SSD_SEGMENTS.series()
_GET_HITS: Final = catalog.GET_HITS.series()
_GET_MISSES: Final = catalog.GET_MISSES.series()
_PEER_HITS: Final = catalog.PEER_HITS.series()
_HITS_HELD_BACK: Final = catalog.HITS_HELD_BACK.series()
_GET_BYTES: Final = catalog.GET_BYTES.series()
_PUTS_STORED: Final = catalog.PUTS_STORED.series()
_PUT_BYTES: Final = catalog.PUT_BYTES.series()
_TAKEN_ENTRIES: Final = catalog.TAKEN_ENTRIES.series()
_TAKEN_BYTES: Final = catalog.TAKEN_BYTES.series()
_SSD_READS: Final = catalog.SSD_READS.series()
_SSD_READ_BYTES: Final = catalog.SSD_READ_BYTES.series()
_SSD_READ_FAILURES: Final = catalog.SSD_READ_FAILURES.series()
_SSD_DEMOTIONS: Final = catalog.SSD_DEMOTIONS.series()
_SSD_DEMOTED_BYTES: Final = catalog.SSD_DEMOTED_BYTES.series()
_SSD_RELOCATIONS: Final = catalog.SSD_RELOCATIONS.series()
_SSD_WRITTEN_BYTES: Final = catalog.SSD_WRITTEN_BYTES.series()
_SSD_EVICTIONS: Final = catalog.SSD_EVICTIONS.series()
_SSD_LOST: Final = catalog.SSD_LOST.series()
_SERVED_BYTES: Final = catalog.SERVED_BYTES.series()
_RATE_DELAYED: Final = catalog.RATE_DELAYED.series()
_RATE_REFUSED: Final = catalog.RATE_REFUSED.series()
_RATE_WAIT_SECONDS: Final = catalog.RATE_WAIT_SECONDS.series()


@dataclass(frozen=True, slots=True)
class Rates:
    """What a tenant's rates did to its requests; all but ``waiting`` only grow.

    Attributes:
        waiting: requests that wait now.
        delayed, refused: requests that had to wait, and that were refused.
        waited_ns: how long they waited, all together.
        served_bytes: bytes of entries moved.
    """

    waiting: int
    delayed: int
    refused: int
    waited_ns: int
    served_bytes: int


def gauges(usage: TenantUsage, sessions: int, rates: Rates | None) -> Readings:
    """What one tenant has now."""
    found = {
        _USED_BYTES_DRAM: usage.used_bytes,
        _LIMIT_BYTES_DRAM: usage.limit_bytes,
        _RESERVED_BYTES_DRAM: usage.reserved_bytes,
        _LENT_BYTES_DRAM: usage.lent_bytes,
        _BORROWED_BYTES_DRAM: usage.borrowed_bytes,
        _ENTRIES_DRAM: usage.entries,
        _PROTECTED_BYTES: usage.protected_bytes,
        _IN_FLIGHT_BYTES: usage.in_flight_bytes,
        _HELD_BYTES: usage.held_bytes,
        _TENANT_SESSIONS: sessions,
        _WAITING_REQUESTS: 0 if rates is None else rates.waiting,
    }
    return found if usage.ssd is None else found | _ssd_gauges(usage.ssd)


def _ssd_gauges(ssd: SsdUsage) -> Readings:
    return {
        _USED_BYTES_SSD: ssd.used_bytes,
        _LIMIT_BYTES_SSD: ssd.limit_bytes,
        _RESERVED_BYTES_SSD: ssd.reserved_bytes,
        _LENT_BYTES_SSD: max(0, ssd.reserved_bytes - ssd.used_bytes),
        _BORROWED_BYTES_SSD: max(0, ssd.used_bytes - ssd.reserved_bytes),
        _ENTRIES_SSD: ssd.entries,
        _SSD_LIVE_BYTES: ssd.live_bytes,
        _SSD_LEAVING_BYTES: ssd.leaving_bytes,
        _SSD_SEGMENTS: ssd.segments,
    }


def counters(usage: TenantUsage, spent: Spent | None, rates: Rates | None) -> Readings:
    """What has happened for one tenant: each only grows, until the node forgets the tenant."""
    counted = usage.counters
    found: Readings = {
        _GET_HITS: counted.get_hits,
        _GET_MISSES: counted.get_misses,
        _PEER_HITS: counted.peer_hits,
        _HITS_HELD_BACK: counted.hits_held_back,
        _GET_BYTES: counted.get_bytes,
        _PUTS_STORED: counted.puts_stored,
        _PUT_BYTES: counted.put_bytes,
        _TAKEN_ENTRIES: counted.taken_entries,
        _TAKEN_BYTES: counted.taken_bytes,
    }
    _add(found, catalog.PUTS_REFUSED, counted.refused_by_reason.items())
    _add(found, catalog.EVICTIONS, counted.evictions_by_cause.items())
    _add(found, catalog.EVICTED_BYTES, counted.evicted_bytes_by_cause.items())
    if usage.ssd is not None:
        below = usage.ssd.counters
        found |= {
            _SSD_READS: below.reads,
            _SSD_READ_BYTES: below.read_bytes,
            _SSD_READ_FAILURES: below.read_failures,
            _SSD_DEMOTIONS: below.demotions,
            _SSD_DEMOTED_BYTES: below.demoted_bytes,
            _SSD_RELOCATIONS: below.relocations,
            _SSD_WRITTEN_BYTES: below.written_bytes,
            _SSD_EVICTIONS: below.evictions,
            _SSD_LOST: below.lost,
        }
        _add(found, catalog.SSD_DROPPED, below.dropped_by_reason.items())
    if spent is not None:
        for operation, requests, total_ns in zip(OPERATIONS, spent.requests, spent.total_ns, strict=True):
            if requests:
                found[catalog.TENANT_REQUESTS.series(operation.value)] = requests
                found[catalog.TENANT_SECONDS.series(operation.value)] = total_ns
    if rates is not None:
        found[_SERVED_BYTES] = rates.served_bytes
        found[_RATE_DELAYED] = rates.delayed
        found[_RATE_REFUSED] = rates.refused
        found[_RATE_WAIT_SECONDS] = rates.waited_ns
    return found


def traffic_bytes(usage: TenantUsage) -> int:
    """How much a tenant has asked of the node so far: bytes moved, and a little for each key."""
    counted = usage.counters
    keys = counted.get_hits + counted.get_misses + counted.puts_stored
    return counted.get_bytes + counted.put_bytes + _KEY_COST_BYTES * keys


def _add(found: Readings, family: Family, by_label: Iterable[tuple[str, int]]) -> None:
    for label, value in by_label:
        found[family.series(str(label))] = value

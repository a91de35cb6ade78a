"""One tenant's books and counters as readings: a number for each series that the tenant has.

A series is a family and the values of its labels, without the tenant: whose it is exposed under is decided later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from dataplane.core.usage import SsdUsage, TenantUsage
from dataplane.metrics import catalog
from dataplane.metrics.catalog import Family
from dataplane.metrics.meters import OPERATIONS, Spent

#: A family and the values of its labels but ``tenant``. Bytes and counts are integers; so are times, in nanoseconds.
Series: TypeAlias = tuple[Family, tuple[str, ...]]
Readings: TypeAlias = dict[Series, int]

_DRAM: Final = ("dram",)
_SSD: Final = ("ssd",)
_KEY_COST_BYTES: Final = 4096


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
        (catalog.USED_BYTES, _DRAM): usage.used_bytes,
        (catalog.LIMIT_BYTES, _DRAM): usage.limit_bytes,
        (catalog.RESERVED_BYTES, _DRAM): usage.reserved_bytes,
        (catalog.LENT_BYTES, _DRAM): usage.lent_bytes,
        (catalog.BORROWED_BYTES, _DRAM): usage.borrowed_bytes,
        (catalog.ENTRIES, _DRAM): usage.entries,
        (catalog.PROTECTED_BYTES, ()): usage.protected_bytes,
        (catalog.IN_FLIGHT_BYTES, ()): usage.in_flight_bytes,
        (catalog.HELD_BYTES, ()): usage.held_bytes,
        (catalog.TENANT_SESSIONS, ()): sessions,
        (catalog.WAITING_REQUESTS, ()): 0 if rates is None else rates.waiting,
    }
    return found if usage.ssd is None else found | _ssd_gauges(usage.ssd)


def _ssd_gauges(ssd: SsdUsage) -> Readings:
    return {
        (catalog.USED_BYTES, _SSD): ssd.used_bytes,
        (catalog.LIMIT_BYTES, _SSD): ssd.limit_bytes,
        (catalog.RESERVED_BYTES, _SSD): ssd.reserved_bytes,
        (catalog.LENT_BYTES, _SSD): max(0, ssd.reserved_bytes - ssd.used_bytes),
        (catalog.BORROWED_BYTES, _SSD): max(0, ssd.used_bytes - ssd.reserved_bytes),
        (catalog.ENTRIES, _SSD): ssd.entries,
        (catalog.SSD_LIVE_BYTES, ()): ssd.live_bytes,
        (catalog.SSD_LEAVING_BYTES, ()): ssd.leaving_bytes,
        (catalog.SSD_SEGMENTS, ()): ssd.segments,
    }


def counters(usage: TenantUsage, spent: Spent | None, rates: Rates | None) -> Readings:
    """What has happened for one tenant: each only grows, until the node forgets the tenant."""
    counted = usage.counters
    found: Readings = {
        (catalog.GET_HITS, ()): counted.get_hits,
        (catalog.GET_MISSES, ()): counted.get_misses,
        (catalog.GET_BYTES, ()): counted.get_bytes,
        (catalog.PUTS_STORED, ()): counted.puts_stored,
        (catalog.PUT_BYTES, ()): counted.put_bytes,
        (catalog.TAKEN_ENTRIES, ()): counted.taken_entries,
        (catalog.TAKEN_BYTES, ()): counted.taken_bytes,
    }
    _add(found, catalog.PUTS_REFUSED, counted.refused_by_reason.items())
    _add(found, catalog.EVICTIONS, counted.evictions_by_cause.items())
    _add(found, catalog.EVICTED_BYTES, counted.evicted_bytes_by_cause.items())
    if usage.ssd is not None:
        below = usage.ssd.counters
        found |= {
            (catalog.SSD_READS, ()): below.reads,
            (catalog.SSD_READ_BYTES, ()): below.read_bytes,
            (catalog.SSD_READ_FAILURES, ()): below.read_failures,
            (catalog.SSD_DEMOTIONS, ()): below.demotions,
            (catalog.SSD_DEMOTED_BYTES, ()): below.demoted_bytes,
            (catalog.SSD_RELOCATIONS, ()): below.relocations,
            (catalog.SSD_WRITTEN_BYTES, ()): below.written_bytes,
            (catalog.SSD_EVICTIONS, ()): below.evictions,
            (catalog.SSD_LOST, ()): below.lost,
        }
        _add(found, catalog.SSD_DROPPED, below.dropped_by_reason.items())
    if spent is not None:
        for operation, requests, total_ns in zip(OPERATIONS, spent.requests, spent.total_ns, strict=True):
            if requests:
                found[catalog.TENANT_REQUESTS, (operation.value,)] = requests
                found[catalog.TENANT_SECONDS, (operation.value,)] = total_ns
    if rates is not None:
        found[catalog.SERVED_BYTES, ()] = rates.served_bytes
        found[catalog.RATE_DELAYED, ()] = rates.delayed
        found[catalog.RATE_REFUSED, ()] = rates.refused
        found[catalog.RATE_WAIT_SECONDS, ()] = rates.waited_ns
    return found


def traffic_bytes(usage: TenantUsage) -> int:
    """How much a tenant has asked of the node so far: bytes moved, and a little for each key."""
    counted = usage.counters
    keys = counted.get_hits + counted.get_misses + counted.puts_stored
    return counted.get_bytes + counted.put_bytes + _KEY_COST_BYTES * keys


def _add(found: Readings, family: Family, by_label: Iterable[tuple[str, int]]) -> None:
    for label, value in by_label:
        found[family, (str(label),)] = value

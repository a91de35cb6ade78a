"""What the core tells about itself: books and counters, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from saltern.names import TenantId


@dataclass(slots=True)
class TenantCounters:
    """What happened for one tenant since the node learned of it; only ever grows.

    Attributes:
        get_hits, get_misses: keys asked for and found, or not.
        get_bytes: lengths of the hits.
        put_bytes: lengths of the entries stored.
        puts_refused: puts that were neither stored nor there already.
        evictions, evicted_bytes: entries that left to make room or to meet a lower limit, and their lengths.
    """

    get_hits: int = 0
    get_misses: int = 0
    get_bytes: int = 0
    put_bytes: int = 0
    puts_stored: int = 0
    puts_refused: int = 0
    evictions: int = 0
    evicted_bytes: int = 0


@dataclass(slots=True)
class SsdCounters:
    """What happened on SSD for one tenant since the node started; only ever grows.

    Attributes:
        reads, read_bytes: entries read back whole.
        read_failures: entries that could not be read or did not verify: each was a miss.
        demotions, demoted_bytes: entries written when DRAM evicted them.
        demotions_dropped: entries that DRAM evicted and SSD did not take: no room, over the write budget, queue full
            or not writable.
        relocations: hot entries written anew when their segment was reclaimed.
        evictions: entries lost to a reclaim.
    """

    reads: int = 0
    read_bytes: int = 0
    read_failures: int = 0
    demotions: int = 0
    demoted_bytes: int = 0
    demotions_dropped: int = 0
    relocations: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class SsdUsage:
    """One tenant's books on SSD at one moment, in bytes of files (see :mod:`dataplane.core.ssd_books`).

    Attributes:
        used_bytes: charged: records, dead ones too, with heads and footers.
        leaving_bytes: the part of it whose files are on their way out.
        live_bytes: records of entries that can be read.
    """

    reserved_bytes: int
    limit_bytes: int
    used_bytes: int
    leaving_bytes: int
    live_bytes: int
    entries: int
    segments: int
    counters: SsdCounters


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """One tenant's books in DRAM (see :class:`dataplane.core.budget.TierBudget`) and counters at one moment.

    ``used_bytes`` = ``resident_bytes`` + ``in_flight_bytes`` + ``slack_bytes``; ``entries`` counts what can be read.
    """

    reserved_bytes: int
    limit_bytes: int
    used_bytes: int
    resident_bytes: int
    in_flight_bytes: int
    slack_bytes: int
    held_bytes: int
    entries: int
    counters: TenantCounters
    ssd: SsdUsage | None = None


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """The whole core at one moment: sum of the tenants' ``used_bytes`` + ``free_bytes`` = ``capacity_bytes`` (I8).

    ``largest_free_bytes`` below ``free_bytes`` shows fragmentation. ``ssd_capacity_bytes`` is 0 without an SSD tier.
    """

    policy_version: int
    capacity_bytes: int
    free_bytes: int
    largest_free_bytes: int
    tenants: Mapping[TenantId, TenantUsage]
    ssd_capacity_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PolicyApplied:
    """What a new policy cost: entries purged because they may no longer be read, or evicted to meet a lower limit."""

    version: int
    purged_entries: int = 0
    evicted_entries: int = 0

"""What the core tells about itself: books and counters, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from saltern.names import NamespaceId, TenantId


class EvictionCause(StrEnum):
    """Why an entry was evicted: whose put, or whose rule, made it go.

    OWN_LIMIT: its own tenant's put, which would have passed the tenant's limit.
    OWN_PUT: its own tenant's put; the pool was full and this was what the put could take.
    NEIGHBOUR: another tenant's put; the pool was full and this was the coldest that the put could take.
    SOFT_MARK: in the background, before a put of its tenant has to wait for it.
    QUOTA: its tenant's limit was lowered below what it used.
    NAMESPACE_LIMIT: its own namespace's put, which would have passed the namespace's limit; or that limit was lowered.
    """

    OWN_LIMIT = "own-limit"
    OWN_PUT = "own-put"
    NEIGHBOUR = "neighbour"
    SOFT_MARK = "soft-mark"
    QUOTA = "quota"
    NAMESPACE_LIMIT = "namespace-limit"


@dataclass(slots=True)
class TenantCounters:
    """What happened for one tenant since the node learned of it; only ever grows.

    Attributes:
        get_hits, get_misses: keys asked for and found, or not.
        get_bytes: lengths of the hits.
        peer_hits: of ``get_hits``, those that were a peer's entries, in a sharing group.
        hit_tokens: of the hits: each is a block of its namespace's tokens.
        hits_held_back: keys asked for that were there and counted as misses, because too much was in transfer already
            (:mod:`dataplane.core.held`).
        put_bytes: lengths of the entries stored.
        refused_by_reason: puts that were neither stored nor there already, by the reason of the error.
        evictions_by_cause, evicted_bytes_by_cause: entries of this tenant that left to make room or to meet a lower
            limit, and their lengths; a cause that never was is absent.
        taken_entries, taken_bytes: what this tenant's own puts evicted of others, and their lengths.
    """

    get_hits: int = 0
    get_misses: int = 0
    get_bytes: int = 0
    peer_hits: int = 0
    hit_tokens: int = 0
    hits_held_back: int = 0
    put_bytes: int = 0
    puts_stored: int = 0
    taken_entries: int = 0
    taken_bytes: int = 0
    refused_by_reason: dict[str, int] = field(default_factory=dict)
    evictions_by_cause: dict[EvictionCause, int] = field(default_factory=dict)
    evicted_bytes_by_cause: dict[EvictionCause, int] = field(default_factory=dict)

    @property
    def puts_refused(self) -> int:
        """Puts that were neither stored nor there already."""
        return sum(self.refused_by_reason.values())

    @property
    def evictions(self) -> int:
        """Entries that left to make room or to meet a lower limit."""
        return sum(self.evictions_by_cause.values())

    @property
    def evicted_bytes(self) -> int:
        """Lengths of the entries that left to make room or to meet a lower limit."""
        return sum(self.evicted_bytes_by_cause.values())

    def refused(self, reason: str) -> None:
        """A put of this tenant was refused."""
        self.refused_by_reason[reason] = self.refused_by_reason.get(reason, 0) + 1

    def evicted(self, size_bytes: int, cause: EvictionCause, entries: int = 1) -> None:
        """An entry of this tenant was evicted, or several of one size."""
        self.evictions_by_cause[cause] = self.evictions_by_cause.get(cause, 0) + entries
        self.evicted_bytes_by_cause[cause] = self.evicted_bytes_by_cause.get(cause, 0) + size_bytes * entries

    def took(self, size_bytes: int) -> None:
        """A put of this tenant evicted an entry of another one."""
        self.taken_entries += 1
        self.taken_bytes += size_bytes

    def copy(self) -> TenantCounters:
        """The counters as they are now; later events do not change it."""
        return replace(
            self,
            refused_by_reason=dict(self.refused_by_reason),
            evictions_by_cause=dict(self.evictions_by_cause),
            evicted_bytes_by_cause=dict(self.evicted_bytes_by_cause),
        )


class DropReason(StrEnum):
    """Why an entry that DRAM evicted was not written to SSD, and is gone."""

    NO_STAGING = "no-staging"  #: too much is on its way to the device already, of this tenant or of all
    NO_ROOM = "no-room"  #: the tenant's or its namespace's limit or the device's capacity, even after what may go
    WRITE_BUDGET = "write-budget"  #: the tenant has written as much as it may in a second
    NOT_WRITABLE = "not-writable"  #: the tier is off or read-only
    WRITE_FAILED = "write-failed"  #: the device failed while it was written


@dataclass(slots=True)
class SsdCounters:
    """What happened on SSD for one tenant since the node started; only ever grows.

    Attributes:
        reads, read_bytes: entries read back whole.
        read_failures: entries that could not be read or did not verify: each was a miss.
        demotions, demoted_bytes: entries written when DRAM evicted them.
        dropped_by_reason: entries that DRAM evicted and SSD did not take.
        relocations: hot entries written anew when their segment was reclaimed.
        written_bytes: records of both, with their heads and padding: what the tenant wore off the device.
        evictions: entries lost to a reclaim.
        lost: entries given up because their segment could not be made durable.
    """

    reads: int = 0
    read_bytes: int = 0
    read_failures: int = 0
    demotions: int = 0
    demoted_bytes: int = 0
    dropped_by_reason: dict[DropReason, int] = field(default_factory=dict)
    relocations: int = 0
    written_bytes: int = 0
    evictions: int = 0
    lost: int = 0

    @property
    def demotions_dropped(self) -> int:
        """Entries that DRAM evicted and SSD did not take."""
        return sum(self.dropped_by_reason.values())

    def dropped(self, reason: DropReason) -> None:
        """An entry that DRAM evicted was not taken."""
        self.dropped_by_reason[reason] = self.dropped_by_reason.get(reason, 0) + 1

    def copy(self) -> SsdCounters:
        """The counters as they are now."""
        return replace(self, dropped_by_reason=dict(self.dropped_by_reason))


@dataclass(frozen=True, slots=True)
class SsdUsage:
    """One tenant's books on SSD at one moment, in bytes of files (see :mod:`dataplane.core.ssd_books`).

    Attributes:
        used_bytes: charged: records, dead ones too, with heads and footers.
        leaving_bytes: the part of it whose files are on their way out.
        live_bytes: records of entries that can be read.
        write_bytes_per_s: the tenant's write budget in force; 0 for none.
    """

    reserved_bytes: int
    limit_bytes: int
    used_bytes: int
    leaving_bytes: int
    live_bytes: int
    entries: int
    segments: int
    counters: SsdCounters
    write_bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """One namespace's part of its tenant's books and counters, what it has in sharing groups included.

    Attributes:
        uid: distinguishes the namespace from a deleted one of the same name.
        limit_bytes, ssd_limit_bytes: its own limits on this node; None where it has none.
        get_hits, get_misses: keys asked for and found, or not, on either tier.
        hit_tokens: of the hits.
    """

    uid: str
    used_bytes: int
    entries: int
    get_hits: int
    get_misses: int
    limit_bytes: int | None = None
    ssd_used_bytes: int = 0
    ssd_entries: int = 0
    ssd_limit_bytes: int | None = None
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """One tenant's books in DRAM (see :class:`dataplane.core.budget.TierBudget`) and counters at one moment.

    ``used_bytes`` = ``resident_bytes`` + ``in_flight_bytes`` + ``slack_bytes``; ``entries`` counts what can be read.

    Attributes:
        weight: divides the age of its entries when victims are compared across tenants.
        protected_bytes: what of the reservation nobody else may take now (:mod:`dataplane.core.reservations`).
        uid: of the tenant, in the policy; empty where that does not say.
        namespaces: those that the policy names, as far as they have been used or have a limit.
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
    weight: int = 100
    protected_bytes: int = 0
    uid: str = ""
    namespaces: Mapping[NamespaceId, NamespaceUsage] = field(default_factory=dict)

    @property
    def lent_bytes(self) -> int:
        """What of the reservation the tenant does not use, and others may meanwhile."""
        return max(0, self.reserved_bytes - self.used_bytes)

    @property
    def borrowed_bytes(self) -> int:
        """What the tenant uses beyond its reservation."""
        return max(0, self.used_bytes - self.reserved_bytes)


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """The whole core at one moment: sum of the tenants' ``used_bytes`` + ``free_bytes`` = ``capacity_bytes`` (I8).

    ``largest_free_bytes`` below ``free_bytes`` shows fragmentation. ``ssd_capacity_bytes`` is 0 without an SSD tier.
    ``compactions`` are puts that had other entries moved out of the way (:mod:`dataplane.core.compaction`), and
    ``moved_bytes`` the lengths of those, since the node started.
    """

    policy_version: int
    capacity_bytes: int
    free_bytes: int
    largest_free_bytes: int
    tenants: Mapping[TenantId, TenantUsage]
    ssd_capacity_bytes: int = 0
    compactions: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PolicyApplied:
    """What a new policy cost: entries purged because they may no longer be read, or evicted to meet a lower limit."""

    version: int
    purged_entries: int = 0
    evicted_entries: int = 0

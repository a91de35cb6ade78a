"""Every metric of a node: its name, type, labels and meaning. What is not here cannot be exposed (docs/metrics.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from prometheus_client import Metric

PREFIX: Final = "saltern_node_"
Kind = Literal["gauge", "counter", "histogram", "info"]


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric; two are the same only if they are one object, which makes them cheap to look up.

    Attributes:
        name: without ``saltern_node_`` and without what the exposition adds to it (``_total``, ``_bucket``, ...).
        labels: names of the labels, in the order in which a series has their values.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    _series: dict[tuple[str, ...], Series] = field(default_factory=dict, repr=False)

    def series(self, *labels: str) -> Series:
        """The one series of this family with these values of its labels but ``tenant``, whoever asks for it."""
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = Series(self, labels)
        return found

    @property
    def exposed_name(self) -> str:
        """The name of its samples; of a histogram, the part that they share."""
        return PREFIX + self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")

    def metric(self) -> Metric:
        """An empty metric of this family."""
        return Metric(PREFIX + self.name, self.help, self.kind)


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """A family and the values of its labels but ``tenant``; made by :meth:`Family.series` alone, one of each."""

    family: Family
    labels: tuple[str, ...]


_T: Final = ("tenant",)
_TIER: Final = ("tenant", "tier")
_CAUSE: Final = ("tenant", "cause")
_REASON: Final = ("tenant", "reason")
_OPERATION: Final = ("tenant", "operation")

# ---- books of the tenants
USED_BYTES = Family("used_bytes", "gauge", "Charged to the tenant: entries, puts in flight and rounding.", _TIER)
LIMIT_BYTES = Family("limit_bytes", "gauge", "What the tenant may use on this node.", _TIER)
RESERVED_BYTES = Family("reserved_bytes", "gauge", "What the tenant may always use on this node.", _TIER)
LENT_BYTES = Family("lent_bytes", "gauge", "Reservation that the tenant does not use, for others meanwhile.", _TIER)
BORROWED_BYTES = Family("borrowed_bytes", "gauge", "What the tenant uses beyond its reservation.", _TIER)
ENTRIES = Family("entries", "gauge", "Entries that can be read.", _TIER)
PROTECTED_BYTES = Family("protected_bytes", "gauge", "The reservation, or what of it earns hits: nobody takes it.", _T)
IN_FLIGHT_BYTES = Family("in_flight_bytes", "gauge", "Entries being written to DRAM.", _T)
HELD_BYTES = Family("held_bytes", "gauge", "DRAM that cannot be evicted now: being written or being read.", _T)
SSD_LIVE_BYTES = Family("ssd_live_bytes", "gauge", "Records on SSD that can be read.", _T)
SSD_LEAVING_BYTES = Family("ssd_leaving_bytes", "gauge", "Files on SSD that are being removed; still charged.", _T)
SSD_SEGMENTS = Family("ssd_segments", "gauge", "Files on SSD.", _T)
WAITING_REQUESTS = Family(
    "waiting_requests", "gauge", "Requests that wait for the tenant's rates or bytes in flight.", _T
)
TENANT_SESSIONS = Family("tenant_sessions", "gauge", "Open sessions of the wire protocol.", _T)

# ---- what happened to them
GET_HITS = Family("get_hits", "counter", "Keys asked for with get and found, on either tier.", _T)
GET_MISSES = Family("get_misses", "counter", "Keys asked for with get and not found.", _T)
PEER_HITS = Family("peer_hits", "counter", "Hits that were entries of a peer, in a sharing group.", _T)
HITS_HELD_BACK = Family(
    "hits_held_back", "counter", "Misses of keys that were there: too much was in transfer already.", _T
)
GET_BYTES = Family("get_bytes", "counter", "Lengths of the hits.", _T)
PUTS_STORED = Family("puts_stored", "counter", "Entries stored.", _T)
PUT_BYTES = Family("put_bytes", "counter", "Lengths of the entries stored.", _T)
PUTS_REFUSED = Family("puts_refused", "counter", "Entries refused, by the reason of the error.", _REASON)
EVICTIONS = Family("evictions", "counter", "Entries evicted from DRAM, by cause.", _CAUSE)
EVICTED_BYTES = Family("evicted_bytes", "counter", "Lengths of the entries evicted from DRAM, by cause.", _CAUSE)
TAKEN_ENTRIES = Family("taken_entries", "counter", "Entries of others that this tenant's puts evicted.", _T)
TAKEN_BYTES = Family("taken_bytes", "counter", "Lengths of the entries of others that its puts evicted.", _T)
DISPLACED_BYTES = Family(
    "displaced_bytes", "counter", "Lengths of the tenant's entries that puts of one other evicted.", ("tenant", "by")
)
SSD_READS = Family("ssd_reads", "counter", "Entries read back from SSD.", _T)
SSD_READ_BYTES = Family("ssd_read_bytes", "counter", "Lengths of the entries read back from SSD.", _T)
SSD_READ_FAILURES = Family("ssd_read_failures", "counter", "Entries on SSD that were unreadable or not intact.", _T)
SSD_DEMOTIONS = Family("ssd_demotions", "counter", "Entries written to SSD when DRAM evicted them.", _T)
SSD_DEMOTED_BYTES = Family("ssd_demoted_bytes", "counter", "Lengths of the entries written to SSD.", _T)
SSD_DROPPED = Family("ssd_dropped", "counter", "Evicted entries that SSD did not take, by reason.", _REASON)
SSD_RELOCATIONS = Family("ssd_relocations", "counter", "Hot entries written anew when their file was reclaimed.", _T)
SSD_WRITTEN_BYTES = Family("ssd_written_bytes", "counter", "Bytes written to the device for the tenant: wear.", _T)
SSD_EVICTIONS = Family("ssd_evictions", "counter", "Entries lost to a reclaim of SSD space.", _T)
SSD_LOST = Family("ssd_lost", "counter", "Entries given up because their file could not be made durable.", _T)
TENANT_REQUESTS = Family("tenant_requests", "counter", "Requests answered.", _OPERATION)
TENANT_SECONDS = Family("tenant_request_seconds", "counter", "Time that requests took, all together.", _OPERATION)
SERVED_BYTES = Family("served_bytes", "counter", "Bytes of entries moved to and from clients.", _T)
RATE_DELAYED = Family("rate_delayed_requests", "counter", "Requests that waited for the tenant's rates.", _T)
RATE_REFUSED = Family("rate_refused_requests", "counter", "Requests refused for the tenant's rates.", _T)
RATE_WAIT_SECONDS = Family("rate_wait_seconds", "counter", "How long requests waited for the tenant's rates.", _T)

# ---- doors
_DOOR: Final = ("transport",)
_DOOR_REASON: Final = ("transport", "reason")
REQUEST_SECONDS = Family(
    "request_duration_seconds",
    "histogram",
    "From a request's header to its last byte handed to the kernel; the client's own pace is in it.",
    ("transport", "operation"),
)
REQUESTS_REFUSED = Family("requests_refused", "counter", "Requests answered with an error as a whole.", _DOOR_REASON)
SESSIONS = Family("sessions", "gauge", "Open sessions of the wire protocol.", _DOOR)
SESSIONS_OPENED = Family("sessions_opened", "counter", "Sessions that passed HELLO.", _DOOR)
SESSIONS_CLOSED = Family("sessions_closed", "counter", "Sessions that ended, by reason.", _DOOR_REASON)
TURNED_AWAY = Family("connections_turned_away", "counter", "Connections that ended without a session.", _DOOR_REASON)

# ---- the node
ARENA_BYTES = Family("arena_bytes", "gauge", "Cache memory of the node.")
ARENA_FREE_BYTES = Family("arena_free_bytes", "gauge", "Cache memory that is charged to nobody.")
ARENA_LARGEST_FREE_BYTES = Family("arena_largest_free_bytes", "gauge", "The longest free extent.")
COMPACTIONS = Family("compactions", "counter", "Puts for which entries were moved within the cache memory.")
MOVED_BYTES = Family("moved_bytes", "counter", "Lengths of the entries that were moved.")
SSD_CAPACITY_BYTES = Family("ssd_capacity_bytes", "gauge", "What all tenants together may have on SSD; 0 for no tier.")
SSD_STATE = Family("ssd_state", "gauge", "1 for the state that the SSD tier is in.", ("state",))
ENGINE_CONNECTED = Family("engine_connected", "gauge", "1 while the store below can be reached.", ("engine",))
ENGINE_READS = Family("engine_reads", "counter", "Records asked of it: hits, and misses by cause.", ("outcome",))
ENGINE_READ_BYTES = Family("engine_read_bytes", "counter", "Sealed bytes of those that came whole.")
ENGINE_WRITES = Family("engine_writes", "counter", "Records given to it, by what became of them.", ("outcome",))
ENGINE_WRITTEN_BYTES = Family("engine_written_bytes", "counter", "Sealed bytes of those that it took.")
ENGINE_REMOVED = Family("engine_removed", "counter", "Objects removed from it, or found gone.")
ENGINE_REMOVALS_FAILED = Family("engine_removals_failed", "counter", "Removals that failed; they are tried again.")
TENANTS = Family("tenants", "gauge", "Tenants that the policy names or that still hold bytes.")
TENANTS_LABELLED = Family("tenants_labelled", "gauge", "Tenants with a label value of their own.")
POLICY_VERSION = Family("policy_version", "gauge", "The policy in force; 0 before the first.")
POLICY_APPLIED = Family("policy_applied_timestamp_seconds", "gauge", "When it came into force; 0 before the first.")
POLICY_REFUSED = Family("policy_refused", "gauge", "1 while a newer policy was offered and could not be applied.")
CONTROL_CONNECTED = Family("control_connected", "gauge", "1 while the control plane answers.")
HEALTH_STATE = Family("health_state", "gauge", "1 for the state of /readyz.", ("state",))
LOOP_LAG_SECONDS = Family("event_loop_lag_seconds", "histogram", "How late the event loop runs what is due.")
LOOP_LAG_MAX_SECONDS = Family("event_loop_lag_max_seconds", "gauge", "The worst of that in the last minute.")
COLLECTION_SECONDS = Family("metrics_collection_seconds", "gauge", "Time on the event loop that the last page cost.")
HTTP_REQUESTS = Family("metrics_http_requests", "counter", "Answers of the metrics door, by status.", ("code",))
BUILD = Family("build", "info", "What runs here.", ("node", "version", "python"))

FAMILIES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Family))
#: Of processes and Python in general: :mod:`prometheus_client` names and documents these.
STANDARD_NAMES: Final = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
    "python_gc_objects_collected_total",
    "python_gc_objects_uncollectable_total",
    "python_gc_collections_total",
)

"""What the doors count: sessions, refusals and how long requests take; in constant time, read when somebody scrapes.

A request is measured from its header (gRPC: from the call's admission) to the last byte of its reply being handed to
the kernel, so the time that a client takes to send a payload, or to read one, is in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final

from saltern.names import TenantId
from saltern.wire import Opcode


class Transport(StrEnum):
    """How entries of a session travel: by the door that it came by, or over RDMA once it has a queue pair."""

    TCP = "tcp"
    SHM = "shm"
    RDMA = "rdma"
    GRPC = "grpc"


class Operation(StrEnum):
    """What a request asked for; ``session`` stands for all that moves and finds no entries."""

    LOOKUP = "lookup"
    GET = "get"
    PUT = "put"
    DELETE = "delete"
    SESSION = "session"


#: Upper bounds of the buckets, inclusive: 50 us to 10 s; what is above goes into one more.
BUCKETS_S: Final = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_BOUNDS_NS: Final = tuple(round(bound_s * 1e9) for bound_s in BUCKETS_S)
OPERATIONS: Final = tuple(Operation)
_BY_OPCODE: Final[Mapping[int, Operation]] = {
    Opcode.LOOKUP: Operation.LOOKUP,
    Opcode.GET: Operation.GET,
    Opcode.PUT: Operation.PUT,
    Opcode.DELETE: Operation.DELETE,
}


class Histogram:
    """Counts by bucket, each for itself, not cumulated.

    Attributes:
        counts: one for each of ``BUCKETS_S``, and one for what took longer.
        total_ns: the sum of all durations.
    """

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_NS) + 1)
        self.total_ns = 0

    def observe(self, elapsed_ns: int) -> None:
        self.counts[bisect_left(_BOUNDS_NS, elapsed_ns)] += 1
        self.total_ns += elapsed_ns


class Spent:
    """How many requests one tenant made, and how long they took together; by position of the operation."""

    __slots__ = ("requests", "total_ns")

    def __init__(self) -> None:
        self.requests = [0] * len(Operation)
        self.total_ns = [0] * len(Operation)


class DoorMeter:
    """What one door counts; its sessions call this.

    Attributes:
        histograms: how long requests took.
        refused: requests that were answered with an error as a whole, by its reason.
        opened: sessions that passed HELLO.
        closed: those of them that have ended, by reason.
        turned_away: connections that ended without a session, by reason.
    """

    __slots__ = ("_by_opcode", "_by_tenant", "closed", "histograms", "opened", "refused", "turned_away")

    def __init__(self, by_tenant: dict[TenantId, Spent]) -> None:
        self.histograms: Final = {operation: Histogram() for operation in Operation}
        self.refused: Final[Counter[str]] = Counter()
        self.opened = 0
        self.closed: Final[Counter[str]] = Counter()
        self.turned_away: Final[Counter[str]] = Counter()
        #: (position in ``Operation``, histogram) by opcode: to look an enum up by its hash runs Python code.
        self._by_opcode: Final = [
            (OPERATIONS.index(operation), self.histograms[operation])
            for operation in (_BY_OPCODE.get(opcode, Operation.SESSION) for opcode in range(max(Opcode) + 1))
        ]
        self._by_tenant: Final = by_tenant

    def observe(self, opcode: int, tenant: TenantId | None, elapsed_ns: int) -> None:
        """Count one request that has ended, of a known ``opcode``; ``tenant`` is None before HELLO."""
        position, histogram = self._by_opcode[opcode]
        histogram.observe(elapsed_ns)
        if tenant is None:
            return
        spent = self._by_tenant.get(tenant)
        if spent is None:
            spent = self._by_tenant[tenant] = Spent()
        spent.requests[position] += 1
        spent.total_ns[position] += elapsed_ns

    def ended(self, *, was_open: bool, reason: str) -> None:
        """Count the end of a connection."""
        (self.closed if was_open else self.turned_away)[reason] += 1


class Meters:
    """The meters of all doors of a node, and what each tenant spent of their time."""

    def __init__(self) -> None:
        self._by_tenant: dict[TenantId, Spent] = {}
        self.doors: Final = {transport: DoorMeter(self._by_tenant) for transport in Transport}

    def spent(self, tenant: TenantId) -> Spent | None:
        """What a tenant has spent; None for nothing."""
        return self._by_tenant.get(tenant)

    def retain(self, tenants: Collection[TenantId]) -> None:
        """Forget every tenant but these: call it with each new policy, or the gone would pile up."""
        for gone in [tenant for tenant in self._by_tenant if tenant not in tenants]:
            del self._by_tenant[gone]

"""Who could lose an entry to somebody else's put, coldest first: kept between puts, so that none looks at everybody.

A *borrower* is a tenant that uses more than what is protected of its own and has an entry that nobody holds. For each
there is one *record*: the age of its next victim. Records of one weight keep their order as time passes, so they wait
in one heap for each weight (two with the idle ones, which age faster; two more for those whose next victim straddles
the protected line, see :mod:`dataplane.core.victims`), and only the heads of the heaps have to be compared.

A record is exact whenever it is read. What can change it is always something that its own tenant did or lost: after
that the tenant is only *noted*, and looked at anew when the next put must evict. At most :data:`NOTED_MAX` wait for
that, so a put looks at no more than those and at the victims that it takes, whether there are 10 tenants or 10,000.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from dataplane.core.entry import Entry
from dataplane.core.tenant_cache import TenantCache

#: Tenants that may wait to be looked at; the next one noted has the longest waiting looked at instead.
NOTED_MAX: Final = 64
#: A heap is swept when less than half of it, beyond so many, are records in force.
_SWEEP_LEAST: Final = 64


class Kind(NamedTuple):
    """Borrowers whose order does not change with time.

    Attributes:
        straddles: taking the next victim would cut below what is protected.
    """

    straddles: bool
    weight: int
    is_idle: bool


class Record(NamedTuple):
    """``touched_ns`` of the next victim of ``owner``; ``serial`` so that no two records compare equal."""

    touched_ns: int
    serial: int
    owner: TenantCache


@dataclass(slots=True)
class _Queue:
    """A heap of records, of which some may be out of force; and how many of it were not when it was last swept."""

    heap: list[Record] = field(default_factory=list)
    swept: int = 0


class Borrowers:
    """All borrowers of one pool."""

    __slots__ = ("_noted", "_queues", "_records", "_serial")

    def __init__(self) -> None:
        self._noted: dict[TenantCache, None] = {}
        self._records: dict[TenantCache, tuple[Kind, Record]] = {}
        self._queues: dict[Kind, _Queue] = {}
        self._serial = 0

    def note(self, owner: TenantCache) -> None:
        """Something of ``owner`` changed: its entries, their order or who holds them, its books or its quota."""
        noted = self._noted
        noted[owner] = None
        if len(noted) > NOTED_MAX:
            longest = next(iter(noted))
            del noted[longest]
            self._look_at(longest)

    def forget(self, owner: TenantCache) -> None:
        """The tenant is gone."""
        self._noted.pop(owner, None)
        self._records.pop(owner, None)

    def has_only(self, owner: TenantCache) -> bool:
        """Whether no other tenant could lose an entry, as far as is known without looking at any."""
        return len(self._noted) <= (owner in self._noted) and len(self._records) <= (owner in self._records)

    def settle(self, requester: TenantCache) -> None:
        """Make every record exact, but for the requester, which is no candidate of the others' kind and has none."""
        self._records.pop(requester, None)
        noted = self._noted
        noted.pop(requester, None)
        for owner in noted:
            self._look_at(owner)
        noted.clear()
        noted[requester] = None
        for kind, queue in list(self._queues.items()):
            heap = queue.heap
            while heap and not self.is_in_force(kind, heap[0]):
                heappop(heap)
            if not heap:
                del self._queues[kind]

    def heaps(self, *, straddles: bool) -> Iterator[tuple[Kind, list[Record]]]:
        """Yield the heaps of those whose next victim straddles the protected line, or of the others; only to read."""
        for kind, queue in self._queues.items():
            if kind.straddles is straddles:
                yield kind, queue.heap

    def is_in_force(self, kind: Kind, record: Record) -> bool:
        """Whether a record in the heap of ``kind`` is its owner's newest, and so exact after :meth:`settle`."""
        mine = self._records.get(record.owner)
        return mine is not None and mine[1] is record and mine[0] == kind

    def check_invariants(self, owners: Iterable[TenantCache]) -> None:
        """Assert that each borrower among ``owners`` has an exact record or is noted, and nobody else a record."""
        owners = list(owners)
        assert self._records.keys() | self._noted.keys() <= set(owners), "somebody is remembered who is gone"
        for owner in owners:
            if owner not in self._noted:
                head = _next_victim(owner)
                kind, record = self._records.get(owner, (None, None))
                assert kind == (None if head is None else _kind_of(owner, head)), "I5: a borrower is misplaced"
                assert head is None or (record is not None and record.touched_ns == head.touched_ns), "I5: stale age"
        for kind, record in self._records.values():
            assert record in self._queues[kind].heap, "I5: a borrower is in no heap"

    def _look_at(self, owner: TenantCache) -> None:
        """Make the record of ``owner`` exact."""
        head = _next_victim(owner)
        if head is None:
            self._records.pop(owner, None)
            return
        kind = _kind_of(owner, head)
        mine = self._records.get(owner)
        if mine is not None and mine[0] == kind and mine[1].touched_ns == head.touched_ns:
            return
        self._serial += 1
        record = Record(head.touched_ns, self._serial, owner)
        self._records[owner] = kind, record
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = _Queue()
        heappush(queue.heap, record)
        if len(queue.heap) > 2 * queue.swept + _SWEEP_LEAST:
            queue.heap = [kept for kept in queue.heap if self.is_in_force(kind, kept)]
            heapify(queue.heap)
            queue.swept = len(queue.heap)


def _next_victim(owner: TenantCache) -> Entry | None:
    """The entry that would leave first; None if ``owner`` is no borrower."""
    if owner.budget.used_bytes <= owner.budget.protected_bytes:
        return None
    for entry in owner.order:
        if not entry.pins:
            return entry
    return None


def _kind_of(owner: TenantCache, head: Entry) -> Kind:
    budget = owner.budget
    straddles = budget.used_bytes - budget.protected_bytes < head.extent_bytes
    return Kind(straddles, budget.weight, owner.is_idle)

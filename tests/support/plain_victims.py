"""The rules of :mod:`dataplane.core.victims` again, by looking at every tenant: slow, plain, the oracle of tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dataplane.core.entry import Entry
from dataplane.core.extents import Extents
from dataplane.core.tenant_cache import TenantCache
from dataplane.core.victims import VICTIMS_MAX

_IDLE_AGE_FACTOR = 16


class _Books:
    """A tenant, its entries that could go from the next victim on, and what it would use without those taken."""

    def __init__(self, owner: TenantCache) -> None:
        self.owner = owner
        self.entries = [entry for entry in owner.order if not entry.pins]
        self.used_bytes = owner.budget.used_bytes
        self.protected_bytes = owner.budget.protected_bytes

    @property
    def spare_bytes(self) -> int:
        return self.used_bytes - self.protected_bytes

    def rank(self, now_ns: int) -> tuple[int, int]:
        head = self.entries[0]
        age_ns = (now_ns - head.touched_ns) * (_IDLE_AGE_FACTOR if self.owner.is_idle else 1)
        return -(age_ns * 100 // self.owner.budget.weight), head.touched_ns

    def take(self) -> Entry:
        entry = self.entries.pop(0)
        self.used_bytes -= entry.extent_bytes
        return entry


def plain_victims(
    extents: Extents, requester: TenantCache, tenants: Iterable[TenantCache], extent_bytes: int, now_ns: int
) -> list[Entry] | None:
    """What ``choose_room`` must answer; ``tenants`` are all there are."""
    own = _Books(requester)
    others = [_Books(owner) for owner in tenants if owner is not requester]
    excess_bytes = own.used_bytes + extent_bytes - requester.budget.limit_bytes
    if excess_bytes > requester.budget.evictable_bytes:
        return None
    for_limit: list[Entry] = []
    while excess_bytes > 0:
        for_limit.append(own.take())
        excess_bytes -= for_limit[-1].extent_bytes

    trial = extents.trial()
    runs = [trial.add(entry.offset, entry.extent_bytes) for entry in for_limit]
    if max([extents.largest_free_bytes, *(end - start for start, end in runs)]) >= extent_bytes:
        return for_limit
    for_room: list[Entry] = []
    for entry in _coldest_first(own, others, extent_bytes, now_ns):
        for_room.append(entry)
        start, end = trial.add(entry.offset, entry.extent_bytes)
        if end - start >= extent_bytes:
            return [*for_limit, *(victim for victim in for_room if start <= victim.offset < end)]
        if len(for_limit) + len(for_room) >= VICTIMS_MAX:
            break
    return None


def _coldest_first(own: _Books, others: list[_Books], extent_bytes: int, now_ns: int) -> Iterator[Entry]:
    """Rules 2 to 4, one after the other."""

    def coldest(candidates: Iterable[_Books]) -> _Books | None:
        return min((books for books in candidates if books.entries), key=lambda books: books.rank(now_ns), default=None)

    while books := coldest(
        books
        for books in [own, *others]
        if books.entries and books.spare_bytes >= (1 if books is own else books.entries[0].extent_bytes)
    ):
        yield books.take()
    if own.used_bytes + extent_bytes <= own.owner.budget.reserved_bytes:
        while books := coldest(books for books in others if books.spare_bytes > 0):
            yield books.take()
    while own.entries:
        yield own.take()

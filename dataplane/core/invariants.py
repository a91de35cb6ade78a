"""The books against the truth: recomputes everything that the core counts and asserts that it agrees (I8)."""

from __future__ import annotations

from typing import Final

from dataplane.core.entry import Entry, EntryState
from dataplane.core.extents import Extents, round_up
from dataplane.core.pool import Pool
from dataplane.core.soft_mark import next_trimmed
from dataplane.core.tenant_cache import NO_LIMIT_BYTES, NamespaceBooks, TenantCache
from saltern.names import TenantId

_THERE: Final = (EntryState.READABLE, EntryState.ADOPTED)


def check_invariants(pool: Pool) -> None:
    """Assert the rules that hold between any two commands to the core; takes time linear in the number of entries."""
    pool.extents.check_invariants()
    for partition, index in pool.open.items():
        assert pool.tenants[partition.tenant].partitions[partition] is index, "an open partition has no owner (I2)"
    entries = list(pool.detached)
    for tenant, owner in pool.tenants.items():
        entries += _check_tenant(tenant, owner, pool)
        budget = owner.budget
        assert 0 <= budget.protected_bytes <= budget.reserved_bytes, "I5: protected beyond the reservation"
        assert owner.account is not None or budget.protected_bytes == budget.reserved_bytes, "I5: strict is all of it"
        assert owner in pool.above_mark or next_trimmed(owner) is None, "a tenant above its soft mark is not noted"
    assert pool.above_limit.keys() <= set(pool.tenants.values()), "a tenant is to be shrunk that is gone"
    there = {namespace for owner in pool.tenants.values() for namespace in owner.namespaces.values()}
    assert pool.namespaces_above.keys() | pool.namespaces_held.keys() <= there, (
        "a namespace is to be shrunk that is gone"
    )
    assert all(pool.tenants.get(index.owner.tenant) is index.owner for index in pool.purged if index.entries), (
        "I8: lost"
    )
    assert pool.above_mark.keys() <= set(pool.tenants.values()), "a tenant is to be trimmed that is gone"
    pool.borrowers.check_invariants(pool.tenants.values())
    pool.held.check_invariants(pool.tenants.values())
    pool.loans.check_invariants()
    _check_arena(entries, pool.extents)
    if pool.layout is not None:
        pool.layout.check_invariants(entries)


def _check_tenant(tenant: TenantId, owner: TenantCache, pool: Pool) -> list[Entry]:
    there = [index for index in pool.purged if index.owner is owner]
    assert not any(index.writing or pool.open.get(index.partition) is index for index in there), "I12: purged and open"
    purged = [entry for index in there for entry in index.entries.values()]
    readable: list[Entry] = []
    writing: list[Entry] = []
    for partition, index in owner.partitions.items():
        assert owner.tenant == partition.tenant == tenant and index.owner is owner, "I2: an index in foreign hands"
        for key, entry in index.entries.items():
            assert entry.key == key and entry.index is index and entry.state in _THERE
            assert not (entry.pins and entry.state is EntryState.ADOPTED), "I7: bytes left before they were verified"
        for key, entry in index.writing.items():
            assert entry.key == key and entry.index is index and entry.state is EntryState.WRITING and not entry.pins
        assert not index.entries.keys() & index.writing.keys(), "I7: a key is readable while it is written"
        readable += index.entries.values()
        writing += index.writing.values()
    assert owner.in_policy or (owner.budget.used_bytes and not readable and not writing), (
        "I12: a deleted one is readable"
    )
    readable += purged  # unreachable, and else as they were

    ordered = list(owner.order)
    assert len(ordered) == len(readable) and set(ordered) == set(readable), "the eviction order lost an entry"
    orphans = [entry for entry in pool.detached if entry.index.owner is owner]
    assert all(entry.state is EntryState.DETACHED for entry in orphans)
    read_last = [entry for entry in orphans if entry.pins]
    written_last = [entry for entry in orphans if not entry.pins]

    budget = owner.budget
    held = [*writing, *orphans, *(entry for entry in readable if entry.pins)]
    assert budget.used_bytes == sum(e.extent_bytes for e in (*readable, *writing, *orphans)), "I8: used"
    assert budget.resident_bytes == sum(e.size_bytes for e in (*readable, *read_last)), "I8: resident"
    assert budget.in_flight_bytes == sum(e.size_bytes for e in (*writing, *written_last)), "I8: in-flight"
    assert budget.held_bytes == sum(e.extent_bytes for e in held), "I8: held"
    assert budget.slack_bytes >= 0
    assert pool.loans.lent_bytes(owner) <= budget.held_bytes, "I7: lent and not held"
    # After a limit was lowered, only transfers in progress may still be above it, and what is known to be leaving (I4).
    is_leaving = owner in pool.above_limit or bool(purged)
    assert budget.used_bytes <= budget.limit_bytes or budget.evictable_bytes == 0 or is_leaving, "I4: above the limit"
    _check_namespaces(owner, pool, readable, [*readable, *writing, *orphans])
    return readable + writing


def _check_namespaces(owner: TenantCache, pool: Pool, ordered: list[Entry], entries: list[Entry]) -> None:
    """The books of namespaces against their entries (I4, I8); ``ordered`` are those in the order of eviction."""
    of_namespace: dict[NamespaceBooks, list[Entry]] = {namespace: [] for namespace in owner.namespaces.values()}
    for entry in entries:
        assert entry.index.namespace in of_namespace, "I12: an entry of a namespace that is forgotten"
        of_namespace[entry.index.namespace].append(entry)
    for uid, namespace in owner.namespaces.items():
        mine = of_namespace[namespace]
        assert namespace.owner is owner and all(entry.index.partition.namespace_uid == uid for entry in mine), "I2"
        assert namespace.used_bytes == sum(entry.extent_bytes for entry in mine), "I8: used by a namespace"
        assert namespace.order is not None or namespace.limit_bytes == NO_LIMIT_BYTES, "a limit without an order"
        if namespace.order is not None:
            own = list(namespace.order)
            assert len(own) == len(set(own)), "the order of a namespace holds an entry twice"
            assert set(own) == {entry for entry in ordered if entry.index.namespace is namespace}, "an order lost one"
        if namespace.is_above_limit and namespace not in pool.namespaces_above:
            assert namespace in pool.namespaces_held, "I4: a namespace above its limit is forgotten"
            assert all(entry.pins for entry in ordered if entry.index.namespace is namespace), "I4: and could evict"


def _check_arena(entries: list[Entry], extents: Extents) -> None:
    """Extents of entries and free extents tile the arena: none overlap, none is lost (I7, I8)."""
    pieces = [(entry.offset, entry.extent_bytes) for entry in entries] + extents.free_extents()
    end = 0
    for start, length in sorted(pieces):
        assert start == end, f"the arena has a gap or an overlap at {end}"
        end = start + length
    assert end == extents.capacity_bytes
    extents.check_begins([start for start, _ in pieces])
    assert all(entry.extent_bytes == round_up(entry.size_bytes) for entry in entries)

"""What must hold between any two commands, rule by rule; each failure begins with the rule that it breaks."""

from __future__ import annotations

from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.usage import NodeUsage
from tests.sim.sessions import Getting, Putting, name_of
from tests.sim.world import World


def check(world: World) -> None:
    """Raise AssertionError if core and model disagree, or if either breaks a rule."""
    usage = world.core.usage()
    _i2_partitions(world)
    _i4_limits(world, usage)
    _i5_i6_evictions_and_refusals(world)
    _i7_bytes(world)
    _i8_books(world, usage)
    _i12_gone(world)
    world.core.check_invariants()


def _i2_partitions(world: World) -> None:
    """Every session sees exactly what was put under its own partition."""
    model = world.model
    mine: dict[object, set[bytes]] = {}
    for entry in model.readable():
        mine.setdefault(entry.partition, set()).add(entry.key)
    for session in world.sessions:
        partition = session.partition
        there = mine.get(partition, set()) if model.is_open(partition) else set()
        _, found = world.core.lookup(partition, world.keys)
        assert found == bytes(key in there for key in world.keys), f"I2: {session} sees what is not its own, or not all"
        if not partition.group_uid or not model.is_open(partition):
            continue
        peers = model.peers(partition)
        sources = world.core.sources(partition, world.now_ns)
        assert sources == (partition, *peers), f"I2: {session} reads {sources}, and both sides agree on {peers}"
        shared = there.union(*(mine.get(peer, set()) for peer in peers))
        _, found = world.core.lookup(partition, world.keys, world.now_ns)
        assert found == bytes(key in shared for key in world.keys), f"I2: {session} sees not what its group has"


def _i4_limits(world: World, usage: NodeUsage) -> None:
    """Within the limit; or, after it was lowered, only transfers in progress are above it, and nothing grows."""
    model, above = world.model, world.above
    for tenant, books in usage.tenants.items():
        if books.used_bytes <= model.quota(tenant).limit_bytes:
            above.pop(tenant, None)
            continue
        assert model.evictable(tenant) == 0 or model.may_lag(tenant), f"I4: {tenant} is above its limit and could evict"
        assert books.used_bytes <= above.get(tenant, books.used_bytes), f"I4: {tenant} grows above its limit"
        above[tenant] = books.used_bytes


def _i5_i6_evictions_and_refusals(world: World) -> None:
    assert world.model.unlawful == [], "; ".join(world.model.unlawful)
    for entry in world.model.readable():
        assert world.sees(entry), f"I6: an acknowledged entry of {name_of(entry.partition)} is gone"


def _i7_bytes(world: World) -> None:
    """Whole: the memory of every entry holds its own bytes, as far as they were written, and no two overlap."""
    view = world.arena.view
    granules = 0
    taken: set[int] = set()
    for entry in world.model.entries():
        taken.update(entry.granules)
        granules += len(entry.granules)
        written = entry.written_bytes
        if not entry.is_rotten:
            assert view(entry.offset, written) == entry.payload[:written], (
                f"I7: bytes of {name_of(entry.partition)} at {entry.offset} were overwritten"
            )
    assert len(taken) == granules, "I7: two entries share memory"
    assert not taken or (min(taken) >= 0 and max(taken) < world.shape.capacity_bytes // GRANULE_BYTES)


def _i8_books(world: World, usage: NodeUsage) -> None:
    """Usage is the sum of what is there, and nobody who holds nothing and is not in the policy is in the books."""
    model = world.model
    assert set(usage.tenants) == set(model.tenants) | {entry.tenant for entry in model.live}, "I8: who is in the books"
    for tenant, books in usage.tenants.items():
        entries = model.of(tenant)
        expected = (
            sum(entry.extent_bytes for entry in entries),
            sum(entry.size_bytes for entry in entries if not entry.is_being_written),
            sum(entry.size_bytes for entry in entries if entry.is_being_written),
            sum(entry.extent_bytes for entry in entries if not entry.is_evictable),
            sum(entry.state == "readable" for entry in entries),
        )
        told = (books.used_bytes, books.resident_bytes, books.in_flight_bytes, books.held_bytes, books.entries)
        assert told == expected, f"I8: books of {tenant} (used, resident, in flight, held, entries): {told}, {expected}"
        assert books.slack_bytes == books.used_bytes - books.resident_bytes - books.in_flight_bytes
        assert books.counters == model.counters[tenant], f"I8: counters of {tenant}"
    used_bytes = sum(books.used_bytes for books in usage.tenants.values())
    assert usage.free_bytes + used_bytes == world.shape.capacity_bytes, "I8: free and used are not the capacity"
    assert usage.largest_free_bytes == model.longest_gap(model.live), "I8: the longest free extent"


def _i12_gone(world: World) -> None:
    """What the policy does not name is closed and its index gone; only transfers may still hold memory of it."""
    model = world.model
    for partition in list(world.partitions):
        assert (world.core.check_access(partition) is None) == model.is_open(partition), (
            f"I12: {name_of(partition)} is {'closed' if model.is_open(partition) else 'open'}"
        )
        if model.exists(partition):
            continue
        owner = world.core._pool.tenants.get(partition.tenant)
        assert owner is None or partition not in owner.partitions, f"I12: entries of {name_of(partition)} are kept"
        if not any(session.partition == partition for session in world.sessions):
            del world.partitions[partition]
    busy = [session.busy for session in world.sessions]
    writing = {id(put.entry) for put in busy if isinstance(put, Putting)}
    reading = {id(entry) for get in busy if isinstance(get, Getting) for entry in get.entries}
    for entry in model.entries():
        if not model.exists(entry.partition) and entry.state != "purged":
            assert id(entry) in writing | reading, "I12: bytes of a deleted partition are kept for nobody"

"""What must hold between any two commands of a node with two tiers; a failure begins with the rule that it breaks."""

from __future__ import annotations

from collections import Counter

from dataplane.core.partition import Partition
from dataplane.core.segments import BLOCK_BYTES
from dataplane.core.usage import TenantUsage
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from tenants.quota import Tier
from tests.sim.disk import Value
from tests.sim.two_tiers import TwoTierWorld


class Watch:
    """Remembers what was on SSD before a command, to see that what left had a reason."""

    def __init__(self, world: TwoTierWorld) -> None:
        self._tier = world.tier
        self._there = on_ssd(world)
        self._gone = _accounted(world)

    def check(self, world: TwoTierWorld) -> None:
        """Raise AssertionError if a rule does not hold after a command."""
        assert not world.unlawful, "; ".join(world.unlawful)
        there = on_ssd(world)
        if world.tier is self._tier:
            self._i6_losses_are_accounted_for(world, there)
        _i2_i7_entries(world, there)
        _i4_limits(world)
        _i8_books(world)
        _i12_gone(world, there)
        world.core.check_invariants()

    def _i6_losses_are_accounted_for(self, world: TwoTierWorld, there: dict[tuple[Partition, BlockKey], int]) -> None:
        """Whatever left SSD was evicted, unreadable, deleted or closed; counters say how many."""
        gone = _accounted(world)
        lost: Counter[TenantId] = Counter(
            partition.tenant for partition, key in self._there.keys() - there.keys() - world.losses
            if world.is_open(partition)
        )  # fmt: skip
        for tenant, count in lost.items():
            assert count <= gone[tenant] - self._gone[tenant], f"I6: {count} entries of {tenant} left SSD for no reason"


def on_ssd(world: TwoTierWorld) -> dict[tuple[Partition, BlockKey], int]:
    """Where each entry on SSD lies, as the index has it: its segment's number and block in one."""
    return {
        (Partition(owner.tenant, NamespaceId("ns"), books.storage_uid, books.epoch), key): (
            entry.segment.number << 32 | entry.block
        )
        for owner in world.tier.tenants.values()
        for books in owner.partitions.values()
        for key, entry in books.entries.items()
    }


def _accounted(world: TwoTierWorld) -> Counter[TenantId]:
    return Counter({
        tenant: owner.counters.evictions + owner.counters.read_failures + owner.counters.lost
        for tenant, owner in world.tier.tenants.items()
    })  # fmt: skip


def _i2_i7_entries(world: TwoTierWorld, there: dict[tuple[Partition, BlockKey], int]) -> None:
    """Every entry, on either tier, is the value that its key has now, with its own bytes, in its own partition."""
    current = world.truth.current
    for (partition, key), entry in world.in_dram().items():
        value = _current(current, partition, key)
        if value.number in world.rotten:
            continue  # found out before its first read
        assert bytes(world.arena.view(entry.offset, entry.size_bytes)) == value.payload, "I7: other bytes in DRAM"
    for (partition, key), place in there.items():
        if not world.is_open(partition):
            continue
        file = world.disk.files.get(place >> 32)  # type: ignore[call-overload]  # a number is a number
        record = file.at(place & 0xFFFFFFFF) if file is not None else None
        assert record is not None, "I7: an entry without a record on disk"
        assert place >> 32 not in world.not_durable, "I7: served from a segment that the device failed to make durable"
        assert file is not None and file.folder.partition == partition, "I2: a record in another partition's file"
        assert record.value == _current(current, partition, key), "I7: an older record of the key"


def _current(current: dict[tuple[Partition, BlockKey], Value], partition: Partition, key: BlockKey) -> Value:
    value = current.get((partition, key))
    assert value is not None, f"I12: an entry of {partition.tenant} is there that was deleted or never acknowledged"
    return value


def _i4_limits(world: TwoTierWorld) -> None:
    """Within both limits; or, after one was lowered, only what is in use or on its way out is above, and shrinks."""
    usage = world.core.usage()
    file_bytes: Counter[TenantId] = Counter()
    for file in world.disk.files.values():
        file_bytes[file.folder.tenant] += file.size_bytes
    for tenant, owner in world.tier.tenants.items():
        quota = owner.quota
        assert file_bytes[tenant] <= owner.used_bytes, f"I4: {tenant} has more on disk than it is charged"
        _never_grows_above(world, tenant, "SSD", owner.used_bytes, quota.limit_bytes if owner.in_policy else 0)
        books = usage.tenants.get(tenant)
        if books is not None and tenant in world.rules:
            _never_grows_above(world, tenant, "DRAM", books.used_bytes, books.limit_bytes)
            _i4_namespaces(world, tenant, books)
    assert sum(file_bytes.values()) <= world.tier.used_bytes <= world.tier.capacity_bytes, "I4: the device"


def _i4_namespaces(world: TwoTierWorld, tenant: TenantId, books: TenantUsage) -> None:
    """As of a tenant: a namespace is within its own limits, or above a lowered one and shrinking; and has no others."""
    for part in books.namespaces.values():
        assert part.used_bytes <= books.used_bytes, f"I8: a namespace of {tenant} uses more than all of it"
        limits = world.rules[tenant].namespace_limits
        assert part.limit_bytes == limits.get(Tier.DRAM) and part.ssd_limit_bytes in (None, limits.get(Tier.SSD))
        held = (("DRAM", part.used_bytes, part.limit_bytes), ("SSD", part.ssd_used_bytes, part.ssd_limit_bytes))
        for tier, used_bytes, limit_bytes in held:
            if limit_bytes is not None:
                _never_grows_above(world, tenant, f"{tier} of namespace {part.uid}", used_bytes, limit_bytes)


def _never_grows_above(world: TwoTierWorld, tenant: TenantId, tier: str, used_bytes: int, limit_bytes: int) -> None:
    if used_bytes <= limit_bytes:
        world.above.pop((tenant, tier), None)
        return
    before_bytes = world.above.get((tenant, tier), used_bytes)
    assert used_bytes <= before_bytes, f"I4: {tenant} grows above its limit on {tier}"
    world.above[tenant, tier] = used_bytes


def _i8_books(world: TwoTierWorld) -> None:
    for tenant, owner in world.tier.tenants.items():
        charged_bytes = sum(segment.charged_bytes for segment in owner.segments.values())
        assert owner.used_bytes == charged_bytes, f"I8: {tenant} on SSD"
        assert owner.used_bytes % BLOCK_BYTES == 0
    usage = world.core.usage()
    dram: Counter[TenantId] = Counter()
    for (partition, _), entry in world.in_dram().items():
        dram[partition.tenant] += entry.size_bytes
    for tenant, books in usage.tenants.items():
        assert books.resident_bytes >= dram[tenant], f"I8: {tenant} has more in DRAM than its books say"
    used_bytes = sum(books.used_bytes for books in usage.tenants.values())
    assert usage.free_bytes + used_bytes == world.dram_bytes, "I8: free and used are not the capacity"


def _i12_gone(world: TwoTierWorld, there: dict[tuple[Partition, BlockKey], int]) -> None:
    """What the policy does not name is in no index; its files wait for their removal, without a way to them."""
    for partition, _ in there:
        assert world.is_open(partition), f"I12: {partition} is closed, and still in the index"
    for partition in {partition for partition, _ in world.in_dram()}:
        assert world.is_open(partition), f"I12: {partition} is closed, and still in DRAM"

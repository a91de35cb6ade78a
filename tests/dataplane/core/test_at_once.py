"""Using keys at once is the same as the single commands, one key after the other: entries, order, books."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dataplane.core.cache import CacheCore
from dataplane.core.entry import PutTicket
from dataplane.core.eviction import Eviction
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.core.reservations import Reservations
from dataplane.replay.ssd import NodeSsd, quota_bytes
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota

TENANTS = [TenantId(name) for name in ("a", "b", "c")]
PARTITIONS = {
    (tenant, name): Partition(tenant, NamespaceId(name), f"{tenant}-{name}", 1)
    for tenant in TENANTS
    for name in ("n", "m")
}


def policy(reserved: int, limit: int, *, namespace_limit: int | None = None) -> NodePolicy:
    quota = TierQuota(reserved * GRANULE_BYTES, limit * GRANULE_BYTES)
    limits = {} if namespace_limit is None else {Tier.DRAM: namespace_limit * GRANULE_BYTES}
    return NodePolicy(
        1,
        {
            tenant: TenantPolicy(
                TenantState.ACTIVE,
                {Tier.DRAM: quota},
                {
                    NamespaceId(name): NamespacePolicy(f"{tenant}-{name}", 2 * GRANULE_BYTES, (1,), limits, {}, 16)
                    for name in ("n", "m")
                },
            )
            for tenant in TENANTS
        },
    )


def one_by_one(
    core: CacheCore, partition: Partition, keys: Sequence[BlockKey], size_bytes: int, now_ns: int, *, reads: bool
) -> None:
    for key in keys:
        if key in core._open_index(partition).entries:  # a lookup's miss would count
            if reads:
                core.get_end(core.get_start(partition, (key,), now_ns))
        elif isinstance(ticket := core.put_start(partition, key, size_bytes, now_ns), PutTicket):
            core.put_commit(ticket, 0, now_ns)


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.blake2b(number.to_bytes(4, "big"), digest_size=32).digest())


def orders(core: CacheCore) -> dict[TenantId, list[tuple[BlockKey, int]]]:
    return {
        tenant: [(entry.key, entry.size_bytes) for entry in owner.order] for tenant, owner in core._pool.tenants.items()
    }


@pytest.mark.parametrize("eviction", Eviction)
@pytest.mark.parametrize(
    ("reserved", "limit", "namespace_limit", "reservations", "sizes"),
    [
        (0, 30, None, Reservations.STRICT, (GRANULE_BYTES,)),
        (10, 12, None, Reservations.STRICT, (GRANULE_BYTES,)),
        (5, 30, None, Reservations.STRICT, (GRANULE_BYTES, GRANULE_BYTES - 1)),
        (5, 30, None, Reservations.STRICT, (GRANULE_BYTES, 2 * GRANULE_BYTES)),
        (10, 30, None, Reservations.EARNING, (GRANULE_BYTES,)),
        (0, 30, 7, Reservations.STRICT, (GRANULE_BYTES,)),
    ],
)
def test_used_at_once_is_as_by_single_commands(
    eviction: Eviction,
    reserved: int,
    limit: int,
    namespace_limit: int | None,
    reservations: Reservations,
    sizes: tuple[int, ...],
) -> None:
    chance = random.Random(f"{eviction} {reserved} {limit} {sizes}")
    cores = [CacheCore(32 * GRANULE_BYTES, eviction=eviction, reservations=reservations) for _ in range(2)]
    evicted: list[list[tuple[str, BlockKey]]] = [[], []]
    for core, gone in zip(cores, evicted, strict=True):
        core.apply_policy(policy(reserved, limit, namespace_limit=namespace_limit), 1)
        core.on_evict(lambda entry, gone=gone: gone.append((entry.index.owner.tenant, entry.key)))  # type: ignore[misc]
    now_ns = 1
    held = None
    for step in range(400):
        now_ns += 10_000_000
        partition = PARTITIONS[chance.choice(TENANTS), chance.choice("nm")]
        first = chance.randrange(40)
        keys = [key_of(number) for number in range(first, first + chance.randrange(1, 12))]
        reads, size_bytes = chance.random() < 0.7, chance.choice(sizes)
        cores[0].use_at_once(partition, keys, size_bytes, now_ns, reads=reads)
        one_by_one(cores[1], partition, keys, size_bytes, now_ns, reads=reads)
        if step % 50 == 20:  # somebody reads meanwhile
            held = [core.get_start(partition, keys[:3], now_ns) for core in cores]
        elif held and step % 50 == 30:
            for core, pins in zip(cores, held, strict=True):
                core.get_end(pins)
        for core in cores:
            core.check_invariants()
        assert orders(cores[0]) == orders(cores[1])
        assert evicted[0] == evicted[1]
        assert cores[0].usage() == cores[1].usage()
    assert evicted[0], "nothing was ever evicted: nothing was compared"


def test_what_is_on_ssd_is_not_stored_again_as_by_single_commands() -> None:
    chance = random.Random(5)
    ssds = [NodeSsd(60, 1, read_bytes_per_s=1e9, write_bytes_per_s=1e9) for _ in range(2)]
    cores = [CacheCore(32 * GRANULE_BYTES, ssd=ssd.tier) for ssd in ssds]
    for core, ssd in zip(cores, ssds, strict=True):
        rules = policy(5, 30)
        ssd_quota = TierQuota(0, quota_bytes(60))
        core.apply_policy(
            replace(
                rules,
                tenants={
                    tenant: replace(one, tiers={**one.tiers, Tier.SSD: ssd_quota})
                    for tenant, one in rules.tenants.items()
                },
            ),
            1,
        )
        core.on_evict(ssd.demote)
    for step in range(300):
        partition = PARTITIONS[chance.choice(TENANTS), chance.choice("nm")]
        first = chance.randrange(40)
        keys = [key_of(number) for number in range(first, first + chance.randrange(1, 12))]
        cores[0].use_at_once(partition, keys, GRANULE_BYTES, step * 10_000_000, reads=False)
        one_by_one(cores[1], partition, keys, GRANULE_BYTES, step * 10_000_000, reads=False)
        for core in cores:
            core.check_invariants()
        assert orders(cores[0]) == orders(cores[1])
        assert cores[0].usage() == cores[1].usage()
    assert ssds[0].blocks() == ssds[1].blocks() > 0


def test_a_closed_partition_stores_nothing() -> None:
    core = CacheCore(32 * GRANULE_BYTES)
    core.apply_policy(policy(0, 30), 1)
    stranger = Partition(TENANTS[0], NamespaceId("n"), "another", 1)
    core.use_at_once(stranger, [key_of(1)], GRANULE_BYTES, 2)
    assert core.lookup(stranger, [key_of(1)]) == (0, b"\0")
    core.check_invariants()

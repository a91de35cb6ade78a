"""A core that was led by deltas is one that was led by snapshots, and a delta costs what it changes."""

from __future__ import annotations

import random

import pytest

from dataplane.core.cache import CacheCore
from dataplane.core.entry import PutTicket
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.core.ssd_tier import SsdTier
from saltern.errors import FailedPreconditionError
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota

GRANULES = 256
CHAT = NamespaceId("chat")
NAMES = [TenantId(name) for name in "abcdefgh"]


def rules(draw: random.Random) -> TenantPolicy:
    limit_bytes = draw.randint(0, 24) * GRANULE_BYTES
    quota = TierQuota(draw.randint(0, limit_bytes), limit_bytes)
    return TenantPolicy(
        draw.choice([TenantState.ACTIVE, TenantState.ACTIVE, TenantState.SUSPENDED]),
        {Tier.DRAM: quota, Tier.SSD: quota},
        {CHAT: NamespacePolicy("u", GRANULE_BYTES, (draw.randint(1, 2),))},
    )


def state(core: CacheCore, ssd: SsdTier) -> object:
    core.check_invariants()
    usage = core.usage()  # where in the arena things lie depends on the order in which tenants are looked at
    return (
        core.policy,
        core.settled_version,
        usage.tenants,
        usage.free_bytes,
        {tenant: (owner.quota, owner.in_policy) for tenant, owner in ssd.tenants.items()},
    )


def new_core() -> tuple[CacheCore, SsdTier]:
    ssd = SsdTier(GRANULES * GRANULE_BYTES)
    return CacheCore(GRANULES * GRANULE_BYTES, ssd=ssd), ssd


@pytest.mark.parametrize("seed", range(40))
def test_led_by_deltas_or_by_snapshots_it_is_the_same_core(seed: int) -> None:
    draw = random.Random(seed)
    cores = [new_core(), new_core()]
    tenants: dict[TenantId, TenantPolicy] = {}
    for version in range(1, 40):
        touched = draw.sample(NAMES, draw.randint(0, 3))
        tenants = dict(tenants)
        for name in touched:
            tenants.pop(name, None)
            if draw.random() < 0.8:
                tenants[name] = rules(draw)
        policy = NodePolicy(version, tenants)
        for by_delta, (core, _) in enumerate(cores):
            core.apply_policy(policy, version, touched=touched if by_delta else None)
        for number in range(12):
            name, epoch, key = draw.choice(NAMES), draw.randint(1, 2), BlockKey(draw.randbytes(32))
            for core, _ in cores:
                ticket = core.put_start(Partition(name, CHAT, "u", epoch), key, GRANULE_BYTES, version * 100 + number)
                if isinstance(ticket, PutTicket):
                    core.put_commit(ticket, 0, version * 100 + number)
        assert state(*cores[0]) == state(*cores[1])
        if draw.random() < 0.5:
            for core, _ in cores:
                core.work_off(version * 100 + 50, GRANULES * GRANULE_BYTES)
            assert state(*cores[0]) == state(*cores[1])
    assert cores[1][0].settled_version


def test_i5_a_delta_that_reserves_too_much_changes_nothing() -> None:
    core, _ = new_core()
    whole = TierQuota(GRANULES * GRANULE_BYTES, GRANULES * GRANULE_BYTES)
    base = {NAMES[0]: TenantPolicy(TenantState.ACTIVE, {Tier.DRAM: whole}, {})}
    core.apply_policy(NodePolicy(1, base), 0)
    for tier in Tier:
        more = base | {NAMES[1]: TenantPolicy(TenantState.ACTIVE, {tier: TierQuota(1, 1)}, {})}
        if tier is Tier.SSD:
            more[NAMES[2]] = TenantPolicy(TenantState.ACTIVE, {tier: whole}, {})
        with pytest.raises(FailedPreconditionError, match="reservations"):
            core.apply_policy(NodePolicy(2, more), 1, touched=NAMES[1:3])
        assert core.policy.version == 1
        assert core.tenants() == [NAMES[0]]
    core.apply_policy(NodePolicy(3, {NAMES[1]: base[NAMES[0]]}), 2, touched=NAMES[:2])
    assert core.policy.version == 3

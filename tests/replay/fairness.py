"""Tenants beside each other in one pool, through the real core: hit rates, and how they compare with being alone.

    python -m tests.replay.fairness TRACES_FOLDER [CAPACITY_BLOCKS ...]

On the four-tenant trace, each tenant has a quarter of the pool reserved and may use all of it. *rho* of a tenant is its
hit rate in the pool over that of a cache of its own of the size of its reservation, under LRU.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dataplane.core.cache import CacheCore
from dataplane.core.entry import PutTicket
from dataplane.core.eviction import DEFAULT_EVICTION, Eviction
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.core.reservations import Reservations
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota
from tests.replay.orders import hit_rate
from tests.replay.traces import ReplayTrace, load

TENANTS: Final = ("agent", "chat", "burst", "scan")
_NAMESPACE: Final = NamespaceId("n")
_BLOCK_NS: Final = 1_000_000


@dataclass(frozen=True)
class Rates:
    """Hit tokens over prompt tokens: by tenant, and in all."""

    by_tenant: dict[str, float]
    aggregate: float

    def rho(self, alone: dict[str, float]) -> dict[str, float]:
        """By tenant, for those whom a cache serves at all."""
        return {tenant: self.by_tenant[tenant] / rate for tenant, rate in alone.items() if rate > 0.001}


def replay(
    trace: ReplayTrace,
    keys: list[BlockKey],
    capacity_blocks: int,
    *,
    reserved_blocks: int,
    reservations: Reservations,
    eviction: Eviction = DEFAULT_EVICTION,
    touches_chain: bool = True,
) -> Rates:
    """Drive a core as a client does: get the prompt's blocks, put those that are missing, mark all as used.

    Args:
        touches_chain: mark the whole chain after a put; False: only what was put.
    """
    core = CacheCore(capacity_blocks * GRANULE_BYTES, eviction=eviction, reservations=reservations)
    core.apply_policy(_policy(capacity_blocks, reserved_blocks), 1)
    partitions = {tenant: Partition(TenantId(tenant), _NAMESPACE, "u", 1) for tenant in TENANTS}
    hit_tokens: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    now_ns = 1
    for request in trace.requests:
        partition = partitions[request.tenant]
        chain = [keys[block] for block in request.blocks]
        now_ns += _BLOCK_NS * len(chain)
        pins = core.get_start(partition, chain, now_ns)
        core.get_end(pins)
        prefix = pins.index(None) if None in pins else len(pins)
        hit_tokens[request.tenant] += min(request.tokens, prefix * trace.block_tokens)
        tokens[request.tenant] += request.tokens
        now_ns += _BLOCK_NS * len(chain)
        missing = [key for key, pin in zip(chain, pins, strict=True) if pin is None]
        for key in reversed(missing):
            ticket = core.put_start(partition, key, GRANULE_BYTES, now_ns)
            if isinstance(ticket, PutTicket):
                core.put_commit(ticket, 0, now_ns)
        now_ns += _BLOCK_NS * len(chain)
        core.touch(partition, chain if touches_chain else missing, now_ns)
        now_ns += _BLOCK_NS * len(chain)
    core.check_invariants()
    rates = {tenant: hit_tokens[tenant] / tokens[tenant] for tenant in tokens}
    return Rates(rates, hit_tokens.total() / tokens.total())


def alone_rates(trace: ReplayTrace, keys: list[BlockKey], capacity_blocks: int) -> dict[str, float]:
    """Each tenant by itself in an LRU cache of that size."""
    rates = {}
    for tenant in TENANTS:
        own = ReplayTrace(
            trace.block_tokens, trace.unique_blocks, [request for request in trace.requests if request.tenant == tenant]
        )
        rates[tenant] = hit_rate(own, keys, Eviction.LRU, capacity_blocks)
    return rates


def _policy(capacity_blocks: int, reserved_blocks: int) -> NodePolicy:
    quota = TierQuota(reserved_blocks * GRANULE_BYTES, capacity_blocks * GRANULE_BYTES)
    namespaces = {_NAMESPACE: NamespacePolicy("u", GRANULE_BYTES, (1,))}
    rules = TenantPolicy(TenantState.ACTIVE, {Tier.DRAM: quota}, namespaces)
    return NodePolicy(1, {TenantId(tenant): rules for tenant in TENANTS})


def main(folder: str, *capacities: str) -> None:
    trace = load(Path(folder), "mt_sample")
    keys = trace.keys()
    for capacity_blocks in map(int, capacities or ("48000", "24000")):
        reserved_blocks = capacity_blocks // len(TENANTS)
        alone = alone_rates(trace, keys, reserved_blocks)
        for name, reservations, blocks in (
            ("nothing reserved", Reservations.STRICT, 0),
            ("strict", Reservations.STRICT, reserved_blocks),
            ("earning", Reservations.EARNING, reserved_blocks),
        ):
            for eviction in (Eviction.TWO_QUEUE, Eviction.LRU):
                rates = replay(
                    trace, keys, capacity_blocks, reserved_blocks=blocks, reservations=reservations, eviction=eviction
                )
                rho = rates.rho(alone)
                print(
                    f"{capacity_blocks} {name}, {eviction}: min rho {min(rho.values()):.3f}"
                    f" aggregate {rates.aggregate:.4f}",
                    {tenant: round(value, 3) for tenant, value in rho.items()},
                    flush=True,
                )


if __name__ == "__main__":
    main(*sys.argv[1:])

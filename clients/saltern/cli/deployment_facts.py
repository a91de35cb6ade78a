"""What the books of a deployment tell of mistakes that no probe of a door shows: pure functions of what was listed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final

from saltern.admin.v1.credentials_pb2 import ApiKey
from saltern.admin.v1.namespaces_pb2 import Namespace
from saltern.admin.v1.quotas_pb2 import TIER_DRAM, TIER_SSD, Quota
from saltern.admin.v1.tenants_pb2 import Tenant
from saltern.admin.v1.usage_pb2 import Node, Usage
from saltern.cli.finding import Finding, ok, warn
from saltern.endpoints import parse_endpoint
from saltern.sizes import format_size

#: An API key that ends within this time is worth a warning.
KEY_WARN_DAYS: Final = 14
_NAMES_SHOWN_MAX: Final = 5


def of_nodes(nodes: Iterable[Node], *, is_control_local: bool) -> Iterator[Finding]:
    """What the registry says of nodes that answer: where clients are sent, which policy they go by, who wants what."""
    at: defaultdict[str, list[str]] = defaultdict(list)
    for node in nodes:
        node_id = node.name.removeprefix("nodes/")
        if node.state == Node.STATE_LOST:
            continue  # said elsewhere
        at[node.wire_endpoint].append(node_id)
        check = f"node {node_id}"
        if node.state == Node.STATE_LATE:
            yield warn(check, "did not report when it should have", "look at its log, its load and its clock")
        if node.admin_state == Node.ADMIN_STATE_CORDONED:
            yield warn(
                check, "cordoned: new sessions go elsewhere", f"`saltern node uncordon {node_id}` when it is well"
            )
        elif node.admin_state == Node.ADMIN_STATE_DRAINING:
            yield warn(check, "draining: it evicts down to nothing", f"`saltern node uncordon {node_id}` to keep it")
        if node.policy_lag:
            yield warn(
                check,
                f"goes by a policy that is {node.policy_lag} version{'s' * (node.policy_lag != 1)} behind",
                "its log says what it refuses, or that it is cut off",
            )
        if not is_control_local and parse_endpoint(node.wire_endpoint).is_loopback:
            yield warn(
                check,
                f"clients are sent to {node.wire_endpoint}, which on their machines is themselves",
                f"start it with --listen on an address of its own, or --advertise-host, and restart {node_id}",
            )
    for endpoint, ids in at.items():
        if len(ids) > 1:
            yield warn(
                f"nodes {', '.join(sorted(ids))}",
                f"all say that they are at {endpoint}",
                "give each an address of its own: --listen, --advertise-host",
            )


def of_memory(nodes: Iterable[Node], usages: Iterable[Usage]) -> Finding:
    """Whether what is promised fits the nodes that are there now (I5)."""
    there = sum(node.dram_capacity_bytes for node in nodes if node.state != Node.STATE_LOST)
    promised = sum(tier.reserved_bytes for usage in usages for tier in usage.tiers if tier.tier == TIER_DRAM)
    text = f"{format_size(promised)} reserved of {format_size(there)} on nodes that are there"
    if promised > there:
        return warn(
            "reservations",
            text,
            "start the lost nodes again, or lower reservations: until then they cannot all be kept",
        )
    return ok("reservations", text)


def of_tenants(tenants: Iterable[Tenant], usages: Iterable[Usage]) -> Iterator[Finding]:
    """Tenants that can store nothing, and those that are suspended."""
    limits = {usage.tenant.removeprefix("tenants/"): sum(tier.limit_bytes for tier in usage.tiers) for usage in usages}
    listed = list(tenants)
    ids = [tenant.name.removeprefix("tenants/") for tenant in listed]
    without = [tenant_id for tenant_id in ids if not limits.get(tenant_id)]
    if without:
        yield warn(
            "quotas",
            f"no quota, so nothing is ever stored: {_some(without)}",
            f"`saltern quota set {without[0]} --dram-limit SIZE`",
        )
    suspended = [
        tenant_id for tenant_id, tenant in zip(ids, listed, strict=True) if tenant.state == Tenant.STATE_SUSPENDED
    ]
    if suspended:
        yield warn(
            "tenants", f"suspended: {_some(suspended)}", f"`saltern tenant resume {suspended[0]}` if it may again"
        )
    if not without and not suspended:
        yield ok("tenants", f"{len(ids)}, each with a quota")


def of_quota(quota: Quota) -> Finding:
    """What a tenant's own quota lets it store."""
    limits = {tier.tier: tier.limit_bytes for tier in quota.tiers}
    if not any(limits.values()):
        return warn(
            "quota", "no limit was given, so nothing is ever stored", "ask the platform's administrator for a quota"
        )
    shown = ", ".join(
        f"{format_size(limits[tier])} of {name}"
        for tier, name in ((TIER_DRAM, "DRAM"), (TIER_SSD, "SSD"))
        if limits.get(tier)
    )
    return ok("quota", f"up to {shown}")


def of_namespace(namespace: Namespace, quota: Quota) -> Finding:
    """Whether a block of the namespace fits what it may hold."""
    check = f"namespace {namespace.name.rpartition('/')[2]} limits"
    quotas = {tier.tier: tier.limit_bytes for tier in quota.tiers}
    own = {limit.tier: limit.limit_bytes for limit in namespace.tier_limits}
    dram_bytes = min(quotas.get(TIER_DRAM, 0), own.get(TIER_DRAM, quotas.get(TIER_DRAM, 0)))
    if not dram_bytes:
        return warn(
            check,
            "it may hold nothing in DRAM, and what is not there never gets to SSD",
            f"`saltern namespace update ... --dram-limit SIZE`, and a quota with --dram-limit, for {namespace.name}",
        )
    if dram_bytes < namespace.block_bytes:
        return warn(
            check,
            f"one block of {format_size(namespace.block_bytes)} does not fit the {format_size(dram_bytes)} it may hold",
            "raise the limit of the namespace or the quota, or make a namespace of smaller blocks",
        )
    return ok(check, f"room for {dram_bytes // namespace.block_bytes} of the largest blocks")


def of_keys(keys: Iterable[ApiKey], now: datetime) -> Iterator[Finding]:
    """API keys that have ended or end soon; ``now`` with its timezone."""
    ending: list[str] = []
    ended: list[str] = []
    count = 0
    for key in keys:
        count += 1
        if key.HasField("expire_time"):
            days = (key.expire_time.ToDatetime(tzinfo=UTC) - now).total_seconds() / 86400
            if days <= 0:
                ended.append(key.name.rpartition("/")[2])
            elif days < KEY_WARN_DAYS:
                ending.append(f"{key.name.rpartition('/')[2]} in {days:.0f} days")
    if ended:
        yield warn("API keys", f"ended: {_some(ended)}", f"`saltern key rotate {ended[0]}`, or delete it")
    if ending:
        first = ending[0].partition(" ")[0]
        yield warn("API keys", f"ending: {_some(ending)}", f"`saltern key rotate {first} --expires-in 90d`")
    if not ended and not ending:
        yield ok("API keys", f"{count}, none ends within {KEY_WARN_DAYS} days")


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMES_SHOWN_MAX])
    return shown if len(names) <= _NAMES_SHOWN_MAX else f"{shown} and {len(names) - _NAMES_SHOWN_MAX} more"

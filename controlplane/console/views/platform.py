"""What the platform's administrators see: tenants, nodes with their leases, and which policy each node goes by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.console.views import texts
from controlplane.console.views.usage import Figure
from saltern.admin.v1.quotas_pb2 import TIER_DRAM
from saltern.admin.v1.tenants_pb2 import Tenant
from saltern.admin.v1.usage_pb2 import Node, Usage
from saltern.hit_rate import wanted_so_far


@dataclass(frozen=True, slots=True)
class TenantRow:
    id: str
    display_name: str
    is_suspended: bool
    used: str
    limit: str
    reserved: str
    share: str
    used_width: float
    hit_rate: str
    refused: str
    taken_by_others: str


def tenant_rows(tenants: Sequence[Tenant], usages: Mapping[str, Usage]) -> list[TenantRow]:
    """``usages``: by resource name of the tenant."""
    return [_tenant(tenant, usages.get(tenant.name, Usage())) for tenant in tenants]


def _tenant(tenant: Tenant, usage: Usage) -> TenantRow:
    dram = next((tier for tier in usage.tiers if tier.tier == TIER_DRAM), None)
    used, limit = (dram.used_bytes, dram.limit_bytes) if dram is not None else (0, 0)
    return TenantRow(
        id=texts.last_segment(tenant.name),
        display_name=tenant.display_name,
        is_suspended=tenant.state == Tenant.STATE_SUSPENDED,
        used=texts.size(used),
        limit=texts.size(limit) if limit else "no quota",
        reserved=texts.size(dram.reserved_bytes) if dram is not None else texts.NOTHING,
        share=texts.ratio(used, limit),
        used_width=round(1000 * min(used / limit, 1), 1) if limit else 0,
        hit_rate=texts.ratio(usage.get_hits, wanted_so_far(usage)),
        refused=texts.count(usage.puts_refused),
        taken_by_others=texts.count(usage.evictions_by_cause.get("neighbour", 0)),
    )


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node. ``state``: live, late or lost. ``lag``: policy versions behind; 0 for none."""

    id: str
    state: str
    admin_state: str
    wire_endpoint: str
    grpc_endpoint: str
    is_tls: bool
    capacity: str
    granted: str
    believed: str
    granted_width: float
    lease_until: str
    fencing_epoch: int
    reported: str
    policy_version: int
    settled_version: int
    lag: int


def node_rows(nodes: Sequence[Node], now: datetime) -> list[NodeRow]:
    return [_node(node, now) for node in nodes]


def _node(node: Node, now: datetime) -> NodeRow:
    capacity = node.dram_capacity_bytes
    return NodeRow(
        id=texts.last_segment(node.name),
        state=texts.enum_word(Node.State, node.state, "STATE_"),
        admin_state=texts.enum_word(Node.AdminState, node.admin_state, "ADMIN_STATE_"),
        wire_endpoint=node.wire_endpoint,
        grpc_endpoint=node.grpc_endpoint,
        is_tls=bool(node.tls_server_name),
        capacity=texts.size(capacity),
        granted=texts.size(node.granted_bytes),
        believed=texts.size(node.believed_bytes),
        granted_width=round(1000 * min(node.granted_bytes / capacity, 1), 1) if capacity else 0,
        lease_until=texts.exact_stamp(node.lease_expire_time),
        fencing_epoch=node.fencing_epoch,
        reported=texts.ago(texts.to_datetime(node.last_report_time), now),
        policy_version=node.policy_version,
        settled_version=node.settled_version,
        lag=node.policy_lag,
    )


def node_figures(nodes: Sequence[Node]) -> tuple[Figure, ...]:
    """The fleet in four numbers."""
    live = [node for node in nodes if node.state == Node.STATE_LIVE]
    capacity = sum(node.dram_capacity_bytes for node in live)
    granted = sum(node.granted_bytes for node in live)
    behind = sum(node.policy_lag > 0 for node in live)
    return (
        Figure("Nodes live", f"{len(live)}", f"of {len(nodes)} registered"),
        Figure("Capacity", texts.size(capacity), "DRAM of live nodes"),
        Figure("Leased", texts.ratio(granted, capacity), f"{texts.size(granted)} granted to tenants"),
        Figure("Newest policy", f"{newest_version(nodes)}", f"{behind} live node{'s' if behind != 1 else ''} behind"),
    )


def newest_version(nodes: Sequence[Node]) -> int:
    """The newest policy that there is, as far as nodes tell; 0 without any."""
    return max((node.policy_version + node.policy_lag for node in nodes), default=0)

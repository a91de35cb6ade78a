"""Checks and decodes what nodes send: nothing reaches the database that the schema or a reader could trip over."""

from __future__ import annotations

from typing import Final

from controlplane.node.registry import NodeFacts, TenantBooks, TierBooks
from controlplane.node.snapshot import TIER_FROM_PROTO
from saltern.errors import InvalidArgumentError
from saltern.names import parse_tenant_id
from saltern.node.v1 import node_pb2
from tenants.quota import BYTES_MAX, Tier

_TEXT_MAX_CHARS: Final = 256
_COUNTERS: Final = (
    "get_hits",
    "get_misses",
    "get_bytes",
    "put_bytes",
    "puts_stored",
    "puts_refused",
    "evictions",
    "evicted_bytes",
)


def decode_facts(request: node_pb2.RegisterNodeRequest) -> NodeFacts:
    """Decode a registration; raises InvalidArgumentError."""
    capacities: dict[Tier, int] = {}
    for capacity in request.capacities:
        tier = _tier(capacity.tier)
        if tier in capacities:
            raise _invalid("capacities", f"names the tier {tier.value} twice")
        capacities[tier] = _count("capacity_bytes", capacity.capacity_bytes, BYTES_MAX)
    endpoint = request.endpoint
    return NodeFacts(
        wire_endpoint=_text("wire_endpoint", endpoint.wire_endpoint, required=True),
        shm_path=_text("shm_path", endpoint.shm_path),
        grpc_endpoint=_text("grpc_endpoint", endpoint.grpc_endpoint),
        host_id=_text("host_id", endpoint.host_id),
        capacities_bytes=capacities,
        software_version=_text("software_version", request.software_version),
    )


def decode_books(request: node_pb2.ReportUsageRequest) -> list[TenantBooks]:
    """Decode a usage report; raises InvalidArgumentError."""
    _count("applied_version", request.applied_version)
    books: dict[str, TenantBooks] = {}
    for usage in request.tenants:
        tenant = parse_tenant_id(usage.tenant_id)
        if tenant in books:
            raise _invalid("tenants", f"names the tenant {tenant} twice")
        tiers: dict[Tier, TierBooks] = {}
        for tier_usage in usage.tiers:
            tier = _tier(tier_usage.tier)
            if tier in tiers:
                raise _invalid("tiers", f"names the tier {tier.value} of {tenant} twice")
            tiers[tier] = TierBooks(
                used_bytes=_count("used_bytes", tier_usage.used_bytes), entries=_count("entries", tier_usage.entries)
            )
        counters = {name: _count(name, getattr(usage, name)) for name in _COUNTERS}
        books[tenant] = TenantBooks(tenant, tiers, counters)
    return list(books.values())


def _tier(value: int) -> Tier:
    tier = TIER_FROM_PROTO.get(value)  # type: ignore[call-overload]
    if tier is None:
        raise _invalid("tier", f"{value} is not a tier")
    return Tier(tier)


def _count(field: str, value: int, limit: int = 2**63 - 1) -> int:
    if not 0 <= value <= limit:
        raise _invalid(field, f"{value} is outside 0..{limit}")
    return value


def _text(field: str, value: str, *, required: bool = False) -> str:
    if len(value) > _TEXT_MAX_CHARS or not value.isprintable() or (required and not value):
        raise _invalid(field, f"must be {1 if required else 0} to {_TEXT_MAX_CHARS} printable characters")
    return value


def _invalid(field: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{field}: {what}", reason="INVALID_NODE_FIELD", hint="see proto/saltern/node/v1", metadata={"field": field}
    )

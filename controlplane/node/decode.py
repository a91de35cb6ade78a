"""Checks and decodes what nodes send: nothing reaches the database that the schema or a reader could trip over."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from controlplane.db.models import USAGE_COUNTERS, USAGE_MAPS
from controlplane.node.books import TenantBooks, TierBooks
from controlplane.node.policy_encode import TIER_FROM_PROTO
from controlplane.node.registry import NodeFacts
from saltern.admin.v1 import usage_pb2
from saltern.errors import InvalidArgumentError
from saltern.names import NodeId, parse_tenant_id
from saltern.node.v1 import node_pb2
from tenants.quota import BYTES_MAX, Tier

_TEXT_MAX_CHARS: Final = 256
#: Causes and reasons that one tenant's usage may name: far more than there are.
_NAMES_MAX: Final = 64
#: Nodes of which the last good report is remembered.
_NODES_MAX: Final = 64
#: Looked at in one go, about 5 ms where all of them have changed.
_TENANTS_AT_ONCE: Final = 100
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)


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
        tls_server_name=_text("tls_server_name", endpoint.tls_server_name),
        state_id=_text("state_id", request.state_id),
    )


class ReportChecker:
    """Checks reports of nodes. What a node says of a tenant byte for byte as in its last good report needs no look.

    Of 10,000 tenants nearly all are as they were, and to compare bytes takes a tenth of the time.
    """

    def __init__(self) -> None:
        self._good: OrderedDict[NodeId, dict[str, bytes]] = OrderedDict()

    async def check(self, node: NodeId, report: node_pb2.ReportUsageRequest) -> dict[str, bytes]:
        """What ``report`` says of each tenant, encoded; others have the event loop now and then.

        Raises:
            InvalidArgumentError: INVALID_NODE_FIELD; the report before counts still.
        """
        _count("applied_version", report.applied_version)
        _count("settled_version", report.settled_version)
        good = self._good.get(node, {})
        said: dict[str, bytes] = {}
        for number, usage in enumerate(report.tenants):
            if number % _TENANTS_AT_ONCE == _TENANTS_AT_ONCE - 1:
                await asyncio.sleep(0)
            tenant = usage.tenant_id
            if tenant in said:
                raise _invalid("tenants", f"names the tenant {tenant[:64]!r} twice")
            encoded = usage.SerializeToString(deterministic=True)
            known = good.get(tenant)
            if known == encoded:
                said[tenant] = known
            else:
                decode_books(usage)
                said[tenant] = encoded
        self._good[node] = said
        self._good.move_to_end(node)
        while len(self._good) > _NODES_MAX:
            self._good.popitem(last=False)
        return said


def decode_books(usage: node_pb2.TenantUsage) -> TenantBooks:
    """Decode what a report says of one tenant; raises InvalidArgumentError."""
    tenant = parse_tenant_id(usage.tenant_id)
    tiers: dict[Tier, TierBooks] = {}
    for tier_usage in usage.tiers:
        tier = _tier(tier_usage.tier)
        if tier in tiers:
            raise _invalid("tiers", f"names the tier {tier.value} of {tenant} twice")
        tiers[tier] = TierBooks(
            used_bytes=_count("used_bytes", tier_usage.used_bytes),
            entries=_count("entries", tier_usage.entries),
            lent_bytes=_count("lent_bytes", tier_usage.lent_bytes),
            borrowed_bytes=_count("borrowed_bytes", tier_usage.borrowed_bytes),
        )
    return TenantBooks(
        tenant,
        tiers,
        counters={name: _count(name, getattr(usage, name)) for name in USAGE_COUNTERS},
        maps={name: _counts_by_name(name, getattr(usage, name)) for name in USAGE_MAPS},
        ssd=_ssd_activity(usage.ssd) if usage.HasField("ssd") else None,
    )


def _counts_by_name(field: str, counts: Mapping[str, int]) -> dict[str, int]:
    if len(counts) > _NAMES_MAX:
        raise _invalid(field, f"has {len(counts)} names, above the limit of {_NAMES_MAX}")
    for name in counts:
        if _NAME.fullmatch(name) is None:
            raise _invalid(field, f"{name[:64]!r} is not the name of a cause or a reason")
    return {name: _count(field, count) for name, count in counts.items()}


def _ssd_activity(activity: usage_pb2.SsdActivity) -> dict[str, int]:
    return {
        field.name: _count(f"ssd.{field.name}", getattr(activity, field.name)) for field in activity.DESCRIPTOR.fields
    }


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

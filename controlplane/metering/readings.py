"""From what a node reports of a tenant to readings, under the names that records count by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from controlplane.core.metering import Reading, Subject
from saltern.admin.v1 import quotas_pb2
from saltern.errors import InvalidArgumentError
from saltern.names import TenantId, parse_namespace_id
from saltern.node.v1 import node_pb2
from tenants.quota import Tier

#: Between the column of counters by name and the name: ``puts_refused_by_reason/QUOTA_EXCEEDED``.
NAME_SEPARATOR: Final = "/"
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_COUNTERS_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_NAMESPACE_UID_MAX_CHARS: Final = 64
#: Fields of node.v1.TenantUsage, and the columns of records that they are counted in.
_TENANT_COUNTERS: Final = (
    ("get_hits", "hits"),
    ("get_misses", "misses"),
    ("hit_tokens", "tokens_saved"),
    ("get_bytes", "read_bytes"),
    ("put_bytes", "stored_bytes"),
    ("puts_stored", "puts_stored"),
    ("puts_refused", "puts_refused"),
    ("evictions", "evictions"),
    ("evicted_bytes", "evicted_bytes"),
)
_TENANT_MAPS: Final = (("refused_by_reason", "puts_refused_by_reason"), ("evictions_by_cause", "evictions_by_cause"))
_SSD_COUNTERS: Final = (("read_bytes", "ssd_read_bytes"), ("written_bytes", "ssd_written_bytes"))
_NAMESPACE_COUNTERS: Final = (("get_hits", "hits"), ("get_misses", "misses"), ("hit_tokens", "tokens_saved"))


def parse_counters_id(value: str) -> str:
    """The id of a process's counters, 32 hexadecimal digits; raises InvalidArgumentError."""
    if _COUNTERS_ID.fullmatch(value) is None:
        raise _invalid("counters_id", f"{value[:64]!r} is not 32 hexadecimal digits")
    return value


def decode_readings(
    usage: node_pb2.TenantUsage, capacities_bytes: Mapping[Tier, int]
) -> Iterator[tuple[Subject, Reading]]:
    """The reading of a tenant, and of each of its namespaces; nothing where the node does not know the tenant's uid.

    ``usage`` has passed :func:`controlplane.node.decode.decode_books`. What is said to be held counts up to the node's
    capacity: a node that lies, or counts wrong, makes nobody's bill larger than it could have been.

    Raises:
        InvalidArgumentError: it has, and cannot be metered all the same.
    """
    if not usage.tenant_uid:
        return  # it goes by a policy of before there were uids, until its next one
    if _UUID.fullmatch(usage.tenant_uid) is None:
        raise _invalid("tenant_uid", f"{usage.tenant_uid[:64]!r} is not a uid")
    tenant, tenant_uid = TenantId(usage.tenant_id), usage.tenant_uid
    counters = {name: _count(field, getattr(usage, field)) for field, name in _TENANT_COUNTERS}
    for field, column in _TENANT_MAPS:
        for name, count in getattr(usage, field).items():
            counters[f"{column}{NAME_SEPARATOR}{name}"] = count
    if usage.HasField("ssd"):
        counters.update((name, getattr(usage.ssd, field)) for field, name in _SSD_COUNTERS)
    yield Subject(tenant, tenant_uid), _reading(usage.tiers, counters, capacities_bytes)
    for part in usage.namespaces:
        if not 0 < len(part.uid) <= _NAMESPACE_UID_MAX_CHARS:
            raise _invalid("namespaces", f"the uid of {part.namespace_id[:64]!r} has {len(part.uid)} characters")
        counters = {name: _count(field, getattr(part, field)) for field, name in _NAMESPACE_COUNTERS}
        yield (
            Subject(tenant, tenant_uid, part.uid, parse_namespace_id(part.namespace_id)),
            _reading(part.tiers, counters, capacities_bytes),
        )


def _reading(
    tiers: Iterable[node_pb2.TenantTierUsage] | Iterable[node_pb2.NamespaceTierUsage],
    counters: dict[str, int],
    capacities_bytes: Mapping[Tier, int],
) -> Reading:
    held = {tier.tier: _count("used_bytes", tier.used_bytes) for tier in tiers}
    return Reading(
        dram_bytes=min(held.get(quotas_pb2.TIER_DRAM, 0), capacities_bytes[Tier.DRAM]),
        ssd_bytes=min(held.get(quotas_pb2.TIER_SSD, 0), capacities_bytes[Tier.SSD]),
        counters={name: count for name, count in counters.items() if count},
    )


def _count(field: str, value: int) -> int:
    if value < 0:
        raise _invalid(field, f"{value} is negative")
    return value


def _invalid(field: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{field}: {what}", reason="INVALID_NODE_FIELD", hint="see proto/saltern/node/v1", metadata={"field": field}
    )

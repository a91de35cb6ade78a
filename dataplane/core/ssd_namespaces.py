"""What namespaces have on SSD and may have: limits of a policy onto the books, and the books as values."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from dataplane.core.ssd_books import NO_LIMIT_BYTES, NamespaceSsd, TenantSsd
from tenants.policy import TenantPolicy
from tenants.quota import Tier


class NamespaceSsdUsage(NamedTuple):
    """One namespace's part of its tenant's :class:`dataplane.core.usage.SsdUsage`; no limit is None."""

    used_bytes: int
    entries: int
    limit_bytes: int | None


def set_namespace_limits(owner: TenantSsd, rules: TenantPolicy, *, is_frozen: bool = False) -> None:
    """Take over the limits of the namespaces that the policy names (I4), or no more than is there (I9).

    Books of other namespaces stay while there is something of them on disk.
    """
    limits = {space.uid: space.tier_limits.get(Tier.SSD, NO_LIMIT_BYTES) for space in rules.namespaces.values()}
    for uid, books in list(owner.namespaces.items()):
        if uid not in limits:
            books.limit_bytes = NO_LIMIT_BYTES
            if not books.used_bytes:
                del owner.namespaces[uid]
    for uid, limit_bytes in limits.items():
        if uid in owner.namespaces or limit_bytes != NO_LIMIT_BYTES:
            books = owner.namespace(uid)
            books.limit_bytes = min(limit_bytes, books.used_bytes) if is_frozen else limit_bytes


def namespace_usages(owner: TenantSsd) -> dict[str, NamespaceSsdUsage]:
    """Each of its namespaces that has something here or a limit, by uid."""
    entries: Counter[NamespaceSsd] = Counter()
    for partition in owner.partitions.values():
        entries[partition.namespace] += len(partition.entries)
    return {
        uid: NamespaceSsdUsage(
            used_bytes=books.used_bytes,
            entries=entries[books],
            limit_bytes=None if books.limit_bytes == NO_LIMIT_BYTES else books.limit_bytes,
        )
        for uid, books in owner.namespaces.items()
    }

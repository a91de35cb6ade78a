"""Rows of salt epochs, as others need them: what nodes may read, what the rules rotate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from controlplane.db.models import SaltEpoch


def readable_epochs(rows: Iterable[SaltEpoch]) -> dict[str, tuple[int, ...]]:
    """The epochs of each tenant in ascending order, the current one last: all that nodes are told of salts."""
    epochs: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        epochs[row.tenant_id].append(row.epoch)
    return {tenant: tuple(sorted(numbers)) for tenant, numbers in epochs.items()}

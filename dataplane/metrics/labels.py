"""Which tenants have a label value of their own, and under which one each increment is counted.

A node may have 10,000 tenants and some 60 series for each. So the largest tenants, by what they hold and by what they
move, are exposed by name, at most so many of them, and all others together as ``_other``. Two things must hold:

* *No series ever goes back.* An increment is counted in exactly one series, the one that its tenant is exposed under
  when it is seen, and stays there. So a tenant that gets a label begins at zero under it, and one that loses and
  regains it goes on where it stopped.
* *Labels stay.* A label is withdrawn only when its tenant is gone, or has been far from the largest for ``PATIENCE_S``
  while another one waits for a label.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from dataplane.metrics.catalog import Series
from dataplane.metrics.readings import Readings
from saltern.names import TenantId

#: No tenant can have this name: identifiers begin with a letter.
OTHER: Final = "_other"
#: How often tenants are ranked, and how long one keeps its label that no longer ranks high.
RANKING_S: Final = 15.0
PATIENCE_S: Final = 600.0


class TenantLabels:
    """Decides who is exposed by name.

    Args:
        labels_max: how many at most; 0 for nobody.
    """

    def __init__(self, labels_max: int) -> None:
        self.labels_max: Final = labels_max
        #: Who has a label, and since when he no longer deserves it; None while he does.
        self._labelled: dict[TenantId, float | None] = {}
        self._ranked_s = float("-inf")
        self._traffic_seen: dict[TenantId, int] = {}
        self._traffic: dict[TenantId, float] = {}
        self._by_use = _Largest(labels_max)
        self._by_traffic = _Largest(labels_max)

    def __contains__(self, tenant: TenantId) -> bool:
        return tenant in self._labelled

    def __len__(self) -> int:
        return len(self._labelled)

    def retain(self, tenants: Collection[TenantId]) -> bool:
        """Withdraw the labels of whoever is not among ``tenants``; label all if there is room for all.

        Returns:
            Whether there is not, so that they have to be weighed and ranked.
        """
        present = set(tenants)
        for gone in self._labelled.keys() - present:
            del self._labelled[gone]
        for gone in self._traffic_seen.keys() - present:
            del self._traffic_seen[gone]
            self._traffic.pop(gone, None)
        if len(present) > self.labels_max:
            return True
        for tenant in present - self._labelled.keys():
            self._labelled[tenant] = None
        return False

    def is_ranking_due(self, now_s: float) -> bool:
        return now_s >= self._ranked_s + RANKING_S

    def weigh(self, tenant: TenantId, *, used_bytes: int, traffic_bytes: int) -> None:
        """Say how large a tenant is: call it for each one before :meth:`rank`.

        Args:
            used_bytes: what it holds now.
            traffic_bytes: what it has asked for so far.
        """
        before_bytes = self._traffic_seen.get(tenant, 0)
        moved_bytes = traffic_bytes - before_bytes if traffic_bytes >= before_bytes else traffic_bytes
        self._traffic_seen[tenant] = traffic_bytes
        # Half of it is forgotten at each ranking: the last minutes count.
        traffic = self._traffic[tenant] = self._traffic.get(tenant, 0.0) / 2 + moved_bytes
        self._by_use.offer(used_bytes, tenant)
        self._by_traffic.offer(traffic, tenant)

    def rank(self, now_s: float) -> None:
        """Give labels to the largest of those weighed since the last ranking, as far as there are labels."""
        self._ranked_s = now_s
        by_use, by_traffic = self._by_use.take(), self._by_traffic.take()
        large = {*by_use, *by_traffic}
        for tenant, since_s in self._labelled.items():
            self._labelled[tenant] = None if tenant in large else since_s if since_s is not None else now_s
        # The largest by either measure in turn, so that each has half of the labels when they disagree.
        deserving = _alternating(by_use, by_traffic)[: self.labels_max]
        waiting = [tenant for tenant in deserving if tenant not in self._labelled]
        given_up = sorted(
            (since_s, tenant)
            for tenant, since_s in self._labelled.items()
            if since_s is not None and now_s - since_s >= PATIENCE_S
        )
        for tenant in waiting:
            if len(self._labelled) >= self.labels_max:
                if not given_up:
                    break
                del self._labelled[given_up.pop(0)[1]]
            self._labelled[tenant] = None


class Ledger:
    """Counters of all tenants, each increment in exactly one series."""

    def __init__(self) -> None:
        #: What unlabelled tenants counted, those included that are gone.
        self.other: Counter[Series] = Counter()
        self._own: dict[TenantId, Counter[Series]] = {}
        self._seen: dict[TenantId, Readings] = {}

    def account(self, tenant: TenantId, counted: Readings, *, is_labelled: bool) -> Mapping[Series, int]:
        """Take over a tenant's counters as they stand now; return what is exposed under its own name."""
        seen = self._seen.setdefault(tenant, {})
        own = self._own.setdefault(tenant, Counter()) if is_labelled else self.other
        for series, value in counted.items():
            before = seen.get(series, 0)
            # Less than before: who counts it has forgotten the tenant and begun anew, so all of it is new.
            increment = value - before if value >= before else value
            if increment or is_labelled:
                own[series] += increment
            if value or before:
                seen[series] = value
        return own if is_labelled else {}

    def retain(self, tenants: Collection[TenantId]) -> None:
        """Forget everyone but these. What they counted as others stays counted."""
        for gone in self._seen.keys() - set(tenants):
            del self._seen[gone]
            self._own.pop(gone, None)


class _Largest:
    """The largest few of many, offered one by one."""

    def __init__(self, count: int) -> None:
        self._count = count
        #: A heap: the smallest of them first.
        self._kept: list[tuple[float, TenantId]] = []

    def offer(self, size: float, tenant: TenantId) -> None:
        if size <= 0 or not self._count:
            return
        if len(self._kept) < self._count:
            heapq.heappush(self._kept, (size, tenant))
        elif (size, tenant) > self._kept[0]:
            heapq.heapreplace(self._kept, (size, tenant))

    def take(self) -> list[TenantId]:
        """They, the largest first; equal ones always in the same order. Begins anew."""
        kept, self._kept = sorted(self._kept, reverse=True), []
        return [tenant for _, tenant in kept]


def _alternating(first: list[TenantId], second: list[TenantId]) -> list[TenantId]:
    """Both lists, one from each in turn, without repetition."""
    mixed: dict[TenantId, None] = {}
    for index in range(max(len(first), len(second))):
        mixed.update(dict.fromkeys((*first[index : index + 1], *second[index : index + 1])))
    return list(mixed)

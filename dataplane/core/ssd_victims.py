"""Whose segments give way when the device is full: the rules of :mod:`dataplane.core.victims`, a segment at a time.

The oldest segment goes among tenants above their reservation, as far as that leaves them at or above it. A tenant that
grows within its reservation takes back what it lent: then also a segment that straddles the line goes. Nobody at or
below its reservation loses anything because of others (I5). At last, and only where there is no room at all, its own
oldest goes. A weight divides the age, which is counted in segments that are newer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dataplane.core.ssd_books import NamespaceSsd, SegmentBooks, SegmentState, TenantSsd


def oldest_first(owner: TenantSsd | NamespaceSsd) -> Iterator[SegmentBooks]:
    """Segments that may go, oldest first; those that are still written come last."""
    segments = list(owner.segments.values())
    yield from (one for one in segments if one.state in (SegmentState.SEALED, SegmentState.CLOSED))
    yield from (one for one in segments if one.state in (SegmentState.SEALING, SegmentState.OPEN))


def choose_segments(
    requester: TenantSsd, owners: Collection[TenantSsd], need_bytes: int, excess_bytes: int, *, is_full: bool
) -> list[SegmentBooks]:
    """Choose segments of together at least ``excess_bytes``, or as many as there lawfully are."""
    staying_bytes = requester.used_bytes - requester.leaving_bytes
    is_entitled = staying_bytes + need_bytes <= requester.quota.reserved_bytes
    left = {owner.tenant: owner.used_bytes - owner.leaving_bytes for owner in owners}
    queues = {owner: oldest_first(owner) for owner in owners}
    heads = {owner: head for owner, queue in queues.items() if (head := next(queue, None)) is not None}
    newest = max((head.number for head in heads.values()), default=0) + 1
    chosen: list[SegmentBooks] = []
    while excess_bytes > 0:
        lawful = [owner for owner, head in heads.items() if _may_lose(owner, head, left[owner.tenant], is_entitled)]
        if not lawful and is_full and not chosen and requester in heads:
            lawful = [requester]
        if not lawful:
            return chosen
        victim = max(lawful, key=lambda owner: (newest - heads[owner].number) / owner.quota.weight)
        segment = heads[victim]
        chosen.append(segment)
        left[victim.tenant] -= segment.charged_bytes
        excess_bytes -= segment.charged_bytes
        following = next(queues[victim], None)
        if following is None:
            del heads[victim]
        else:
            heads[victim] = following
    return chosen


def _may_lose(owner: TenantSsd, segment: SegmentBooks, staying_bytes: int, is_entitled: bool) -> bool:
    spare_bytes = staying_bytes - owner.quota.reserved_bytes
    return spare_bytes > 0 if is_entitled else spare_bytes >= segment.charged_bytes

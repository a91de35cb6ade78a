"""Faults planted into what joins the tiers, the tier on SSD, the soft mark and warm restarts; see tests.sim.plants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from dataplane.core import cache, soft_mark, ssd_log
from dataplane.core.cache import CacheCore
from dataplane.core.pool import Pool
from dataplane.core.segments import BLOCK_BYTES
from dataplane.core.ssd_books import Append, SegmentBooks, SegmentState, SsdRead
from dataplane.core.ssd_log import SegmentLog
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.tenant_cache import NO_LIMIT_BYTES
from tests.sim.plants import Plant


def _charge_less(original: Any) -> Any:
    def charge(self: SegmentLog, partition: Any, change_bytes: int) -> None:
        original(self, partition, change_bytes - (BLOCK_BYTES if change_bytes > 2 * BLOCK_BYTES else 0))

    return charge


def _find_what_was_not_written(original: Any) -> Any:
    return lambda self, append, *, written: original(self, append, written=True)


def _write_on_after_a_failure(original: Any) -> Any:
    """The segment goes on after a failed write: its blocks would be sealed a second time under the same nonces."""
    return lambda self, segment: None


def _do_nothing(_: Any) -> Any:
    return lambda *_, **__: None


def _keep_the_key(original: Any) -> Any:
    """A partition that goes takes its segments along, and its key stays."""

    def destroy(self: SegmentLog, partition: Any) -> None:
        before = list(self.actions)
        original(self, partition)
        after = [action for action in self.actions if action not in before and type(action).__name__ != "DestroyKey"]
        self.actions.clear()
        self.actions.extend([*before, *after])

    return destroy


def _ignore_reservations(original: Any) -> Any:
    def choose(requester: Any, owners: Any, *rest: Any, **named: Any) -> Any:
        kept = [(owner, owner.quota) for owner in owners]
        for owner, quota in kept:
            owner.quota = type(quota)(0, quota.limit_bytes, quota.weight)
        try:
            return original(requester, owners, *rest, **named)
        finally:
            for owner, quota in kept:
                owner.quota = quota

    return choose


def _the_older_record_wins(original: Any) -> Any:
    def adopt(self: SegmentLog, partition: Any, number: Any, end_block: int, rows: Any, dead: Any, **named: Any) -> Any:
        kept = [row for row in rows if row[0] not in partition.entries]
        return original(self, partition, number, end_block, kept, dead, **named)

    return adopt


def _forget_tombstones_at_a_restart(original: Any) -> Any:
    def adopt(self: SegmentLog, partition: Any, number: Any, end_block: int, rows: Any, _: Any, **named: Any) -> Any:
        return original(self, partition, number, end_block, rows, (), **named)

    return adopt


def _serve_what_was_deleted_meanwhile(original: Any) -> Any:
    def read_end(self: SsdTier, read: SsdRead, *, intact: bool) -> bool:
        original(self, read, intact=intact)
        return intact

    return read_end


def _demote_what_was_deleted_meanwhile(original: Any) -> Any:
    def append_end(self: SsdTier, append: Append, *, written: bool) -> None:
        append.is_cancelled = False
        original(self, append, written=written)

    return append_end


def _grow_past_the_limit(original: Any) -> Any:
    def make_room(self: SegmentLog, partition: Any, need_bytes: int) -> bool:
        owner = partition.owner
        quota = owner.quota
        owner.quota = type(quota)(quota.reserved_bytes, quota.limit_bytes + 8 * BLOCK_BYTES, quota.weight)
        try:
            return bool(original(self, partition, need_bytes))
        finally:
            owner.quota = quota

    return make_room


def _grow_past_the_namespaces_limit(original: Any) -> Any:
    def admit(self: Pool, index: Any, *rest: Any) -> Any:
        limit_bytes, index.namespace.limit_bytes = index.namespace.limit_bytes, NO_LIMIT_BYTES
        try:
            return original(self, index, *rest)
        finally:
            index.namespace.limit_bytes = limit_bytes

    return admit


def _grow_past_the_namespaces_limit_on_ssd(original: Any) -> Any:
    def make_room(self: SegmentLog, partition: Any, need_bytes: int) -> bool:
        limit_bytes, partition.namespace.limit_bytes = partition.namespace.limit_bytes, NO_LIMIT_BYTES
        try:
            return bool(original(self, partition, need_bytes))
        finally:
            partition.namespace.limit_bytes = limit_bytes

    return make_room


def _keep_what_is_above_a_namespaces_limit(_: Any) -> Any:
    def evict(self: Pool, namespace: Any, work_max: int = 0) -> int:
        self.forget_limit(namespace)
        return 0

    return evict


def _credit_no_namespace(original: Any) -> Any:
    """What is freed stays charged to the namespace: it can hold less and less."""

    def free(self: Pool, entry: Any) -> None:
        original(self, entry)
        entry.index.namespace.used_bytes += entry.extent_bytes

    return free


def _store_over_what_is_on_ssd(original: Any) -> Any:
    return lambda self, partition, key: False


def _seal_without_the_first_row(original: Any) -> Any:
    def live(self: SegmentBooks) -> Any:
        entries = original(self)
        return entries[1:] if self.state is SegmentState.SEALING and len(entries) > 1 else entries

    return live


def _serve_a_segment_that_was_not_flushed(original: Any) -> Any:
    return lambda self, seal, *, written, lost=False: original(self, seal, written=written or lost)


def _forget_what_no_index_has(_: Any) -> Any:
    """As if a record were gone because a read of it, or the removal of its file, has failed."""
    return lambda partition, keys: []


def _drop_a_tombstone_too_early(original: Any) -> Any:
    return lambda segment: False


def _trim_below_the_mark(original: Any) -> Any:
    def next_trimmed(owner: Any) -> Any:
        return original(owner) or next((entry for entry in owner.order if not entry.pins), None)

    return next_trimmed


def _adopt_unverified(original: Any) -> Any:
    return lambda self, entry: True


def _adopt_what_the_policy_does_not_name(original: Any) -> Any:
    """As if a snapshot were right about who may read what it holds."""

    def adopt(self: CacheCore, snapshot: Any, digest: Any, now_ns: int) -> Any:
        adopted = original(self, snapshot, digest, now_ns)
        return type(adopted)(adopted.entries, adopted.size_bytes, 0, adopted.evicted_entries)

    return adopt


def _adopt_above_a_lowered_limit(original: Any) -> Any:
    def adopt(pool: Pool, *rest: Any) -> Any:
        with patch.object(Pool, "evict_down_to_limit", lambda *_: 0):
            return original(pool, *rest)

    return adopt


#: Every fault by its name.
PLANTS: dict[str, Plant] = {
    "charge SSD a block too little": Plant("I8", SegmentLog, "_charge", _charge_less),
    "find what was not written": Plant("I7", SsdTier, "append_end", _find_what_was_not_written),
    "go on in a segment after a failed write": Plant("I7", SegmentLog, "_close", _write_on_after_a_failure),
    "write no tombstones": Plant("I12", SegmentLog, "_bury", _do_nothing),
    "keep a destroyed partition's key": Plant("I12", SegmentLog, "_destroy", _keep_the_key),
    "ignore reservations on SSD": Plant("I5", ssd_log, "choose_segments", _ignore_reservations),
    "the older record wins": Plant("I7", SegmentLog, "adopt_segment", _the_older_record_wins),
    "forget tombstones at a restart": Plant("I12", SegmentLog, "adopt_segment", _forget_tombstones_at_a_restart),
    "serve what was deleted meanwhile": Plant("I12", SsdTier, "read_end", _serve_what_was_deleted_meanwhile),
    "demote what was deleted meanwhile": Plant("I12", SsdTier, "append_end", _demote_what_was_deleted_meanwhile),
    "grow past the limit on SSD": Plant("I4", SegmentLog, "_make_room", _grow_past_the_limit),
    "grow past a namespace's limit": Plant("I4", Pool, "admit", _grow_past_the_namespaces_limit),
    "grow past a namespace's limit on SSD": Plant(
        "I4", SegmentLog, "_make_room", _grow_past_the_namespaces_limit_on_ssd
    ),
    "keep what is above a namespace's lowered limit": Plant(
        "I4", Pool, "evict_namespace_down", _keep_what_is_above_a_namespaces_limit
    ),
    "credit no namespace": Plant("I8", Pool, "_free", _credit_no_namespace),
    "keep what is above a lowered SSD limit": Plant("I4", SegmentLog, "_shrink", _do_nothing),
    "store over what is on SSD": Plant("I6", SsdTier, "outdate", _store_over_what_is_on_ssd),
    "seal without the first row": Plant("I7", SegmentBooks, "live_entries", _seal_without_the_first_row),
    "serve a segment that was not flushed": Plant("I7", SsdTier, "seal_end", _serve_a_segment_that_was_not_flushed),
    "drop a tombstone too early": Plant("I12", SegmentLog, "_is_needed", _drop_a_tombstone_too_early),
    "forget records that no index has": Plant("I12", SegmentLog, "_take_remains", _forget_what_no_index_has),
    "never try a removal again": Plant("I12", SsdTier, "drop_again", _do_nothing),
    "trim below the soft mark": Plant("I5", soft_mark, "next_trimmed", _trim_below_the_mark),
    "serve adopted bytes unverified": Plant("I7", Pool, "_is_intact", _adopt_unverified),
    "say that nothing was purged at a start": Plant("I12", CacheCore, "adopt", _adopt_what_the_policy_does_not_name),
    "adopt above a lowered limit": Plant("I4", cache, "adopt_snapshot", _adopt_above_a_lowered_limit),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Break the core in this way until the end of the block."""
    plant = PLANTS[name]
    original = plant.owner.__dict__[plant.attribute]
    function = original.__func__ if isinstance(original, staticmethod) else original
    broken = plant.replace(function)
    with patch.object(plant.owner, plant.attribute, staticmethod(broken) if function is not original else broken):
        yield

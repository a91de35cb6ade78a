"""The SSD tier's books against the truth (I8)."""

from __future__ import annotations

from dataplane.core.partition import split_storage_uid
from dataplane.core.segments import SegmentNumber, record_blocks
from dataplane.core.ssd_log import SegmentLog


def check_ssd_invariants(tier: SegmentLog) -> None:
    """Recompute every book from the segments and assert that all agree (I2, I4, I7, I8)."""
    for tenant, owner in tier.tenants.items():
        segments = owner.segments.values()
        assert owner.tenant == tenant
        assert owner.used_bytes == sum(segment.charged_bytes for segment in segments), "I8: used"
        leaving = [segment for segment in segments if segment.is_leaving]
        assert owner.leaving_bytes == sum(segment.charged_bytes for segment in leaving), "I8: leaving"
        # After a limit was lowered, only what is being removed may still be above it (I4).
        assert owner.used_bytes - owner.leaving_bytes <= owner.quota.limit_bytes or not owner.in_policy, "I4"
        for uid, books in owner.namespaces.items():
            mine = [segment for segment in segments if segment.partition.namespace is books]
            uids = {split_storage_uid(segment.partition.storage_uid)[0] for segment in mine}
            assert books.owner is owner and uids <= {uid}, "I2: a namespace in foreign hands"
            assert books.used_bytes == sum(segment.charged_bytes for segment in mine), "I8: used by a namespace"
            assert books.leaving_bytes == sum(s.charged_bytes for s in mine if s.is_leaving), "I8: leaving a namespace"
            assert books.used_bytes - books.leaving_bytes <= books.limit_bytes, "I4: a namespace"
        assert owner.used_bytes == sum(books.used_bytes for books in owner.namespaces.values()), "I8: of no namespace"
        alive: dict[SegmentNumber, int] = {}
        for (uid, epoch), partition in owner.partitions.items():
            assert (partition.storage_uid, partition.epoch, partition.owner) == (uid, epoch, owner), "I2"
            for key, entry in partition.entries.items():
                segment = entry.segment
                assert entry.key == key and segment.partition is partition, "I2: an entry in foreign hands"
                assert owner.segments.get(segment.number) is segment, "I7: an entry without a file"
                assert entry.block + record_blocks(entry.size_bytes) <= segment.next_block
                alive[segment.number] = alive.get(segment.number, 0) + entry.record_bytes
        for number, segment in owner.segments.items():
            assert segment.live_bytes == alive.get(number, 0), "I8: live"
            assert segment.readers >= 0 and segment.writers >= 0 and segment.relocating >= 0
    assert tier.used_bytes == sum(owner.used_bytes for owner in tier.tenants.values())
    assert tier.leaving_bytes == sum(owner.leaving_bytes for owner in tier.tenants.values())
    assert tier.used_bytes <= tier.capacity_bytes, "I4: capacity"

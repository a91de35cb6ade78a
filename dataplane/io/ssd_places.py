"""Names of folders and segments on disk: what a partition and a segment of the core's books are called there."""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.core.segments import SegmentNumber
from dataplane.core.ssd_books import SegmentBooks, SsdPartition
from saltern.names import TenantId


@dataclass(frozen=True, slots=True)
class Folder:
    """Names a partition's folder, and what its key is for."""

    tenant: TenantId
    number: int
    storage_uid: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SegmentPath:
    folder: Folder
    number: SegmentNumber


def folder_of(partition: SsdPartition) -> Folder:
    return Folder(partition.owner.tenant, partition.number, partition.storage_uid, partition.epoch)


def place_of(segment: SegmentBooks) -> SegmentPath:
    return SegmentPath(folder_of(segment.partition), segment.number)

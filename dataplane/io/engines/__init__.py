"""Byte engines: who keeps the records of the tier below DRAM. The core above decides everything and knows none of them.

::

    core (SsdTier: whose, how much, which goes)  -->  Writer, Reader  -->  ByteEngine
                                                                             local: files of this node (ssd_disk.Disk)
                                                                             objects in a store (objects.ObjectEngine)

An engine is handed sealed records by place (segment and block) and asked for them by place. It knows no budget and
decides nothing. Every record is sealed before an engine sees it and opened after the engine has given it up, so that an
engine, and whoever else reaches what it keeps, can lose bytes and cannot forge them (I2, I7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from dataplane.core.segments import Row, SegmentCipher
from dataplane.io.ssd_disk import Wanted
from dataplane.io.ssd_places import Folder, SegmentPath
from saltern.endpoints import Endpoint
from saltern.keys import BlockKey


class EngineName(StrEnum):
    """Engines as ``--engine`` calls them."""

    LOCAL = "local"
    MOONCAKE = "mooncake"


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """Where a Mooncake store is.

    Attributes:
        master: of its master service.
        metadata: as Mooncake's own clients are told; all of one store must agree.
        protocol, device: how bytes travel: ``tcp``, or ``rdma`` over the devices named.
    """

    master: Endpoint
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device: str = ""


class ByteEngine(Protocol):
    """What :class:`dataplane.io.ssd_writer.Writer` and :class:`dataplane.io.ssd_reader.Reader` ask of an engine.

    Everything but :meth:`cipher` and :meth:`path` may block and runs on worker threads: what changes something on one
    of them, in the order in which the core asked for it; :meth:`read` on any number. Each raises OSError where whoever
    keeps the bytes fails or does not answer; the core then goes by what it is told: a record that was not written is
    not found, one that could not be removed stays charged (I4, I8).
    """

    @property
    def run_bytes(self) -> int:
        """Records of about so many bytes are read in one call."""

    @property
    def ciphers(self) -> Mapping[SegmentPath, SegmentCipher]:
        """Ciphers of the segments that are there."""

    def cipher(self, segment: SegmentPath) -> SegmentCipher:
        """The cipher to seal a segment's records with; made for a new one."""

    def path(self, segment: SegmentPath) -> Path:
        """What messages call the segment."""

    def write_records(self, segment: SegmentPath, blocks: Sequence[int], memory: memoryview) -> None:
        """Keep sealed records that follow each other, each from its block on. Raises OSError: none counts as kept."""

    def write_tombstones(self, segment: SegmentPath, block: int, keys: Sequence[BlockKey]) -> None:
        """Keep for good that every earlier record of ``keys`` is dead (I12)."""

    def erase(self, segment: SegmentPath, block: int) -> None:
        """Remove one record that is dead, where that can be done. Never raises."""

    def seal(self, segment: SegmentPath, end_block: int, rows: Sequence[Row], tombstones: Sequence[BlockKey]) -> None:
        """Keep for good what the segment holds; it takes no more after that."""

    def drop(self, segment: SegmentPath) -> None:
        """Remove a segment with all its records."""

    def destroy_key(self, folder: Folder) -> None:
        """I12: from here on nothing of the partition can be read."""

    def read(self, segment: SegmentPath, wanted: Sequence[Wanted]) -> list[int | Exception]:
        """Read and open records that follow each other; for each its checksum, or why it is a miss.

        BadFormatError: what came is not what was sealed (I7); GoneError: it is not there any more; OSError: nobody
        could say.
        """

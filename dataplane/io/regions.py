"""Regions of one session: what a client may register, and how the node reaches it (WIRE.md 4, REGISTER).

A region is shared memory that the node maps, or memory at the other end of the session's RDMA queue pair
(:class:`~dataplane.core.remote_region.RemoteRegion`). Shared memory the client can change at any time, but never take
away: only a memfd sealed against shrinking is accepted, so a read of the mapping cannot fault (SIGBUS). Every offset
and length is checked against the registered size in integer arithmetic before anything is touched (I3: the node drives
every transfer).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections import Counter
from collections.abc import Sequence
from typing import Final

from dataplane.core.remote_region import RemoteRegion, check_inside
from dataplane.io.letting_go import let_go
from saltern.errors import InvalidArgumentError, ResourceExhaustedError, SalternError
from saltern.names import TenantId
from saltern.wire import REGION_MAX_BYTES, REGIONS_MAX

_F_GET_SEALS: Final = getattr(fcntl, "F_GET_SEALS", 1034)
_F_SEAL_SHRINK: Final = getattr(fcntl, "F_SEAL_SHRINK", 0x0002)
#: linux/magic.h. hugetlbfs has another: its pages may be missing at the first touch, which is a SIGBUS as well.
_TMPFS_MAGIC: Final = 0x01021994
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
TENANT_REGIONS_MAX_BYTES: Final = 4 * 1024**4
REGIONS_MAX_BYTES: Final = 64 * 1024**4
_STATFS_BYTES: Final = 256  # struct statfs is 120 bytes on 64-bit Linux; f_type is its first long


class Region:
    """One mapped region of ``size_bytes``."""

    __slots__ = ("_memory", "_view", "size_bytes")

    def __init__(self, memory: mmap.mmap, size_bytes: int) -> None:
        self.size_bytes: Final = size_bytes
        self._memory = memory
        self._view = memoryview(memory)

    def check(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Raise InvalidArgumentError (OUT_OF_REGION) unless every entry lies inside the region."""
        check_inside(self.size_bytes, offsets, sizes)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """The bytes of one entry, as :meth:`check` has allowed."""
        return self._view[offset : offset + size_bytes]

    def close(self) -> None:
        """Unmap; while a traceback still holds a view of it, the mapping goes together with that.

        Where the client is gone this frees all of its memory, so the event loop does not wait for it.
        """
        with contextlib.suppress(BufferError):
            self._view.release()
            let_go(self._memory.close)


class RegionSpace:
    """Address space that regions may take, of one tenant and in all.

    A sparse memfd costs a client nothing, and a process has 128 TiB of addresses: without a bound one client could take
    them all, and no other's region, nor any memory of the node's own, could be mapped any more.
    """

    __slots__ = ("_by_tenant", "_tenant_max_bytes", "_total_max_bytes")

    def __init__(
        self, *, tenant_max_bytes: int = TENANT_REGIONS_MAX_BYTES, total_max_bytes: int = REGIONS_MAX_BYTES
    ) -> None:
        self._tenant_max_bytes = tenant_max_bytes
        self._total_max_bytes = total_max_bytes
        self._by_tenant: Counter[TenantId] = Counter()

    def claim(self, tenant: TenantId, size_bytes: int) -> None:
        """Take ``size_bytes`` more, or fewer if negative; raises ResourceExhaustedError (REGION_SPACE_EXHAUSTED)."""
        for used_bytes, limit_bytes, whose in (
            (self._by_tenant[tenant], self._tenant_max_bytes, f"tenant {tenant!r}"),
            (self._by_tenant.total(), self._total_max_bytes, "all tenants"),
        ):
            if used_bytes + size_bytes > limit_bytes:
                raise ResourceExhaustedError(
                    f"a region of {size_bytes} bytes would take the regions of {whose} on this node past {limit_bytes}",
                    reason="REGION_SPACE_EXHAUSTED",
                    hint="register smaller regions, or share one between sessions less often",
                    metadata={"limit_bytes": str(limit_bytes)},
                )
        self._by_tenant[tenant] += size_bytes

    def release(self, tenant: TenantId, size_bytes: int) -> None:
        self._by_tenant[tenant] -= size_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class RegionTable:
    """The regions of one session, by the number that the client gave them."""

    __slots__ = ("_regions", "_space", "_tenant")

    def __init__(self, space: RegionSpace) -> None:
        self._regions: dict[int, Region | RemoteRegion] = {}
        self._space = space
        self._tenant = TenantId("")

    def __getitem__(self, number: int) -> Region | RemoteRegion:
        region = self._regions.get(number)
        if region is None:
            raise _unknown(number)
        return region

    def register(self, tenant: TenantId, number: int, size_bytes: int, descriptors: Sequence[int]) -> None:
        """Map the one descriptor as region ``number``, replacing an older one; the caller closes the descriptors.

        ``tenant`` is the session's, the same every time.

        Raises:
            InvalidArgumentError: REGION_OUT_OF_RANGE, REGION_DESCRIPTORS, REGION_NOT_MEMFD, REGION_NOT_SEALED or
                REGION_TOO_SHORT; the older region stays.
            ResourceExhaustedError: REGION_NOT_MAPPED, the system refuses the mapping; REGION_SPACE_EXHAUSTED.
        """
        _check_number(number, size_bytes)
        if len(descriptors) != 1:
            raise InvalidArgumentError(
                f"{len(descriptors)} descriptors came with REGISTER instead of one",
                reason="REGION_DESCRIPTORS",
                hint="send one memfd with the frame's first byte, over the unix socket",
            )
        old = self._regions.get(number)
        grown_bytes = size_bytes - (old.size_bytes if isinstance(old, Region) else 0)
        self._tenant = tenant
        self._space.claim(tenant, grown_bytes)
        try:
            memory = _map_sealed(descriptors[0], size_bytes)
        except SalternError:
            self._space.release(tenant, grown_bytes)
            raise
        if old is not None:
            old.close()
        self._regions[number] = Region(memory, size_bytes)

    def register_remote(self, number: int, size_bytes: int, address: int, remote_key: int) -> None:
        """Remember memory of the client's own RDMA registration as region ``number``, replacing an older one.

        It takes no addresses of the node's.

        Raises:
            InvalidArgumentError: REGION_OUT_OF_RANGE; the older region stays.
        """
        _check_number(number, size_bytes)
        region = RemoteRegion(address, size_bytes, remote_key)
        old = self._regions.pop(number, None)
        if old is not None:
            self._close(old)
        self._regions[number] = region

    def unregister(self, number: int) -> None:
        """Let go of a region; raises InvalidArgumentError (UNKNOWN_REGION)."""
        region = self._regions.pop(number, None)
        if region is None:
            raise _unknown(number)
        self._close(region)

    def close(self) -> None:
        """Unmap every region."""
        while self._regions:
            self._close(self._regions.popitem()[1])

    def _close(self, region: Region | RemoteRegion) -> None:
        region.close()
        if isinstance(region, Region):
            self._space.release(self._tenant, region.size_bytes)


def _check_number(number: int, size_bytes: int) -> None:
    if not 0 <= number < REGIONS_MAX or not 1 <= size_bytes <= REGION_MAX_BYTES:
        raise InvalidArgumentError(
            f"region {number} of {size_bytes} bytes is outside 0..{REGIONS_MAX - 1} or 1..{REGION_MAX_BYTES} bytes",
            reason="REGION_OUT_OF_RANGE",
            hint="register fewer or smaller regions",
        )


def _map_sealed(descriptor: int, size_bytes: int) -> mmap.mmap:
    try:
        # First, because it answers for memfds alone: statfs of a file on FUSE would wait for a daemon of the client's.
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        seals = None
    statfs = ctypes.create_string_buffer(_STATFS_BYTES)
    if (
        seals is None
        or _LIBC.fstatfs(descriptor, statfs) != 0
        or ctypes.c_long.from_buffer(statfs).value != _TMPFS_MAGIC
    ):
        raise InvalidArgumentError(
            "the descriptor is not a memfd on tmpfs",
            reason="REGION_NOT_MEMFD",
            hint="create it with memfd_create(MFD_CLOEXEC | MFD_ALLOW_SEALING), without MFD_HUGETLB",
        )
    if not seals & _F_SEAL_SHRINK:
        raise InvalidArgumentError(
            "the memfd is not sealed against shrinking",
            reason="REGION_NOT_SEALED",
            hint="set its size and then fcntl(F_ADD_SEALS, F_SEAL_SHRINK)",
        )
    # The seal came first, so the length that is read now is one that can only grow.
    length_bytes = os.fstat(descriptor).st_size
    if length_bytes < size_bytes:
        raise InvalidArgumentError(
            f"the memfd is {length_bytes} bytes long, shorter than the {size_bytes} of the region",
            reason="REGION_TOO_SHORT",
            hint="ftruncate it to the size of the region before sealing it",
        )
    try:
        return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise ResourceExhaustedError(
            f"the region cannot be mapped: {error}",
            reason="REGION_NOT_MAPPED",
            hint="open the memfd for reading and writing, without F_SEAL_WRITE",
        ) from None


def _unknown(number: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"region {number} is not registered in this session",
        reason="UNKNOWN_REGION",
        hint="send REGISTER with a memfd over the unix socket first",
    )

"""What the arena asks of the host beyond plain memory: huge pages, one NUMA node; and what it then really got.

Linux only, through mmap flags, madvise and two system calls that Python does not name (mbind, get_mempolicy; numbers
from the kernel's own tables). Whatever was asked for by name and cannot be had is an error at start; what is only
better where it exists (transparent huge pages) is not.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from saltern.errors import FailedPreconditionError, ResourceExhaustedError
from saltern.sizes import format_size

MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not named by the mmap module of Python 3.11
_MADV_NOHUGEPAGE: Final = getattr(mmap, "MADV_NOHUGEPAGE", 15)
_MAP_HUGETLB: Final = 0x40000
_MAP_HUGE_SHIFT: Final = 26
_MPOL_BIND: Final = 2
_MPOL_MF_MOVE: Final = 2
_MPOL_F_NODE: Final = 1
_MPOL_F_ADDR: Final = 2
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)
#: (mbind, get_mempolicy) by machine.
_SYSCALLS: Final = {"x86_64": (237, 239), "aarch64": (235, 236)}
_NODES: Final = Path("/sys/devices/system/node")
_HUGE_PAGES: Final = Path("/sys/kernel/mm/hugepages")
_SAMPLES: Final = 64
#: Lines of /proc/PID/smaps that count memory in pages larger than 4 KiB.
_HUGE_LINES: Final = re.compile(
    r"^(?:AnonHugePages|ShmemPmdMapped|FilePmdMapped|Shared_Hugetlb|Private_Hugetlb): +(\d+) kB", re.ASCII
)
_AREA: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ", re.ASCII)


class HugePages(StrEnum):
    """Pages that the arena is made of. Explicit sizes are taken from the pool that the administrator has reserved."""

    OFF = "off"
    TRANSPARENT = "transparent"
    MIB_2 = "2MiB"
    GIB_1 = "1GiB"

    @property
    def page_bytes(self) -> int:
        """Size of an explicit page; 0 for the others."""
        return _PAGE_BYTES.get(self, 0)

    @property
    def map_flags(self) -> int:
        """What an anonymous mapping of such pages adds to its flags."""
        return _MAP_HUGETLB | (self.page_bytes.bit_length() - 1) << _MAP_HUGE_SHIFT if self.page_bytes else 0


_PAGE_BYTES: Final[dict[HugePages, int]] = {HugePages.MIB_2: 2 << 20, HugePages.GIB_1: 1 << 30}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the memory really is.

    Attributes:
        huge_bytes: in pages of 2 MiB and more, of whatever kind.
        nodes: share of sampled pages on each NUMA node, in percent; empty where the system does not tell.
    """

    huge_bytes: int
    nodes: dict[int, int]


def round_to_pages(size_bytes: int, page_bytes: int) -> int:
    """Round up to whole pages of ``page_bytes``."""
    return -(-size_bytes // page_bytes) * page_bytes


def advise_pages(memory: mmap.mmap, huge_pages: HugePages) -> None:
    """Ask for transparent huge pages, or for none. Raises OSError on a kernel that knows neither."""
    if huge_pages is HugePages.TRANSPARENT:
        memory.madvise(mmap.MADV_HUGEPAGE)
    elif huge_pages is HugePages.OFF:
        memory.madvise(_MADV_NOHUGEPAGE)


def too_few_huge_pages(page_bytes: int, needed_bytes: int) -> ResourceExhaustedError:
    """The error for a mapping that the pool of huge pages could not fill."""
    pages = round_to_pages(needed_bytes, page_bytes) // page_bytes
    pool = _HUGE_PAGES / f"hugepages-{page_bytes // 1024}kB"
    try:
        free_pages = int((pool / "free_hugepages").read_text()) - int((pool / "resv_hugepages").read_text())
        state = f"{max(free_pages, 0)} are free"
        hint = f"echo {pages} > {pool / 'nr_hugepages'} as root, at boot if it can, or choose --huge-pages transparent"
    except (OSError, ValueError):
        state = "this kernel has no such pages"
        hint = "boot with hugepagesz and hugepages set (nr_hugepages), or choose --huge-pages transparent"
    return ResourceExhaustedError(
        f"the arena needs {pages} huge pages of {format_size(page_bytes)}, and {state}",
        reason="HUGE_PAGES_UNAVAILABLE",
        hint=hint,
    )


# ---- NUMA


def check_numa_node(node: int, needed_bytes: int) -> None:
    """Refuse a node that this machine has not, or that is too small.

    Raises:
        FailedPreconditionError: NUMA_NODE_UNKNOWN.
        ResourceExhaustedError: NUMA_NODE_TOO_SMALL: binding to it would end in the kernel killing a process.
    """
    try:
        listed = (_NODES / "has_memory").read_text().strip()
    except OSError:
        listed = ""
    if node not in _parse_nodes(listed):
        raise FailedPreconditionError(
            f"this machine has no NUMA node {node} with memory; it has {listed or 'none that the system tells of'}",
            reason="NUMA_NODE_UNKNOWN",
            hint="choose one of those with --numa-node, or leave the option out",
        )
    match = re.search(r"MemTotal: +(\d+) kB", (_NODES / f"node{node}" / "meminfo").read_text(), re.ASCII)
    if match and int(match[1]) * 1024 < needed_bytes:
        raise ResourceExhaustedError(
            f"NUMA node {node} has {format_size(int(match[1]) * 1024)}, less than the arena of {needed_bytes} bytes",
            reason="NUMA_NODE_TOO_SMALL",
            hint="lower --dram-bytes, or run one node for each NUMA node",
        )


def bind_to_numa_node(memory: mmap.mmap, node: int) -> None:
    """Have every page of ``memory`` on one NUMA node; pages that are elsewhere move.

    Raises:
        FailedPreconditionError: NUMA_BIND_REFUSED.
    """
    mbind, _ = _SYSCALLS.get(platform.machine(), (0, 0))
    words = node // _WORD_BITS + 2  # the kernel reads one bit less than it is told of
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    error_number = errno.ENOSYS
    if mbind:
        error_number = _syscall(
            mbind, address_of(memory), len(memory), _MPOL_BIND, mask, words * _WORD_BITS, _MPOL_MF_MOVE
        )
    if error_number:
        raise FailedPreconditionError(
            f"the system refuses to bind memory to NUMA node {node}: {os.strerror(error_number)}",
            reason="NUMA_BIND_REFUSED",
            hint="in a container, permit the system call mbind (CAP_SYS_NICE); or leave --numa-node out",
        )


def placement_of(memory: mmap.mmap) -> Placement:
    """Find out what ``memory`` is made of. Its pages must be there already, or looking would fetch them."""
    address = address_of(memory)
    nodes: Counter[int] = Counter()
    _, get_mempolicy = _SYSCALLS.get(platform.machine(), (0, 0))
    step = max(len(memory) // _SAMPLES & -mmap.PAGESIZE, mmap.PAGESIZE)
    for offset in range(0, len(memory), step) if get_mempolicy else ():
        node = ctypes.c_int(-1)
        at = ctypes.c_void_p(address + offset)
        if not _syscall(get_mempolicy, ctypes.byref(node), None, 0, at, _MPOL_F_NODE | _MPOL_F_ADDR):
            nodes[node.value] += 1
    samples = nodes.total()
    return Placement(_huge_bytes(address, len(memory)), {node: 100 * n // samples for node, n in sorted(nodes.items())})


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping begins; the mapping can be closed afterwards as before."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _huge_bytes(address: int, length: int) -> int:
    """Sum over the mappings of this process that lie in the given range: the kernel may have split it."""
    huge_bytes = 0
    is_inside = False
    with Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            area = _AREA.match(line)
            if area:
                is_inside = address <= int(area[1], 16) and int(area[2], 16) <= address + length
            elif is_inside and (huge := _HUGE_LINES.match(line)):
                huge_bytes += int(huge[1]) * 1024
    return huge_bytes


def _parse_nodes(listed: str) -> set[int]:
    """``0-1,3`` as numbers."""
    nodes: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return nodes


def _syscall(number: int, *arguments: object) -> int:
    """Make a system call; 0, or the error's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    plain = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *plain) < 0 else 0

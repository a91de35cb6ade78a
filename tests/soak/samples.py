"""What processes and folders hold, read from /proc and the file system; and whether a series of it is flat."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one part of the deployment.

    Attributes:
        memory_bytes: of its own: private memory, and its part of files that it maps.
        shared_bytes: its part of memory that processes share, as far as it was touched.
    """

    memory_bytes: int
    shared_bytes: int
    descriptors: int
    threads: int
    processes: int


@dataclass(frozen=True, slots=True)
class Trend:
    """A series in two numbers: the median of its second quarter, when everything is warm, and of its last one."""

    early: float
    late: float

    @property
    def growth(self) -> float:
        return self.late - self.early


def descendants(pid: int) -> Iterator[int]:
    """``pid`` and all processes below it."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from descendants(int(child))


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def sample(pids: Sequence[int]) -> Sample:
    """The sum over ``pids``; a process that ends meanwhile counts as nothing.

    Memory is the proportional set size, in which what processes share is counted once (proc(5), smaps_rollup).
    """
    memory_bytes = shared_bytes = descriptors = threads = processes = 0
    for pid in pids:
        with suppress(OSError, KeyError):
            held = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
            touched_bytes = int(held["Pss_Shmem"].split()[0]) * 1024
            memory_bytes += int(held["Pss"].split()[0]) * 1024 - touched_bytes
            shared_bytes += touched_bytes
            descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
            processes += 1
    return Sample(memory_bytes, shared_bytes, descriptors, threads, processes)


def mapped_shared_bytes(pid: int) -> int:
    """How much shared memory a process has mapped for writing, touched or not: more than that it cannot come to."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, permissions = line.split()[:2]
        if permissions == "rw-s":
            begin, _, end = addresses.partition("-")
            total += int(end, 16) - int(begin, 16)
    return total


def folder_bytes(folder: Path) -> int:
    """What the files below ``folder`` take on disk; files that go meanwhile count as nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += (Path(root) / name).lstat().st_blocks * 512
    return total


def trend(series: Sequence[float]) -> Trend:
    """Needs at least four values."""
    quarter = len(series) // 4
    return Trend(median(series[quarter : 2 * quarter]), median(series[-quarter:]))

"""CPU seconds of a client and its servers for each gigabyte that they moved."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class CpuUse:
    """Summed over turns."""

    client_s: float = 0.0
    server_s: float = 0.0
    moved_bytes: int = 0

    def add(self, client_s: float, server_s: float, moved_bytes: int) -> None:
        self.client_s += client_s
        self.server_s += server_s
        self.moved_bytes += moved_bytes

    def reset(self) -> None:
        """Forget what was measured so far."""
        self.client_s, self.server_s, self.moved_bytes = 0.0, 0.0, 0

    @property
    def client_s_per_gb(self) -> float:
        return self.client_s / (self.moved_bytes / 1e9)

    @property
    def server_s_per_gb(self) -> float:
        return self.server_s / (self.moved_bytes / 1e9)

    @property
    def s_per_gb(self) -> float:
        return self.client_s_per_gb + self.server_s_per_gb


def measured(use: CpuUse, server_pid: int, moved_bytes: int, operation: Callable[[], None]) -> float:
    """Run ``operation``, add what it took of CPUs to ``use`` and return its wall seconds."""
    server_before_s, client_before_s, begin = process_cpu_s(server_pid), time.process_time(), time.perf_counter()
    operation()
    wall_s = time.perf_counter() - begin
    use.add(time.process_time() - client_before_s, process_cpu_s(server_pid) - server_before_s, moved_bytes)
    return wall_s


def process_cpu_s(pid: int) -> float:
    """CPU seconds of the live threads of another process, from ``/proc/PID/task/*/schedstat`` (nanoseconds on a CPU;
    Linux Documentation/scheduler/sched-stats): ``/proc/PID/stat`` counts in steps of 10 ms."""
    return sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in _tasks(pid)) / 1e9


@contextmanager
def pinned(cpus_of: dict[int, set[int]]) -> Iterator[None]:
    """Keep processes, by pid with all their threads, on the given CPUs within the block; 0 is this process."""
    tids = [(int(task.name), cpus) for pid, cpus in cpus_of.items() for task in _tasks(pid or os.getpid())]
    before = [(tid, os.sched_getaffinity(tid)) for tid, _ in tids]
    try:
        for tid, cpus in tids:
            os.sched_setaffinity(tid, cpus)
        yield
    finally:
        for tid, cpus in before:
            os.sched_setaffinity(tid, cpus)


def _tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())

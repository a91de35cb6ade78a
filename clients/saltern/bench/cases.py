"""What is measured: each case pairs one figure of ours with the machine's limit for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from saltern.bench.limits import BareSocket, Memcpy
from saltern.client import Client
from saltern.errors import InternalError
from saltern.keys import KEY_BYTES, BlockKey
from saltern.results import Hit, Stored

BATCH_BYTES = 128 * 1024 * 1024
KIB, MIB = 1024, 1024 * 1024
SIZES_BYTES = (64 * KIB, MIB, 4 * MIB)
LOOKUP_KEYS = 500
LOOKUPS_PER_TURN = 200
PINGS_PER_TURN = 1000
DEADLINE_MS = 30_000


@dataclass(slots=True)
class Case:
    """One line of the report.

    Attributes:
        unit: of both figures; for ``us`` less is better.
        ours, limit: measure once and return a figure.
        target: the least ratio of ours to the limit (for ``us`` of the limit to ours); None where only reported.
    """

    name: str
    unit: str
    ours: Callable[[], float]
    limit: Callable[[], float]
    target: float | None
    limit_name: str
    ours_seen: list[float] = field(default_factory=list)
    limit_seen: list[float] = field(default_factory=list)

    def turn(self, *, ours_first: bool) -> None:
        """Measure both once, right after each other, so that both meet the machine in the same mood."""
        steps = [(self.ours, self.ours_seen), (self.limit, self.limit_seen)]
        for measure, seen in steps if ours_first else reversed(steps):
            seen.append(measure())

    @property
    def ratio(self) -> float:
        """Ours as a share of the limit: the median over turns of the ratio within a turn."""
        pairs = zip(self.ours_seen, self.limit_seen, strict=True)
        return median(limit / ours if self.unit == "us" else ours / limit for ours, limit in pairs)


class CpuMeter:
    """CPU seconds of this process and of a node, per gigabyte moved, summed over turns.

    The node's come from ``/proc/PID/task/*/schedstat`` (nanoseconds on a CPU; Linux
    Documentation/scheduler/sched-stats): ``/proc/PID/stat`` counts in steps of 10 ms.
    """

    def __init__(self, node_pid: int) -> None:
        self._tasks = Path(f"/proc/{node_pid}/task")
        self.reset()

    def reset(self) -> None:
        """Forget what was measured so far."""
        self.client_s = self.node_s = 0.0
        self.moved_bytes = 0

    def measure(self, moved_bytes: int, operation: Callable[[], None]) -> float:
        """Run ``operation`` and return its wall seconds."""
        node_before_s, client_before_s, begin = self._node_s(), time.process_time(), time.perf_counter()
        operation()
        wall_s = time.perf_counter() - begin
        self.client_s += time.process_time() - client_before_s
        self.node_s += self._node_s() - node_before_s
        self.moved_bytes += moved_bytes
        return wall_s

    def per_gigabyte(self) -> dict[str, float]:
        gigabytes = self.moved_bytes / 1e9
        return {"client": self.client_s / gigabytes, "node": self.node_s / gigabytes}

    def _node_s(self) -> float:
        return sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in self._tasks.iterdir()) / 1e9


class Blocks:
    """A batch of equal blocks in the client's registered memory, under keys of their own."""

    def __init__(self, client: Client, block_bytes: int) -> None:
        self.client = client
        self.count = BATCH_BYTES // block_bytes
        self.keys = [BlockKey(os.urandom(KEY_BYTES)) for _ in range(self.count)]
        self.buffer = client.allocate(BATCH_BYTES)
        self.buffer.view[:] = os.urandom(MIB) * (BATCH_BYTES // MIB)
        self.views = [self.buffer[start : start + block_bytes] for start in range(0, BATCH_BYTES, block_bytes)]

    def put(self) -> None:
        results = self.client.put_many(zip(self.keys, self.views, strict=True), deadline_ms=DEADLINE_MS)
        _require(all(isinstance(result, Stored) for result in results), "a put of the bench was refused", results)

    def get(self) -> None:
        results = self.client.get_into(self.keys, self.views, deadline_ms=DEADLINE_MS)
        _require(all(isinstance(result, Hit) for result in results), "a get of the bench missed", results)

    def delete(self) -> None:
        self.client.delete(self.keys, deadline_ms=DEADLINE_MS)


def transfer_cases(
    tcp: Client, shm: Client, bare: BareSocket, memcpy: Memcpy, meters: dict[str, CpuMeter]
) -> Iterator[Case]:
    """Batches over TCP beside a bare socket pair; batches over shared memory beside memcpy."""
    scratch = memoryview(bytearray(BATCH_BYTES))
    gigabytes = BATCH_BYTES / 1e9
    for size_bytes in SIZES_BYTES:
        label = f"{size_bytes // KIB} KiB" if size_bytes < MIB else f"{size_bytes // MIB} MiB"
        blocks = Blocks(tcp, size_bytes)
        yield _case(f"TCP put {label}", _put(blocks, meters["tcp put"]), bare.put, scratch, size_bytes)
        yield _case(f"TCP get {label}", _get(blocks, meters["tcp get"]), bare.get, scratch, size_bytes)
    blocks = Blocks(shm, MIB)
    for name, ours in (("put", _put(blocks, meters["shm put"])), ("get", _get(blocks, meters["shm get"]))):
        yield Case(
            name=f"shared memory {name} 1 MiB",
            unit="GB/s",
            ours=ours,
            limit=lambda: gigabytes / memcpy.seconds_for(MIB, BATCH_BYTES // MIB),
            target=0.6,
            limit_name="memcpy, one thread",
        )


def lookup_cases(tcp: Client, bare: BareSocket) -> Iterator[Case]:
    """Existence of many keys and of one."""
    wanted = [BlockKey(os.urandom(KEY_BYTES)) for _ in range(LOOKUP_KEYS)]
    joined = b"".join(wanted)
    megakeys = LOOKUP_KEYS * LOOKUPS_PER_TURN / 1e6
    yield Case(
        name=f"exists, {LOOKUP_KEYS} keys",
        unit="Mkeys/s",
        ours=lambda: megakeys / _seconds(LOOKUPS_PER_TURN, lambda: tcp.lookup(wanted, deadline_ms=DEADLINE_MS)),
        limit=lambda: megakeys / _seconds(LOOKUPS_PER_TURN, lambda: bare.lookup(joined)),
        target=0.5,
        limit_name="bare socket + dict",
    )
    one = wanted[:1]
    yield Case(
        name="exists, 1 key, p50",
        unit="us",
        ours=lambda: 1e6 * median(_each(PINGS_PER_TURN, lambda: tcp.lookup(one, deadline_ms=DEADLINE_MS))),
        limit=lambda: 1e6 * median(_each(PINGS_PER_TURN, bare.ping_pong)),
        target=0.5,
        limit_name="bare socket ping-pong",
    )


def latencies(client: Client, count: int) -> dict[str, dict[str, float]]:
    """p50 and p99, in milliseconds, of single puts and gets of 1 MiB."""
    blocks = Blocks(client, MIB)
    pairs = list(zip(blocks.keys, blocks.views, strict=True))
    seen: dict[str, list[float]] = {"put": [], "get": []}
    for turn in range(count):
        pair = pairs[turn % len(pairs)]
        client.delete([pair[0]], deadline_ms=DEADLINE_MS)
        seen["put"] += _each(1, lambda pair=pair: client.put_many([pair], deadline_ms=DEADLINE_MS))  # type: ignore[misc]
        seen["get"] += _each(1, lambda pair=pair: client.get_into([pair[0]], [pair[1]], deadline_ms=DEADLINE_MS))  # type: ignore[misc]
    blocks.delete()
    return {
        name: {"p50_ms": 1e3 * median(times), "p99_ms": 1e3 * sorted(times)[int(len(times) * 0.99)]}
        for name, times in seen.items()
    }


def _case(
    name: str,
    ours: Callable[[], float],
    bare: Callable[[memoryview, int], None],
    scratch: memoryview,
    size_bytes: int,
) -> Case:
    def limit() -> float:
        return BATCH_BYTES / 1e9 / _seconds(1, lambda: bare(scratch, size_bytes))

    return Case(name=name, unit="GB/s", ours=ours, limit=limit, target=0.7, limit_name="bare socket pair")


def _put(blocks: Blocks, meter: CpuMeter) -> Callable[[], float]:
    def measure() -> float:
        blocks.delete()
        return BATCH_BYTES / 1e9 / meter.measure(BATCH_BYTES, blocks.put)

    return measure


def _get(blocks: Blocks, meter: CpuMeter) -> Callable[[], float]:
    return lambda: BATCH_BYTES / 1e9 / meter.measure(BATCH_BYTES, blocks.get)


def _seconds(times: int, operation: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        operation()
    return time.perf_counter() - begin


def _each(times: int, operation: Callable[[], object]) -> list[float]:
    return [_seconds(1, operation) for _ in range(times)]


def _require(condition: bool, what: str, results: object) -> None:
    if not condition:
        raise InternalError(f"{what}: {str(results)[:300]}", reason="BENCH_FAILED")

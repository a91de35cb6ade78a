"""What is measured: each case pairs one figure of ours with the machine's limit and with the peers'."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from saltern.bench.case import OURS, Case, Contender, Role
from saltern.bench.cpu import CpuUse, measured, pinned
from saltern.bench.limits import BareSocket, Memcpy
from saltern.bench.peers.process import PeerProcess
from saltern.client import Client
from saltern.errors import InternalError
from saltern.keys import KEY_BYTES, BlockKey
from saltern.results import Hit, Stored

BATCH_BYTES = 128 * 1024 * 1024
KIB, MIB = 1024, 1024 * 1024
SIZES_BYTES = (64 * KIB, MIB, 4 * MIB)
SHM_BYTES = MIB
LOOKUP_KEYS = 500
LOOKUPS_PER_TURN = 200
PINGS_PER_TURN = 1000
DEADLINE_MS = 60_000
SMALL_BYTES = 4 * KIB


@dataclass(frozen=True, slots=True)
class Field:
    """Everything that is measured against each other.

    Attributes:
        tcp, shm: our clients.
        node_pid: our server.
        peers: running ones.
    """

    tcp: Client
    shm: Client
    node_pid: int
    bare: BareSocket
    memcpy: Memcpy
    memcpy_around_caches: Memcpy
    peers: Sequence[PeerProcess]


class Blocks:
    """A batch of equal blocks in the client's registered memory, under keys of their own."""

    def __init__(self, client: Client, block_bytes: int, batch_bytes: int = BATCH_BYTES) -> None:
        self.client = client
        self.count = batch_bytes // block_bytes
        self.keys = new_keys(self.count)
        self.buffer = client.allocate(batch_bytes)
        pattern = os.urandom(min(MIB, batch_bytes))
        self.buffer.view[:] = pattern * (batch_bytes // len(pattern))
        self.views = [self.buffer[start : start + block_bytes] for start in range(0, batch_bytes, block_bytes)]

    def put(self) -> None:
        results = self.client.put_many(zip(self.keys, self.views, strict=True), deadline_ms=DEADLINE_MS)
        _require(all(isinstance(result, Stored) for result in results), "a put of the bench was refused", results)

    def get(self) -> None:
        results = self.client.get_into(self.keys, self.views, deadline_ms=DEADLINE_MS)
        _require(all(isinstance(result, Hit) for result in results), "a get of the bench missed", results)

    def delete(self) -> None:
        self.client.delete(self.keys, deadline_ms=DEADLINE_MS)

    def close(self) -> None:
        """Delete the entries and give the memory back."""
        self.delete()
        for view in self.views:
            view.release()
        self.buffer.close()


def size_label(size_bytes: int) -> str:
    return f"{size_bytes // KIB} KiB" if size_bytes < MIB else f"{size_bytes // MIB} MiB"


def transfer_cases(field: Field) -> Iterator[Case]:
    """Batches over TCP beside a bare socket pair; batches over shared memory beside memcpy."""
    scratch = memoryview(bytearray(BATCH_BYTES))
    for size_bytes in SIZES_BYTES:
        blocks = Blocks(field.tcp, size_bytes)
        for operation, move in (("put", field.bare.put), ("get", field.bare.get)):
            use = CpuUse()

            def bare(
                move: Callable[[memoryview, int], None] = move, size_bytes: int = size_bytes, use: CpuUse = use
            ) -> float:
                moving = partial(move, scratch, size_bytes)
                return BATCH_BYTES / 1e9 / measured(use, field.bare.pid, BATCH_BYTES, moving)

            yield Case(
                f"TCP {operation} {size_label(size_bytes)}",
                "GB/s",
                [
                    _ours(operation, blocks, field.node_pid),
                    Contender("bare socket pair", Role.LIMIT, bare, use),
                    *_transfers(field.peers, "tcp", operation, size_bytes),
                ],
            )
    blocks = Blocks(field.shm, SHM_BYTES)
    for operation in ("put", "get"):
        yield Case(
            f"shared memory {operation} {size_label(SHM_BYTES)}",
            "GB/s",
            [
                _ours(operation, blocks, field.node_pid),
                _copies("memcpy", field.memcpy),
                _copies("memcpy around caches", field.memcpy_around_caches),
                *_transfers(field.peers, "shm", operation, SHM_BYTES),
            ],
        )


def lookup_cases(field: Field) -> Iterator[Case]:
    """Existence of many keys and of one."""
    client, bare = field.tcp, field.bare
    present, absent = new_keys(LOOKUP_KEYS), new_keys(LOOKUP_KEYS)
    client.put_many([(key, bytes(SMALL_BYTES)) for key in present], deadline_ms=DEADLINE_MS)
    megakeys = LOOKUP_KEYS * LOOKUPS_PER_TURN / 1e6
    for words, keys, hit in (("hits", present, True), ("misses", absent, False)):

        def ours(keys: list[BlockKey] = keys) -> float:
            return megakeys / _seconds(LOOKUPS_PER_TURN, lambda: client.lookup(keys, deadline_ms=DEADLINE_MS))

        def limit(joined: bytes = b"".join(keys)) -> float:
            return megakeys / _seconds(LOOKUPS_PER_TURN, lambda: bare.lookup(joined))

        def peer_asked(peer: PeerProcess, hit: bool = hit) -> float:
            answer = peer.ask("exists", count=LOOKUP_KEYS, calls=LOOKUPS_PER_TURN, hit=hit)
            return float(answer["keys_per_s"]) / 1e6

        yield Case(
            f"exists, {LOOKUP_KEYS} keys, {words}",
            "Mkeys/s",
            [
                Contender(OURS, Role.OURS, ours),
                Contender("bare socket + dict", Role.LIMIT, limit),
                *[_peer(peer, lambda peer=peer: peer_asked(peer)) for peer in _by_key(field.peers)],  # type: ignore[misc]
            ],
        )
    yield from _single_cases(field, absent[:1])


def _single_cases(field: Field, one: list[BlockKey]) -> Iterator[Case]:
    """One key, wherever the kernel puts client and server, and with each pair held in the same places."""

    def ours() -> float:
        return 1e6 * median(each(PINGS_PER_TURN, lambda: field.tcp.lookup(one, deadline_ms=DEADLINE_MS)))

    def limit() -> float:
        return 1e6 * median(each(PINGS_PER_TURN, field.bare.ping_pong))

    def peer_asked(peer: PeerProcess) -> float:
        return 1e6 * float(peer.ask("exists_one", calls=PINGS_PER_TURN)["seconds"])

    yield Case(
        "exists, 1 key, p50",
        "us",
        [
            Contender(OURS, Role.OURS, ours),
            Contender("bare ping-pong", Role.LIMIT, limit),
            *[_peer(peer, lambda peer=peer: peer_asked(peer)) for peer in _by_key(field.peers)],  # type: ignore[misc]
        ],
    )
    cpus = sorted(os.sched_getaffinity(0))
    places = {"one core": (cpus[0], cpus[0])}
    if len(cpus) > 1:
        places["two cores"] = (cpus[0], cpus[1])
    for words, (here, there) in places.items():

        def held(pid: int, measure: Callable[[], float], here: int = here, there: int = there) -> float:
            with pinned({0: {here}, pid: {there}}):
                return measure()

        yield Case(
            f"exists, 1 key, p50, {words}",
            "us",
            [
                Contender(OURS, Role.OURS, lambda held=held: held(field.node_pid, ours)),  # type: ignore[misc]
                Contender("bare ping-pong", Role.LIMIT, lambda held=held: held(field.bare.pid, limit)),  # type: ignore[misc]
            ],
        )


def latencies(client: Client, count: int) -> dict[str, dict[str, float]]:
    """p50 and p99, in milliseconds, of single puts and gets of 1 MiB."""
    blocks = Blocks(client, MIB)
    pairs = list(zip(blocks.keys, blocks.views, strict=True))
    seen: dict[str, list[float]] = {"put": [], "get": []}
    for turn in range(count):
        pair = pairs[turn % len(pairs)]
        client.delete([pair[0]], deadline_ms=DEADLINE_MS)
        seen["put"] += each(1, lambda pair=pair: client.put_many([pair], deadline_ms=DEADLINE_MS))  # type: ignore[misc]
        seen["get"] += each(1, lambda pair=pair: client.get_into([pair[0]], [pair[1]], deadline_ms=DEADLINE_MS))  # type: ignore[misc]
    blocks.delete()
    return {
        name: {"p50_ms": 1e3 * median(times), "p99_ms": 1e3 * sorted(times)[int(len(times) * 0.99)]}
        for name, times in seen.items()
    }


def each(times: int, operation: Callable[[], object]) -> list[float]:
    """Seconds of each of ``times`` runs."""
    return [_seconds(1, operation) for _ in range(times)]


def _ours(operation: str, blocks: Blocks, node_pid: int) -> Contender:
    use = CpuUse()

    def measure() -> float:
        if operation == "put":
            blocks.delete()
        return BATCH_BYTES / 1e9 / measured(use, node_pid, BATCH_BYTES, getattr(blocks, operation))

    return Contender(OURS, Role.OURS, measure, use)


def _copies(name: str, memcpy: Memcpy) -> Contender:
    count = BATCH_BYTES // SHM_BYTES
    return Contender(name, Role.LIMIT, lambda: BATCH_BYTES / 1e9 / memcpy.seconds_for(SHM_BYTES, count))


def _transfers(peers: Sequence[PeerProcess], transport: str, operation: str, size_bytes: int) -> list[Contender]:
    """Put comes before get in the cases, so that the first turn of a get finds what it reads."""
    contenders = []
    for peer in peers:
        if peer.peer.transport != transport:
            continue
        use = CpuUse()

        def measure(peer: PeerProcess = peer, use: CpuUse = use) -> float:
            peer.prepare(size_bytes)
            answer = peer.ask(operation, block_bytes=size_bytes)
            use.add(float(answer["client_cpu_s"]), float(answer["server_cpu_s"]), BATCH_BYTES)
            return BATCH_BYTES / 1e9 / float(answer["seconds"])

        contenders.append(_peer(peer, measure, use))
    return contenders


def _by_key(peers: Sequence[PeerProcess]) -> list[PeerProcess]:
    return [peer for peer in peers if peer.peer.transport == "tcp"]


def _peer(peer: PeerProcess, measure: Callable[[], float], use: CpuUse | None = None) -> Contender:
    return Contender(peer.peer.title, Role.PEER, measure, use)


def new_keys(count: int) -> list[BlockKey]:
    """Random keys that nobody else has."""
    return [BlockKey(os.urandom(KEY_BYTES)) for _ in range(count)]


def _seconds(times: int, operation: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        operation()
    return time.perf_counter() - begin


def _require(condition: bool, what: str, results: object) -> None:
    if not condition:
        raise InternalError(f"{what}: {str(results)[:300]}", reason="BENCH_FAILED")

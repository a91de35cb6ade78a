"""Large batches in one call: do they work, and how long do they take?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from saltern.bench.case import OURS
from saltern.bench.cases import DEADLINE_MS, SMALL_BYTES, new_keys
from saltern.bench.peers.process import PeerError, PeerProcess
from saltern.client import Client
from saltern.results import Hit, Stored

BATCH_KEYS: Final = (3_000, 100_000)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One batch of ``keys`` entries of 4 KiB; seconds are None where ``failure`` says what went wrong."""

    store: str
    keys: int
    put_s: float | None = None
    exists_s: float | None = None
    get_s: float | None = None
    failure: str = ""


def large_batches(client: Client, peers: Sequence[PeerProcess]) -> list[BatchResult]:
    """Ours and every peer's, each once; a get checks what comes back."""
    results = []
    for count in BATCH_KEYS:
        results.append(_ours(client, count))
        results += [_peers(peer, count) for peer in peers if peer.peer.transport == "tcp"]
    return results


def _ours(client: Client, count: int) -> BatchResult:
    keys = new_keys(count)
    payloads = [key * (SMALL_BYTES // len(key)) for key in keys]
    begin_s = time.perf_counter()
    stored = client.put_many(zip(keys, payloads, strict=True), deadline_ms=DEADLINE_MS)
    put_s = time.perf_counter()
    found = client.exists(keys, deadline_ms=DEADLINE_MS)
    exists_s = time.perf_counter()
    got = client.get_many(keys, deadline_ms=DEADLINE_MS)
    get_s = time.perf_counter()
    wrong = sum(
        not (isinstance(put, Stored) and there and isinstance(result, Hit) and result.payload == payload)
        for put, there, result, payload in zip(stored, found, got, payloads, strict=True)
    )
    client.delete(keys, deadline_ms=DEADLINE_MS)
    if wrong:
        return BatchResult(OURS, count, failure=f"{wrong} of {count} keys were not stored, found and read")
    return BatchResult(OURS, count, put_s - begin_s, exists_s - put_s, get_s - exists_s)


def _peers(peer: PeerProcess, count: int) -> BatchResult:
    try:
        answer = peer.ask("batch", count=count, block_bytes=SMALL_BYTES)
    except PeerError as error:
        return BatchResult(peer.peer.title, count, failure=error.message)
    return BatchResult(peer.peer.title, count, answer["put_seconds"], answer["exists_seconds"], answer["get_seconds"])

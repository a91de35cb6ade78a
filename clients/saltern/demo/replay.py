"""Replays a trace's requests through the SDK, as an engine's connector would, and compares every byte that comes back.

For each request: ask how long its cached prefix is, get that, and put the rest in one batch, head first. Hit tokens of
a request are ``min(input tokens, hit blocks * block tokens)``; the hit rate is hit tokens over input tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from saltern.client import Client
from saltern.demo.payload import block_payload, differing_bytes, engine_block_hash
from saltern.demo.plan import Plan
from saltern.results import AlreadyStored, Error, Hit, Stored
from saltern.traces import BLOCK_TOKENS, TraceRequest


@dataclass(slots=True)
class Measured:
    """What one pass over one tenant's requests saw. Milliseconds are for one batch: all blocks of a request."""

    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    get_bytes: int = 0
    put_bytes: int = 0
    puts_stored: int = 0
    puts_refused: int = 0
    faults: int = 0
    wrong_bytes: int = 0
    get_ms: list[float] = field(default_factory=list)
    put_ms: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


def replay(plan: Plan, clients: Mapping[str, Client], progress: Callable[[], None]) -> dict[str, Measured]:
    """Send every request of the plan once, in order of time; ``progress`` is called after each."""
    measured = {tenant.tenant: Measured() for tenant in plan.tenants}
    for tenant, request in plan.order:
        _send(tenant, request, clients[tenant], plan.block_bytes, measured[tenant])
        progress()
    return measured


def _send(tenant: str, request: TraceRequest, client: Client, block_bytes: int, measured: Measured) -> None:
    keys = client.block_keys(map(engine_block_hash, request.block_ids))
    cached_blocks = client.longest_prefix(keys)
    hit_blocks = 0
    if cached_blocks:
        started_s = time.perf_counter()
        results = client.get_many(keys[:cached_blocks])
        measured.get_ms.append((time.perf_counter() - started_s) * 1000)
        for block_id, result in zip(request.block_ids, results, strict=False):
            if not isinstance(result, Hit):
                measured.faults += isinstance(result, Error) or result.cause is not None
                break
            expected = block_payload(tenant, block_id, block_bytes)
            measured.wrong_bytes += differing_bytes(expected, result.payload)
            measured.get_bytes += result.size_bytes
            hit_blocks += 1
    measured.requests += 1
    measured.input_tokens += request.input_tokens
    measured.hit_tokens += min(request.input_tokens, hit_blocks * BLOCK_TOKENS)
    missing = range(hit_blocks, len(keys))
    if missing:
        batch = [(keys[index], block_payload(tenant, request.block_ids[index], block_bytes)) for index in missing]
        started_s = time.perf_counter()
        outcomes = client.put_many(batch)
        measured.put_ms.append((time.perf_counter() - started_s) * 1000)
        stored = sum(isinstance(outcome, Stored) for outcome in outcomes)
        measured.puts_stored += stored
        measured.put_bytes += stored * block_bytes
        measured.puts_refused += sum(not isinstance(outcome, Stored | AlreadyStored) for outcome in outcomes)

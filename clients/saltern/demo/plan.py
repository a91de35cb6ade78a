"""What the demo will do, decided before anything starts: who sends which request, and how large the quotas are.

A trace that names tenants is split by them, and a block id means a block of that tenant. One that does not is split by
conversation: requests that agree in their second block (the first is often a system prompt that everybody shares)
belong to the same tenant, and conversations go to the tenants in turn. Blocks of the shared prompt are then asked for
by both tenants under the same engine hash, each with a copy of its own: what a cache without walls would mix up.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import structs

from saltern.errors import InvalidArgumentError, ResourceExhaustedError
from saltern.sizes import format_size
from saltern.traces import Trace, TraceRequest, encode_jsonl, file_sha256, generate_agent_requests, read_trace

TENANTS: Final = ("alpha", "beta")
NAMESPACES: Final = {"alpha": "coder", "beta": "support"}
REQUESTS_DEFAULT: Final = 1000
#: Small beside the megabytes of a real model's blocks, so that the whole demo fits a laptop.
BLOCK_BYTES: Final = 32 * 1024
GENERATOR_SEED: Final = 20260506
#: alpha's limit holds all it will ever ask for; beta's a third of that, so that it must evict.
_LIMIT_PER_WORKING_SET: Final = {"alpha": 1.10, "beta": 0.33}
#: A tenant must at least hold its longest request, and that twice over while a put is in flight.
_LIMIT_PER_LONGEST_REQUEST: Final = 2
_RESERVED_PART: Final = {"alpha": 1.0, "beta": 0.5}
_MIB: Final = 1024 * 1024
_NODE_SPARE_BYTES: Final = 32 * _MIB


@dataclass(frozen=True, slots=True)
class TenantPlan:
    """One tenant: its requests in order of time, and its quota."""

    tenant: str
    namespace: str
    requests: tuple[TraceRequest, ...]
    working_set_blocks: int
    limit_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole demo. ``order`` lists (tenant, request) by time, as one replay sends them."""

    trace: Trace
    tenants: tuple[TenantPlan, ...]
    order: tuple[tuple[str, TraceRequest], ...]
    block_bytes: int
    dram_bytes: int


def load_trace(path: Path | None, *, requests: int) -> Trace:
    """Read the first ``requests`` requests of ``path``; without one generate that many of two tenants' agents.

    Raises:
        SalternError: the file is absent or no trace, see :func:`saltern.traces.read_trace`.
    """
    if path is None:
        generated = generate_agent_requests(seed=GENERATOR_SEED, tenants=TENANTS, requests=requests)
        digest = hashlib.sha256(encode_jsonl(generated)).hexdigest()
        return Trace(f"generated agent sessions, seed {GENERATOR_SEED}", digest, generated)
    return Trace(str(path), file_sha256(path), tuple(read_trace(path, limit_requests=requests)))


def default_trace() -> Path | None:
    """The conversation trace in the folder that ``SALTERN_TRACES`` names; None where there is none."""
    folder = os.environ.get("SALTERN_TRACES")
    path = Path(folder) / "mooncake" / "conversation_trace.jsonl.gz" if folder else None
    return path if path is not None and path.is_file() else None


def make_plan(trace: Trace, *, block_bytes: int = BLOCK_BYTES) -> Plan:
    """Split the trace between two tenants and size their quotas and the node.

    Raises:
        InvalidArgumentError: the trace has requests for one of them only.
    """
    requests = _with_ids_of_their_own(trace.requests)
    order = tuple(sorted(zip(_owners(requests), requests, strict=True), key=lambda item: item[1].timestamp_ms))
    tenants = tuple(
        _plan_tenant(tenant, tuple(request for owner, request in order if owner == tenant), block_bytes)
        for tenant in TENANTS
    )
    dram_bytes = sum(tenant.limit_bytes for tenant in tenants) + _NODE_SPARE_BYTES
    return Plan(trace, tenants, order, block_bytes, dram_bytes)


def check_memory(plan: Plan) -> None:
    """Refuse a plan that this machine has no memory for.

    Raises:
        ResourceExhaustedError: the node would take more than half of what is free now.
    """
    free_bytes = available_bytes()
    if plan.dram_bytes > free_bytes // 2:
        raise ResourceExhaustedError(
            f"the demo's node would take {format_size(plan.dram_bytes)} and {format_size(free_bytes)} are free here",
            reason="NOT_ENOUGH_MEMORY",
            hint=f"send fewer than {len(plan.order)} requests: --requests N",
        )


def available_bytes() -> int:
    """Memory that can be had without swapping (proc(5), MemAvailable), or what is plainly free."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _with_ids_of_their_own(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests, with the block ids of each tenant that the trace names told apart from the others'."""
    fresh: dict[tuple[str, int], int] = {}
    return [
        structs.replace(
            request,
            block_ids=tuple(fresh.setdefault((request.tenant, block), len(fresh)) for block in request.block_ids),
        )
        for request in requests
    ]


def _owners(requests: Sequence[TraceRequest]) -> list[str]:
    """For each request the tenant that sends it: what it belongs to together goes to the tenants in turn."""
    turns: dict[str | int, str] = {}
    owners = []
    for request in requests:
        group: str | int = request.tenant or request.block_ids[:2][-1]
        owners.append(turns.setdefault(group, TENANTS[len(turns) % len(TENANTS)]))
    return owners


def _plan_tenant(tenant: str, requests: tuple[TraceRequest, ...], block_bytes: int) -> TenantPlan:
    if not requests:
        raise InvalidArgumentError(
            f"the trace has no request for tenant {tenant}: all of it is one conversation",
            reason="TRACE_TOO_SMALL",
            hint="use a longer trace, or raise --requests",
        )
    working_set_blocks = len({block for request in requests for block in request.block_ids})
    longest_blocks = max(len(request.block_ids) for request in requests)
    limit_blocks = max(
        int(working_set_blocks * _LIMIT_PER_WORKING_SET[tenant]), longest_blocks * _LIMIT_PER_LONGEST_REQUEST
    )
    limit_bytes = -(-limit_blocks * block_bytes // _MIB) * _MIB
    return TenantPlan(
        tenant=tenant,
        namespace=NAMESPACES[tenant],
        requests=requests,
        working_set_blocks=working_set_blocks,
        limit_bytes=limit_bytes,
        reserved_bytes=int(limit_bytes * _RESERVED_PART[tenant]),
    )

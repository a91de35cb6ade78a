"""Small whole reports for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence

from saltern.replay.assemble import compare
from saltern.replay.profiles import builtin_profiles
from saltern.replay.results import (
    Assumption,
    Column,
    ColumnResult,
    EngineKind,
    Quantiles,
    ReplayReport,
    Series,
    TenantResult,
    TraceFacts,
)
from saltern.replay.setup import ReplaySetup, TenantQuota

_PROFILES = builtin_profiles()
_GIB = 2**30


def column(kind: Column, tenants: Sequence[str], *, hit_rate: float = 0.5, ttft_s: float = 2.0) -> ColumnResult:
    """One complete column of 100 requests; without a cache only 60 of them meet the target."""
    has_nodes = kind is not Column.NO_CACHE
    quantiles = Quantiles(count=100, mean_s=ttft_s, p50_s=ttft_s, p95_s=2 * ttft_s, p99_s=4 * ttft_s, max_s=9 * ttft_s)
    series = Series(
        bin_s=2.0,
        hit_rate=[0.0, None, hit_rate, hit_rate] if has_nodes else [None] * 4,
        read_bytes=[0, 0, 3 * _GIB, _GIB] if has_nodes else [0] * 4,
        written_bytes=[_GIB] * 4 if has_nodes else [0] * 4,
        occupancy_bytes={name: [0, _GIB, 2 * _GIB, (1 + at) * _GIB] for at, name in enumerate(tenants)},
    )
    return ColumnResult(
        column=kind,
        complete=True,
        requests=100,
        prompt_tokens=10_000,
        hit_tokens=int(10_000 * hit_rate) if has_nodes else 0,
        hit_rate=hit_rate if has_nodes else 0.0,
        within_slo=95 if has_nodes else 60,
        duration_s=100.0,
        recorded_s=90.0,
        prefill_s=10.0 if has_nodes else 20.0,
        evictions_by_cause={"own-put": 7} if has_nodes else {},
        ttft=quantiles,
        end_to_end=quantiles,
        series=series if has_nodes else Series(),
        tenants={
            name: TenantResult(
                requests=100,
                prompt_tokens=5_000,
                hit_rate=hit_rate if has_nodes else 0.0,
                evicted_by=dict.fromkeys(tenants, 3) if has_nodes else {},
                ttft=quantiles,
            )
            for name in tenants
        },
    )


def report(
    *,
    engine: EngineKind = EngineKind.SIMULATED,
    tenants: Sequence[str] = ("chat", "agent"),
    name: str = "small",
    sha256: str = "ab" * 32,
    nodes: int = 2,
    hit_rate: float = 0.5,
    columns: Sequence[Column] = tuple(Column),
) -> ReplayReport:
    """A complete report with costs, as :func:`saltern.replay.assemble.run_replay` would leave it."""
    made = ReplayReport(
        engine=engine,
        setup=ReplaySetup(
            model=_PROFILES.model("qwen3-8b"),
            hardware=_PROFILES.machine("1xh100"),
            nodes=nodes,
            node_bytes=4 * _GIB,
            quotas={one: TenantQuota(reserved_bytes=_GIB) for one in tenants},
            seed=1234,
        ),
        trace=TraceFacts(
            name=name,
            format="hash-ids",
            sha256=sha256,
            arrival="absolute",
            identity="recorded",
            identity_note="as the file has them",
            block_tokens=16,
        ),
        program="saltern 0.0.0",
        complete=True,
        assumptions=[Assumption(name="time", value=f"of {name}", source="nobody")],
        columns=[column(kind, tenants, hit_rate=hit_rate) for kind in columns],
    )
    compare(made)
    return made

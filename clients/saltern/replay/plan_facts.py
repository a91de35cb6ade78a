"""What a plan says, as names and texts: the same for the terminal and for HTML."""

from __future__ import annotations

from typing import Final

from saltern.replay.plan_results import Plan, PlannedTenant, PlanTrial
from saltern.replay.rows import Unit, cell

TENANT_HEADINGS: Final = (
    "tenant", "requests", "needs at most", "reserve DRAM", "reserve SSD", "infinite", "predicted", "simulated",
)  # fmt: skip
TRIAL_HEADINGS: Final = (
    "nodes", "DRAM each", "SSD each", "predicted", "simulated", "of it SSD", "TTFT p95", "in time", "USD an hour",
)  # fmt: skip


def plan_facts(plan: Plan) -> list[tuple[str, str]]:
    """Verdict, machines, target, traffic with the sha256 of every file, seed, every assumption with its source.

    Names that belong to the one before begin with two spaces.
    """
    setup, trace, target = plan.setup, plan.trace, plan.target
    nodes = f"{setup.nodes} of {size(setup.node_bytes)} of DRAM"
    if setup.node_ssd_bytes:
        nodes += f" and {size(setup.node_ssd_bytes)} of SSD"
    wanted = {
        "hit rate": None if target.hit_rate is None else f"{target.hit_rate:g}",
        "TTFT": None
        if target.slo_ttft_s is None
        else f"at most {target.slo_ttft_s:g} s for {target.slo_share:.1%} of requests",
        "budget": None if target.budget_usd_per_hour is None else f"{target.budget_usd_per_hour:g} USD an hour",
    }
    return [
        ("plan", plan.verdict),
        ("nodes", f"{nodes}; the number follows from: {plan.nodes_reason}"),
        ("target", "; ".join(f"{name} {value}" for name, value in wanted.items() if value is not None)),
        ("engine", f"{plan.engine.upper()}: {plan.engine.note}"),
        ("trace", f"{trace.name} ({trace.format}, {trace.arrival} arrivals)"),
        ("  sha256", trace.sha256),
        *((f"  {part.name}", part.sha256) for part in plan.parts),
        ("  prefixes", f"{trace.identity}: {trace.identity_note}"),
        *(("  note", note) for note in trace.notes),
        ("  blocks", f"{plan.unique_blocks:,} distinct ones of {plan.block_bytes:,} bytes"),
        ("  infinite", f"a cache without end hits {plan.infinite_hit_rate:.4f}"),
        ("seed", str(setup.seed)),
        *(
            (assumed.name, f"{assumed.value} [{assumed.source}]" if assumed.source else assumed.value)
            for assumed in plan.assumptions
        ),
    ]


def tenant_cells(name: str, tenant: PlannedTenant) -> list[str]:
    """Under :data:`TENANT_HEADINGS`."""
    return [
        name or "-",
        cell(tenant.requests, Unit.COUNT),
        size(tenant.unique_bytes),
        size(tenant.dram_reserved_bytes),
        size(tenant.ssd_reserved_bytes),
        cell(tenant.infinite_hit_rate, Unit.RATE),
        cell(tenant.predicted_hit_rate, Unit.RATE),
        cell(tenant.simulated_hit_rate, Unit.RATE),
    ]


def trial_cells(plan: Plan, trial: PlanTrial) -> list[str]:
    """Under :data:`TRIAL_HEADINGS`."""
    return [
        f"{trial.nodes}" if trial.complete else f"{trial.nodes} (part)",
        size(trial.node_bytes),
        size(trial.node_ssd_bytes),
        cell(trial.predicted_hit_rate, Unit.RATE),
        cell(trial.simulated_hit_rate, Unit.RATE),
        cell(trial.ssd_hit_rate, Unit.RATE) if trial.node_ssd_bytes else "-",
        cell(trial.ttft_p95_s, Unit.SECONDS),
        "-" if plan.target.slo_ttft_s is None else f"{trial.within_share:.1%}",
        f"{trial.usd_per_hour:.2f}",
    ]


def size(size_bytes: int) -> str:
    """In the units in which memory is ordered; a dash for none."""
    if not size_bytes:
        return "-"
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:,.4g} TiB"

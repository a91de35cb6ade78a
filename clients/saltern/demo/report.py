"""What the demo saw: as JSON for programs (``report.json``) and as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saltern.admin.v1.usage_pb2 import Usage
from saltern.cli.render import Table, bar, make_console
from saltern.cli.settings import Settings
from saltern.demo.plan import Plan, TenantPlan
from saltern.demo.proofs import Proof
from saltern.demo.replay import Measured
from saltern.sizes import format_size


@dataclass(frozen=True, slots=True)
class TenantReport:
    """One tenant: its plan, both passes, and what the node reported at the end of them."""

    plan: TenantPlan
    cold: Measured
    warm: Measured
    usage: Usage
    used_bytes_max: int
    usage_reports: int

    @property
    def wrong_bytes(self) -> int:
        return self.cold.wrong_bytes + self.warm.wrong_bytes


@dataclass(frozen=True, slots=True)
class Report:
    """The whole demo. ``refused`` has a verdict for each thing that must be refused."""

    plan: Plan
    tenants: tuple[TenantReport, ...]
    cross_tenant_hits: int
    refused: dict[str, bool]
    proofs: tuple[Proof, ...]
    transport: str
    seconds: float

    @property
    def wrong_bytes(self) -> int:
        return sum(tenant.wrong_bytes for tenant in self.tenants)

    @property
    def holds(self) -> bool:
        """Whether everything that was to be shown was shown."""
        return self.wrong_bytes == 0 and self.cross_tenant_hits == 0 and all(proof.holds for proof in self.proofs)


def report_dict(report: Report) -> dict[str, Any]:
    """The object in ``report.json``. Times are milliseconds for one batch: all blocks of one request."""
    return {
        "trace": {
            "source": report.plan.trace.source,
            "sha256": report.plan.trace.sha256,
            "requests": len(report.plan.trace.requests),
        },
        "tenants": {tenant.plan.tenant: _tenant_dict(tenant) for tenant in report.tenants},
        "cross_tenant_hits": report.cross_tenant_hits,
        "refused": report.refused,
        "wrong_bytes": report.wrong_bytes,
        "proofs": [{"title": proof.title, "outcome": proof.outcome, "holds": proof.holds} for proof in report.proofs],
        "block_bytes": report.plan.block_bytes,
        "node_dram_bytes": report.plan.dram_bytes,
        "transport": report.transport,
        "seconds": round(report.seconds, 1),
    }


def _tenant_dict(tenant: TenantReport) -> dict[str, Any]:
    get_ms = tenant.cold.get_ms + tenant.warm.get_ms
    put_ms = tenant.cold.put_ms + tenant.warm.put_ms
    return {
        "requests": tenant.cold.requests,
        "hit_rate_cold": round(tenant.cold.hit_rate, 4),
        "hit_rate_warm": round(tenant.warm.hit_rate, 4),
        "put_bytes": tenant.cold.put_bytes + tenant.warm.put_bytes,
        "get_bytes": tenant.cold.get_bytes + tenant.warm.get_bytes,
        "evictions": tenant.usage.evictions,
        "used_bytes_max": tenant.used_bytes_max,
        "limit_bytes": tenant.plan.limit_bytes,
        "reserved_bytes": tenant.plan.reserved_bytes,
        "working_set_bytes": tenant.plan.working_set_blocks * _block_bytes(tenant),
        "usage_reports": tenant.usage_reports,
        "puts_refused": tenant.cold.puts_refused + tenant.warm.puts_refused,
        "faults": tenant.cold.faults + tenant.warm.faults,
        "get_ms_p50": percentile(get_ms, 50),
        "get_ms_p99": percentile(get_ms, 99),
        "put_ms_p50": percentile(put_ms, 50),
        "put_ms_p99": percentile(put_ms, 99),
    }


def _block_bytes(tenant: TenantReport) -> int:
    stored = tenant.cold.puts_stored
    return tenant.cold.put_bytes // stored if stored else 0


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile, in milliseconds to three places; None of nothing."""
    if not values:
        return None
    rank = -(-len(values) * percent // 100)
    return round(sorted(values)[max(rank, 1) - 1], 3)


def print_report(settings: Settings, report: Report) -> None:
    """Print the report for people on stdout."""
    from rich.text import Text

    console = make_console(settings)
    trace = report.plan.trace
    console.print()
    console.print(f"{len(trace.requests)} requests of {trace.source} (sha256 {trace.sha256[:16]}...)")
    console.print(
        f"each sent twice; blocks of {format_size(report.plan.block_bytes)} (a real model's are megabytes) over "
        f"{report.transport} into one node of {format_size(report.plan.dram_bytes)}"
    )
    console.print()
    table = Table("", *(tenant.plan.tenant for tenant in report.tenants), right=[t.plan.tenant for t in report.tenants])
    for title, values in _rows(report):
        table.add(title, *values)
    table.print(settings)
    console.print()
    proofs = Table("PROOF", "WHAT CAME OF IT", "")
    for proof in report.proofs:
        verdict = Text("holds", style="green") if proof.holds else Text("BROKEN", style="bold red")
        proofs.add(proof.title, proof.outcome, verdict)
    proofs.print(settings)
    console.print()
    summary = "Everything held" if report.holds else "SOMETHING DID NOT HOLD"
    console.print(
        f"{summary}: {report.wrong_bytes} wrong bytes, {report.cross_tenant_hits} hits across tenants, "
        f"{report.seconds:.0f} s."
    )


def _rows(report: Report) -> list[tuple[str, list[object]]]:
    tenants = [(tenant, _tenant_dict(tenant)) for tenant in report.tenants]

    def row(title: str, *fields: str, form: str = "{}") -> tuple[str, list[object]]:
        return title, [form.format(*(values[field] for field in fields)) for _, values in tenants]

    def sizes(title: str, field: str) -> tuple[str, list[object]]:
        return title, [format_size(values[field]) for _, values in tenants]

    return [
        row("requests", "requests"),
        row("hit rate, cold (tokens)", "hit_rate_cold", form="{:.1%}"),
        row("hit rate, warm (tokens)", "hit_rate_warm", form="{:.1%}"),
        sizes("bytes put", "put_bytes"),
        sizes("bytes got, every one compared", "get_bytes"),
        row("get p50 / p99 of a request's blocks", "get_ms_p50", "get_ms_p99", form="{} / {} ms"),
        row("put p50 / p99 of a request's blocks", "put_ms_p50", "put_ms_p99", form="{} / {} ms"),
        sizes("asks for in all", "working_set_bytes"),
        sizes("reserved", "reserved_bytes"),
        sizes("limit", "limit_bytes"),
        sizes("most ever used", "used_bytes_max"),
        (" ", [bar(values["used_bytes_max"], values["limit_bytes"]) for _, values in tenants]),
        row("evictions", "evictions"),
        row("puts refused", "puts_refused"),
    ]

"""What a report rests on, as names and texts: the same for the terminal and for HTML."""

from __future__ import annotations

from saltern.replay.results import ReplayReport
from saltern.replay.rows import Unit, cell
from saltern.replay.setup import ReplaySetup


def report_facts(report: ReplayReport) -> list[tuple[str, str]]:
    """Engine, traffic with the sha256 of every file, seed, nodes, quotas, every assumption with its source, references.

    Names that belong to the one before begin with two spaces.
    """
    trace, setup, references = report.trace, report.setup, report.references
    facts = [
        ("engine", f"{report.engine.upper()}: {report.engine.note}"),
        ("trace", f"{trace.name} ({trace.format}, {trace.arrival} arrivals)"),
        ("  sha256", trace.sha256),
        *((f"  {part.name}", part.sha256) for part in report.parts),
        ("  prefixes", f"{trace.identity}: {trace.identity_note}"),
        *(("  note", note) for note in trace.notes),
        ("seed", str(setup.seed)),
        ("nodes", f"{setup.nodes} of {_node_sizes(setup)}, {setup.eviction}, {setup.reservations}"),
    ]
    for name, quota in setup.quotas.items():
        sizes = {"reserved": quota.reserved_bytes, "limit": quota.limit_bytes}
        sizes |= {"SSD reserved": quota.ssd_reserved_bytes, "SSD limit": quota.ssd_limit_bytes}
        told = [f"{what} {cell(size, Unit.BYTES)}" for what, size in sizes.items() if size is not None]
        facts.append(("  quota", ", ".join([name or "-", *told, f"weight {quota.weight}"])))
    for assumed in report.assumptions:
        source = f" [{assumed.source}]" if assumed.source else ""
        facts.append((assumed.name, f"{assumed.value}{source}"))
    for result in report.columns:
        limit = None if result.measures is None else result.measures.limit(result.driver_cpu_s)
        if limit is not None and result.measures is not None:
            took = f"nodes took {result.measures.node_cpu_s:.2f} s of CPU, the driver {result.driver_cpu_s:.2f} s"
            facts.append((f"limit, {result.column}", f"{limit}: {took}"))
    compared = (
        f"infinite {cell(references.infinite_hit_rate, Unit.RATE)}, when warm "
        f"{cell(references.infinite_warm_hit_rate, Unit.RATE)}, OPT {cell(references.opt_hit_rate, Unit.RATE)} in "
        f"{references.capacity_blocks:,} of {cell(references.unique_blocks, Unit.COUNT)} blocks; {references.note}"
    )
    return [*facts, ("references", compared)]


def _node_sizes(setup: ReplaySetup) -> str:
    ssd = f" and {cell(setup.node_ssd_bytes, Unit.BYTES)} of SSD" if setup.node_ssd_bytes else ""
    return f"{cell(setup.node_bytes, Unit.BYTES)}{ssd}"

"""A report from what an engine yields: columns beside each other, references, costs; also of a run cut short."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import version
from typing import Final

from saltern.errors import InvalidArgumentError, SalternError
from saltern.replay.cost import column_usd, judge
from saltern.replay.engines import Progress, ReplayEngine
from saltern.replay.profiles import PRICE_SOURCE
from saltern.replay.results import (
    Assumption,
    Column,
    ColumnResult,
    References,
    ReplayReport,
    TraceFacts,
)
from saltern.replay.setup import ReplaySetup
from saltern.traces.hit_rates import Accesses, Policy, bounded_accesses_of, hit_rate, infinite_hit_rate
from saltern.traces.request import Arrival, Identity, Provenance, Trace

#: Blocks of all prompts for which references are worked out; more would not fit into memory (4 bytes each, and 100 for
#: each distinct one).
REFERENCE_BLOCKS_MAX: Final = 50_000_000


def run_replay(
    trace: Trace, setup: ReplaySetup, columns: Sequence[Column], engine: ReplayEngine, progress: Progress
) -> tuple[ReplayReport, BaseException | None]:
    """Run every column; returns the report, and why it ended early if it did.

    What ends a replay early (a damaged trace, Ctrl-C) is returned, not raised: what is known so far is worth printing.

    Raises:
        InvalidArgumentError: the setup or the choice of columns makes no sense.
    """
    _check_columns(columns)
    report = ReplayReport(
        engine=engine.kind,
        setup=setup.checked(),
        trace=trace_facts(trace, trace.provenance),
        parts=[part_facts(part) for part in trace.provenance.parts],
        program=f"saltern {version('saltern')}",
        assumptions=assumptions(trace, setup, engine),
    )
    ended: BaseException | None = None
    try:
        # Closed at once, whatever ends it: an engine may hold processes.
        with closing(engine.replay(trace, setup, columns, progress)) as results:
            for result in results:
                report.columns.append(result)
        report.references = references_of(trace, setup)
    except (SalternError, KeyboardInterrupt) as error:
        ended = error
    report.ended = "" if ended is None else _why(ended)
    report.complete = ended is None and len(report.columns) == len(columns)
    compare(report)
    return report, ended


def _check_columns(columns: Sequence[Column]) -> None:
    if not columns or len(set(columns)) < len(columns):
        raise InvalidArgumentError(
            "cannot replay no column, or one twice",
            reason="INVALID_REPLAY",
            hint=f"choose some of: {', '.join(Column)}",
        )


def _why(ended: BaseException) -> str:
    if isinstance(ended, SalternError):
        return str(ended)
    return "interrupted" if ended.__cause__ is None else f"interrupted; {ended.__cause__}"


# ---- what is beside the figures


def trace_facts(trace: Trace, provenance: Provenance) -> TraceFacts:
    return TraceFacts(
        name=trace.name,
        format=provenance.format,
        sha256=provenance.sha256,
        arrival=str(trace.arrival),
        identity=str(trace.identity),
        identity_note=trace.identity_note,
        block_tokens=trace.block_tokens,
        notes=list(trace.notes),
        provenance=provenance.to_dict(),
    )


def part_facts(part: Provenance) -> TraceFacts:
    """Of a file that a composed trace is made of."""
    return TraceFacts(
        name=part.source.rpartition("/")[2],
        format=part.format,
        sha256=part.sha256,
        arrival="",
        identity="",
        identity_note="",
        block_tokens=0,
        notes=list(part.steps),
    )


def assumptions(trace: Trace, setup: ReplaySetup, engine: ReplayEngine) -> list[Assumption]:
    """Everything that figures rest on, engine's first."""
    model, hardware = setup.model, setup.hardware
    delays, slo = setup.delays, setup.slo
    found = [Assumption(name=name, value=value, source=source) for name, value, source in engine.assumptions(setup)]
    cap = "not capped" if delays.cap_s is None else f"capped at {delays.cap_s:g} s"
    targets = {"TTFT": slo.ttft_s, "end to end": slo.end_to_end_s}
    slo_text = " and ".join(f"{name} <= {target:g} s" for name, target in targets.items() if target is not None)
    rows = [
        ("model", f"{model.name}: {model.kv_bytes_per_token:,} bytes of KV a token", model.source),
        (
            "machine",
            f"{hardware.name}: {hardware.gpus} GPUs of {hardware.flops_per_s / 1e12:g} TFLOP/s at "
            f"{hardware.efficiency:.0%}, overhead {hardware.overhead_s:g} s, link {hardware.link_bytes_per_s / 1e9:g} "
            f"GB/s, latency {hardware.latency_s * 1e3:g} ms",
            hardware.source,
        ),
        (
            "prices",
            f"GPU {hardware.gpu_usd_per_hour:g} USD/h, DRAM {hardware.dram_usd_per_gib_hour:g} and SSD "
            f"{hardware.ssd_usd_per_gib_hour:g} USD/GiB/h, node {hardware.node_usd_per_hour:g} USD/h, operation "
            f"{hardware.operations_usd_per_hour:g} USD/h, network {hardware.network_usd_per_gib:g} USD/GiB",
            PRICE_SOURCE,
        ),
        ("paid for", "the recorded length of the traffic, all engines and nodes, busy or not", ""),
        ("target", slo_text or "none: every completion counts", ""),
        ("routing", f"{setup.routing} over {setup.engines} engines", ""),
        (
            "engines' own cache",
            f"{setup.engine_cache_tokens:,} tokens each" if setup.engine_cache_tokens else "none",
            "",
        ),
    ]
    if trace.arrival is Arrival.CLOSED_LOOP:
        rows.append(
            ("tool delays", f"think times as recorded, scaled by {delays.scale:g}, {cap}: this swings results", "")
        )
    if trace.identity is Identity.NONE:
        rows.append(("prefixes", "the trace has no prefix identity: nothing can be hit", ""))
    return [*found, *(Assumption(name=name, value=value, source=source) for name, value, source in rows)]


# ---- columns beside each other


def compare(report: ReplayReport) -> None:
    """Fill in what needs several columns: shares of references, rho, slowdown, cost."""
    alone, without = report.column(Column.COLD), report.column(Column.NO_CACHE)
    for result in report.columns:
        _share(result, report.references)
        if alone is not None and result is not alone and result.column not in (Column.NO_CACHE, Column.WARM):
            _beside(result, alone)
        if result.within_slo:
            usd = column_usd(report.setup, result)
            result.cost_per_completion_usd = usd / result.within_slo if usd else None
    if without is None:
        return
    report.costs = [judge(report.setup, without, result) for result in report.columns if result is not without]
    for cost in report.costs:
        result_of = report.column(cost.column)
        assert result_of is not None
        result_of.relative_cost = cost.relative_cost


def _share(result: ColumnResult, references: References) -> None:
    if result.column is Column.NO_CACHE or not result.complete:
        return
    is_warm = result.column is Column.WARM
    infinite = references.infinite_warm_hit_rate if is_warm else references.infinite_hit_rate
    result.share_of_infinite = result.hit_rate / infinite if infinite else None
    best = None if is_warm else references.opt_hit_rate
    result.share_of_opt = result.hit_rate / best if best else None


def _beside(result: ColumnResult, alone: ColumnResult) -> None:
    for name, tenant in result.tenants.items():
        by_itself = alone.tenants.get(name)
        if by_itself is None or not by_itself.requests:
            continue
        tenant.alone_hit_rate = by_itself.hit_rate
        # Below a thousandth a cache does not serve it, and a ratio says nothing.
        tenant.rho = tenant.hit_rate / by_itself.hit_rate if by_itself.hit_rate > 0.001 else None
        tenant.slowdown = tenant.ttft.mean_s / by_itself.ttft.mean_s if by_itself.ttft.mean_s else None


def references_of(trace: Trace, setup: ReplaySetup) -> References:
    """Hit rates to compare with, in one pool of all nodes' blocks."""
    if trace.identity is Identity.NONE or not trace.block_tokens:
        return References(note="the trace has no prefix identity")
    accesses = bounded_accesses_of(trace, REFERENCE_BLOCKS_MAX)
    block_bytes = trace.block_tokens * setup.model.kv_bytes_per_token
    capacity_blocks = setup.nodes * (setup.node_bytes // block_bytes)
    if accesses is None:
        return References(
            capacity_blocks=capacity_blocks,
            note=f"not worked out: more than {REFERENCE_BLOCKS_MAX:,} blocks in prompts",
        )
    return References(
        infinite_hit_rate=infinite_hit_rate(accesses),
        infinite_warm_hit_rate=_warm_hit_rate(accesses),
        opt_hit_rate=hit_rate(accesses, Policy.OPT, capacity_blocks),
        capacity_blocks=capacity_blocks,
        unique_blocks=accesses.unique_blocks,
        note="one pool of all nodes' blocks, no second copies",
    )


def _warm_hit_rate(accesses: Accesses) -> float:
    """Of a cache that has seen everything: all tokens of blocks."""
    tokens = sum(accesses.input_tokens)
    hits = sum(min(prompt, len(blocks) * accesses.block_tokens) for prompt, blocks in accesses.requests())
    return hits / tokens if tokens else 0.0

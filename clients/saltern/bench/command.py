"""``saltern bench``."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from saltern.cli.render import Table, print_json
from saltern.cli.settings import settings_of

if TYPE_CHECKING:
    from saltern.bench.run import BenchReport


@click.command("bench")
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/bench"),
    show_default=True,
    help="Where report.json goes.",
)
@click.option("--turns", type=click.IntRange(1, 100), default=7, show_default=True, help="Measurements of each pair.")
@click.pass_context
def bench(ctx: click.Context, output_dir: Path, turns: int) -> None:
    """Measure this machine: ours beside a bare socket pair and memcpy, in turns, on a private stack."""
    from saltern.bench.run import run_bench

    settings = settings_of(ctx)
    report = run_bench(turns, lambda text: click.echo(f"bench: {text}", err=True))
    path = report.write(output_dir)
    if settings.json:
        print_json(report.as_json())
        return
    for table in _tables(report):
        table.print(settings)
        click.echo()
    click.echo(f"medians of {turns} turns, authentication on; {path}")


def _tables(report: BenchReport) -> list[Table]:
    pairs = Table("", "OURS", "LIMIT", "UNIT", "RATIO", "TARGET", "LIMIT IS")
    for case in report.cases:
        target = "" if case.target is None else f"{case.target:.2f} {'met' if case.ratio >= case.target else 'MISSED'}"
        pairs.add(
            case.name,
            f"{median(case.ours_seen):.2f}",
            f"{median(case.limit_seen):.2f}",
            case.unit,
            f"{case.ratio:.2f}",
            target,
            case.limit_name,
        )
    single = Table("1 MIB, ONE AT A TIME", "P50 MS", "P99 MS")
    for transport, by_operation in report.latency_ms.items():
        for operation, figures in by_operation.items():
            single.add(f"{transport} {operation}", f"{figures['p50_ms']:.2f}", f"{figures['p99_ms']:.2f}")
    cpu = Table("CPU SECONDS PER GB", "CLIENT", "NODE", "BOTH")
    for name, sides in report.cpu_s_per_gb.items():
        cpu.add(name, f"{sides['client']:.2f}", f"{sides['node']:.2f}", f"{sides['client'] + sides['node']:.2f}")
    return [pairs, single, cpu]

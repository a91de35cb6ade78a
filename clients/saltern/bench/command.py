"""``saltern bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from saltern.bench.markdown import markdown_table
from saltern.cli.render import Table, print_json
from saltern.cli.settings import Settings, settings_of

if TYPE_CHECKING:
    from saltern.bench.rdma import RdmaReport
    from saltern.bench.report import BenchReport
    from saltern.bench.scale import ScaleReport

PEERS_DIR = Path("build/bench/peers")


@click.command("bench")
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/bench"),
    show_default=True,
    help="Where report.json and report.md go.",
)
@click.option("--turns", type=click.IntRange(1, 100), default=7, show_default=True, help="Measurements of each.")
@click.option(
    "--peers",
    metavar="NAMES",
    help="Other stores to measure beside ours: redis, valkey, mooncake, lmcache, lmcache-shm, with commas; or none. "
    "[default: those that are installed]",
)
@click.option(
    "--peers-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=PEERS_DIR,
    show_default=True,
    help="Where make bench-peers installed them.",
)
@click.option("--scale", is_flag=True, help="Instead: 10^6 entries and 10,000 tenants beside 10^4 and one (minutes).")
@click.option(
    "--transport",
    type=click.Choice(["rdma"]),
    help="Instead: puts and gets over RDMA beside ib_read_bw and ib_write_bw, on one device "
    "(SALTERN_RDMA_DEVICE names it).",
)
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
@click.pass_context
def bench(
    ctx: click.Context,
    *,
    output_dir: Path,
    turns: int,
    peers: str | None,
    peers_dir: Path,
    scale: bool,
    transport: str | None,
    markdown: bool,
) -> None:
    """Measure this machine: ours beside its own limits and other stores, in turns, on a private stack."""
    settings = settings_of(ctx)
    report: BenchReport | ScaleReport | RdmaReport
    if scale and transport:
        raise click.UsageError("--scale and --transport are two different benches: choose one")
    if transport:
        from saltern.bench.rdma import run_rdma_bench

        report = run_rdma_bench(turns, _say)
        if report.note:
            _say(report.note)
    elif scale:
        from saltern.bench.scale import run_scale

        report = run_scale(turns, _say)
    else:
        from saltern.bench.peers.catalogue import choose_peers
        from saltern.bench.run import run_bench

        chosen, left_out = choose_peers(peers, peers_dir)
        report = run_bench(turns, chosen, left_out, peers_dir, _say)
    path = report.write(output_dir)
    if settings.json:
        print_json(report.as_json())
    elif markdown:
        click.echo("\n\n".join(markdown_table(*table) for table in report.tables()))
    else:
        _print_tables(report.tables(), settings)
        click.echo(f"medians of {turns} turns, authentication on; {path}")


def _say(text: str) -> None:
    click.echo(f"bench: {text}", err=True)


def _print_tables(tables: list[tuple[list[str], list[list[str]]]], settings: Settings) -> None:
    for headings, rows in tables:
        table = Table(*[heading.upper() for heading in headings])
        for row in rows:
            table.add(*row)
        table.print(settings)
        click.echo()

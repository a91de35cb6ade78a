"""``saltern bench``."""

from __future__ import annotations

from pathlib import Path

import click

from saltern.cli.render import Table, print_json
from saltern.cli.settings import settings_of

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
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
@click.pass_context
def bench(
    ctx: click.Context, *, output_dir: Path, turns: int, peers: str | None, peers_dir: Path, markdown: bool
) -> None:
    """Measure this machine: ours beside its own limits and other stores, in turns, on a private stack."""
    from saltern.bench.peers.catalogue import choose_peers
    from saltern.bench.run import run_bench

    settings = settings_of(ctx)
    chosen, left_out = choose_peers(peers, peers_dir)
    report = run_bench(turns, chosen, left_out, peers_dir, lambda text: click.echo(f"bench: {text}", err=True))
    path = report.write(output_dir)
    if settings.json:
        print_json(report.as_json())
    elif markdown:
        click.echo(report.as_markdown())
    else:
        for headings, rows in report.tables():
            table = Table(*[heading.upper() for heading in headings])
            for row in rows:
                table.add(*row)
            table.print(settings)
            click.echo()
        click.echo(f"medians of {turns} turns, authentication on; {path}")
